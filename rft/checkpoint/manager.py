"""The trainer's side of checkpoints: what to save is staged here, everything after that happens in
the agents.

    start (once, collective): who stores what ─► slots ─► agent
    save ─► snapshot, begin to copy, return      before_update ─► until the copies are made
            poll ─► what became of it

In: a `Snapshotable` (the policy) and the loop's own state. Out: committed directories
(`rft.checkpoint.storage`). Invariant: all that a checkpoint holds is of one step, and every rank
calls `save` for the same steps in the same order, so that all keep the same states in memory;
beyond that a save needs no collective, but one in memory alone beside saves to disk, and no work
of the training process after the copies.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rft.checkpoint import catalog, commit, restore, sharding
from rft.checkpoint.kept import KeptStates
from rft.checkpoint.link import AGENT, Link, SaveMessages
from rft.checkpoint.neighbours import RankPlace
from rft.checkpoint.records import (
    Begin,
    CheckpointSettings,
    Committed,
    Export,
    Exported,
    Exporting,
    Freed,
    NotKept,
    Output,
    Replicated,
    Report,
    Retention,
    SavedPart,
    SaveFailed,
)
from rft.checkpoint.sharding import Claim, claim_of
from rft.checkpoint.stager import (
    BUSY,
    Room,
    Slot,
    SlotPool,
    Stager,
    StagingTuner,
    windows_of,
)
from rft.checkpoint.storage import VERSIONS, WEIGHTS, open_storage
from rft.config import TrainerConfig
from rft.config.layout import BASES
from rft.ground import host_memory, process
from rft.ground.device import Device, choose
from rft.ground.protocols import Collective, Snapshotable
from rft.monitor import trace

log = logging.getLogger(__name__)
KNOWN = 64  # saves that have ended, and are known still


@dataclass(frozen=True)
class SavePlan:
    """This rank's part of every checkpoint, and of saves of the model alone.

    `order`: positions of the stored pieces in a snapshot.
    """

    order: list[int]
    whole: SavedPart
    weights: SavedPart


@dataclass
class SaveOutcome:
    """What is known of one save. `open`: collections that are neither committed nor failed."""

    step: int
    open: set[str]
    cause: str = ""
    name: str = ""  # of the committed directory
    is_repeated: bool = False  # it failed, and the same step was saved again


@dataclass
class Status:
    """Counts for the metrics."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0  # of the last commit, from its first byte
    bytes: int = 0  # of that
    versions: int = 0  # that were kept
    versions_lost: int = 0
    versions_bytes: int = 0  # of all that were kept, on disk


class CheckpointManager:
    """One per rank.

    `control`: local directory of run epochs and locks; `about`: what `show` prints, with the
    `layout`.
    """

    def __init__(
        self,
        root: Path | str,
        ranks: Collective,
        trainer: TrainerConfig,
        *,
        control: Path | None = None,
        epoch: int = 1,
        device: Device | None = None,
        about: dict[str, Any] | None = None,
        log_dir: Path | None = None,
        agent: tuple[str, ...] = AGENT,
        place: RankPlace | None = None,
    ):
        """`place`: of this rank, for replicas."""
        self.storage = open_storage(root)
        self.ranks = ranks
        self.trainer = trainer
        self.config = trainer.checkpoint
        self.control = control or Path(str(root)) / "control"
        self.epoch = epoch
        self.device = device or choose("cpu")
        self.about = about or {}
        self.agent_log = log_dir / f"checkpoint_agent_{ranks.rank}.log" if log_dir else None
        self.status = Status()
        # step of the newest checkpoint that this process has loaded or seen committed
        self.newest: int | None = None
        self.requested: int | None = None  # step of the last save or load
        self.read = (0, 0.0)  # bytes that were loaded from memory, and seconds
        self.reached = 0  # the last step that agents know of, as far as rank 0 has asked
        self.scores: dict[int, float] = {}
        self.needed = 0  # the oldest version that an experience which may be trained is of
        # told by the link's thread, after everything else
        self.hear: Callable[[Report], None] = lambda report: None
        self._agent = agent
        place = (place or RankPlace()) if self.config.replicas else None
        self._states = KeptStates(self.control, ranks, trainer.memory_interval > 0, place)
        self._saves = 0
        self._outcomes: dict[str, SaveOutcome] = {}
        # directories that are being written, and when they were last heard of
        self._exports: dict[str, float] = {}
        self._failed_export = ""
        self._news: list[Report] = []
        self._changed = threading.Condition()
        self._tuner = StagingTuner(self.config.staging)
        self._link: Link | None = None

    @property
    def remembered(self) -> int | None:
        """Step of the last save or load of memory."""
        return self._states.remembered

    @property
    def in_memory(self) -> int | None:
        """Step of the newest state that is kept in memory."""
        return self._states.newest

    def load(self, policy: Snapshotable) -> dict[str, Any] | None:
        """Restore the newest state, from memory or disk; its loop state, or None when there never
        was one.

        A job without any begins from `trainer.resume_from_path`, at that step, and with nothing
        else of the loop it is from. See `rft.checkpoint.restore`.
        """
        restore.prepare(self.storage, self.ranks)
        layout, path = self.about.get("layout"), self.trainer.resume_from_path
        memory = self._states.look()
        found = restore.load(self.storage, self.ranks, policy, layout, memory=memory)
        self.reached = memory.reached
        if found is None and path:
            return {"step": restore.adopt(path, self.ranks, policy, layout)["step"]}
        if found is None:
            return None
        self.newest = found.on_disk
        self.requested = found.loop["step"] if found.is_on_disk else None
        self.read = found.read
        self._states.resumed(found.identity, found.loop["step"])
        self.scores = restore.scores_of(found.loop)
        return found.loop

    def _loaded(self, step: int) -> set[str]:
        """Name of a committed checkpoint that an earlier attempt has written."""
        return {
            [entry.path for entry in catalog.list_entries(self.storage) if entry.step == step][-1]
        }

    def start(self, policy: Snapshotable) -> None:
        """Agree on who stores what, reserve memory, start the agent. The only collective besides
        `load`; before the first step.

        Raises ValueError when the memory cannot hold the largest piece.
        """
        if self.ranks.rank == 0:
            self.storage.prepare()
        free = host_memory.available()  # asked before any rank can have taken its memory
        self._plan = self._agree([claim_of(piece) for piece in policy.snapshot().pieces])
        regions, total = self._plan.whole.regions, self._plan.whole.bytes
        kept = BASES * self._plan.weights.bytes if self.config.versions != "none" else 0
        room = Room(regions, free, kept)
        size = room.slot_size(
            self.config, self._states.slot_bytes, self.trainer.memory_interval > 0
        )
        windows = windows_of(regions, size, total)
        inherited = self._states.take_over(regions, size)
        replicas = self._states.replication(
            self.epoch, total, kept + (0 if inherited else 2 * size), free
        )
        room.check(0 if inherited else size)
        room.check_whole(size, self.trainer.memory_interval)
        patience_s = min(self.config.staging_patience_s, self.config.agent_deadline_s)
        descriptors = inherited.slots if inherited else [None, None]
        slots = SlotPool(
            [Slot(number, size, self.device, held) for number, held in enumerate(descriptors)],
            patience_s,
            self._idle_s,
        )
        self._stager = Stager(
            slots, regions, windows, self.device.copier(), self.config.agent_deadline_s
        )
        model = self._plan.weights
        self._model_windows = windows_of(model.regions, size, model.bytes)
        settings = CheckpointSettings(
            root=self.storage.where,
            control=str(self.control),
            rank=self.ranks.rank,
            world=self.ranks.world,
            epoch=self.epoch,
            slots=[slot.descriptor for slot in slots.all],
            slot_bytes=size,
            strategy=self.trainer.save_strategy,
            rate_limit=self.config.rate_limit_mb * 1e6,
            deadline_s=self.config.agent_deadline_s,
            lease_s=self.config.lease_s,
            reserve=total * self.ranks.world,
            launcher=process.launcher(),
            replicas=replicas,
        )
        self._link = Link(settings, self._hear, self.agent_log, self._agent, patience_s=patience_s)
        if inherited is not None and inherited.kept is not None:
            slots.take(inherited.kept.slot)
        self._states.start(self._link, inherited)
        log.info("checkpoints: %.3f GB of this rank, 2 slots of %.3f GB", total / 1e9, size / 1e9)

    def _idle_s(self) -> float:
        return 0.0 if self._link is None else self._link.idle_s

    def _agree(self, claims: list[Claim]) -> SavePlan:
        listed = self.ranks.gather(sharding.encode(claims))
        positions = self.ranks.broadcast(None if listed is None else sharding.planned(listed))
        mine = sorted(
            positions[self.ranks.rank], key=lambda p: not claims[p].key.startswith(sharding.MODEL)
        )
        regions = sharding.place([claims[p] for p in mine])
        weights = [r for r in regions if r.key.startswith(sharding.MODEL)]
        parts = self.ranks.gather([sharding.part_digest(part) for part in (regions, weights)])
        whole, weights_only = self.ranks.broadcast(
            None
            if parts is None
            else [sharding.digest_of(part) for part in zip(*parts, strict=True)]
        )
        return SavePlan(
            mine,
            SavedPart(regions=regions, layout=whole, bytes=sharding.extent(regions)),
            SavedPart(regions=weights, layout=weights_only, bytes=sharding.extent(weights)),
        )

    def save(
        self,
        step: int,
        policy: Snapshotable,
        loop: dict[str, Any],
        *,
        full: bool = True,
        weights: bool = False,
        version: bool = False,
        memory: bool = False,
        local: dict[str, bytes] | None = None,
        later: bool = False,
    ) -> bool:
        """Begin to save `step`: everything (`full`, or in `memory` alone), the model alone, for
        engines (`weights`) or to be kept as a `version`, or some of these of one staging. `local`:
        more of this rank's own, beside what the snapshot has. `later`: see `copy_now`.

        Returns at once unless staging is eager; False if the save was skipped because both slots
        are in use.
        """
        assert self._link is not None, "start() comes before the first save"
        self._stager.await_done()
        self._states.release()  # what it frees comes back while the rest is made ready
        identity = f"e{self.epoch:04d}n{self._saves:04d}"
        self._saves += 1
        outputs = [
            self._output(step, identity, collection)
            for collection in [""] * full + [WEIGHTS] * weights + [VERSIONS] * version
        ]
        snapshot = policy.snapshot()
        # JSON has no other keys
        scores = {str(scored): value for scored, value in self.scores.items()}
        lead = self.ranks.rank == 0
        whole = full or memory
        begin = Begin(
            id=identity,
            step=step,
            outputs=outputs,
            small=snapshot.small,
            local=snapshot.local | (local or {}),
            loop=loop | {"step": step, "scores": scores} if lead else None,
            about=self.about if lead else None,
            kept=self._plan.whole if whole and self._states.is_on else None,
        )
        self.requested = step if full else self.requested
        self._states.remembered = step if whole else self._states.remembered
        with self._changed:
            self._forget()
            for outcome in self._outcomes.values():
                outcome.is_repeated |= outcome.step == step and bool(outcome.cause)
            if outputs:
                self._outcomes[identity] = SaveOutcome(step, {one.collection for one in outputs})
        messages = SaveMessages(self._link, begin, self._states.staged)
        # engines wait for weights: these are never given up
        if outputs and not weights and not self._make_room(messages):
            return False
        if not self._states.admit(begin, self._writing()):
            messages.drop(identity, BUSY)
            return True
        tensors = [snapshot.pieces[position].tensor for position in self._plan.order]
        windows = None if whole else self._model_windows
        patience_s = None if outputs else self._states.patience_s()
        self._stager.start(
            identity, tensors, messages.window, messages.drop, windows, patience_s, later
        )
        if self._tuner.next() == "eager":
            self._stager.await_copies()
        return True

    def _forget(self) -> None:
        """Of saves that ended long ago nobody asks; of each step there may be one."""
        ended = [key for key, outcome in self._outcomes.items() if not outcome.open]
        for key in ended[:-KNOWN]:
            del self._outcomes[key]

    def _writing(self) -> set[str]:
        """Saves of which something is to be committed."""
        with self._changed:
            return {key for key, outcome in self._outcomes.items() if outcome.open}

    def _output(self, step: int, identity: str, collection: str) -> Output:
        draft, final = commit.names_of(self.storage, collection, step, identity)
        part = self._plan.weights if collection in (WEIGHTS, VERSIONS) else self._plan.whole
        return Output(
            collection=collection,
            draft=draft,
            final=final,
            regions=part.regions,
            bytes=part.bytes,
            layout=part.layout,
            retention=self._retention(collection),
        )

    def _retention(self, collection: str) -> Retention:
        config = self.config
        if collection == WEIGHTS:
            return Retention(last=2)
        if collection == VERSIONS:
            return Retention() if config.versions == "all" else Retention(last=2, since=self.needed)
        return Retention(
            last=self.trainer.max_checkpoints_to_keep,
            every=config.keep_every,
            best=config.keep_best,
            best_is_lowest=config.best_mode == "min",
            max_bytes=int(config.max_gb * 1e9),
            scores=dict(self.scores),
        )

    def _make_room(self, messages: SaveMessages) -> bool:
        """What `when_busy` says: leave it to the copying thread, give this save up, which is
        collective, or an older one that still queues.
        """
        assert self._link is not None
        begin, when_busy = messages.begin, self.config.when_busy
        if when_busy == "wait":
            return True
        is_free = self._stager.slots.is_free(self._states.patience_s(self._writing() - {begin.id}))
        if self._states.everywhere(is_free) if when_busy == "skip" else is_free:
            return True
        if when_busy == "newest_wins":
            if all(output.collection for output in begin.outputs):  # a version, which waits
                return True
            queued = [
                key
                for key, outcome in self._outcomes.items()
                if outcome.open and WEIGHTS not in outcome.open and key != begin.id
            ]
            if queued:  # else what holds the slots has ended and is about to give them back
                self._link.drop(queued[-1], f"given up for the newer save of step {begin.step}")
            return True
        self.status.skipped += 1
        trace.instant("checkpoint skipped", step=begin.step)
        log.warning("save of step %d skipped: both slots are still being written", begin.step)
        messages.drop(begin.id, "skipped: both slots were still being written")
        return False

    def score(self, step: int, metrics: dict[str, float]) -> None:
        """What an evaluation of version `step` gave: `keep_best` goes by `best_metric`, and one
        that is not finite is no score.
        """
        if self.config.best_metric not in metrics:
            return
        value = metrics[self.config.best_metric]
        if isfinite(value):
            self.scores[step] = value
        else:
            log.warning("%s of step %d is %g: no score", self.config.best_metric, step, value)

    def copy_now(self) -> None:
        """The cores have time for the copies of a save that was told to make them `later`."""
        self._stager.make_due()

    def before_update(self) -> float:
        """Before weights change: until the last save's copies are made. Seconds waited."""
        waited = self._stager.await_copies()
        self._tuner.updated()
        return waited

    def poll(self) -> list[Report]:
        """Committed, Retained, SaveFailed and Exported reports since the last call."""
        with self._changed:
            news, self._news = self._news, []
        return news

    def wait(self, step: int) -> None:
        """Until the saves of `step` are committed. Raises RuntimeError when one failed."""
        deadline = time.monotonic() + 2 * self.config.agent_deadline_s
        with self._changed:
            known = [
                outcome
                for outcome in self._outcomes.values()
                if outcome.step == step and not outcome.is_repeated
            ]
            self._changed.wait_for(
                lambda: not any(o.open for o in known), max(0.0, deadline - time.monotonic())
            )
        if failed := [outcome for outcome in known if outcome.cause]:
            raise RuntimeError(f"checkpoint of step {step} failed: {failed[0].cause}")
        if any(outcome.open for outcome in known):
            raise RuntimeError(
                f"checkpoint of step {step} is not there after "
                f"{2 * self.config.agent_deadline_s:g} s"
            )

    def export(self, step: int, source: str, target: str) -> None:
        """Begin the Hugging Face export of committed step `step` (see `rft.checkpoint.export`);
        rank 0 only.
        """
        assert self._link is not None
        with self._changed:
            names = {
                o.name for o in self._outcomes.values() if o.step == step and o.name
            } or self._loaded(step)
            self._exports[target] = time.monotonic()
        self._link.export(Export(step=step, name=names.pop(), source=source, target=target))

    def wait_exports(self) -> None:
        """Until all exports are there.

        Raises RuntimeError when one failed, or nothing is heard of them any more.
        """
        patience = 2 * self.config.agent_deadline_s
        with self._changed:
            while (
                self._exports
                and (left := max(self._exports.values()) + patience - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            if self._failed_export:
                raise RuntimeError(f"Hugging Face export failed: {self._failed_export}")
            if self._exports:
                raise RuntimeError(
                    f"Hugging Face export failed: nothing was heard of {min(self._exports)} for "
                    f"{patience:g} s"
                )

    def metrics(self) -> dict[str, float]:
        assert self._link is not None
        return (
            {
                "checkpoint/committed": self.status.committed,
                "checkpoint/failed": self.status.failed,
                "checkpoint/skipped": self.status.skipped,
                "checkpoint/commit_s": self.status.seconds,
                "checkpoint/copy_s": self._stager.current.seconds,
                "checkpoint/agent_deaths": self._link.deaths,
                "checkpoint/agent_ok": float(self._link.state == "ready"),
                "checkpoint/bytes": self.status.bytes,
            }
            | self._states.metrics()
            | self._version_metrics()
        )

    def _version_metrics(self) -> dict[str, float]:
        if self.config.versions == "none":
            return {}
        return {
            "checkpoint/versions": self.status.versions,
            "checkpoint/versions_lost": self.status.versions_lost,
            "checkpoint/versions_bytes": self.status.versions_bytes,
        }

    def close(self, deadline_s: float = 5.0) -> None:
        """The agent finishes what it has, without us if it takes longer."""
        if self._link is not None:
            try:
                self._states.end_resting()
                self._stager.await_done()
            finally:
                self._link.close(deadline_s)
            self._stager.close()
            for slot in self._stager.slots.all:
                slot.close()
            self._link = None

    def _hear(self, report: Report) -> None:
        """Called by the link's thread, and by one that hands a
        save over which no agent can take.
        """
        if isinstance(report, Freed):
            self._stager.slots.give_back(report.slot)
            return
        if isinstance(report, Exporting):
            with self._changed:
                if report.target in self._exports:
                    self._exports[report.target] = time.monotonic()
            return
        if isinstance(report, Replicated):
            self._states.replicated = report.step
            return
        if isinstance(report, SaveFailed) and report.id not in self._outcomes:
            self._states.skip(report)
            return
        with self._changed:
            if isinstance(report, Committed):
                self._on_commit(report)
            elif isinstance(report, NotKept):
                self._on_loss(report)
            elif isinstance(report, SaveFailed):
                report = self._on_failure(report)
            elif isinstance(report, Exported):
                self._exports.pop(report.target, None)
                self._failed_export = report.cause or self._failed_export
            self._news.append(report)
            self._changed.notify_all()
        self.hear(report)

    def _on_failure(self, report: SaveFailed) -> SaveFailed | NotKept:
        """What is to be told of it: where nothing but a version is lost, no checkpoint is."""
        outcome = self._outcomes[report.id]
        if VERSIONS in outcome.open:
            lost = NotKept(id=report.id, step=report.step, collection=VERSIONS, cause=report.cause)
            self._on_loss(lost)
            if not outcome.open:
                return lost
        if not outcome.cause:
            self.status.failed += 1
            log.error(
                "checkpoint of step %d failed, training goes on: %s", report.step, report.cause
            )
            trace.instant("checkpoint failed", step=report.step, cause=report.cause)
        outcome.open, outcome.cause = set(), report.cause
        return report

    def _on_loss(self, report: NotKept) -> None:
        if VERSIONS not in self._outcomes[report.id].open:  # heard with its checkpoint's failure
            return
        self._outcomes[report.id].open.discard(VERSIONS)
        self.status.versions_lost += 1
        log.error("version %d is not kept, training goes on: %s", report.step, report.cause)
        trace.instant("version not kept", step=report.step, cause=report.cause)

    def _on_commit(self, report: Committed) -> None:
        self._outcomes[report.id].open.discard(report.collection)
        if report.collection == VERSIONS:
            self.status.versions += 1
            self.status.versions_bytes += report.bytes
        if report.collection:
            return
        self._outcomes[report.id].name = report.name
        self.status.committed += 1
        self.status.seconds, self.status.bytes = report.seconds, report.bytes
        self.newest = max(report.step, self.newest or 0)
        trace.instant("checkpoint committed", step=report.step, seconds=round(report.seconds, 3))
