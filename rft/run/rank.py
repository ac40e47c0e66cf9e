"""One trainer rank, from its first line to its last: builds the parts, runs the loop, tells how it
ended.

    python -m rft.run.rank RESOLVED_YAML        (started by `rft.run.elastic`, or called by
                                                `rft.train` under an outer torchrun)

In: the resolved config, RANK/WORLD_SIZE/... of torch's launcher, and at rank 0 the address of the
supervisor's Ray. Out: exit code 0, or a failure record (rank, phase, cause) in the attempt's log
directory and exit code 1.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft import config as configs
from rft.config import Config
from rft.ground import device as devices
from rft.ground import plugins, redact
from rft.ground.protocols import TrainBackend
from rft.monitor import logs, trace
from rft.run import processes
from rft.run.stages import export_dir, write_result
from rft.trainer import control

if TYPE_CHECKING:
    from rft.trainer.reporting import StepReporter
    from rft.trainer.trainer import Trainer

log = logging.getLogger(__name__)
PHASE_BYTES = 64
SETTLE_S = 2.0  # if another part's death is the cause, the sidecar has heard of it by then


@dataclass
class Rank:
    """What the parts of one rank have in common while they are built."""

    config: Config
    job: Path
    device: devices.Device
    # signals received: a clean end at the next step boundary
    stopping: list[int] = field(default_factory=list)
    trainer: Any = None
    complete: bool = False
    waiting_for: str = ""

    @property
    def phase(self) -> str:
        return (
            self.trainer.phase
            if self.trainer
            else f"waiting for {self.waiting_for}"
            if self.waiting_for
            else "starting"
        )

    def stop(self, received: int, _frame: object) -> None:
        """Signal handler: nothing new is begun, and what rank 0 waits for is given up (by a thread:

        Ray may be in a call).
        """
        self.stopping.append(received)
        threading.Thread(target=self._stop_waits, daemon=True).start()

    def _stop_waits(self) -> None:
        self.trainer.evaluations.stop()
        if isinstance(self.trainer.feed.source, control.QueueSource):
            self.trainer.feed.source.stop()


def main(path: str, terminal: int | None = None) -> int:
    """Run this process as a rank of the stage described by `path`; returns its exit code.

    `terminal`: where the first rank that fails says so, when no supervisor will (ranks under an
    outer launcher).
    """
    config = configs.load(path)
    number = int(os.environ.get("RANK", "0"))
    log_dir = Path(os.environ["RFT_LOG_DIR"])
    logs.redirect(log_dir / f"rank_{number}.log", config.log, keep_stdout=number == 0)
    logs.die_with_parent()
    # of the attempt before a restart
    (log_dir / f"failure_rank_{number}.json").unlink(missing_ok=True)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank = Rank(
        config,
        configs.job_dir(config),
        devices.choose(config.device, local, config.cluster.threads_per_rank),
    )
    try:
        plugins.load(config.plugin_dirs)
        run(rank)
    except Exception as error:
        log.error("rank %d failed while %s\n%s", number, rank.phase, traceback.format_exc())
        logs.flush()
        trace.instant("failed", cause=control.cause(error))
        record = {
            "part": f"trainer rank {number}",
            "phase": rank.phase,
            "cause": control.cause(error),
        }
        tell(record, log_dir, number, terminal)
        try:
            logs.ask_stacks_of_siblings()
            keep_batch(rank)
        finally:
            logs.flush()
            # other threads (gloo, ray) may hang in a peer that is gone; nothing here is left to be
            # saved
            os._exit(1)
    if rank.complete and not (rank.stopping and terminal is not None):
        return 0
    # all ranks end together, whichever of them was told to
    return 128 + (rank.stopping or [signal.SIGTERM])[0]


def keep_batch(rank: Rank) -> None:
    """Rank 0 leaves the batch of the step that failed, as of one that was skipped."""
    if rank.trainer is not None and rank.trainer.feed.current is not None:
        path = rank.trainer.skips.keep(rank.trainer.feed.current)
        log.error("the batch of the step that failed is in %s", path)


def tell(record: dict[str, str], log_dir: Path, number: int, terminal: int | None) -> None:
    """Leave the failure record; under an outer launcher also tell the user, unless a part that
    failed earlier is told of.
    """
    is_first = not list(log_dir.glob("failure_rank_*.json"))
    (log_dir / f"failure_rank_{number}.json").write_text(
        redact.text(json.dumps(record)), encoding="utf-8"
    )
    if terminal is None or not is_first:
        return
    time.sleep(SETTLE_S)
    if not (log_dir / "failure.json").exists():
        message = (
            f"rft: {record['part']} failed while {record['phase']}: {record['cause']}; logs "
            f"in {log_dir}\n"
        )
        os.write(terminal, redact.text(message).encode())


def run(rank: Rank) -> None:
    """Build the parts, resume, train, close."""
    config = rank.config
    mesh = backend_of(config).open_mesh(config, rank.device)
    # there every rank leaves its own weights
    leads = mesh.rank == 0 or config.synchronizer.sync_method == "memory"
    talks = leads and "RFT_RAY_ADDRESS" in os.environ
    if talks:
        control.connect(os.environ["RFT_RAY_ADDRESS"], os.environ["RFT_RAY_NAMESPACE"])
    try:
        _train(rank, mesh)
    finally:
        mesh.close()
    if talks:
        control.disconnect()


def _train(rank: Rank, mesh: Any) -> None:
    config = rank.config
    if config.cluster.colocate:  # engines measure the card's free memory as they start
        rank.waiting_for = "the engines to start"
        control.await_engines(_explorer(config) if mesh.rank == 0 else None)
        mesh.barrier(rank.waiting_for)
        rank.waiting_for = ""
    with trace.span("build models"):
        models = backend_of(config).build_models(config, mesh)
    log.info("rank %d of %d: %s", mesh.rank, mesh.world, models.policy.describe())
    trainer, step, reporter = build_trainer(rank, mesh, models)
    rank.trainer = trainer
    # until now there was nothing to save
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, rank.stop)
    logs.show_stacks_when_stopped()
    reached = trainer.fit(step)
    trainer.phase = "closing"
    trainer.checkpoints.close()
    trainer.publisher.close()
    rank.complete = trainer.complete
    if reporter is not None:
        reporter.close()
        write_result(config, reached, rank.complete)
    models.close()


def backend_of(config: Config) -> TrainBackend:
    """Where the policy learns, by `trainer.trainer_type`."""
    return importlib.import_module(f"rft.run.{config.trainer.trainer_type}_backend")  # type: ignore[return-value]


def build_trainer(rank: Rank, mesh: Any, models: Any) -> "tuple[Trainer, int, StepReporter | None]":
    """The loop with everything it needs, resumed; the policy version that it begins at; at rank 0
    who writes down what it does.

    Rank 0 alone holds handles to the outside and has listeners.
    """
    from rft.algorithm import recipe
    from rft.run.sources import build_feed
    from rft.sync.style import Cadence
    from rft.trainer.feed import is_supervised
    from rft.trainer.profiler import Profiler
    from rft.trainer.skips import SkippedSteps
    from rft.trainer.trainer import Trainer

    config, backend, lead = rank.config, backend_of(rank.config), mesh.rank == 0
    rollouts = not is_supervised(config.algorithm) and config.mode == "both"
    explorer = _explorer(config) if lead and rollouts else None
    synchronizer = control.actor("synchronizer") if lead and rollouts else None
    epoch = mesh.broadcast(take_epoch(rank) if lead else None)
    checkpoints = backend.build_checkpoints(rank, mesh, epoch, models)
    publisher = backend.build_publisher(rank, mesh, models, checkpoints, synchronizer, epoch)
    feed = build_feed(config, mesh, models.policy)
    skips = SkippedSteps(
        rank.job / "failed_batches", config.trainer.max_skipped_steps, lead, mesh.barrier
    )
    with trace.span("resume"):
        step, losses = resume(checkpoints, models, feed, skips, epoch)
    checkpoints.start(models)
    # no answer mixes two versions, and engines that sleep answer nothing
    alone = config.deterministic or config.cluster.colocate
    control.await_engines(explorer, hold=alone)
    publisher.connect()
    reporter = build_reporter(rank, mesh, models, feed.cost, step, explorer) if lead else None
    trainer = Trainer(
        config=config.trainer,
        mesh=mesh,
        models=models,
        feed=feed,
        publisher=publisher,
        cadence=Cadence(
            config.synchronizer, ask=feed.wants_weights if rollouts else lambda interval: False
        ),
        checkpoints=checkpoints,
        evaluations=build_evaluations(config, alone, explorer, synchronizer, reporter, checkpoints),
        skips=skips,
        profiler=Profiler(config.trainer, mesh.rank, rank.device, rank.job / "profile"),
        log_step=reporter.step if reporter else unheard,
        export=exporting(rank, checkpoints) if lead else unheard,
        token_loss=recipe.policy_loss(config.algorithm, models.nearness.loss),
        run_epoch=epoch,
        stopping=lambda: bool(rank.stopping),
        on_phase=phase_file(Path(os.environ["RFT_LOG_DIR"]), mesh.rank),
        recent_losses=losses,
    )
    return trainer, step, reporter


def build_evaluations(
    config: Config,
    alone: bool,
    explorer: "control.ExplorerHandle | None",
    synchronizer: Any | None,
    reporter: "StepReporter | None",
    checkpoints: Any,
) -> control.Evaluations:
    """An evaluation begins when the synchronizer says that the engines serve its version: where
    there is an explorer, there is a synchronizer.
    """
    from rft.sync.synchronizer import Synchronizer

    return control.Evaluations(
        explorer,
        config.explorer,
        scoring(reporter, checkpoints) if reporter else unheard,
        alone,
        served=partial(synchronizer.ask, Synchronizer.wait_for) if synchronizer else unheard,
        reported=reporter.evaluated if reporter else (),
    )


def unheard(*_: Any) -> None:
    """What only rank 0 tells."""


def _explorer(config: Config) -> "control.ExplorerHandle":
    return control.actor(config.explorer.name)


def build_reporter(
    rank: Rank,
    mesh: Any,
    models: Any,
    cost: Any,
    step: int,
    explorer: "control.ExplorerHandle | None",
) -> "StepReporter":
    """Rank 0's, of a run that goes on from `step`; `cost` is that of a token."""
    from rft.monitor.speed import Speed
    from rft.run.sources import tokenizer_of
    from rft.trainer.reporting import StepReporter

    config = rank.config
    print(f"trainer: {models.policy.describe()}", flush=True)
    peak = config.trainer.peak_tflops or rank.device.peak_tflops(config.trainer.dtype)
    speed = Speed(cost, mesh.world, peak, config.trainer.recompute_granularity == "full")
    pool = control.PoolNumbers(explorer)
    return StepReporter(config, rank.job, step, tokenizer_of(config), speed, pool.metrics)


def phase_file(log_dir: Path, number: int) -> Callable[[str], None]:
    """Keeps the current phase in a small file, for
    `rft.run.elastic` to read when this rank was killed.
    """
    file = os.open(log_dir / f"phase_rank_{number}", os.O_WRONLY | os.O_CREAT, 0o644)

    def write(phase: str) -> None:
        os.pwrite(file, phase.ljust(PHASE_BYTES).encode()[:PHASE_BYTES], 0)

    return write


def resume(
    checkpoints: Any, models: Any, feed: Any, skips: Any, epoch: int
) -> "tuple[int, deque[float]]":
    """Restore the newest good checkpoint on every rank and tell the buffer; returns the policy
    version and the losses of the steps before it.
    """
    from rft.trainer.trainer import LOSS_WINDOW

    loop = checkpoints.load(models) or {"step": 0, "recent_losses": []}
    step = int(loop["step"])
    skips.restore(loop.get("skips", [0, 0]))
    if isinstance(feed.source, control.QueueSource):
        feed.source.attach(step, epoch)
    return step, deque(loop["recent_losses"], maxlen=LOSS_WINDOW)


def take_epoch(rank: Rank) -> int:
    """Let the agents of the last attempt finish what they hold, then begin a new one."""
    from rft.checkpoint import commit, fence
    from rft.checkpoint.storage import open_storage

    rank.waiting_for = "the last attempt's checkpoint"
    control = fence.control_dir(rank.job)
    fence.await_agents(control, rank.config.trainer.checkpoint.agent_deadline_s, log.warning)
    rank.waiting_for = ""
    written = commit.list_entries(open_storage(configs.checkpoint_root(rank.config)))
    return fence.take_epoch(control, above=max((entry.epoch for entry in written), default=0))


def scoring(reporter: "StepReporter", checkpoints: Any) -> Callable[[Any], None]:
    """Evaluations are reported and also rank checkpoints, for `trainer.checkpoint.keep_best`."""
    # the checkpoint may be older than its own evaluation
    for version, metrics in reporter.evaluated.items():
        checkpoints.score(version, metrics)

    def told(result: Any) -> None:
        reporter.evaluation(result)
        checkpoints.score(
            result.version, {f"eval/{result.taskset}/{k}": v for k, v in result.metrics.items()}
        )

    return told


def exporting(rank: Rank, checkpoints: Any) -> Callable[[int], None]:
    """Begins the Hugging Face export of a version, in the background."""
    return lambda step: checkpoints.export(
        step, rank.config.model.model_path, str(export_dir(rank.job, step))
    )


if __name__ == "__main__":
    end = processes.ShortExit()
    end.code = main(sys.argv[1])
