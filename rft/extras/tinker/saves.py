"""Checkpoints and publication where a service holds the weights: it saves them, and rft keeps a
record of where, with the loop's own state, and tells engines the path.

    save ─► save_state, weights for samplers (both begin) ─► poll: both are there
            ─► <job>/remote/step_N.json ─► older ones go
    load ─► the newest record ─► a training client from its state, optimizer included
    start: a version is wanted ─► save_weights_for_sampler ─► its path
            ─► the synchronizer tells the engines, which open them where they lie ─► outcome

The calls of `rft.checkpoint.manager.CheckpointManager`, as far as the loop makes them. In: the
policy, and what the loop remembers. Out: records. Invariants: a record is written as a whole and is
on disk before anybody hears of it; it names weights of its own step only; one that is not as it was
written stops the run by name, for taken as absent it would reset the data to an older step.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rft.checkpoint.records import Committed, Report, Retained, decode_json, encode_json, sha256
from rft.config import SynchronizerConfig
from rft.extras.tinker.remote_policy import LocalMesh, RemotePolicy
from rft.extras.tinker.service import ServiceFailed, in_a_line
from rft.ground import durable
from rft.ground.rounds import AtPath
from rft.sync.publisher import Origin, Outcome
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle

if TYPE_CHECKING:
    from rft.trainer.models import Models

log = logging.getLogger(__name__)
FORMAT = 1
METHOD = "tinker"  # of publication


class DamagedRecord(RuntimeError):
    """A record that is not as it was written."""


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`state`, `sampler`: the service's paths.

    `small`: what else moves from step to step. `seal`: sha256 of all of it.
    """

    format: int
    step: int
    state: str
    sampler: str
    base_model: str
    rank: int
    loop: dict[str, Any]
    small: dict[str, bytes]
    seal: str = ""

    def sealed(self) -> "SaveRecord":
        return msgspec.structs.replace(
            self, seal=sha256(encode_json(msgspec.structs.replace(self, seal="")))
        )


class Records:
    """The records of a run: a file each, none of which is ever changed."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, record: SaveRecord) -> Path:
        """Returns when it is on disk."""
        if not self.root.exists():
            self.root.mkdir(parents=True)
            durable.sync_directory(self.root.parent)
        path = self._path(record.step)
        durable.put(path, encode_json(record.sealed()))
        return path

    def read(self, step: int) -> SaveRecord:
        path = self._path(step)
        try:
            record = decode_json(path.read_bytes(), SaveRecord)
        except ValueError as error:
            raise DamagedRecord(
                self._advice(path, f"is torn or was edited ({in_a_line(error)})")
            ) from error
        if record.sealed() != record or (record.format, record.step) != (FORMAT, step):
            raise DamagedRecord(self._advice(path, "is not as it was written"))
        return record

    def steps(self) -> list[int]:
        """In order. What else lies there is somebody's own: a copy, a note."""
        named = (path.stem.removeprefix("step_") for path in self.root.glob("step_*.json"))
        numbers = [int(number) for number in named if number.isdecimal()]
        return sorted(step for step in numbers if self._path(step).exists())

    def remove(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.root / f"step_{step:08d}.json"

    def _advice(self, path: Path, what: str) -> str:
        older = [step for step in self.steps() if self._path(step) < path]
        then = f"of step {older[-1]}" if older else "from the start"
        return f"{path} {what}: put back what was written there, or delete it to go on {then}"


@dataclass
class PendingSave:
    """A save that was begun."""

    step: int
    paths: "dict[str, Future[str]]"
    loop: dict[str, Any]
    small: dict[str, bytes]
    began: float

    @property
    def is_over(self) -> bool:
        return all(path.done() for path in self.paths.values())


class RemoteCheckpoints:
    """`keep`: records that stay, 0 for all.

    `reach`: so many versions after its own somebody may still sample from weights.
    """

    def __init__(self, root: Path, policy: RemotePolicy, keep: int, reach: int):
        self.records = Records(root)
        self.policy = policy
        self.keep = keep
        self.reach = reach
        self.requested: int | None = None  # step of the last save or load
        self.remembered: int | None = None
        self.read, self.reached = (0, 0.0), 0
        self.needed = 0
        self._pending: list[PendingSave] = []
        self._told: list[Report] = []  # until the next `poll`
        self._failed: dict[int, str] = {}  # why, by step
        self._committed = 0
        self._seconds = 0.0

    def load(self, models: "Models") -> dict[str, Any] | None:
        """Let the service go on from the newest record; the loop's
        state, or None when there never was one.
        """
        steps = self.records.steps()
        if not steps:
            self.policy.open()
            return None
        records = {step: self.records.read(step) for step in steps}
        for step, record in records.items():
            self.policy.known("state", step, record.state)
            self.policy.known("sampler", step, record.sampler)
        newest = records[steps[-1]]
        config = self.policy.config
        if (newest.base_model, newest.rank) != (config.base_model, config.rank):
            raise ValueError(
                f"the newest checkpoint is of {newest.base_model} with rank {newest.rank}, "
                f"model.tinker says {config.base_model} "
                f"with rank {config.rank}: give it what it was trained with, or start under "
                "another name"
            )
        self.policy.open(newest.step, newest.state)
        models.kl.restore(newest.small)
        self.requested = newest.step
        return newest.loop

    def start(self, models: "Models") -> None:
        """Nothing is held in memory for saves."""

    def save(
        self,
        step: int,
        models: "Models",
        loop: dict[str, Any],
        full: bool = True,
        weights: bool = False,
        version: bool = False,
        memory: bool = False,
        local: dict[str, bytes] | None = None,
        later: bool = False,
    ) -> bool:
        """Begin; the service takes its copy before the next update, and a rank has nothing of its
        own.

        Weights for engines alone are the publisher's, and versions and memory the service's.
        """
        self._failed.pop(step, None)  # it is tried again
        self._pending = [save for save in self._pending if save.step != step]
        paths = {kind: self.policy.saved(kind, step) for kind in ("state", "sampler")}
        self._pending.append(PendingSave(step, paths, loop, models.kl.state(), time.monotonic()))
        self.requested = step
        return True

    def poll(self) -> list[Report]:
        """Write the records of saves that are there; what has become of them, in order."""
        self._settle()
        told, self._told = self._told, []
        return told

    def _settle(self) -> None:
        while self._pending and self._pending[0].is_over:
            save = self._pending.pop(0)
            if errors := [
                error for path in save.paths.values() if (error := path.exception()) is not None
            ]:
                self._fail(save.step, errors[0])
                continue
            try:
                self._told += self._commit(save)
            except OSError as error:  # a full disk: the next save may find room
                self._fail(save.step, error)

    def _fail(self, step: int, error: BaseException) -> None:
        self._failed[step] = in_a_line(error)
        log.error("checkpoint of step %d failed, training goes on: %s", step, self._failed[step])

    def _commit(self, save: PendingSave) -> list[Report]:
        config = self.policy.config
        record = SaveRecord(
            format=FORMAT,
            step=save.step,
            base_model=str(config.base_model),
            rank=config.rank,
            loop=save.loop,
            small=save.small,
            **{kind: path.result() for kind, path in save.paths.items()},
        )
        name = self.records.write(record).name
        self._committed, self._seconds = self._committed + 1, time.monotonic() - save.began
        steps = self.records.steps()
        for old in steps[: -self.keep] if self.keep else []:
            self.records.remove(old)  # first: no record ever names weights that are gone
            self.policy.forget("state", old)
        self.tidy(save.step)
        oldest = self.records.read(self.records.steps()[0])
        committed = Committed(
            id=name, step=save.step, collection="", name=name, seconds=self._seconds
        )
        return [committed, Retained(oldest=oldest.loop)]

    def tidy(self, newest: int) -> None:
        """Delete weights for samplers that neither a record names nor anybody samples from;
        `newest`: served, or saved.
        """
        named = {*self.records.steps(), *(save.step for save in self._pending)}
        for step in self.policy.samplers():
            if step < newest - self.reach and step not in named:
                self.policy.forget("sampler", step)

    @property
    def newest(self) -> int | None:
        return max(self.records.steps(), default=None)

    def copy_now(self) -> None:
        """Nothing is copied here."""

    def before_update(self) -> float:
        """Requests are done in their order: a save that was begun
        is of the weights before the update.
        """
        return 0.0

    def wait(self, step: int) -> None:
        """Until the record of `step` is on disk. Raises RuntimeError when the save failed."""
        for save in [save for save in self._pending if save.step <= step]:
            for kind, path in save.paths.items():
                what = f"checkpoint of step {save.step}: saving the {kind}"
                try:
                    self.policy.service.answer(path, what)
                except ServiceFailed:
                    if save.step == step:  # what became of older ones is told by `poll`
                        raise
        self._settle()
        if step in self._failed:
            raise RuntimeError(f"checkpoint of step {step} failed: {self._failed[step]}")

    def wait_exports(self) -> None:
        """There are none."""

    def score(self, step: int, metrics: dict[str, float]) -> None:
        """No checkpoint is kept for being good."""

    def metrics(self) -> dict[str, float]:
        return {
            "checkpoint/committed": self._committed,
            "checkpoint/failed": len(self._failed),
            "checkpoint/commit_s": self._seconds,
        }

    def close(self) -> None:
        """Whatever was begun and counts was waited for."""


class PathOrigin(Origin):
    """Publication by path. No weights come through here, and those that were saved are the
    service's own copy: the policy may change at once.

    `synchronizer`: None where no engines belong to this run; then versions just count.
    """

    failure = ServiceFailed

    def __init__(
        self,
        mesh: LocalMesh,
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
        return self.lead(Synchronizer.attach, self.epoch, METHOD)

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
