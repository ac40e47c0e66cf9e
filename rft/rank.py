"""One trainer rank, from its first line to its last: builds the parts, runs the loop, tells how it ended.

    python -m rft.rank RESOLVED_YAML        (started by `rft.ranks`, or called by `rft.train` under an outer torchrun)

In: the resolved config, RANK/WORLD_SIZE/... of torch's launcher, and at rank 0 the address of the supervisor's Ray. Out: exit
code 0, or a failure record (rank, phase, cause) in the attempt's log directory and exit code 1.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft import config as configs
from rft import control, plugins, processes
from rft import device as devices
from rft.config import Config, TrainerConfig
from rft.monitor import logs, redact, trace
from rft.protocols import TrainBackend

log = logging.getLogger(__name__)
PHASE_BYTES = 64
SETTLE_S = 2.0  # if another part's death is the cause, the sidecar has heard of it by then


@dataclass
class Rank:
    """What the parts of one rank have in common while they are built."""

    config: Config
    job: Path
    device: devices.Device
    stopping: list[int] = field(default_factory=list)  # signals received: a clean end at the next step boundary
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
        """Signal handler: nothing new is begun, and what rank 0 waits for is given up (by a thread: Ray may be in a call)."""
        self.stopping.append(received)
        threading.Thread(target=self._stop_waits, daemon=True).start()

    def _stop_waits(self) -> None:
        self.trainer.evaluations.stop()
        if isinstance(self.trainer.feed.source, control.QueueSource):
            self.trainer.feed.source.stop()


def main(path: str, terminal: int | None = None) -> int:
    """Run this process as a rank of the stage described by `path`; returns its exit code.

    `terminal`: where the first rank that fails says so, when no supervisor will (ranks under an outer launcher).
    """
    config = configs.load(path)
    number = int(os.environ.get("RANK", "0"))
    log_dir = Path(os.environ["RFT_LOG_DIR"])
    logs.redirect(log_dir / f"rank_{number}.log", config.log, keep_stdout=number == 0)
    logs.die_with_parent()
    (log_dir / f"failure_rank_{number}.json").unlink(missing_ok=True)  # of the attempt before a restart
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank = Rank(config, configs.job_dir(config), devices.choose(config.device, local, config.cluster.threads_per_rank))
    try:
        plugins.load(config.plugin_dirs)
        run(rank)
    except Exception as error:
        log.error("rank %d failed while %s\n%s", number, rank.phase, traceback.format_exc())
        logs.flush()
        trace.instant("failed", cause=control.cause(error))
        record = {"part": f"trainer rank {number}", "phase": rank.phase, "cause": control.cause(error)}
        tell(record, log_dir, number, terminal)
        try:
            logs.ask_stacks_of_siblings()
            keep_batch(rank)
        finally:
            logs.flush()
            os._exit(1)  # other threads (gloo, ray) may hang in a peer that is gone; nothing here is left to be saved
    if rank.complete and not (rank.stopping and terminal is not None):
        return 0
    return 128 + (rank.stopping or [signal.SIGTERM])[0]  # all ranks end together, whichever of them was told to


def keep_batch(rank: Rank) -> None:
    """Rank 0 leaves the batch of the step that failed, as of one that was skipped."""
    if rank.trainer is not None and rank.trainer.feed.current is not None:
        path = rank.trainer.skips.keep(rank.trainer.feed.current)
        log.error("the batch of the step that failed is in %s", path)


def tell(record: dict[str, str], log_dir: Path, number: int, terminal: int | None) -> None:
    """Leave the failure record; under an outer launcher also tell the user, unless a part that failed earlier is told of."""
    is_first = not list(log_dir.glob("failure_rank_*.json"))
    (log_dir / f"failure_rank_{number}.json").write_text(redact.text(json.dumps(record)), encoding="utf-8")
    if terminal is None or not is_first:
        return
    time.sleep(SETTLE_S)
    if not (log_dir / "failure.json").exists():
        message = f"rft: {record['part']} failed while {record['phase']}: {record['cause']}; logs in {log_dir}\n"
        os.write(terminal, redact.text(message).encode())


def run(rank: Rank) -> None:
    """Build the parts, resume, train, close."""
    config = rank.config
    mesh = backend_of(config).open_mesh(config, rank.device)
    leads = mesh.rank == 0 or config.synchronizer.sync_method == "memory"  # there every rank leaves its own weights
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
    from rft.checkpoint.disk import Disk
    from rft.checkpoint.storage import LocalStorage
    from rft.monitor.speed import Speed

    config = rank.config
    if config.cluster.colocate:  # engines measure the card's free memory as they start
        rank.waiting_for = "the engines to start"
        control.await_engines(config.explorer.name if mesh.rank == 0 else None)
        mesh.barrier(rank.waiting_for)
        rank.waiting_for = ""
    with trace.span("build models"):
        models = backend_of(config).build_models(config, mesh)
    log.info("rank %d of %d: %s", mesh.rank, mesh.world, models.policy.describe())
    monitor = None
    trainer = rank.trainer = build_trainer(rank, mesh, models)
    with trace.span("resume"):
        step = resume(trainer, config)
    trainer.checkpoints.start(models)
    trainer.evaluations.await_ready()
    trainer.publisher.connect()
    if mesh.rank == 0:
        from rft.reporting import StepReporter

        print(f"trainer: {models.policy.describe()}", flush=True)
        peak = config.trainer.peak_tflops or rank.device.peak_tflops(config.trainer.dtype)
        speed = Speed(trainer.feed.cost, mesh.world, peak, config.trainer.recompute_granularity == "full")
        pool = control.PoolNumbers(trainer.evaluations.explorer)
        monitor = StepReporter(config, rank.job, step, tokenizer_of(config), speed, pool.metrics)
        trainer.log_step = monitor.step
        trainer.evaluations.report = scoring(monitor.evaluation, trainer.checkpoints)
        trainer.export = lambda step: trainer.checkpoints.export(
            step, config.model.model_path, str(export_dir(rank.job, step))
        )
        trainer.evaluations.reported = set(monitor.evaluated)
        for version, found in monitor.evaluated.items():  # the checkpoint may be older than its own evaluation
            trainer.checkpoints.score(version, found)
    trainer.timer.pop()  # steps are timed from here on
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # until now there was nothing to save
        signal.signal(number, rank.stop)
    logs.show_stacks_when_stopped()
    reached = trainer.fit(step)
    trainer.phase = "closing"
    trainer.checkpoints.close()
    trainer.publisher.close()
    if monitor is not None:
        monitor.close()
    rank.complete = trainer.complete
    if mesh.rank == 0:
        asked = config.trainer.total_steps
        result = {
            "version": reached,
            "complete": rank.complete,
            "asked": asked,
            "huggingface": str(export_dir(rank.job, reached)),
        }
        LocalStorage(rank.job, Disk()).put("result.json", json.dumps(result, indent=1).encode())
    models.close()


def backend_of(config: Config) -> TrainBackend:
    """Where the policy learns, by `trainer.trainer_type`."""
    return importlib.import_module(f"rft.on_{config.trainer.trainer_type}")  # type: ignore[return-value]


def build_trainer(rank: Rank, mesh: Any, models: Any) -> Any:
    """Everything the loop needs, each from its own section. Rank 0 alone holds handles to the outside."""
    from rft.algorithm import recipe
    from rft.feed import Feed, is_supervised
    from rft.packing import Cost
    from rft.profiler import Profiler
    from rft.skips import SkippedSteps
    from rft.sync.style import Cadence
    from rft.trainer import Trainer

    config, policy, backend = rank.config, models.policy, backend_of(rank.config)
    rollouts = not is_supervised(config.algorithm) and config.mode == "both"
    lead = mesh.rank == 0
    explorer = control.actor(config.explorer.name) if lead and rollouts else None
    synchronizer = control.actor("synchronizer") if lead and rollouts else None
    epoch = mesh.broadcast(take_epoch(rank) if lead else None)
    checkpoints = backend.build_checkpoints(rank, mesh, epoch, models)
    feed = Feed(
        _source(rank) if lead else None, mesh, config.algorithm, int(config.trainer.max_token_len_per_gpu or 0) * mesh.cp,
        policy.multiple, Cost.of(policy.hf_config), cut_of(config.trainer), int(config.model.max_response_tokens or 1),
        _experts(rank) if lead else None,
    )  # fmt: skip
    return Trainer(
        config=config.trainer,
        mesh=mesh,
        models=models,
        feed=feed,
        publisher=backend.build_publisher(rank, mesh, models, checkpoints, synchronizer, epoch),
        cadence=Cadence(config.synchronizer, ask=feed.wants_weights if rollouts else lambda interval: False),
        checkpoints=checkpoints,
        evaluations=control.Evaluations(
            explorer,
            config.explorer,
            report=lambda result: None,
            alone=config.deterministic or config.cluster.colocate,  # engines that sleep answer nothing
            served=synchronizer.wait_for.remote if synchronizer is not None else lambda version: version,
        ),  # fmt: skip
        skips=SkippedSteps(rank.job / "failed_batches", config.trainer.max_skipped_steps, lead, mesh.barrier),
        profiler=Profiler(config.trainer, mesh.rank, rank.device, rank.job / "profile"),
        log_step=lambda step, metrics, experiences: None,
        export=lambda step: None,
        token_loss=recipe.policy_loss(config.algorithm, models.nearness.loss),
        run_epoch=epoch,
        stopping=lambda: bool(rank.stopping),
        on_phase=phase_file(Path(os.environ["RFT_LOG_DIR"]), mesh.rank),
    )


def cut_of(trainer: TrainerConfig) -> Any:
    from rft.packing import Cut

    rows = None if trainer.use_dynamic_bsz else trainer.ppo_micro_batch_size_per_gpu
    return Cut(rows, trainer.balance_batch, pad=not trainer.use_remove_padding)


def phase_file(log_dir: Path, number: int) -> Callable[[str], None]:
    """Keeps the current phase in a small file, for `rft.ranks` to read when this rank was killed."""
    file = os.open(log_dir / f"phase_rank_{number}", os.O_WRONLY | os.O_CREAT, 0o644)

    def write(phase: str) -> None:
        os.pwrite(file, phase.ljust(PHASE_BYTES).encode()[:PHASE_BYTES], 0)

    return write


def _source(rank: Rank) -> Any:
    """Rank 0's batches: supervised rows or experiences from a file, or what is in a buffer."""
    from rft.feed import is_supervised

    config = rank.config
    experience_buffer = config.buffer.trainer_input.experience_buffer
    if experience_buffer.storage_type == "file" and not is_supervised(config.algorithm):
        from rft.buffer.experience_file import ExperienceFile

        return ExperienceFile(str(experience_buffer.path), config.buffer.batch_size, config.trainer.total_steps)
    if experience_buffer.storage_type == "file":
        from rft.algorithm import ALGORITHMS
        from rft.buffer.sft_rows import SupervisedRows

        return SupervisedRows(
            experience_buffer, tokenizer_of(config), int(config.buffer.train_batch_size or 1), config.seed,
            int(config.model.max_model_len or 0), total_steps=config.trainer.total_steps,
            chat_template=config.model.custom_chat_template, schema=ALGORITHMS[config.algorithm.algorithm_type].schema,
        )  # fmt: skip
    controlled = config.algorithm.sample_strategy == "staleness_control"
    oldest = int(config.algorithm.sample_strategy_args["max_staleness"]) if controlled else None
    return control.QueueSource(control.actor(experience_buffer.name), experience_buffer.max_read_timeout, oldest)


def _experts(rank: Rank) -> Any | None:
    """Rank 0's expert rows, where the algorithm mixes them in: as many per step as the batch has room for."""
    from rft.algorithm import mixing
    from rft.buffer.sft_rows import SupervisedRows

    config = rank.config
    if not mixing.is_mixed(config.algorithm):
        return None
    name = mixing.argument(config.algorithm, "sft_dataset_name")
    return SupervisedRows(
        config.buffer.trainer_input.auxiliary_buffers[name], tokenizer_of(config),
        mixing.expert_rows(config.algorithm, int(config.buffer.train_batch_size or 1)), config.seed,
        int(config.model.max_model_len or 0), chat_template=config.model.custom_chat_template,
        key_path=f"buffer.trainer_input.auxiliary_buffers.{name}", expert=True,
    )  # fmt: skip


def tokenizer_of(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.model_path, trust_remote_code=config.model.trust_remote_code)


def resume(trainer: Any, config: Config) -> int:
    """Restore the newest good checkpoint on every rank and tell the buffer; returns the policy version."""
    loop = trainer.checkpoints.load(trainer.models)
    step = int(loop["step"]) if loop else 0
    if loop:
        trainer.recent_losses.extend(loop["recent_losses"])
        trainer.skips.restore(loop.get("skips", [0, 0]))
    if isinstance(trainer.feed.source, control.QueueSource):
        trainer.feed.source.attach(step, trainer.run_epoch)
    return step


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


def scoring(report: Callable[[Any], None], checkpoints: Any) -> Callable[[Any], None]:
    """Evaluations also rank checkpoints, for `trainer.checkpoint.keep_best`."""

    def told(result: Any) -> None:
        report(result)
        checkpoints.score(result.version, {f"eval/{result.taskset}/{k}": v for k, v in result.metrics.items()})

    return told


def export_dir(job: Path, step: int) -> Path:
    return job / "huggingface" / f"step_{step:08d}"


if __name__ == "__main__":
    end = processes.ShortExit()
    end.code = main(sys.argv[1])
