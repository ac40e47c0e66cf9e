"""Rows of one step -> balanced, packed microbatches. Pure numpy.

    rows ──stack──► [dp rank][microbatch] Stacked: all that must travel, at rank 0
      Stacked ──packed──► Packed ──slice_cp──► this context-parallel rank's tokens, on every rank
      (`rft.data.context_parallel`)

Every array of a `Packed` is aligned to the *predicting* position t: `labels[t]`, `weight[t]`,
`behaviour[t]`, `advantage[t]` and the scores at t belong to the next token of the same sequence.
Invariant: every token of every row is in exactly one microbatch of one rank, and a weight that is
not 0 stands only before a trained token; so the sum of weight * loss over everything is the step's
loss, however the rows were cut. Rows of a group that begin alike may stand side by side
(`rft.data.prefixes`): then what they share counts once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import numpy as np

from rft.config import TrainerConfig
from rft.data.balance import Cost, assign, assign_chains, fill, refine
from rft.data.prefixes import chains, shared_lengths
from rft.data.runs import Numbers, Runs, expanded
from rft.ground.experience import NO_EXPERT


@dataclass(frozen=True)
class Row:
    """One sequence [L] with what is known about each of its tokens (0 where nothing is)."""

    tokens: np.ndarray  # int32
    trained: np.ndarray  # 1 where the token is a training target
    behaviour: np.ndarray  # the engine's log-probability of the token
    advantage: Numbers
    weight: Numbers  # global loss weight of the token, already divided by the global counts
    temperature: float = 1.0
    # more, by name; all rows of a step have the same
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    group: int = -1  # rows of one begin alike; -1: of none
    # [L, layers, top_k]: experts that the engine sent each token through, as `RoutedExperts`
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Packed:
    """One microbatch of T tokens: sequences one after another,
    then padding that belongs to none.
    """

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T], from 0 in every sequence
    labels: np.ndarray  # int32 [T]
    weight: np.ndarray  # float32 [T], as are the three below
    behaviour: np.ndarray
    advantage: np.ndarray
    temperature: np.ndarray
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    rows: np.ndarray  # int32 [sequences]: index of each sequence in the list given to `pack`
    # float32 [T] each: of the rows, or of other models
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    # int64 [sequences]: so many first tokens are those of the sequence before, and computed there;
    # empty: none
    shared: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    routes: np.ndarray | None = None  # [T, layers, top_k], of the token itself; None: of none

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens that go through the model, padding left out."""
        return int(self.cu_seqlens[-1]) - int(self.shared.sum())


@dataclass(frozen=True)
class Stacked:
    """The rows of one microbatch, one behind the other: what `Packed` is made of. Every array is
    aligned to its own token here, and nothing is padded.
    """

    length: int  # of the microbatch, padding included
    tokens: np.ndarray  # int32 [tokens], the three below float32
    weight: Numbers
    behaviour: Numbers
    advantage: Numbers
    temperature: np.ndarray  # float32 [sequences]
    lengths: np.ndarray  # int32 [sequences]
    rows: np.ndarray  # as in `Packed`
    shared: np.ndarray
    scores: dict[str, Numbers]  # float32 [tokens] each
    routes: np.ndarray | None = None  # [tokens, layers, top_k]

    def packed(self) -> Packed:
        cu_seqlens = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        total, ends = int(cu_seqlens[-1]), cu_seqlens[1:]

        def padded(values: np.ndarray, dtype: Any, padding: float = 0) -> np.ndarray:
            out = np.empty(self.length, dtype=dtype)
            out[: len(values)] = values
            out[len(values) :] = padding
            return out

        def shifted(values: Numbers, dtype: Any) -> np.ndarray:
            out = padded(expanded(values)[1:], dtype)
            out[ends[ends > 0] - 1] = 0  # behind a sequence comes none of its own
            return out

        starts = np.repeat(cu_seqlens[:-1], self.lengths)
        return Packed(
            tokens=padded(self.tokens, np.int32),
            positions=padded(np.arange(total, dtype=np.int32) - starts, np.int32),
            labels=shifted(self.tokens, np.int32),
            temperature=padded(
                np.repeat(self.temperature, self.lengths), np.float32, PADDING["temperature"]
            ),
            cu_seqlens=cu_seqlens,
            rows=self.rows,
            shared=self.shared,
            scores={name: shifted(values, np.float32) for name, values in self.scores.items()},
            routes=None if self.routes is None else lengthened(self.routes, self.length),
            **{name: shifted(getattr(self, name), np.float32) for name in NUMBERS},
        )


@dataclass(frozen=True)
class PackingPolicy:
    """How a step is cut, where that is not by tokens, balanced and
    without padding between the sequences.
    """

    rows: int | None = None  # so many rows per microbatch, whatever their lengths
    balance: bool = True  # False: rows stay in their order, and every rank takes as many
    pad: bool = False  # every sequence of a microbatch takes the room of its longest
    share: bool = False  # cut by tokens: what rows of a group begin with alike is computed once

    @property
    def by_tokens(self) -> bool:
        return self.rows is None and self.balance and not self.pad


def cut_of(trainer: TrainerConfig) -> PackingPolicy:
    rows = None if trainer.use_dynamic_bsz else trainer.ppo_micro_batch_size_per_gpu
    cut = PackingPolicy(rows, trainer.balance_batch, pad=not trainer.use_remove_padding)
    whole = trainer.megatron.context_parallel_size == 1  # no row is cut over ranks
    return replace(cut, share=trainer.share_prefixes and cut.by_tokens and whole)


BY_TOKENS = PackingPolicy()
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
NUMBERS = ("weight", "behaviour", "advantage")
TOKEN_FIELDS = ("tokens", "positions", "labels", *NUMBERS, "temperature")
PADDING = {"temperature": 1.0}  # every other field is padded with 0


class Cut(Sequence[list[Stacked]]):
    """A step's rows and the microbatches that each data-parallel rank gets of them, stacked when
    they are asked for: beside the rows only what is being sent is in memory.
    """

    def __init__(
        self, rows: list[Row], bins: list[list[list[int]]], multiple: int, policy: PackingPolicy
    ):
        self.rows, self.bins, self.multiple, self.policy = rows, bins, multiple, policy
        picked = [[self._picked(bin_) for bin_ in part] for part in bins]
        self.shared = [[_shared(one, policy.share) for one in part] for part in picked]
        self.lengths = [[[len(row.tokens) for row in one] for one in part] for part in picked]

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, at: Any) -> list[Stacked]:
        scores = tuple(self.rows[0].scores) if self.rows else ()
        return [
            _stacked(self._picked(bin_), bin_, self.multiple, scores, shared)
            for bin_, shared in zip(self.bins[at], self.shared[at], strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Of the rows' columns."""
        columns = (
            (row.tokens, row.behaviour, *(() if row.routes is None else (row.routes,)))
            for row in self.rows
        )
        return sum(column.nbytes for row in columns for column in row)

    def _picked(self, bin_: list[int]) -> list[Row]:
        return _picked(self.rows, bin_, self.policy.pad)


def token_weights(lengths: list[int], mode: str, longest: int = 1) -> list[float]:
    """Weight of every trained token of each row, so that the sum of weight * loss is the aggregate
    `mode` over the batch.

    `lengths` counts the trained tokens of every row of the step; rows without any do not count as
    sequences. The mode `seq-mean-token-sum-norm` divides by `longest`, which is the same in every
    step (Dr. GRPO, arXiv:2503.20783).
    """
    sequences, tokens = sum(n > 0 for n in lengths), sum(lengths)
    if mode == "token-mean":
        return [1.0 / tokens if n else 0.0 for n in lengths]
    if mode == "seq-mean-token-mean":
        return [1.0 / (sequences * n) if n else 0.0 for n in lengths]
    if mode == "seq-mean-token-sum":
        return [1.0 / sequences if n else 0.0 for n in lengths]
    if mode == "seq-mean-token-sum-norm":
        return [1.0 / (sequences * longest) if n else 0.0 for n in lengths]
    raise ValueError(f"algorithm.loss_agg_mode={mode}: use one of {', '.join(AGGREGATIONS)}")


def pack(
    rows: list[Row],
    dp: int,
    max_tokens: int,
    multiple: int,
    cost: Cost = Cost(),
    cut: PackingPolicy = BY_TOKENS,
) -> list[list[Packed]]:
    """Microbatches of at most `max_tokens`, padding included, for each of `dp` ranks: the same
    number everywhere.

    Lengths are padded to a multiple of `multiple`; that `slice_cp` pads every sequence to 2 x its
    ranks is not counted. A row longer than `max_tokens` gets a microbatch of its own; a rank
    without rows gets microbatches of padding only, which compute nothing and keep the collectives
    aligned.
    """
    stacked = stack(rows, dp, max_tokens, multiple, cost, cut)
    return [[one.packed() for one in part] for part in stacked]


def stack(
    rows: list[Row],
    dp: int,
    max_tokens: int,
    multiple: int,
    cost: Cost = Cost(),
    cut: PackingPolicy = BY_TOKENS,
) -> Cut:
    """As `pack`, up to what travels."""
    return Cut(rows, bins_of(rows, dp, max_tokens, multiple, cost, cut), multiple, cut)


def bins_of(
    rows: Sequence[Row],
    dp: int,
    max_tokens: int,
    multiple: int,
    cost: Cost = Cost(),
    cut: PackingPolicy = BY_TOKENS,
) -> list[list[list[int]]]:
    """[rank][microbatch] -> row numbers, as `pack` cuts these rows."""
    limit = max(1, max_tokens - max_tokens % multiple)
    lengths = [len(row.tokens) for row in rows]
    if not cut.by_tokens:
        return divide(lengths, dp, limit, cut, cost)
    if not cut.share:
        return assign(lengths, dp, limit, cost)
    found = chains(
        [row.tokens for row in rows],
        [row.trained for row in rows],
        [row.group for row in rows],
        [row.routes for row in rows],
    )
    return assign_chains(found, dp, limit, cost)


def divide(
    lengths: list[int], dp: int, max_tokens: int, cut: PackingPolicy, cost: Cost = Cost()
) -> list[list[list[int]]]:
    """As `assign`, for another cut: rows over ranks, by cost or in order, then as many into a
    microbatch as it may hold.

    Balanced rows come longest first, so that those padded to one length are of similar ones.
    """
    count = len(lengths)
    ranks = [part.tolist() for part in np.array_split(np.arange(count), dp)]
    if cut.balance:
        longest_first = sorted(range(count), key=lambda i: (-lengths[i], i))
        value, one = cost(np.array(lengths, dtype=np.float64)), np.ones(count, dtype=np.int64)
        limit = -(-count // dp) if cut.rows else count
        filled = fill(longest_first, dp, value, one, limit)
        assert filled is not None, "there is room for every row"
        refine(filled, value, one, limit)
        place = {row: at for at, row in enumerate(longest_first)}
        ranks = [sorted(rank, key=place.__getitem__) for rank in filled]
    parts = [chunks(rank, lengths, max_tokens, cut) for rank in ranks]
    return [part + [[] for _ in range(max(map(len, parts)) - len(part))] for part in parts]


def chunks(
    rows: list[int], lengths: list[int], max_tokens: int, cut: PackingPolicy
) -> list[list[int]]:
    """`rows` in this order, each microbatch as full as it may be; a
    row that is too long gets one of its own.
    """
    found: list[list[int]] = [[]]
    for row in rows:
        count, sizes = len(found[-1]) + 1, [lengths[i] for i in (*found[-1], row)]
        tokens = count * max(sizes) if cut.pad else sum(sizes)
        if found[-1] and (count > cut.rows if cut.rows else tokens > max_tokens):
            found.append([])
        found[-1].append(row)
    return found


def _picked(rows: list[Row], chosen: list[int], pad: bool) -> list[Row]:
    """The chosen rows; `pad`: all as long as the longest, by untrained tokens behind, which nothing
    before them attends to.
    """
    picked = [rows[i] for i in chosen]
    longest = max((len(row.tokens) for row in picked), default=0)
    return [_lengthened(row, longest) for row in picked] if pad else picked


def _lengthened(row: Row, length: int) -> Row:
    behind = (0, length - len(row.tokens))
    numbers = map(expanded, (row.advantage, row.weight))
    arrays = (row.tokens, row.trained, row.behaviour, *numbers)
    scores = {name: np.pad(array, behind) for name, array in row.scores.items()}
    padded = (np.pad(array, behind) for array in arrays)
    routes = None if row.routes is None else lengthened(row.routes, length)
    return Row(*padded, row.temperature, scores, row.group, routes)


def _shared(picked: list[Row], share: bool) -> np.ndarray:
    if not share:
        return np.zeros(len(picked), dtype=np.int64)
    return shared_lengths(
        [row.tokens for row in picked],
        [row.trained for row in picked],
        # a row of no group shares with none
        [row.group if row.group >= 0 else -1 - at for at, row in enumerate(picked)],
        [row.routes for row in picked],
    )


def _stacked(
    picked: list[Row], chosen: list[int], multiple: int, scores: Iterable[str], shared: np.ndarray
) -> Stacked:
    """`scores`: names of those of all rows."""
    lengths = np.array([len(row.tokens) for row in picked], dtype=np.int32)

    def joined(parts: list[np.ndarray], dtype: Any = np.float32) -> np.ndarray:
        return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)

    def numbers(parts: list[Numbers]) -> Numbers:
        runs = [part for part in parts if isinstance(part, Runs)]
        if runs and len(runs) == len(parts):
            return Runs.joined(runs)
        return joined(list(map(expanded, parts)))

    return Stacked(
        length=max(multiple, -(-int(lengths.sum()) // multiple) * multiple),
        tokens=joined([row.tokens for row in picked], np.int32),
        weight=numbers([_weight(row) for row in picked]),
        behaviour=joined([row.behaviour for row in picked]),
        advantage=numbers([row.advantage for row in picked]),
        temperature=np.array([row.temperature for row in picked], dtype=np.float32),
        lengths=lengths,
        rows=np.array(chosen, dtype=np.int32),
        shared=shared,
        scores={name: joined([row.scores[name] for row in picked]) for name in scores},
        routes=joined_routes([row.routes for row in picked], lengths),
    )


def _weight(row: Row) -> Numbers:
    """Runs are those of what is trained."""
    return row.weight if isinstance(row.weight, Runs) else row.weight * (row.trained > 0)


def joined_routes(given: Sequence[np.ndarray | None], lengths: np.ndarray) -> np.ndarray | None:
    """Routes of rows of these lengths one behind the other; None where no row has any."""
    some = next((routes for routes in given if routes is not None), None)
    if some is None:
        return None
    nothing = some[:0]
    return np.concatenate(
        [
            lengthened(nothing, int(length)) if routes is None else routes
            for routes, length in zip(given, lengths, strict=True)
        ]
    )


def lengthened(routes: np.ndarray, length: int) -> np.ndarray:
    """So many tokens, those behind without a route."""
    out = np.full((length, *routes.shape[1:]), NO_EXPERT[routes.dtype.name], routes.dtype)
    out[: len(routes)] = routes
    return out


def work_of(given: Cut, cost: Cost) -> dict[str, float]:
    """Metrics of a step: tokens of its rows, FLOPs of one forward pass over them, and which part of
    both other rows' serve for, which those FLOPs are without.
    """
    lengths = np.array([len(row.tokens) for row in given.rows], dtype=np.float64)
    if not len(lengths):
        return {}
    shared = np.concatenate([one for part in given.shared for one in part]).astype(np.float64)
    flops, saved = float(cost(lengths).sum()), float(cost(shared).sum())
    return {
        "packing/tokens": float(lengths.sum()),
        "packing/forward_flops": flops - saved,
        "packing/shared_frac": float(shared.sum() / lengths.sum()),
        "packing/shared_flops_frac": saved / flops,
    }


def free_tokens(rows: Iterable[Row]) -> dict[str, float]:
    """A metric: so many tokens of a step have no route, and go where the trainer sends them."""
    found = 0
    for row in rows:
        if row.routes is None:
            found += len(row.tokens)
        else:
            none = NO_EXPERT[row.routes.dtype.name]
            found += int((row.routes.reshape(len(row.routes), -1) == none).any(1).sum())
    return {"routing/free_tokens": float(found)}


def empty(length: int, scores: Iterable[str] = ()) -> Packed:
    """A microbatch of padding only, with scores of these names."""
    return _stacked([], [], length, scores, np.zeros(0, dtype=np.int64)).packed()


def multiple_of(tensor: int, context: int, kernels: int = 1) -> int:
    """What the local length of every microbatch is a multiple of: shards of a sequence-parallel
    group, tokens that kernels take at a time, and, with context parallelism, two chunks per rank.
    The padding behind the sequences is one more sequence to Transformer Engine, and a whole
    microbatch where there are none.
    """
    return lcm(tensor * kernels, 2 if context > 1 else 1)
