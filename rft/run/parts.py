"""What the actors of a stage are made of: for each a class, its arguments and what it takes of the
machine.

In: a stage's config, and the actors that one of them asks. Out: an `ActorSpec`, which
`rft.run.actors` starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Generic, TypeVar

from rft import config as configs
from rft.algorithm import mixing, recipe
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.store import buffer_of
from rft.config import AuxiliaryModelConfig, Config, ModelConfig, derived, is_remote
from rft.config.layout import versions_kept
from rft.data.taskset import build_tasksets
from rft.ground.protocols import ActorHandle
from rft.rollout.engine import RolloutEngine
from rft.rollout.explorer import EndpointFactory, Explorer, Pipeline
from rft.rollout.pool import EngineHandle
from rft.rollout.rewards import is_quick
from rft.run.cards import auxiliary_name
from rft.sync.synchronizer import Synchronizer

T = TypeVar("T")


@dataclass(frozen=True)
class ActorSpec(Generic[T]):
    part: str  # who failed, in messages; its log file
    name: str  # in the run's namespace
    make: "partial[T]"  # its class, with all arguments
    threads: int = 1
    gpus: int = 0
    cpus: int = 1  # of Ray's bookkeeping


def is_shared(config: Config) -> bool:
    """Whether other processes write to the buffer, or read from it, while this one runs."""
    return config.buffer.trainer_input.experience_buffer.storage_type == "sql"


def buffer_spec(config: Config, life: str = "") -> ActorSpec[ExperienceBuffer]:
    """`life`: names this start of the run."""
    settings = config.buffer.trainer_input.experience_buffer
    # a client asks when it asks
    limited = config.mode == "both" or (is_shared(config) and config.mode != "serve")
    cls, arguments = buffer_of(
        settings,
        configs.job_dir(config),
        f"{config.project}/{config.name}",
        config.buffer.batch_size,
        int(config.algorithm.repeat_times or 1),
        config.synchronizer.max_staleness if limited else None,
        config.trainer.total_steps if config.mode != "serve" else None,
        config.seed,
        config.explorer.over_rollout if config.mode == "both" else None,
        mixing.rollouts_per_step(config),
        life,
    )
    return ActorSpec("buffer", settings.name, partial(cls, *arguments))


def synchronizer_spec(
    config: Config, buffer: ActorHandle[ExperienceBuffer]
) -> ActorSpec[Synchronizer]:
    """It frees the buffer's slots, which are counted where a trainer frees them."""
    settings, frees = config.synchronizer, config.mode == "both" or is_shared(config)
    make = partial(
        Synchronizer,
        buffer if frees else None,
        settings.sync_timeout,
        settings.kv,
        settings.receive == "direct",
        configs.checkpoint_root(config) if config.mode in ("explore", "serve") else None,
        version=config.explorer.version if config.mode == "serve" else None,
    )
    return ActorSpec("synchronizer", "synchronizer", make)


def explorer_spec(
    config: Config,
    engines: dict[str, EngineHandle],
    buffer: ActorHandle[ExperienceBuffer] | None,
    synchronizer: ActorHandle[Synchronizer] | None,
    api: EndpointFactory | None,
) -> ActorSpec[Explorer]:
    """`engines`: where no synchronizer says which there are."""
    staleness = config.synchronizer.max_staleness if config.mode == "both" else None
    taskset, eval_tasksets = build_tasksets(
        config.buffer,
        config.model,
        config.seed,
        config.trainer.total_steps,
        max_staleness=staleness,
    )
    make = partial(
        Explorer,
        config.explorer,
        config.model,
        taskset,
        eval_tasksets,
        engines,
        buffer,
        config.buffer.batch_size,
        seed=config.seed if config.deterministic else None,
        synchronizer=synchronizer,
        greedy_baseline=recipe.needs_baseline(config.algorithm),
        api=api,
        make_pipeline=_pipeline(config),
        counts_experiences=mixing.rollouts_per_step(config) is not None,
        max_read_timeout=config.buffer.trainer_input.experience_buffer.max_read_timeout,
        quick_rewards=are_quick(config),
        slow_rewards=[one for one in derived.rewards(config) if not is_quick(*one)],
    )
    return ActorSpec("explorer", config.explorer.name, make)


def are_quick(config: Config) -> bool:
    """Whether the rewards of all tasks are, as far as the config says it: a row may name another
    one.
    """
    named = any(one.format.reward_fn_key for one in derived.tasksets(config))
    return not named and all(starmap(is_quick, derived.rewards(config)))


def _pipeline(config: Config) -> Callable[[], Pipeline] | None:
    """What makes the experience pipeline where the explorer runs;
    None: groups go straight to the buffer.
    """
    settings = config.data_processor.experience_pipeline
    if config.mode == "bench" or not (settings.operators or settings.save_input):
        return None
    from rft.extras.pipeline.experiences import ExperiencePipeline

    return partial(
        ExperiencePipeline,
        settings,
        config.service.data_juicer,
        configs.job_dir(config),
        config.buffer.batch_size,
    )


def engine_spec(config: Config, engine: str, name: str) -> ActorSpec[RolloutEngine]:
    """The actor `name` of the policy's `engine`.

    Only those of the start have a CPU of the private Ray's, which are only bookkeeping.
    """
    rollout, threads = config.explorer.rollout_model, config.cluster.threads_per_engine
    is_first = int(engine.removeprefix("engine_")) < int(rollout.engine_num or 1)
    cpus = 1 if is_first or config.cluster.ray_address else 0
    longest = int(config.model.max_model_len or 0)
    if is_remote(config):
        from rft.extras.tinker.sampler import SamplerEngine

        sampler = partial(SamplerEngine, engine, config.model, longest)
        return ActorSpec(engine, name, sampler, threads, cpus=cpus)  # type: ignore[arg-type]
    make = partial(
        RolloutEngine,
        engine,
        config.model,
        rollout,
        threads,
        config.seed,
        config.device,
        longest,
        adapters=versions_kept(config.synchronizer) if config.mode != "bench" else 0,
        colocated=config.cluster.colocate,
        cluster=config.cluster.ray_address,
        bitwise=configs.is_bitwise(config),
    )
    return ActorSpec(engine, name, make, threads, rollout.tensor_parallel_size, cpus)


def auxiliary_spec(
    config: Config, model: AuxiliaryModelConfig, number: int
) -> ActorSpec[RolloutEngine]:
    """Engine `number` of a model that never changes."""
    name, threads = auxiliary_name(model.name, number), config.cluster.threads_per_engine
    make = partial(
        RolloutEngine,
        name,
        ModelConfig(model_path=model.model_path, trust_remote_code=model.trust_remote_code),
        model,
        threads,
        config.seed,
        config.device,
        int(model.max_model_len or 0),
    )
    return ActorSpec(name, name, make, threads, model.tensor_parallel_size)
