"""The records that cross a process boundary, and nothing else.

Flow: a taskset yields `Task`s; the explorer asks an engine with `GenerateRequest` and gets
`Completion`s; a workflow turns them into `Experience`s; the buffer keeps those durably and hands
the trainer a list of them as one step's batch. All are msgspec structs: they encode to msgpack
(`encode` / `decode`), never to pickle.

Invariant: `tokens` are the exact ids that the engine saw and produced; nothing here is ever
re-tokenized, and every column of an experience but its tokens (`rft.ground.columns`) has the length
of its response.
"""

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from rft.ground import columns
from rft.ground.columns import Flags, Ids, LogProbs, TokenRewards

StopReason = Literal["stop", "length", "abort", "prompt_too_long"]
# of `Experience.info`: in a group, only those that say the same are compared with each other
PEERS = "peers"
# a reward beyond it, either way, is a mistake or an attempt: one of them would rule its batch
LARGEST_REWARD = 1e6
# vLLM samples at the lowest where less is asked for, and refuses more than the highest
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
T = TypeVar("T")


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all records: defaults left out on the wire, unknown fields ignored when read."""


class Columnar(Record, kw_only=True):
    """Base of records that hold columns. Lists, and arrays of another dtype, are taken too, and
    become columns by `as_columns`; lists also on their way to another process.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            columns.is_same(getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
        )

    def as_columns(self) -> list[str]:
        """Make columns of what is none; returns the names of these fields. Raises ValueError."""
        found = []
        for name, kind in COLUMNS.items():
            given = getattr(self, name, None)
            if given is None:
                continue
            try:
                made = columns.column(kind, given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if made is not given:
                setattr(self, name, made)
                found.append(name)
        return found


def is_reward(value: float) -> bool:
    """Finite, and no larger than any that means something. False for NaN."""
    return -LARGEST_REWARD <= value <= LARGEST_REWARD


class VersionSpan(Record, kw_only=True):
    """Response tokens [start, end) were sampled from the weights of policy `version`."""

    version: int
    start: int
    end: int


class Sampling(Record, kw_only=True):
    """How to sample one response.

    `temperature=0` is greedy; `top_p=1` and `top_k=-1` are off; seed makes it repeatable.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    # what a response must look like, by vLLM's names: {"json": schema}, {"json_object": true},
    # {"regex": ...}, {"choice": [...]}, {"grammar": ...}, {"structural_tag": ...}
    structured: dict[str, Any] = {}


class Task(Record, kw_only=True):
    """One prompt with its reference answer, as read from a taskset."""

    id: str  # "<taskset>/<epoch>/<row>": the same for every attempt at this task
    taskset: str
    row: int
    epoch: int = 0
    draw: int = 0  # how many tasks its set gave out before
    prompt: str | list[dict[str, Any]]  # plain text, or chat messages
    truth: str | None = None
    workflow: str = "single_turn"
    reward: str = "exact_match"
    reward_args: dict[str, Any] = {}
    workflow_args: dict[str, Any] = {}
    repeat_times: int = 1
    sampling: Sampling
    tools: list[dict[str, Any]] = []  # what the model is shown that it may call, for the template
    raw: dict[str, Any] = {}  # the whole row, for the user's own workflow or reward


class GenerateRequest(Record, kw_only=True):
    """Ask an engine for `n` continuations of the same token ids."""

    request_id: str
    prompt: list[int]
    n: int = 1
    # number of the first of them: seeds follow from numbers, so the others may be there already
    first: int = 0
    sampling: Sampling
    # besides the model's own end of sequence; the one that was met is in the response
    stop_token_ids: list[int] = []
    stop: list[str] = []  # texts that end a response; the one that was met is in it
    # number of its group: where requests wait for a place, or not all have room, older groups come
    # first; None: of no group, as young as the newest
    group: int | None = None


class RoutedExperts(Record, kw_only=True):
    """Which experts an engine sent each token through, so that a trainer may send it the same way
    (router replay).

    `data`: expert numbers of `dtype`, little-endian, of shape (positions, layers, top_k): position
    p is token p of prompt and response together, layers are those that have experts. A token whose
    numbers are all `NO_EXPERT` of the dtype has no route. The last token of a response was never
    sent through the model, so it may be left out.
    """

    layers: int
    top_k: int
    dtype: Literal["uint8", "uint16"] = "uint8"
    data: bytes

    @classmethod
    def of(cls, routes: np.ndarray) -> "RoutedExperts":
        """`routes` [positions, layers, top_k], uint8 or uint16."""
        _, layers, top_k = routes.shape
        kind: Any = routes.dtype.name
        data = routes.astype(routes.dtype.newbyteorder("<")).tobytes()
        return cls(layers=layers, top_k=top_k, dtype=kind, data=data)

    @property
    def width(self) -> int:
        """Bytes of a position."""
        return self.layers * self.top_k * np.dtype(self.dtype).itemsize

    @property
    def positions(self) -> int:
        return len(self.data) // self.width

    def first(self, positions: int) -> "RoutedExperts":
        return msgspec.structs.replace(self, data=self.data[: positions * self.width])

    @staticmethod
    def joined(
        before: "RoutedExperts | None", later: "RoutedExperts | None"
    ) -> "RoutedExperts | None":
        """Of two calls, the later one's prompt beginning with all tokens of the other: what a token
        was sampled behind stays.
        """
        if before is None or later is None:
            return before or later
        return msgspec.structs.replace(before, data=before.data + later.data[len(before.data) :])

    def array(self, tokens: int) -> np.ndarray:
        """[tokens, layers, top_k] of `dtype`, `NO_EXPERT` behind the positions that it has. Raises
        ValueError where these are more than `tokens`, or not whole.
        """
        shape = (self.layers, self.top_k)
        dtype = np.dtype(self.dtype)
        found = np.full((tokens, *shape), NO_EXPERT[self.dtype], dtype)
        given = np.frombuffer(self.data, dtype.newbyteorder("<")).reshape(-1, *shape)
        if len(given) > tokens:
            raise ValueError(f"routes of {len(given)} tokens, where there are {tokens}")
        found[: len(given)] = given
        return found


# what stands in routes where there is none, by dtype: never the number of an expert
NO_EXPERT = {"uint8": 2**8 - 1, "uint16": 2**16 - 1}


def route_dtype(experts: int) -> str:
    """The narrowest that tells `experts` numbers and none."""
    return next(dtype for dtype, none in NO_EXPERT.items() if experts <= none)


class Completion(Columnar, kw_only=True):
    """One continuation: ids, their log-probabilities under the distribution sampled from, and who
    sampled each token.
    """

    tokens: Ids
    logprobs: LogProbs
    versions: list[VersionSpan]
    stop: StopReason
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        self.as_columns()

    @classmethod
    def empty(cls, stop: StopReason) -> "Completion":
        return cls(
            tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=[], stop=stop
        )

    @property
    def ids(self) -> list[int]:
        """The tokens, for a tokenizer."""
        found: list[int] = self.tokens.tolist()
        return found

    def chosen(self, sampling: Sampling) -> Flags:
        """1 for every token that the policy chose; 0 where the form that was asked for left it no
        other: that one's log-probability is 0. A greedy answer was not sampled: none is.
        """
        if sampling.temperature == 0:
            return np.zeros(len(self.tokens), dtype=bool)
        if not sampling.structured:
            return np.ones(len(self.tokens), dtype=bool)
        return self.logprobs != 0


def no_column(kind: Any) -> Any:
    """The default of a field: nothing is known."""
    return msgspec.field(default_factory=lambda: np.zeros(0, columns.DTYPES[kind]))


class Experience(Columnar, kw_only=True):
    """One finished token sequence: what the trainer learns from.

    `tokens` = prompt + response, `prompt_length` splits them. `logprobs`, `action_mask` (and
    `advantages` where set) have one entry per response token; `action_mask` is 1 where the policy
    chose the token. `token_rewards`, where set, holds the reward of every response token and wins
    over `reward`. `sample` says which attempt at the task this belongs to, `turn` which model call
    of that attempt, where each makes an experience of its own. `expert`: a row that no policy
    sampled. `reward_outcome` tells a real reward of 0 from a reward function that timed out or
    failed. `group` is the admission number of its group, -1 for data that no group made (supervised
    rows, evaluation). `routed_experts`: the trainer routes by them.
    """

    tokens: Ids
    prompt_length: int
    action_mask: Flags
    logprobs: LogProbs = no_column(LogProbs)
    versions: list[VersionSpan] = []
    # the one that `logprobs` were taken under; the trainer divides its logits by it
    temperature: float = 1.0
    reward: float = 0.0
    reward_outcome: Literal["ok", "timeout", "error", "none"] = "none"
    stop: StopReason = "stop"
    group: int = -1
    sample: int = 0
    turn: int = 0
    token_rewards: TokenRewards = no_column(TokenRewards)
    expert: bool = False
    task: str = ""
    timeline: int = 0  # run epoch that made it
    routed_experts: RoutedExperts | None = None
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prompt_ids(self) -> list[int]:
        """For a tokenizer."""
        found: list[int] = np.asarray(self.tokens)[: self.prompt_length].tolist()
        return found

    @property
    def response_ids(self) -> list[int]:
        """For a tokenizer."""
        found: list[int] = np.asarray(self.tokens)[self.prompt_length :].tolist()
        return found

    @property
    def token_bytes(self) -> bytes:
        """Equal where the tokens are."""
        return columns.column(Ids, self.tokens).tobytes()

    @property
    def failed(self) -> bool:
        """Its reward function timed out or failed: `reward` is no number to learn from."""
        return self.reward_outcome in ("timeout", "error")

    @property
    def token_versions(self) -> list[int | None]:
        """The policy version of every response token; None where nobody knows it."""
        found: list[int | None] = [None] * self.response_length
        for span in self.versions:
            found[span.start : span.end] = [span.version] * (span.end - span.start)
        return found

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.versions), default=None)


class Batch(Record, kw_only=True):
    """The experiences of one training step, in admission order.

    `replayed`: the same batch was leased before a restart.
    """

    step: int
    experiences: list[Experience]
    replayed: bool = False
    waited_s: float = 0.0


class EvalResult(Record, kw_only=True):
    """Scores of one evaluation set:

    `metrics` maps e.g. `accuracy`, `reward/mean`, `response_length/mean` to a number.
    """

    taskset: str
    version: int
    num_tasks: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]] = []


COLUMNS: dict[str, Any] = {
    "tokens": Ids,
    "action_mask": Flags,
    "logprobs": LogProbs,
    "token_rewards": TokenRewards,
}
_encoder = msgspec.msgpack.Encoder(enc_hook=columns.packed)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(record: Any) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode msgpack bytes into `kind` (`Experience`, `list[Experience]`, ...); raises
    msgspec.ValidationError.
    """
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=columns.unpacked)
    return _decoders[kind].decode(data)
