"""Publication by path: the service saves the weights of a version for samplers, and every engine opens them where they lie.

    start: a version is wanted ─► save_weights_for_sampler ─► its path ─► the synchronizer tells the engines ─► wait: they serve it

The calls of `rft.sync.publisher.Publisher`. No weights come through here, and those that were saved are the service's own copy: the
policy may change at once, `release` does not wait. Invariant: the next version is begun only when this one is served.
"""

from concurrent.futures import Future
from typing import Any

from rft.config import SynchronizerConfig
from rft.sync.publisher import Rounds, answer
from rft.tinker.alone import Alone
from rft.tinker.policy import RemotePolicy
from rft.tinker.saves import RemoteCheckpoints
from rft.tinker.service import ServiceFailed

METHOD = "tinker"


class PathPublisher(Rounds):
    """`synchronizer`: None where no engines belong to this run; then versions just count."""

    def __init__(
        self, mesh: Alone, policy: RemotePolicy, saves: RemoteCheckpoints, synchronizer: Any | None, config: SynchronizerConfig,
        epoch: int,
    ):  # fmt: skip
        super().__init__(mesh, synchronizer, config, epoch)
        self.policy = policy
        self.saves = saves
        self._begun: int | None = None
        self._told: Future[Any] = Future()  # the synchronizer's answer, once there is a path to tell of

    def connect(self) -> None:
        """Let the engines know that a trainer is here."""
        if self.synchronizer is not None:
            self._numbers(self.synchronizer.attach.remote(self.epoch, method=METHOD))

    def start(self, version: int, due: bool = True) -> None:
        """Begin publishing the weights as they are now as `version`, if it is due. What was begun before is finished first."""
        self.wait()
        if not due:
            return
        self._begun, self._told = version, Future()
        if self.synchronizer is None:
            self._told.set_result(None)
        else:
            self.policy.saved("sampler", version).add_done_callback(lambda path: self._tell(version, path))

    def wait(self) -> None:
        """Return when the version that was begun is served by all engines."""
        if self._begun is None:
            return
        reply = self.policy.service.answer(self._told, f"version {self._begun}: saving its weights for samplers")
        numbers = self._numbers(reply) if reply is not None else {}
        self.version, self._begun = self._begun, None
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}
        if self.synchronizer is not None:
            self.saves.tidy(self.version)

    def release(self) -> None:
        """Nobody reads the policy's own weights."""

    def close(self) -> None:
        """Nothing is held."""

    def _tell(self, version: int, path: "Future[str]") -> None:
        """By the client's thread, when the weights are saved."""
        try:
            brought = {"method": METHOD, "digest": path.result(), "origin": {"path": path.result()}}
            told = self.synchronizer.publish.remote(version, self.epoch, brought)  # type: ignore[union-attr]
        except Exception as error:  # raised by `wait`
            self._told.set_exception(error)
        else:
            self._told.set_result(told)

    def _numbers(self, reply: Any) -> dict[str, Any]:
        outcome = answer(reply, self.config.sync_timeout)
        if "error" in outcome:
            raise ServiceFailed(f"weight sync failed: {outcome['error']}")
        return dict(outcome["numbers"])
