"""A rank's trainer, built in one pass: the loop with everything that it needs, in the order in
which the parts need each other.

In: where the policy learns (`rft.run.backends`), the mesh and the models. Out: the `Trainer`, the
policy version that it begins at and, at rank 0, who writes down what it does. Rank 0 alone holds
handles to the outside, has listeners and a source of batches: rows or experiences of a file, or
what explorers put into a buffer. Collective: every rank builds its own.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.algorithm import ALGORITHMS, mixing, recipe
from rft.buffer.experience_file import ExperienceFile
from rft.buffer.progress import StepSize
from rft.checkpoint import fence
from rft.checkpoint.asking import SaveRequests
from rft.config import Config, beat_s, engine_arguments, is_bitwise
from rft.data.chat import load_tokenizer
from rft.data.packing import Cost, cut_of
from rft.data.supervised import SupervisedRows
from rft.data.updates import UpdateRule
from rft.ground.experience import EvalResult
from rft.ground.families import num_experts
from rft.ground.protocols import TrainerMesh
from rft.monitor import trace
from rft.monitor.metrics import Speed
from rft.monitor.run_record import RunRecord
from rft.run.backends import TrainBackend
from rft.run.recovery import Recovery
from rft.run.stages import export_dir
from rft.sync.style import Cadence
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle
from rft.trainer import control
from rft.trainer.feed import WAITS, BatchSource, Feed, is_supervised
from rft.trainer.gates import VITALS, Gates
from rft.trainer.models import Models
from rft.trainer.reporting import Profiler, SkippedSteps, StepReporter
from rft.trainer.saving import SaveTimes, save_times
from rft.trainer.speculation import SpeculationCheck
from rft.trainer.trainer import LOSS_WINDOW, Trainer

if TYPE_CHECKING:
    from rft.rollout.explorer import ExplorerHandle
    from rft.run.backends import Saves

PHASE_BYTES = 64


@dataclass(frozen=True)
class Assembled:
    """`start`: the policy version that `trainer` begins at. `reporter`: rank 0's."""

    trainer: Trainer
    start: int
    reporter: StepReporter | None


def assemble(
    backend: TrainBackend,
    mesh: TrainerMesh,
    models: Models,
    epoch: int,
    stopping: Callable[[], bool],
    recovery: Recovery,
    coming: Future[Any] | None = None,
) -> Assembled:
    """`epoch`: of this run's attempt. `stopping`: whether somebody asked for a clean end.
    `recovery`: what rank 0 tells of ranks that came back. `coming`: the tokenizer, if rank 0 has
    begun to load it already.
    """
    config, lead = backend.config, mesh.rank == 0
    rollouts = not is_supervised(config.algorithm) and config.mode == "both"
    explorer = control.actor(config.explorer.name) if lead and rollouts else None
    synchronizer = control.actor("synchronizer") if lead and rollouts else None
    coming = coming or (begin_tokenizer(config) if lead else None)
    checkpoints = backend.build_checkpoints(mesh, models, epoch)
    publisher = backend.build_publisher(mesh, models, checkpoints, synchronizer, epoch)
    skips = SkippedSteps(
        backend.job / "failed_batches", config.trainer.max_skipped_steps, lead, mesh.barrier
    )
    gates = gates_of(config)
    with trace.span("resume"):
        loop = restored(checkpoints, models)
        compare(gates, mesh, models, loop)
        tokenizer = coming.result() if coming else None
        feed = build_feed(config, mesh, models, tokenizer)
        step, losses = resume(loop, feed, skips, gates, epoch)
    source = "memory" if checkpoints.remembered is not None else "disk"
    reached = max(RunRecord(backend.job).last_step, checkpoints.reached) if lead else 0
    recovery.resumed(step, reached, source if step else "", checkpoints.read)
    if lead and (again := recovery.again()):
        print(f"trainer: {again}", flush=True)
    checkpoints.start(models)
    await_engines(backend, mesh, models, feed, explorer, starts=recovery.died_at is None)
    publisher.connect()
    reporter = None
    if lead:
        print(f"trainer: {models.policy.describe()}", flush=True)
        numbers = partial(told_besides, control.PoolNumbers(explorer), recovery)
        speed = speed_of(backend, mesh)
        reporter = StepReporter(config, backend.job, step, tokenizer, speed, numbers)
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
        evaluations=build_evaluations(config, mesh, explorer, synchronizer, reporter, checkpoints),
        skips=skips,
        profiler=Profiler(config.trainer, mesh.rank, backend.device, backend.job / "profile"),
        log_step=reporter.step if reporter else unheard,
        export=partial(export, backend, checkpoints) if lead else unheard,
        save_times=save_times_of(backend, mesh),
        check=speculation_check(config, mesh, models, feed, explorer, synchronizer, tokenizer),
        token_loss=recipe.policy_loss(config.algorithm, models.kl.loss, is_cut(config)),
        run_epoch=epoch,
        stopping=stopping,
        on_phase=phase_file(Path(os.environ["RFT_LOG_DIR"]), mesh.rank, recovery.enter),
        recent_losses=losses,
        gates=gates,
    )
    return Assembled(trainer, step, reporter)


def await_engines(
    backend: TrainBackend,
    mesh: TrainerMesh,
    models: Models,
    feed: Feed,
    explorer: "ExplorerHandle | None",
    starts: bool,
) -> None:
    """Return when engines serve, if rank 0 has an explorer that asks them. `starts`: they start
    now, too, and ranks warm up meanwhile; ranks that come back find them there.
    """
    if mesh.broadcast(starts and explorer is not None):
        with trace.span("warm up"):
            backend.warm_up(models, feed.packing)
    control.await_engines(explorer, True, mesh.broadcast, beat_s(backend.config))


def gates_of(config: Config) -> Gates:
    dtypes = {config.trainer.dtype, config.explorer.rollout_model.dtype}
    stop = config.trainer.on_drift == "stop"
    to_the_bit = is_bitwise(config) and config.device == "cpu"
    is_plain = recipe.is_plain(config.algorithm)
    return Gates(config.trainer.drift, stop, dtypes == {"fp32"}, is_plain, to_the_bit)


def speculation_check(
    config: Config,
    mesh: TrainerMesh,
    models: Models,
    feed: Feed,
    explorer: "ExplorerHandle | None",
    synchronizer: SynchronizerHandle | None,
    tokenizer: Any,
) -> SpeculationCheck | None:
    """On every rank where the run's engines speculate; rank 0 asks them."""
    name = engine_arguments.speculation(config.explorer.rollout_model.engine_args)
    if name is None or config.mode != "both" or is_supervised(config.algorithm):
        return None
    ask = encode = None
    if explorer is not None and synchronizer is not None:
        served = partial(synchronizer.ask, Synchronizer.wait_for)
        ask = partial(control.sampled, explorer, served)
        encode = partial(tokenizer.encode, add_special_tokens=False)
    return SpeculationCheck(
        f"explorer.rollout_model.engine_args.{name}",
        mesh,
        models.policy,
        feed.packing,
        int(config.model.max_model_len or 0),
        ask,
        encode,
        config.deterministic,
    )


def build_evaluations(
    config: Config,
    mesh: TrainerMesh,
    explorer: "ExplorerHandle | None",
    synchronizer: SynchronizerHandle | None,
    reporter: StepReporter | None,
    checkpoints: "Saves",
) -> control.Evaluations:
    """An evaluation begins when the synchronizer says that the engines serve its version: where
    there is an explorer, there is a synchronizer.
    """
    return control.Evaluations(
        explorer,
        config.explorer,
        scoring(reporter, checkpoints) if reporter else unheard,
        # no answer mixes two versions, and engines that sleep answer nothing
        alone=config.deterministic or config.cluster.colocate,
        served=partial(synchronizer.ask, Synchronizer.wait_for) if synchronizer else unheard,
        reported=reporter.evaluated if reporter else (),
        agreed=mesh.broadcast,
        beat_s=beat_s(config),
    )


def unheard(*_: Any) -> None:
    """What only rank 0 tells."""


def scoring(reporter: StepReporter, checkpoints: "Saves") -> Callable[[EvalResult], None]:
    """Evaluations are reported and also rank checkpoints, for `trainer.checkpoint.keep_best`."""
    # the checkpoint may be older than its own evaluation
    for version, metrics in reporter.evaluated.items():
        checkpoints.score(version, metrics)

    def told(result: EvalResult) -> None:
        reporter.evaluation(result)
        checkpoints.score(
            result.version, {f"eval/{result.taskset}/{k}": v for k, v in result.metrics.items()}
        )

    return told


def export(backend: TrainBackend, checkpoints: Any, step: int) -> None:
    """Begin the Hugging Face export of a version, in the background."""
    target = export_dir(backend.job, step)
    checkpoints.export(step, backend.config.model.model_path, str(target))


def save_times_of(backend: TrainBackend, mesh: TrainerMesh) -> SaveTimes:
    """Rank 0 hears who asks for a save, and tells of a disk that does not follow."""
    if mesh.rank > 0:
        return save_times(backend.config, mesh.broadcast)
    requests = SaveRequests(fence.control_dir(backend.job))
    return save_times(
        backend.config, mesh.broadcast, requests, lambda line: print(f"trainer: {line}", flush=True)
    )


def told_besides(pool: control.PoolNumbers, recovery: Recovery) -> dict[str, float]:
    """Metrics of a step that are not the trainer's own."""
    return pool.metrics() | recovery.pop()


def speed_of(backend: TrainBackend, mesh: TrainerMesh) -> Speed:
    trainer = backend.config.trainer
    peak = trainer.peak_tflops or backend.device.peak_tflops(str(trainer.dtype))
    return Speed(mesh.world, peak, trainer.recompute_granularity == "full")


def phase_file(
    log_dir: Path, number: int, heard: Callable[[str], None] = unheard
) -> Callable[[str], None]:
    """Keeps the current phase in a small file, for `rft.run.elastic` to read when this rank was
    killed; `heard` is told too.
    """
    file = os.open(log_dir / f"phase_rank_{number}", os.O_WRONLY | os.O_CREAT, 0o644)

    def write(phase: str) -> None:
        os.pwrite(file, phase.ljust(PHASE_BYTES).encode()[:PHASE_BYTES], 0)
        heard(phase)

    return write


def begin_tokenizer(config: Config) -> Future[Any]:
    """In a thread: the library behind it takes seconds to be there, in which models are built and a
    state is read.
    """
    pool = ThreadPoolExecutor(1, "tokenizer")
    coming = pool.submit(load_tokenizer, config.model)
    pool.shutdown(wait=False)
    return coming


def restored(checkpoints: "Saves", models: Models) -> dict[str, Any]:
    """The loop state of the newest good checkpoint, which every rank has read."""
    loop = checkpoints.load(models)
    if loop is None:
        models.begin()
        return {"step": 0}
    return loop


def resume(
    loop: dict[str, Any], feed: Feed, skips: SkippedSteps, gates: Gates, epoch: int
) -> tuple[int, deque[float]]:
    """Go on there, and tell the buffer; returns the policy version and the losses of the steps
    before it.
    """
    step = int(loop["step"])
    skips.restore(loop.get("skips", [0, 0]))
    gates.restore(loop.get("gates", {}))
    if isinstance(feed.source, control.QueueSource):
        ends, known = feed.source.mark(), loop.get("journal") or 0
        if ends < known:
            print(
                f"trainer: the buffer's journal ends at {ends:,}, and this state was made behind "
                f"{known:,}: it was removed, or is of another time; what it does not have, answers "
                "that no step has used, is generated again",
                flush=True,
            )
        feed.source.attach(step, epoch)
    losses = [loss for loss in loop.get("recent_losses", []) if loss is not None]
    return step, deque(losses, maxlen=LOSS_WINDOW)


def compare(gates: Gates, mesh: TrainerMesh, models: Models, loop: dict[str, Any]) -> None:
    """What every rank holds after reading a checkpoint with what the save saw. Collective; raises
    Drifted on every rank.
    """
    told = mesh.gather([models.kept_vitals, models.vitals()]) or []
    kept, now = [one for one, _ in told], [one for _, one in told]
    # another layout, or an older rft: what rank 0 has written of one rank or of all
    gates.resumed(kept if all(kept) else loop.get(VITALS), now)
    gates.tripped = mesh.broadcast(gates.tripped)
    gates.refuse()


# --- where batches come from ---------------------------------------------------------------------


def build_feed(config: Config, mesh: TrainerMesh, models: Models, tokenizer: Any) -> Feed:
    """`tokenizer`: rank 0's."""
    lead, vocab = mesh.rank == 0, int(models.policy.hf_config["vocab_size"])
    return Feed(
        source(config, mesh, tokenizer, vocab) if lead else None,
        mesh,
        config.algorithm,
        int(config.trainer.max_token_len_per_gpu or 0) * mesh.cp,
        models.policy.multiple,
        Cost.of(models.policy.hf_config),
        # a service gets whole rows, and cuts them as it likes
        replace(cut_of(config.trainer), share=False)
        if config.model.tinker.enable
        else cut_of(config.trainer),
        int(config.model.max_response_tokens or 1),
        experts(config, tokenizer, vocab) if lead else None,
        rule_of(config),
        config.trainer.router_replay and num_experts(models.policy.hf_config) > 0,
        vocab,
    )


def is_cut(config: Config) -> bool:
    """Whether a step may make several updates."""
    return config.trainer.ppo_epochs > 1 or config.trainer.ppo_mini_batch_size is not None


def rule_of(config: Config) -> UpdateRule:
    trainer = config.trainer
    together = 2 if recipe.needs_pairs(config.algorithm) else 1
    size = trainer.ppo_mini_batch_size
    return UpdateRule(trainer.ppo_epochs, size, trainer.ppo_shuffle, config.seed, together)


def source(config: Config, mesh: TrainerMesh, tokenizer: Any, vocab: int) -> BatchSource:
    """Rank 0's batches: supervised rows or experiences from a file, or what is in a buffer."""
    experience_buffer = config.buffer.trainer_input.experience_buffer
    if experience_buffer.storage_type == "file" and not is_supervised(config.algorithm):
        size = StepSize(config.buffer.batch_size, mixing.rollouts_per_step(config))
        return ExperienceFile(str(experience_buffer.path), size, config.trainer.total_steps)
    if experience_buffer.storage_type == "file":
        return SupervisedRows(
            experience_buffer,
            tokenizer,
            int(config.buffer.train_batch_size or 1),
            config.seed,
            int(config.model.max_model_len or 0),
            total_steps=config.trainer.total_steps,
            chat_template=config.model.custom_chat_template,
            schema=ALGORITHMS[config.algorithm.algorithm_type].schema,
            vocab=vocab,
        )
    controlled = config.algorithm.sample_strategy == "staleness_control"
    oldest = int(config.algorithm.sample_strategy_args["max_staleness"]) if controlled else None
    return control.QueueSource(
        control.actor(experience_buffer.name),
        experience_buffer.max_read_timeout,
        oldest,
        partial(mesh.broadcast, WAITS),
        beat_s(config),
    )


def experts(config: Config, tokenizer: Any, vocab: int) -> BatchSource | None:
    """Rank 0's expert rows, where the algorithm mixes them in: as
    many per step as the batch has room for.
    """
    if not mixing.is_mixed(config.algorithm):
        return None
    name = mixing.argument(config.algorithm, "sft_dataset_name")
    rows = config.buffer.trainer_input.auxiliary_buffers[name]
    return SupervisedRows(
        rows,
        tokenizer,
        mixing.expert_rows(config.algorithm, int(config.buffer.train_batch_size or 1)),
        config.seed,
        int(config.model.max_model_len or 0),
        epochs=rows.total_epochs,
        chat_template=config.model.custom_chat_template,
        key_path=f"buffer.trainer_input.auxiliary_buffers.{name}",
        expert=True,
        vocab=vocab,
    )
