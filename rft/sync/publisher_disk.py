"""Publication by `checkpoint`: a version goes to the engines as a save of the weights, which they read where it lies.

    start: the version is wanted ─► the loop saves it, with its checkpoint if that is due too: one staging for both
    agents: write, commit ─► rank 0 hears of it ─► the synchronizer tells the engines ─► wait: they serve it

For an explorer on another cluster, which has no synchronizer of ours and looks for saves itself (`rft.sync.saved_versions`), and
for one of this run. The same calls as `rft.sync.publisher.Publisher`. Weights may change as soon as the save's copies are made,
which the loop waits for anyway: `release` does not wait. Invariant: the next version is begun only when this one is served, or,
without engines here, committed; so a reader of the newest version always has the two newest saves on disk.
"""

import logging
from concurrent.futures import Future
from typing import Any, Protocol

from rft.checkpoint.commit import read_manifest
from rft.checkpoint.records import Committed, Failed, Report
from rft.checkpoint.storage import WEIGHTS, Storage
from rft.config import SynchronizerConfig
from rft.sync.publisher import Ranks, Rounds, agreed, answer
from rft.sync.synchronizer import brought_by, reason

log = logging.getLogger(__name__)


class Saves(Protocol):
    """What is needed of the checkpoint manager. `hear` is called, by another thread, with every report of the agent."""

    storage: Storage
    hear: Any


class CheckpointPublisher(Rounds):
    """Every rank has one and calls it in the same order. `synchronizer`: rank 0's, if engines belong to this run."""

    def __init__(
        self, mesh: Ranks, saves: Saves, synchronizer: Any | None, config: SynchronizerConfig, epoch: int,
        deadline_s: float, engines: bool = True,
    ):  # fmt: skip
        super().__init__(mesh, synchronizer, config, epoch)
        self.saves = saves
        self.deadline_s = deadline_s  # for one save, from its beginning to its commit
        self.engines = engines  # of this run
        self._wanted: int | None = None  # a version that is to be saved
        self._saving: int | None = None
        self._told: Future[Any] = Future()  # rank 0: the synchronizer's answer, once there is a save to tell of

    def connect(self) -> None:
        """Let the engines know that a trainer is here. Collective."""
        self.saves.hear = self._hear
        outcome = {}
        if self.synchronizer is not None:
            reply = self.synchronizer.attach.remote(self.epoch, method="checkpoint")
            outcome = answer(reply, self.config.sync_timeout)
        agreed(self.mesh, outcome)

    def start(self, version: int, due: bool = True) -> None:
        """Begin publishing the current weights as `version`, if it is due; `claim_save` must follow. What was begun before is
        finished first. A version that is not due needs nothing: engines that come back find the last one on disk."""
        self.wait()
        if due:
            self._wanted = version

    def claim_save(self, version: int) -> bool:
        """Whether `version` is to be saved now, for the engines. Says so once."""
        if self._wanted != version:
            return False
        self._saving, self._wanted, self._told = version, None, Future()
        return True

    def wait(self) -> None:
        """Return when the started version is served by all engines; without engines here, when it is committed. Collective."""
        assert self._wanted is None, f"version {self._wanted} was never saved"
        if self._saving is None:
            return
        numbers = agreed(self.mesh, self._outcome() if self.mesh.rank == 0 else {})
        self.version, self._saving = self._saving, None
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}

    def release(self) -> None:
        """Nobody reads this rank's weights."""

    def close(self) -> None:
        self.saves.hear = lambda report: None

    def _hear(self, report: Report) -> None:
        """By the thread that listens to the agent: a save of the weights that is due ends in exactly one of two ways."""
        told = self._told
        if told.done() or not isinstance(report, Committed | Failed) or report.step != self._saving:
            return
        if isinstance(report, Failed):
            told.set_exception(RuntimeError(f"version {report.step} was not saved: {report.cause}"))
        elif report.collection == WEIGHTS:
            self._tell(report, told)

    def _tell(self, report: Committed, told: "Future[Any]") -> None:
        try:
            self.digest = read_manifest(self.saves.storage, report.name).seal
        except (OSError, ValueError) as error:  # raised by `wait`
            told.set_exception(error)
            return
        if self.synchronizer is None:
            told.set_result(None)
            return
        brought = brought_by(self.saves.storage.where, report.name, self.digest)
        told.set_result(self.synchronizer.publish.remote(report.step, self.epoch, brought))

    def _outcome(self) -> dict[str, Any]:
        """Rank 0: what became of the save, and of the round. Without engines here a save that failed is only counted, as others."""
        try:
            reply = self._told.result(self.deadline_s)
        except TimeoutError:
            return {"error": f"version {self._saving} is not committed after {self.deadline_s:g} s"}
        except Exception as error:
            if self.engines:
                return {"error": reason(error)}
            log.error("weights for explorers elsewhere: %s", error)
            return {}
        return answer(reply, self.config.sync_timeout) if reply is not None else {}
