"""What follows from the keys that a user gave: every value that can be derived from others is set.

In: a config as it was composed, and what is refused of it so far. Out: the same config, filled.
Invariants: what the user gave is never replaced; what cannot be derived stays as it is, and is
refused.
"""

import os
from collections.abc import Collection, Mapping
from itertools import chain, count
from math import lcm
from pathlib import Path

from rft.algorithm import ALGORITHMS, mixing, recipe
from rft.config import (
    TASKSET_KEY,
    AlgorithmConfig,
    Config,
    ConfigError,
    MegatronConfig,
    grace_of,
    is_remote,
    job_dir,
)
from rft.config import verl as verl_keys
from rft.config.choices import fill_choices
from rft.extras.pipeline.output import place
from rft.extras.pipeline.worker_process import TASKS
from rft.ground.errors import unreadable
from rft.preflight.rules import Refusals, Rule, tasksets
from rft.preflight.rules_data import EVAL, agents, environments, names
from rft.preflight.rules_run import APART, GIVEN, SHARED
from rft.preflight.rules_trainer import ALGORITHM_GIVEN, TINKER, TINKER_GIVEN
from rft.rollout.environments import drives
from rft.run import cards, owners
from rft.run.cards import Machine
from rft.sync import style

METHODS = {"online": "nccl", "offline": "checkpoint"}  # of sync_method, in other systems
ALONE_SHARE = 0.9  # of a card's memory, for an engine that has it alone


def fill_config(
    config: Config, refusals: Refusals, machine: Machine | None = None, asks_ray: bool = True
) -> None:
    """Set what follows; `refusals` hears of what cannot be.

    `machine`: default: this one. `asks_ray`: an existing Ray may be asked for its GPUs.
    """
    machine = machine or cards.here()
    refusals.ask((Rule("trainer.trainer_config", verl_keys.merge),), config)
    if config.model.tinker.enable:
        config.trainer.trainer_type = TINKER
    refusals.ask((*GIVEN, *TINKER_GIVEN, *ALGORITHM_GIVEN), config)
    refusals.ask((Rule(TASKS, place),), config)
    _fill_tinker(config)
    if config.algorithm.algorithm_type in ALGORITHMS:
        fill_algorithm(config.algorithm)
        _fill_rows(config)
    refusals.ask(derived(machine, asks_ray), config)
    config.ray_namespace = config.ray_namespace or namespace_of(config)
    if config.shutdown_grace_s is None:
        config.shutdown_grace_s = grace_of(os.environ)
    _fill_tasksets(config)
    _fill_sync(config)
    fill_colocate(config)
    fill_choices(config)
    _fill_agents(config)
    if config.deterministic:
        _fill_deterministic(config)


def namespace_of(config: Config) -> str:
    """Parts of a run that work beside each other, each with a place of its own in the run's
    directory, may share a Ray; their actors have the same names, and find only their own.
    """
    beside = os.path.relpath(owners.place(config), job_dir(config))
    return f"{config.project}/{config.name}" + ("" if beside == "." else f"/{beside}")


def fill_algorithm(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Functions and arguments, by the algorithm's type."""
    defaults = ALGORITHMS[algorithm.algorithm_type]
    algorithm.repeat_times = algorithm.repeat_times or defaults.repeat_times
    algorithm.advantage_fn = algorithm.advantage_fn or defaults.advantage_fn
    algorithm.policy_loss_fn = algorithm.policy_loss_fn or defaults.policy_loss_fn
    mode = algorithm.loss_agg_mode or algorithm.policy_loss_fn_args.get("loss_agg_mode")
    algorithm.loss_agg_mode = mode or defaults.loss_agg_mode  # type: ignore[assignment]
    algorithm.kl_loss_fn = algorithm.kl_loss_fn or defaults.kl_loss_fn
    algorithm.sample_strategy = algorithm.sample_strategy or defaults.sample_strategy
    algorithm.entropy_loss_fn = algorithm.entropy_loss_fn or defaults.entropy_loss_fn
    # arguments of another function would mean nothing to it
    if algorithm.advantage_fn == defaults.advantage_fn:
        algorithm.advantage_fn_args = defaults.advantage_fn_args | algorithm.advantage_fn_args
    if algorithm.policy_loss_fn == defaults.policy_loss_fn:
        given, own = algorithm.policy_loss_fn_args, defaults.policy_loss_fn_args
        if "clip_range" in given:  # both ends
            own = {name: one for name, one in own.items() if not name.startswith("clip_range_")}
        algorithm.policy_loss_fn_args = own | given
    if algorithm.proximal_logprobs is None:
        algorithm.proximal_logprobs = recipe.needs_proximal(algorithm)
    return algorithm


def fill_colocate(config: Config) -> None:
    """The engine's share of a card, and how it receives weights."""
    rollout, shared = config.explorer.rollout_model, config.cluster.colocate
    if rollout.gpu_memory_utilization is None:
        rollout.gpu_memory_utilization = SHARED if shared else ALONE_SHARE
    # nothing decodes meanwhile: memory for a second copy of the model would be for nothing
    if shared:
        config.synchronizer.receive = "direct"


def fewest_ranks(megatron: MegatronConfig) -> int:
    """That these sizes need: layers of experts are cut in another way
    than the others, over the same ranks.
    """
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    experts = (megatron.expert_tensor_parallel_size or tp) * megatron.expert_model_parallel_size
    return lcm(tp * megatron.context_parallel_size, experts) * pp


SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def take_layout(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """The first of trainer.layouts that the ranks which were started make; without a launcher that
    has started any, the first. All get the sizes that they leave out. Raises ConfigError, with all
    that is wrong.
    """
    trainer, problems = config.trainer, []
    for number, layout in enumerate(trainer.layouts):
        for key in SIZES:
            setattr(layout, key, getattr(layout, key) or getattr(trainer.megatron, key))
        fewest = fewest_ranks(layout.of(trainer.megatron))
        if layout.num_ranks % fewest:
            problems.append(
                f"trainer.layouts[{number}].num_ranks={layout.num_ranks}: its sizes need a "
                f"multiple of {fewest}; set that, or other sizes"
            )
    counts = [one.num_ranks for one in trainer.layouts]
    if trainer.layouts and trainer.num_ranks not in (None, *counts):
        problems.append(
            f"trainer.num_ranks={trainer.num_ranks} is what trainer.layouts say: leave it out"
        )
    world = cards.ranks_of(environment) if cards.launched(environment) else None
    fitting = [one for one in trainer.layouts if world in (None, one.num_ranks)]
    if trainer.layouts and not fitting:
        known = ", ".join(map(str, counts))
        problems.append(
            f"trainer.layouts have {known} ranks, and {world} were started on "
            f"{cards.nodes_of(environment)} node(s): start as many as one of them has, or add one"
        )
    if problems:
        raise ConfigError(*problems)
    if fitting:
        trainer.num_ranks = fitting[0].num_ranks
        trainer.megatron = fitting[0].of(trainer.megatron)


def ray_of(environment: Mapping[str, str]) -> str:
    """The cluster that this process was started in:

    Ray names it to the jobs that are submitted to it.
    """
    if address := environment.get("RAY_ADDRESS"):
        return address
    raise ConfigError(
        "cluster.ray_address=auto, but RAY_ADDRESS is not set here: give the address as host:port"
    )


def _derive_address(config: Config) -> None:
    if config.cluster.ray_address == "auto":
        config.cluster.ray_address = ray_of(os.environ)


def _derive_template(config: Config) -> None:
    """chat_template_path wins over custom_chat_template (D4)."""
    if config.model.chat_template_path:
        path = Path(config.model.chat_template_path)
        if said := unreadable(path):
            raise ConfigError(f"model.chat_template_path: {said}")
        if not path.is_file():
            raise ConfigError(f"model.chat_template_path={path}: no such file")
        config.model.custom_chat_template = path.read_text(encoding="utf-8")


def derived(machine: Machine, asks_ray: bool) -> tuple[Rule, ...]:
    """What is looked up or computed, and can fail."""

    def device(config: Config) -> None:
        config.device = cards.device_of(config, machine, asks_ray)  # type: ignore[assignment]

    def numbers(config: Config) -> None:
        cards.fill_numbers(config, machine, fewest_ranks(config.trainer.megatron))

    def dealt(config: Config) -> None:
        config.cluster.cards = cards.deal(config, machine)

    return (
        Rule("cluster.ray_address", _derive_address, derives=True),
        Rule(
            "trainer.layouts trainer.num_ranks trainer.megatron",
            take_layout,
            derives=True,
            late=True,
        ),
        Rule("device mode", device, reads="cluster.ray_address", derives=True, late=True),
        Rule(
            "trainer.num_ranks trainer.megatron mode device cluster.gpu_per_node cluster.node_num "
            "cluster.colocate explorer.rollout_model.engine_num "
            "explorer.rollout_model.tensor_parallel_size",
            numbers,
            reads="explorer.auxiliary_models cluster.ray_address",
            derives=True,
            late=True,
        ),
        Rule(
            "trainer.num_ranks device mode cluster.colocate cluster.gpu_per_node cluster.node_num "
            "explorer.rollout_model.engine_num explorer.rollout_model.tensor_parallel_size "
            "explorer.auxiliary_models",
            dealt,
            reads="cluster.ray_address",
            late=True,
        ),
        Rule("model.chat_template_path", _derive_template, derives=True),
    )


def _fill_tinker(config: Config) -> None:
    """`model.tinker.enable` and `trainer.trainer_type=tinker` are one switch, and the engines
    follow it.
    """
    rollout = config.explorer.rollout_model
    if not is_remote(config):
        rollout.engine_type = rollout.engine_type or "vllm"
        return
    config.model.tinker.enable, rollout.engine_type = True, rollout.engine_type or TINKER
    config.device = "cpu"
    config.synchronizer.sync_method = "checkpoint"


def _fill_rows(config: Config) -> None:
    """How many experiences a step takes, and the names of auxiliary buffers."""
    algorithm, buffer = config.algorithm, config.buffer
    if ALGORITHMS[algorithm.algorithm_type].schema == "dpo":
        algorithm.repeat_times = 2  # a pair is two experiences, whatever was asked for (B2)
    if buffer.step_counts is None:
        buffer.step_counts = "groups" if buffer.train_batch_size is None else "experiences"
    if buffer.train_batch_size is None:
        rollouts = buffer.batch_size * int(algorithm.repeat_times or 1)
        mixed = (
            mixing.is_mixed(algorithm) and 0 < mixing.argument(algorithm, "expert_data_ratio") < 1
        )
        buffer.train_batch_size = mixing.batch_for(algorithm, rollouts) if mixed else rollouts
    for name, beside in buffer.trainer_input.auxiliary_buffers.items():
        if beside.name == type(beside).name:
            beside.name = name


def _fill_tasksets(config: Config) -> None:
    """Workflow and reward: the set's own, else the section's
    default for its kind (F7-F9, F17-F19).
    """
    given = config.buffer.explorer_input
    taken = {*names(config)}
    for key, taskset, is_eval in tasksets(config):
        own = (
            "taskset"
            if key == TASKSET_KEY
            else f"{'eval_' if is_eval else ''}taskset_{key.rsplit('.', 1)[1]}"
        )
        taskset.name = taskset.name or own
        if not is_eval:
            taken.add(taskset.name)
        kind = (
            given.default_eval_workflow_type if is_eval else None
        ) or given.default_workflow_type
        taskset.default_workflow_type = taskset.default_workflow_type or kind
        taskset.default_reward_fn_type = (
            taskset.default_reward_fn_type or given.default_reward_fn_type
        )
        if is_eval:
            if taskset.name in taken:  # often that of the set that is trained on
                taskset.name = _free(f"{taskset.name}{EVAL}", taken, "-")
            taken.add(taskset.name)
            taskset.repeat_times = taskset.repeat_times or 1
        elif taskset.repeat_times is None:
            taskset.repeat_times = config.algorithm.repeat_times


def _free(name: str, taken: Collection[str | None], mark: str) -> str:
    """The name, or that with `mark` and a number, if it is taken."""
    tries = (f"{name}{mark}{number}" for number in count(2))
    return next(one for one in chain((name,), tries) if one not in taken)


def _fill_sync(config: Config) -> None:
    """Aliases become rft's names, and the staleness follows from the style unless it is given."""
    sync = config.synchronizer
    sync.sync_method = sync.sync_method or ("checkpoint" if config.mode in APART else "nccl")
    sync.sync_method = METHODS.get(sync.sync_method, sync.sync_method)
    sync.sync_style = style.ALIASES.get(sync.sync_style, sync.sync_style)
    shared = (
        config.buffer.trainer_input.experience_buffer.storage_type == "sql" and config.mode in APART
    )
    # over several processes only the age that is asked for is kept
    if sync.max_staleness is None and not shared:
        sync.max_staleness = style.default_staleness(
            sync.sync_style, sync.sync_interval, sync.sync_offset
        )


def _fill_agents(config: Config) -> None:
    """Auxiliary models, and the API where something asks it."""
    explorer = config.explorer
    called = {one.name for one in explorer.auxiliary_models}
    for one in explorer.auxiliary_models:
        one.gpu_memory_utilization = one.gpu_memory_utilization or ALONE_SHARE
        if one.name is None:
            one.name = _free(Path(str(one.model_path)).name, called, "-")
            called.add(one.name)
    wanted = config.mode == "serve" or bool(explorer.auxiliary_models) or bool(agents(config))
    wanted = wanted or any(drives(given.get("environment")) for _, given in environments(config))
    explorer.rollout_model.enable_openai_api = explorer.rollout_model.enable_openai_api or wanted


def _fill_deterministic(config: Config) -> None:
    """What makes a response depend on nothing but weights, prompt and seed, whatever else runs; the
    one key wins here.

    Floating-point sums change with the batch that a sequence is computed in and with a prefix taken
    from the cache, unless engines are to compute as the trainer does (`trainer_engine=bitwise`);
    and with staleness it would be a matter of time which version samples a group.
    """
    rollout = config.explorer.rollout_model
    if config.trainer_engine != "bitwise":
        rollout.max_num_seqs, rollout.enable_prefix_caching = 1, False
    config.synchronizer.max_staleness = 0
