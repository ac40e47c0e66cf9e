"""The one training loop. Every rank runs it; sync, one-step-off and fully asynchronous runs differ
in two numbers only: how old rollouts may become, and which versions are published.

    feed.next ──► models.score ──► models.train_step ──► publisher.start ──► metrics
            ──► checkpoint, evaluate if due
    (waits for     (where the       (before an optimizer    (weights of version step+1
     its batch)     algorithm        changes weights: waits   stream out while the
                    needs it)        for the last push)       next step computes)

Consumes one batch per step, produces policy version step+1; `cadence` decides whether the engines
get it. Two waits only: for the batch, and, just before the optimizer changes weights, for the
previous push of those weights and the copies of the previous checkpoint. Where trainer and engines
share devices there is a third one, behind the batch: for the engines to sleep. Invariant: `step` is
the policy version on every rank, in the engines, in the checkpoint and on the metrics' axis. What a
step tells is written down before its checkpoint can exist: a process that dies between the two
resumes before the step and tells it again, instead of never.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft.checkpoint.records import Committed, Retained
from rft.config import TrainerConfig
from rft.ground.experience import encode
from rft.ground.protocols import Checkpoints, TrainerMesh
from rft.monitor import trace
from rft.monitor.metrics import Timer
from rft.sync.publisher import Publisher
from rft.sync.style import Cadence
from rft.trainer.control import Evaluations
from rft.trainer.feed import Feed
from rft.trainer.gates import VITALS, Gates, lost
from rft.trainer.reporting import Profiler, SkippedSteps
from rft.trainer.saving import SaveTimes

if TYPE_CHECKING:
    from rft.trainer.models import Models

log = logging.getLogger(__name__)
LOSS_WINDOW = 5  # steps; one batch's loss is noisy, twenty would notice too late


@dataclass
class Trainer:
    """Wires nothing, owns nothing: its parts are built by `rft.run.assembly`, and every one of them
    knows its own job.
    """

    config: TrainerConfig
    mesh: TrainerMesh
    models: "Models"
    feed: Feed
    publisher: Publisher
    cadence: Cadence  # which versions are published
    checkpoints: Checkpoints
    evaluations: Evaluations
    skips: SkippedSteps
    profiler: Profiler
    log_step: Callable[[int, dict[str, float], list[Any]], None]  # does something at rank 0 only
    token_loss: Callable[..., Any]
    run_epoch: int
    stopping: Callable[[], bool]  # rank 0: has somebody asked for a clean end?
    # hears what this rank does now: a killed one cannot tell any more
    on_phase: Callable[[str], None]
    export: Callable[[int], None]  # begins one at rank 0, in the background
    save_times: SaveTimes
    check: Callable[[int], None] | None = None  # of engines that speculate; refuses by raising
    gates: Gates = field(default_factory=Gates)
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    timer: Timer = field(default_factory=Timer)
    kept: int | None = None  # the last version that was given to be kept
    phase: str = "starting"
    complete: bool = False  # nobody stopped it

    def fit(self, step: int) -> int:
        """Train from policy version `step` on; returns the version reached."""
        if self.feed.ahead is not None:
            self.feed.ahead.over = self.checkpoints.copy_now
        self._publish(step)
        self._save(step, due=False)
        self.publisher.wait()
        if self.check is not None:
            self._enter("comparing log-probabilities with the engines'")
            self.check(step)
        self._evaluate(step, startup=True)
        while not self._is_done(step):
            with self._doing("wait_batch"):
                batch = self.feed.next(step, self.stopping())
            if batch is None:
                break
            self.publisher.rest()
            self.profiler.begin(step + 1)
            with self._doing("score"):
                part, scored = self.models.score(batch.part, batch.groups, batch.others)
            with self._doing("train"):
                metrics = self.models.train_step(
                    part, self.token_loss, self._before_update, batch.updates
                )
            step += 1
            self._enter("judging the step")
            metrics |= self.skips.after(step, metrics, batch.experiences)
            if not metrics["skipped"]:
                self.recent_losses.append(metrics["loss"])
            # only what is served can be evaluated
            self._publish(step, due=self.cadence.is_due(step) or self.evaluations.is_due(step))
            self.feed.consumed(step - 1)
            record = (
                batch.metrics
                | scored
                | metrics
                | self.publisher.pop()
                | self._checkpoint_metrics(step)
            )
            record |= lost(record)
            record |= self.gates.after(step, record)
            self.log_step(step, record | self.timer.pop(), batch.experiences)
            if self.gates.tripped:
                break
            with self._doing("checkpoint"):
                self._save(step, due=self.save_times.is_due(step))
            self._evaluate(step)
            self.profiler.end(step)
        self.profiler.close(step)
        return self._finish(step)

    def _checkpoint_metrics(self, step: int) -> dict[str, float]:
        """With how many steps a crash now would cost."""
        return {
            **self.checkpoints.metrics(),
            "checkpoint/behind_steps": step - (self.checkpoints.newest or 0),
        }

    def _publish(self, step: int, due: bool = True) -> None:
        self._enter(f"publishing version {step}")
        trace.instant(f"version {step}")
        self.publisher.start(step, due)
        if due:
            self.cadence.published = step

    def _before_update(self) -> None:
        """Weights may change now: the last push and the copies of the
        last checkpoint must be done with them.
        """
        with self._doing("sync_wait"):
            self.publisher.release()
        with self._doing("staging_wait"), self.save_times.pace.waiting():
            self.checkpoints.before_update()

    def _save(self, step: int, due: bool) -> None:
        """Begin to save, unless that was done, and what engines take from a save; hear what has
        become of earlier saves.
        """
        full, weights = due and self.checkpoints.requested != step, self.publisher.claim_save(step)
        version = self._claim_version(step)
        remembered = self.checkpoints.remembered
        memory = remembered != step and self.save_times.is_kept(step, is_first=remembered is None)
        if full or weights or version or memory:
            self._begin_save(step, full, weights, version, memory)
        for report in self.checkpoints.poll():
            self.save_times.hear(report)
            if isinstance(report, Retained):
                self.checkpoints.needed = self.feed.retain(report.oldest) or 0
            elif isinstance(report, Committed) and not report.collection:
                self.feed.saved(report.step)
                if self.config.save_hf_checkpoint == "always":
                    self.export(report.step)

    def _claim_version(self, step: int) -> bool:
        """Whether version `step` was published and is to be kept. Says so once."""
        if self.config.checkpoint.versions == "none" or self.cadence.published != step:
            return False
        is_new, self.kept = self.kept != step, step
        return is_new

    def _begin_save(
        self,
        step: int,
        full: bool,
        weights: bool = False,
        version: bool = False,
        memory: bool = False,
    ) -> None:
        loop, local = self.loop_state(step), dict[str, bytes]()
        if full:  # what was in memory has not been read from a disk
            vitals = self.models.vitals()
            loop[VITALS], local[VITALS] = [vitals], encode(vitals)
        with self.save_times.pace.waiting():
            is_begun = self.checkpoints.save(
                step,
                self.models,
                loop,
                full=full,
                weights=weights,
                version=version,
                memory=memory,
                local=local,
                # its thread comes first (`copy_now`), but engines wait for weights
                later=self.feed.ahead is not None and not weights,
            )
        if full and is_begun:
            self.save_times.begun(step, self.checkpoints.newest or 0)
        elif full:
            self.save_times.pace.lost += 1

    def loop_state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "journal": self.feed.mark(),
            "run_epoch": self.run_epoch,
            "recent_losses": list(self.recent_losses),
            "skips": self.skips.state(),
            "gates": self.gates.state(),
        }

    def _is_done(self, step: int) -> bool:
        """All steps made, or stopped early: the loss, the same on every rank, has come down to
        stop_at_loss.
        """
        limit, losses = self.config.stop_at_loss, self.recent_losses
        if limit is not None and len(losses) == LOSS_WINDOW and sum(losses) / LOSS_WINDOW <= limit:
            return True
        return self.config.total_steps is not None and step >= self.config.total_steps

    def _evaluate(self, step: int, startup: bool = False) -> None:
        with self._doing("eval"):
            if self.evaluations.alone:
                self.publisher.wait()
            self.evaluations.at_startup(step) if startup else self.evaluations.if_due(step)

    def _finish(self, step: int) -> int:
        """The last version reaches the engines and the disk; a complete run ends with its
        evaluation and export. Raises Drifted where a gate has ended it.
        """
        self.publisher.wait()
        if self.publisher.version != step:
            self._publish(step)
        self._enter("saving")
        self._save(step, due=True)
        self.publisher.wait()
        self.complete = not self.mesh.broadcast(self.stopping()) and not self.gates.tripped
        if self.complete:
            self._enter("final evaluation")
            self.evaluations.at_end(step)
        self._enter("committing the last checkpoint")
        self._await_save(step)
        self._save(step, due=False)
        if self.complete and self.config.save_hf_checkpoint == "last":
            self.export(step)
        self._enter("waiting for the Hugging Face export")
        self.checkpoints.wait_exports()
        self.gates.refuse()
        return step

    def _await_save(self, step: int) -> None:
        """Until the last checkpoint is there; one that failed is tried once more, on every rank.

        Raises RuntimeError.
        """
        failed: RuntimeError | None = None
        try:
            self.checkpoints.wait(step)
        except RuntimeError as error:
            failed = error
        if self.mesh.broadcast(failed is not None):
            log.error("%s; tried once more", failed or "the last checkpoint failed at rank 0")
            self._begin_save(step, full=True)
            self.checkpoints.wait(step)
        elif failed is not None:
            raise failed

    @contextmanager
    def _doing(self, name: str) -> Iterator[None]:
        self._enter(name)
        with self.profiler.span(name), self.timer.span(name), trace.span(name):
            yield

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.on_phase(phase)
