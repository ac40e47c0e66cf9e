"""Weight publication as the training loop sees it, on every rank: connect once, then start and wait
per version.

    connect: the engines hear of this trainer
    start:   the current weights are a version; rank 0 asks the synchronizer for its round
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
"""

from collections.abc import Callable
from typing import Any

from rft.config import SynchronizerConfig
from rft.ground.protocols import Collective
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle, reason

REPLY_S = 30.0  # on top of sync_timeout: the synchronizer raises the better error first


class Origin:
    """One way for versions to leave the trainer. Every rank has one and calls it in the same order.

    An outcome is {"numbers": ...} or {"error": ...}; rank 0's counts. `is_live`: engines read the
    weights themselves, which may not change before the round is over. `synchronizer`: rank 0's, if
    engines belong to this run.
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

    def connect(self) -> dict[str, Any]:
        """Let the engines know that a trainer is here; returns the outcome. Collective."""
        raise NotImplementedError

    def start(self, version: int, due: bool) -> None:
        """The current weights are `version`. Not `due`: no engine has to take it."""
        raise NotImplementedError

    def outcome(self) -> dict[str, Any]:
        """Of the version that was started last, when its round is over."""
        raise NotImplementedError

    def rest(self) -> dict[str, Any]:
        """Put the engines to sleep; returns the outcome."""
        if self.synchronizer is None:
            return {}
        return self.answer(self.synchronizer.ask(Synchronizer.rest))

    def release(self) -> dict[str, float]:
        """Return, with numbers, when this rank's weights may change."""
        return {}

    def claim_save(self, version: int) -> bool:
        """Whether `version` is to be saved now, for the engines. Says so once."""
        return False

    def close(self) -> None:
        """The trainer ends."""

    def answer(self, reply: Any) -> dict[str, Any]:
        """What the synchronizer says to rank 0, as an outcome for all ranks: its failure becomes
        one of theirs.
        """
        import ray

        try:
            return {"numbers": ray.get(reply, timeout=self.config.sync_timeout + REPLY_S) or {}}
        except Exception as error:  # raised on every rank, after these have heard of it
            return {"error": reason(error)}


class Publisher:
    """Every rank has one and calls it in the same order.

    `origin`: None where nobody takes weights; then versions just count. `probe` looks at the
    engines while they serve exactly these weights. `takes_turns`: with engines on the same devices.
    """

    def __init__(
        self,
        origin: Origin | None,
        probe: Callable[[int], dict[str, float]] = lambda version: {},
        takes_turns: bool = False,
    ):
        self.origin = origin
        self.probe = probe
        self.takes_turns = takes_turns
        self.version: int | None = None  # the last one that all engines serve
        self.last: dict[str, float] = {}
        self._begun: int | None = None

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
        if due:
            self._begun = version
        if self.origin is not None:
            self.origin.start(version, due)

    def wait(self) -> None:
        """Return when the started version, if it was due, is served by all engines. Collective."""
        if self._begun is None:
            return
        if self.origin is not None:
            self._count(self._agreed(self.origin.outcome()) | self.probe(self._begun))
        self.version, self._begun = self._begun, None

    def rest(self) -> None:
        """The engines have done their part of the step: return when they sleep, if they share this
        rank's devices. Collective.
        """
        if not self.takes_turns:
            return
        assert self.origin is not None
        self.wait()
        self._count(self._agreed(self.origin.rest(), "putting the engines to sleep"))

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

    def _agreed(self, outcome: dict[str, Any], what: str = "weight sync") -> dict[str, float]:
        """Rank 0's outcome, on every rank; raises on every rank if it is a failure."""
        assert self.origin is not None
        outcome = self.origin.mesh.broadcast(outcome)
        if "error" in outcome:
            raise self.origin.failure(f"{what} failed: {outcome['error']}")
        return dict(outcome.get("numbers", {}))
