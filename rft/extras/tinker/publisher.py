"""Publication by path: the service saves the weights of a version for samplers, and every engine
opens them where they lie.

    start: a version is wanted ─► save_weights_for_sampler ─► its path
            ─► the synchronizer tells the engines ─► outcome: they serve it

No weights come through here, and those that were saved are the service's own copy: the policy may
change at once.
"""

from concurrent.futures import Future
from typing import Any

from rft.config import SynchronizerConfig
from rft.extras.tinker.alone import Alone
from rft.extras.tinker.policy import RemotePolicy
from rft.extras.tinker.saves import RemoteCheckpoints
from rft.extras.tinker.service import ServiceFailed
from rft.ground.rounds import AtPath
from rft.sync.publisher import Origin, Outcome
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle

METHOD = "tinker"


class PathOrigin(Origin):
    """`synchronizer`: None where no engines belong to this run; then versions just count."""

    failure = ServiceFailed

    def __init__(
        self,
        mesh: Alone,
        policy: RemotePolicy,
        saves: RemoteCheckpoints,
        synchronizer: SynchronizerHandle | None,
        config: SynchronizerConfig,
        epoch: int,
    ):
        super().__init__(mesh, synchronizer, config, epoch)
        self.policy = policy
        self.saves = saves
        self._version = 0
        # the synchronizer's answer, once there is a path to tell of
        self._told: Future[Any] = Future()

    def connect(self) -> Outcome:
        return self.answer(self.ask(Synchronizer.attach, self.epoch, METHOD))

    def start(self, version: int, due: bool) -> None:
        """Save the weights as they are now, if they are due."""
        if not due:
            return
        self._version, self._told = version, Future()
        if self.synchronizer is None:
            self._told.set_result(None)
        else:
            self.policy.saved("sampler", version).add_done_callback(self._tell)

    def outcome(self) -> Outcome:
        version = self._version
        reply = self.policy.service.answer(
            self._told, f"version {version}: saving its weights for samplers"
        )
        if reply is None:
            return Outcome()
        outcome = self.answer(reply)
        if outcome.error is None:
            self.saves.tidy(version)
        return outcome

    def _tell(self, path: "Future[str]") -> None:
        """By the client's thread, when the weights are saved."""
        try:
            told = self.synchronizer.ask(  # type: ignore[union-attr]
                Synchronizer.publish,
                self._version,
                self.epoch,
                path.result(),
                AtPath(path=path.result()),
            )
        except Exception as error:  # raised by `outcome`
            self._told.set_exception(error)
        else:
            self._told.set_result(told)
