"""Weight publication as the training loop sees it, on every rank: connect once, then start and wait
per version.

    connect: the engines hear of this trainer
    start:   the current weights are a version; rank 0 asks the synchronizer for its round, where
             they take turns after every rank has given back what it does not use of its device
    wait:    rank 0 takes the synchronizer's answer
            ─broadcast─► every rank knows that the engines serve it
    rest:    where trainer and engines take turns: as wait; then the engines sleep, until the next
             round wakes them
    release: the weights may change

Consumes versions, produces `version` (the last one that all engines serve) and the rounds' numbers.
How the bytes get from here to the engines is the `Origin`: `rft.sync.origins` has one for streams,
one for the object store and one for saves. Invariants: after `release` returns, this rank's weights
may change, between `start` and `release` they must not; the next version is begun only when this
one is served.

A `Probe` asks whether the engines compute what the trainer computes, every n-th time that weights
were synchronized, and the first time:

    rank 0 ── a fixed prompt ──► every engine: greedy tokens, their log-probabilities ──► packed
            ──► the policy's own forward pass

Checksums say that bytes arrived; this says that they arrived where they belong: a transposed block,
a wrong norm or an expert at another place has the right bytes.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rft.config import SynchronizerConfig
from rft.data.packing import Cut, Packed, Row, stack
from rft.ground.columns import behind
from rft.ground.experience import Completion, GenerateRequest, Record, Sampling, decode, encode
from rft.ground.protocols import Collective, TrainerMesh
from rft.sync.lead import NotConnected
from rft.sync.stored_versions import VersionLost
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle, reason

log = logging.getLogger(__name__)
REPLY_S = 30.0  # on top of sync_timeout: the synchronizer raises the better error first
PROMPT_TOKENS, NEW_TOKENS = 16, 16
# nats, mean: half-precision arithmetic differs by a tenth of it, a wrong layout by several
LIMIT = 0.5
ANSWER_S = 60.0


class Outcome(Record, frozen=True):
    """What became of something that was asked of the synchronizer: its numbers, or the `error`."""

    numbers: dict[str, float] = {}
    error: str | None = None


class Connection:
    """A rank's connection to the synchronizer, which may die and begin anew: `again` is called
    then, by a thread of its own, to do what the new process must know; what the loop has asked
    waits there, or was sent again by Ray.

    Asked for all the time is `Synchronizer.lead`, which only a process answers that does not know
    this trainer.
    """

    def __init__(self, synchronizer: SynchronizerHandle, epoch: int, again: Callable[[], None]):
        self.synchronizer = synchronizer
        self.epoch = epoch
        self.again = again
        self.is_closed = False
        self._watch()

    def _watch(self) -> None:
        """No thread waits: the end of the run may come meanwhile."""
        answer = self.synchronizer.ask(Synchronizer.lead, self.epoch).future()
        answer.add_done_callback(lambda ended: self._ended(ended.exception()))

    def _ended(self, error: BaseException | None) -> None:
        if isinstance(error, NotConnected) and not self.is_closed:
            threading.Thread(target=self._renew, name="connect again", daemon=True).start()

    def _renew(self) -> None:
        log.warning("the synchronizer is a new process: connecting to it again")
        try:
            self.again()
        except Exception:  # the loop's own calls end with a better error
            log.exception("connecting again")
            return
        self._watch()


class Origin(ABC):
    """One way for versions to leave the trainer. Every rank has one and calls it in the same order.

    Of outcomes rank 0's counts. `is_live`: engines read the weights themselves, which may not
    change before the round is over. `synchronizer`: rank 0's, if engines belong to this run.
    """

    is_live = False
    failure: type[RuntimeError] = RuntimeError

    def __init__(
        self,
        mesh: Collective,
        synchronizer: SynchronizerHandle | None,
        config: SynchronizerConfig,
        epoch: int,
    ):
        self.mesh = mesh
        self.synchronizer = synchronizer
        self.config = config
        self.epoch = epoch
        self.digest = ""  # of the plan, or of what stands in for it
        self.connection: Connection | None = None
        self._offered: int | None = None  # a version that engines may take, though none must

    @abstractmethod
    def connect(self) -> Outcome:
        """Let the engines know that a trainer is here; returns the outcome. Collective."""

    @abstractmethod
    def start(self, version: int, due: bool) -> None:
        """The current weights are `version`. Not `due`: no engine has to take it."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Of the version that was started last, when its round is over."""

    def rest(self) -> Outcome:
        """Put the engines to sleep; returns the outcome."""
        return self.answer(self.ask(Synchronizer.rest))

    def release(self) -> dict[str, float]:
        """Return, with numbers, when this rank's weights may change."""
        return {}

    def claim_save(self, version: int) -> bool:
        """Whether `version` is to be saved now, for the engines. Says so once."""
        return False

    def close(self) -> None:
        """The trainer ends."""
        if self.connection is not None:
            self.connection.is_closed = True

    def lead(self, method: Callable[..., Any], *arguments: Any) -> Outcome:
        """Connect by this call of the synchronizer's, now and whenever that begins anew."""
        outcome = self.answer(self.ask(method, *arguments))

        def again() -> None:
            import ray

            ray.get(self.ask(method, *arguments), timeout=self.config.sync_timeout + REPLY_S)
            self.renew()

        if self.synchronizer is not None and outcome.error is None:
            self.connection = Connection(self.synchronizer, self.epoch, again)
        return outcome

    def renew(self) -> None:
        """Connected again: tell what the new process must know."""
        if (version := self._offered) is not None:
            self.ask(Synchronizer.offer, version, self.epoch)

    def ask(self, method: Callable[..., Any], *arguments: Any) -> Any | None:
        """Begin a call of the synchronizer's; None where there is none."""
        return None if self.synchronizer is None else self.synchronizer.ask(method, *arguments)

    def answer(self, reply: Any | None) -> Outcome:
        """What the synchronizer says to rank 0, as an outcome for all ranks: its failure becomes
        one of theirs. Nothing, where nothing was asked.
        """
        if reply is None:
            return Outcome()
        import ray

        try:
            numbers = ray.get(reply, timeout=self.config.sync_timeout + REPLY_S)
        except VersionLost as error:
            log.warning("%s; the next one takes its place", reason(error))
            return Outcome(numbers={"lost": 1.0})
        except Exception as error:  # raised on every rank, after these have heard of it
            return Outcome(error=reason(error))
        return Outcome(numbers=numbers or {})


class Publisher:
    """Every rank has one and calls it in the same order.

    `origin`: None where nobody takes weights; then versions just count. `probe` looks at the
    engines while they serve exactly these weights. `takes_turns`: with engines on the same devices;
    `give_back` then frees what this rank holds of its device and does not use.
    """

    def __init__(
        self,
        origin: Origin | None,
        probe: Callable[[int], dict[str, float]] = lambda version: {},
        takes_turns: bool = False,
        give_back: Callable[[], None] = lambda: None,
    ):
        self.origin = origin
        self.probe = probe
        self.takes_turns = takes_turns
        self.give_back = give_back
        self.version: int | None = None  # the last one that all engines serve
        self.last: dict[str, float] = {}
        self._begun: int | None = None
        self._is_lost = False  # what was begun last was never served

    def connect(self) -> None:
        """Let the engines know that a trainer is here. Collective; raises on every rank if that
        fails.
        """
        if self.origin is not None:
            self._agreed(self.origin.connect())

    def start(self, version: int, due: bool = True) -> None:
        """Begin publishing the current weights as `version`; does not block. Not `due`: they are
        only there for engines that have come back without any. What was started before is released
        and served first.
        """
        self.release()
        self.wait()
        due, self._is_lost = due or self._is_lost, False
        if due:
            self._begun = version
        if self.origin is not None:
            if self.takes_turns:
                self._make_room()
            self.origin.start(version, due)

    def wait(self) -> None:
        """Return when the started version, if it was due, is served by all engines. Collective."""
        if self._begun is None:
            return
        if self.origin is not None:
            numbers = self._agreed(self.origin.outcome())
            self._is_lost = "lost" in numbers
            self._count(numbers | ({} if self._is_lost else self.probe(self._begun)))
        if not self._is_lost:
            self.version = self._begun
        self._begun = None

    def rest(self) -> None:
        """The engines have done their part of the step: return when they sleep, if they share this
        rank's devices. Collective.
        """
        if not self.takes_turns:
            return
        assert self.origin is not None
        self.wait()
        self._count(self._agreed(self.origin.rest(), "putting the engines to sleep"))

    def _make_room(self) -> None:
        """The next round wakes the engines. A worker takes what it needs of its card at once, and
        of what the step before has left in this rank's allocator it could not take a byte; so no
        round is asked for before every rank has given that back. Collective.
        """
        assert self.origin is not None
        self.give_back()
        self.origin.mesh.barrier("room for the engines")

    def release(self) -> None:
        """Return when the weights may change. Collective."""
        if self.origin is None or self.origin.is_live:
            self.wait()
        if self.origin is not None:
            self._count(self.origin.release())

    def claim_save(self, version: int) -> bool:
        """Whether `version` is to be saved now, for the engines. Says so once."""
        return self.origin is not None and self.origin.claim_save(version)

    def pop(self) -> dict[str, float]:
        """The numbers of rounds since the last call."""
        numbers, self.last = self.last, {}
        return numbers

    def close(self) -> None:
        if self.origin is not None:
            self.origin.close()

    def _count(self, numbers: dict[str, float]) -> None:
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}

    def _agreed(self, outcome: Outcome, what: str = "weight sync") -> dict[str, float]:
        """Rank 0's outcome, on every rank; raises on every rank if it is a failure."""
        assert self.origin is not None
        agreed = msgspec.convert(self.origin.mesh.broadcast(outcome), Outcome)
        if agreed.error is not None:
            raise self.origin.failure(f"{what} failed: {agreed.error}")
        return agreed.numbers


# --- do the engines compute what the trainer computes? -------------------------------------------


class Scorer(Protocol):
    multiple: int

    def score(self, part: Sequence[Packed], trained_only: bool = False) -> list[np.ndarray]: ...


class Probe:
    """In: a policy whose weights are those that all engines serve. Out: the mean and the largest
    difference of a log-probability.

    It changes nothing, and every rank comes to the same end. `interval`: every so many versions; 0:
    never. `vocab`: token ids that the model has.
    """

    def __init__(
        self,
        policy: Scorer,
        mesh: TrainerMesh,
        synchronizer: SynchronizerHandle | None,
        interval: int,
        vocab: int,
    ):
        self.policy = policy
        self.mesh = mesh
        self.synchronizer = synchronizer
        self.interval = interval
        self.vocab = vocab
        self.passed = 0  # versions since the last one that was probed

    def after(self, version: int) -> dict[str, float]:
        """All engines serve `version`, which are the policy's weights now.

        Collective; raises when they compute something else.
        """
        due = self.interval > 0 and self.passed % self.interval == 0
        self.passed += 1
        if not due:
            return {}
        completions = self._ask(version) if self.synchronizer is not None else []
        parts = self._stacked(completions) if self.mesh.rank == 0 else None
        mean, most = self._differences(self.mesh.scatter_parts(parts))
        if mean > LIMIT:
            raise RuntimeError(
                f"the engines do not compute what the trainer does: of version {version} their "
                "log-probabilities differ by "
                f"{mean:.2f} nats on average, {most:.2f} at most, on the same tokens"
            )
        return {"probe_mean_diff": mean, "probe_max_diff": most}

    def _ask(self, version: int) -> list[Completion]:
        import ray

        prompt = [(13 + 7919 * i) % self.vocab for i in range(PROMPT_TOKENS)]
        sampling = Sampling(temperature=0.0, max_tokens=NEW_TOKENS)
        self.request = GenerateRequest(
            request_id=f"probe/{version}", prompt=prompt, sampling=sampling
        )
        answers = ray.get(
            self.synchronizer.ask(Synchronizer.probe, encode(self.request)),  # type: ignore[union-attr]
            timeout=ANSWER_S,
        )
        return [made for answer in answers for made in decode(answer, list[Completion])]

    def _stacked(self, completions: list[Completion]) -> Cut:
        rows = [_row(self.request.prompt, made) for made in completions]
        return stack(rows, self.mesh.dp, PROMPT_TOKENS + NEW_TOKENS, self.policy.multiple)

    def _differences(self, part: Sequence[Packed]) -> tuple[float, float]:
        """Mean and maximum over all ranks; ranks that hold the same tokens count them as often."""
        import torch

        sums, maxima = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        found = self.policy.score(part, trained_only=True)
        if self.mesh.is_last_stage:
            for packed, scores in zip(part, found, strict=True):
                differences = np.abs(scores - packed.behaviour)[packed.weight > 0]
                sums += torch.tensor([differences.sum(), len(differences)], dtype=torch.float64)
                maxima = torch.maximum(
                    maxima, torch.tensor([differences.max(initial=0.0)], dtype=torch.float64)
                )
        self.mesh.reduce(sums, maxima)
        return float(sums[0] / max(1.0, float(sums[1]))), float(maxima[0])


def _row(prompt: list[int], made: Completion) -> Row:
    tokens = behind(prompt, made.tokens)
    trained, behaviour = (
        np.zeros(len(tokens), dtype=np.float32),
        np.zeros(len(tokens), dtype=np.float32),
    )
    trained[len(prompt) :] = 1.0
    behaviour[len(prompt) :] = made.logprobs
    return Row(
        tokens,
        trained,
        behaviour,
        advantage=np.zeros(len(tokens), dtype=np.float32),
        weight=trained,
    )
