"""Rules of algorithm, trainer, checkpoints and optimizers, and of a service that trains instead.

In: a config as it is composed (`TINKER_GIVEN`), then a filled one. Nothing is looked at but the
config itself.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import fsspec

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.advantages import ADVANTAGES
from rft.algorithm.strategies import SAMPLE_STRATEGIES
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES
from rft.config import TRAINING, Config, OptimizerConfig, arguments, get, is_remote, nearest
from rft.megatron import schedule
from rft.preflight.rules import SETS, Rule, among, tasksets
from rft.trainer.feed import is_supervised

TYPE, RECIPE = "algorithm.algorithm_type", "algorithm.advantage_fn"
STRATEGY, STRATEGY_ARGS = "algorithm.sample_strategy", "algorithm.sample_strategy_args"
BUFFER = "buffer.trainer_input.experience_buffer"
TINKER = "tinker"
THERE = "the model is at the service, which cuts and keeps it as it likes"
SAMPLER = "responses are sampled by the service"
BY_PATH = "the service hands weights on by their path"
IDLE = {  # keys of a model on one's own machines, and why they mean nothing to a service
    "trainer.megatron": THERE,
    "trainer.dtype": THERE,
    "trainer.trainer_config": THERE,
    "trainer.checkpoint": THERE,
    "trainer.memory_interval": THERE,
    "trainer.layouts": THERE,
    "trainer.save_strategy": THERE,
    "trainer.profiler": THERE,
    "trainer.peak_tflops": THERE,
    "trainer.recompute_granularity": THERE,
    "trainer.recompute_method": THERE,
    "trainer.recompute_num_layers": THERE,
    "trainer.recompute_modules": THERE,
    "trainer.use_remove_padding": THERE,
    "trainer.share_prefixes": THERE,
    "trainer.router_replay": THERE,
    "trainer.moe_router_bias_update_rate": THERE,
    "cluster.colocate": THERE,
    "model.lora_configs": "the adapter is described by model.tinker.rank and model.tinker.train_*",
    "model.ref_model_path": "a KL term compares with model.tinker.base_model",
    "model.min_response_tokens": "the service knows no shortest response",
    "deterministic": "nobody promises that the service computes the same twice",
    "trainer_engine": "nobody promises that its samplers compute as its trainers do",
    "synchronizer.bucket_bytes": BY_PATH,
    "synchronizer.receive": BY_PATH,
    "synchronizer.sync": BY_PATH,
    "synchronizer.full_interval": BY_PATH,
    "synchronizer.kv": BY_PATH,
    "synchronizer.lora_sync": BY_PATH,
    "explorer.rollout_model.tensor_parallel_size": SAMPLER,
    "explorer.rollout_model.dtype": SAMPLER,
    "explorer.rollout_model.enable_return_routed_experts": SAMPLER,
    "explorer.rollout_model.max_num_seqs": SAMPLER,
    "explorer.rollout_model.enable_prefix_caching": SAMPLER,
    "explorer.rollout_model.kv_cache_gb": SAMPLER,
    "explorer.rollout_model.gpu_memory_utilization": SAMPLER,
    "explorer.rollout_model.enforce_eager": SAMPLER,
    "explorer.rollout_model.engine_args": SAMPLER,
}
ONE_VALUE = (  # key, what it may be with a service, why, and the fix
    (
        "explorer.rollout_model.engine_type",
        (None, TINKER),
        "the weights never leave the service",
        "set it to tinker, or leave it out",
    ),
    (
        "synchronizer.sync_method",
        (None, "checkpoint", "offline"),
        BY_PATH,
        "set it to checkpoint, or leave it out",
    ),
    ("device", ("auto", "cpu"), "nothing is computed here", "leave it out"),
    ("trainer.num_ranks", (None, 1), THERE, "leave it out"),
    (
        "trainer.save_hf_checkpoint",
        ("never",),
        "the weights stay at the service, and `tinker checkpoint download` fetches them",
        "set it to never",
    ),
    (
        "algorithm.optimizer.optimizer_type",
        ("adam",),
        "the service's optimizer is AdamW",
        "set it to adam",
    ),
)


def _few(c: Config) -> Iterator[str]:
    advantage = (ADVANTAGES | TOKEN_ADVANTAGES).get(str(c.algorithm.advantage_fn))
    if c.algorithm.advantage_fn_args.get("reward_threshold") is not None:
        return  # each response for itself
    if advantage is not None and int(c.algorithm.repeat_times or 0) < advantage.fewest:
        yield (
            f"algorithm.repeat_times={c.algorithm.repeat_times} with "
            f"advantage_fn={c.algorithm.advantage_fn}: a group of one has no "
            f"baseline to compare with; set it to {advantage.fewest} or more"
        )


def _strategy_args(c: Config) -> Iterator[str]:
    strategy, given = str(c.algorithm.sample_strategy), c.algorithm.sample_strategy_args
    known = arguments.options(SAMPLE_STRATEGIES[strategy])
    for name, value in given.items():
        if name not in known:
            yield (
                f"{STRATEGY_ARGS}.{name} is unknown to sample_strategy={strategy}; "
                + (f"known: {', '.join(known)}" if known else "it takes none")
            )
        elif strategy != "staleness_control":
            yield from arguments.wrong_value(f"{STRATEGY_ARGS}.{name}", value, known[name])
    limit = given.get("max_staleness")
    if strategy == "staleness_control" and (
        not isinstance(limit, int) or isinstance(limit, bool) or limit < 0
    ):
        yield (
            f"{STRATEGY_ARGS}.max_staleness={limit}: staleness_control needs a "
            "whole number of versions, 0 or more"
        )
    elif missing := arguments.missing(given, known):
        yield f"{STRATEGY_ARGS}.{missing[0]} is not set: sample_strategy={strategy} needs it"


def _recipe(c: Config) -> None:
    """What does not follow from a wrong type or strategy is told beside it."""
    algorithm = c.algorithm
    is_known = algorithm.algorithm_type in ALGORITHMS
    is_known = is_known and algorithm.sample_strategy in SAMPLE_STRATEGIES
    if is_known and not any(_strategy_args(c)):
        recipe.check(algorithm)
    else:
        recipe.check_given(algorithm)


ALGORITHM_GIVEN = (among(TYPE, ALGORITHMS),)  # asked before it fills the rest in
ALGORITHM = (
    Rule(f"algorithm.repeat_times {TYPE}", _few, reads=f"{RECIPE} algorithm.advantage_fn_args"),
    Rule(
        STRATEGY,
        lambda c: c.algorithm.sample_strategy not in (None, *SAMPLE_STRATEGIES),
        lambda c: nearest(str(c.algorithm.sample_strategy), SAMPLE_STRATEGIES, STRATEGY),
    ),
    Rule(
        f"{STRATEGY_ARGS} {STRATEGY}",
        _strategy_args,
        applies=lambda c: c.algorithm.sample_strategy is not None,
    ),
    Rule(
        f"{STRATEGY} {TYPE}",
        lambda c: (
            is_supervised(c.algorithm) and c.algorithm.sample_strategy not in ("default", "warmup")
        ),
        "algorithm.sample_strategy={algorithm.sample_strategy} with "
        "algorithm_type={algorithm.algorithm_type}: rows have no age; leave it out",
    ),
    Rule(RECIPE, _recipe, reads="algorithm"),
    Rule(
        f"trainer.critic_warmup {RECIPE} {TYPE}",
        lambda c: c.trainer.critic_warmup and not recipe.needs_critic(c.algorithm),
        "trainer.critic_warmup={trainer.critic_warmup}: "
        "algorithm.advantage_fn={algorithm.advantage_fn} has no critic; set it to 0, or use "
        "algorithm_type=ppo",
    ),
    Rule(
        f"{TYPE} mode {BUFFER}.storage_type",
        lambda c: (
            is_supervised(c.algorithm)
            and (
                c.mode != "train" or c.buffer.trainer_input.experience_buffer.storage_type != "file"
            )
        ),
        "algorithm.algorithm_type={algorithm.algorithm_type} learns from rows: set mode=train and "
        "buffer.trainer_input.experience_buffer.storage_type=file with a path",
    ),
)
PROFILER = (
    Rule(
        "trainer.profile_steps",
        lambda c: (
            len(c.trainer.profile_steps) != 2
            or not 1 <= c.trainer.profile_steps[0] <= c.trainer.profile_steps[1]
        ),
        "trainer.profile_steps={trainer.profile_steps}: give the first step, from 1, and the last",
    ),
    Rule(
        "trainer.profile_ranks trainer.num_ranks",
        lambda c: any(
            not 0 <= rank < int(c.trainer.num_ranks or 1) for rank in c.trainer.profile_ranks
        ),
        lambda c: (
            f"trainer.profile_ranks={c.trainer.profile_ranks}: there are ranks 0 to "
            f"{int(c.trainer.num_ranks or 1) - 1}"
        ),
    ),
    Rule(
        "trainer.profiler device",
        lambda c: c.trainer.profiler == "nsys" and c.device == "cpu",
        "trainer.profiler=nsys with device=cpu: Nsight Systems looks at CUDA, use torch",
    ),
    Rule(
        f"trainer.profile_steps trainer.profiler trainer.total_steps {TYPE}",
        lambda c: (
            c.trainer.profiler
            and not is_supervised(c.algorithm)
            and c.trainer.total_steps is not None
            and c.trainer.profile_steps[0] > c.trainer.total_steps
        ),
        "trainer.profile_steps={trainer.profile_steps}: the run has {trainer.total_steps} steps; "
        "give earlier ones",
    ),
)


PRECISION = (
    Rule(
        "trainer.dtype trainer.megatron.context_parallel_size device model.lora_configs",
        lambda c: (
            c.device == "cuda"
            and c.trainer.dtype == "fp32"
            and c.trainer.megatron.context_parallel_size > 1
            and not c.model.lora_configs
        ),
        "trainer.dtype=fp32 with trainer.megatron.context_parallel_size="
        "{trainer.megatron.context_parallel_size} on a GPU: Transformer Engine has no attention in "
        "fp32 over several ranks; set trainer.dtype=bf16, or context_parallel_size=1",
    ),
)


def _storage(c: Config) -> Iterator[str]:
    storage = c.trainer.checkpoint.storage
    if storage is None:
        return
    scheme, separator, _ = storage.partition("://")
    known = fsspec.available_protocols()
    if not separator:
        yield (
            f"trainer.checkpoint.storage={storage} is no URL like "
            "s3://bucket/prefix; for a directory set checkpoint_root_dir"
        )
    elif scheme not in known:
        yield nearest(scheme, known, "trainer.checkpoint.storage")


def _best_metric(c: Config) -> Iterator[str]:
    checkpoint, key = c.trainer.checkpoint, "trainer.checkpoint.best_metric"
    metric = checkpoint.best_metric
    if metric is None or c.mode not in TRAINING:
        return
    evaluated = [str(one.name) for _, one, is_eval in tasksets(c) if is_eval]
    kind, _, rest = metric.partition("/")
    if not checkpoint.keep_best:
        yield f"{key}={metric} with keep_best=0 keeps nothing: set trainer.checkpoint.keep_best"
    elif kind != "eval" or rest.rpartition("/")[0] not in evaluated:
        sets = ", ".join(evaluated) or "buffer.explorer_input.eval_tasksets, which is empty"
        yield f"{key}={metric} is of no evaluation set: give eval/<set>/<metric> with one of {sets}"


def _versions(c: Config) -> Iterator[str]:
    key = f"trainer.checkpoint.versions={c.trainer.checkpoint.versions}"
    if c.trainer.checkpoint.versions == "none" or c.mode not in TRAINING:
        return
    if is_supervised(c.algorithm):
        yield f"{key}: no version is published, nobody samples from one; leave it out"
    elif c.trainer.checkpoint.versions == "needed" and (
        c.mode != "both" or c.buffer.trainer_input.experience_buffer.storage_type != "queue"
    ):
        yield (
            f"{key} needs mode=both and {BUFFER}.storage_type=queue, whose journal says which "
            "versions its data is of; set trainer.checkpoint.versions=all"
        )


CHECKPOINT = (
    Rule(
        f"trainer.checkpoint.versions mode {TYPE} {BUFFER}.storage_type",
        _versions,
    ),
    Rule(
        "trainer.checkpoint.keep_best",
        lambda c: c.trainer.checkpoint.keep_best and not c.trainer.checkpoint.best_metric,
        "trainer.checkpoint.keep_best={trainer.checkpoint.keep_best} needs "
        "trainer.checkpoint.best_metric, like eval/<taskset>/accuracy",
        reads="trainer.checkpoint.best_metric",
    ),
    Rule(
        "trainer.memory_interval trainer.checkpoint.when_busy",
        lambda c: c.trainer.memory_interval and c.trainer.checkpoint.when_busy == "newest_wins",
        "trainer.memory_interval={trainer.memory_interval} with "
        "trainer.checkpoint.when_busy=newest_wins: what is given up for a newer one would be gone "
        "from memory too; set when_busy=wait or skip",
    ),
    Rule(
        "trainer.checkpoint.replicas",
        lambda c: c.trainer.checkpoint.replicas > 1,
        "trainer.checkpoint.replicas={trainer.checkpoint.replicas}: the next node holds one; set 1 "
        "or 0",
    ),
    Rule(
        "trainer.checkpoint.replicas trainer.memory_interval",
        lambda c: c.trainer.checkpoint.replicas and not c.trainer.memory_interval,
        "trainer.checkpoint.replicas={trainer.checkpoint.replicas} are of states in memory, and "
        "trainer.memory_interval=0 keeps none: set it to 1, or replicas to 0",
    ),
    Rule(
        "trainer.spares trainer.max_restarts",
        lambda c: c.trainer.spares and not c.trainer.max_restarts,
        "trainer.spares=true with trainer.max_restarts=0: ranks that die are not started again, so "
        "nobody needs a spare; set max_restarts, or spares=false",
    ),
    Rule(
        "trainer.memory_interval trainer.checkpoint.memory",
        lambda c: c.trainer.memory_interval and (c.trainer.checkpoint.memory or 2) < 2,
        "trainer.memory_interval={trainer.memory_interval} keeps each state whole, beside the next "
        "one: trainer.checkpoint.memory={trainer.checkpoint.memory:g} has no room for two; set "
        "memory=2, or trainer.memory_interval=0 and save_interval",
    ),
    Rule(
        "trainer.checkpoint.memory trainer.checkpoint.host_memory_gb",
        lambda c: c.trainer.checkpoint.memory and c.trainer.checkpoint.host_memory_gb,
        "trainer.checkpoint.memory={trainer.checkpoint.memory:g} and "
        "host_memory_gb={trainer.checkpoint.host_memory_gb:g} say the same in parts and in GB: "
        "leave one of them out",
    ),
    Rule("trainer.checkpoint.storage", _storage),
    Rule(
        "trainer.checkpoint.best_metric trainer.checkpoint.keep_best mode",
        _best_metric,
        reads=SETS,
    ),
    Rule(
        "trainer.checkpoint.lease_s trainer.checkpoint.agent_deadline_s",
        lambda c: c.trainer.checkpoint.lease_s > c.trainer.checkpoint.agent_deadline_s,
        "trainer.checkpoint.lease_s={trainer.checkpoint.lease_s:g} is longer than "
        "agent_deadline_s={trainer.checkpoint.agent_deadline_s:g}: "
        "nobody could take over in time; lower it",
    ),
)


def _is_trained(c: Config) -> bool:
    """Whether this stage trains, for a known number of steps."""
    return c.mode in TRAINING and c.trainer.total_steps is not None


def _optimizer(
    optimizer: OptimizerConfig, total_steps: int | None, warmup: int, key: str
) -> Iterator[str]:
    """`warmup`: of the steps, in which it makes none."""
    adam = OptimizerConfig()
    for name in ("betas", "eps"):
        if optimizer.optimizer_type == "sgd" and getattr(optimizer, name) != getattr(adam, name):
            yield (
                f"{key}.{name}={getattr(optimizer, name)} with optimizer_type=sgd: only Adam has "
                "one, leave it out"
            )
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"{key}.betas={optimizer.betas}: give two numbers from 0 to below 1"
    if total_steps is not None:
        schedule.check(optimizer, total_steps - warmup, key)


def _policy_optimizer(c: Config) -> Iterator[str]:
    if c.mode in TRAINING:
        steps, warmup = c.trainer.total_steps, c.trainer.critic_warmup
        yield from _optimizer(c.algorithm.optimizer, steps, warmup, "algorithm.optimizer")


def _critic_optimizer(c: Config) -> Iterator[str]:
    if c.mode in TRAINING and recipe.needs_critic(c.algorithm):
        yield from _optimizer(c.critic.optim, c.trainer.total_steps, 0, "critic.optim")


STEPS = (  # asked when the number of steps is known
    Rule(
        "trainer.critic_warmup trainer.total_steps mode",
        lambda c: _is_trained(c) and 0 < c.trainer.critic_warmup >= c.trainer.total_steps,
        "trainer.critic_warmup={trainer.critic_warmup}: the run has {trainer.total_steps} steps, "
        "none would train the policy; lower it",
    ),
    Rule(
        "trainer.stop_at_loss trainer.critic_warmup mode",
        lambda c: _is_trained(c) and c.trainer.critic_warmup and c.trainer.stop_at_loss is not None,
        "trainer.stop_at_loss with trainer.critic_warmup={trainer.critic_warmup}: while only the "
        "critic learns, the loss is its own; set one of the two",
        reads="trainer.total_steps",
    ),
    Rule("algorithm.optimizer trainer.total_steps trainer.critic_warmup mode", _policy_optimizer),
    Rule(f"critic.optim trainer.total_steps {RECIPE} {TYPE} mode", _critic_optimizer),
)


def _changed(value: Any, default: Any, key: str) -> Iterator[str]:
    """The keys, of a section all in it, that are not as they would be by themselves."""
    if is_dataclass(value):
        for one in fields(value):
            yield from _changed(
                getattr(value, one.name), getattr(default, one.name), f"{key}.{one.name}"
            )
    elif value != default:
        yield key


def _idle(key: str, why: str) -> Rule:
    def test(c: Config) -> Iterator[str]:
        for name in _changed(get(c, key), get(Config(), key), key) if is_remote(c) else ():
            yield f"{name}={get(c, name)} with trainer.trainer_type=tinker: {why}; leave it out"

    return Rule(f"{key} trainer.trainer_type", test)


def _one_value(key: str, values: tuple[Any, ...], why: str, fix: str) -> Rule:
    return Rule(
        f"{key} trainer.trainer_type",
        lambda c: is_remote(c) and get(c, key) not in values,
        lambda c: f"{key}={get(c, key)} with trainer.trainer_type=tinker: {why}; {fix}",
    )


TINKER_GIVEN = (  # asked before anything is filled in
    *(_idle(key, why) for key, why in IDLE.items()),
    *(_one_value(*one) for one in ONE_VALUE),
    Rule(
        "explorer.rollout_model.engine_type trainer.trainer_type",
        lambda c: not is_remote(c) and c.explorer.rollout_model.engine_type == TINKER,
        "explorer.rollout_model.engine_type=tinker: such an engine samples what its own "
        "service has trained; set trainer.trainer_type=tinker too",
    ),
)


def _tinker(c: Config) -> Iterator[str]:
    given = c.model.tinker
    if not is_remote(c):
        return
    if not given.base_model:
        yield (
            "model.tinker.base_model is not set: give the service's name of the model, like "
            "Qwen/Qwen3-8B; model.model_path is the directory, or hub name, of its tokenizer and "
            "config.json"
        )
    if given.base_url is not None and not given.base_url.startswith(("http://", "https://")):
        yield f"model.tinker.base_url={given.base_url}: give an address like http://127.0.0.1:8000"
    if given.rank <= 0:
        yield f"model.tinker.rank={given.rank}: must be greater than 0"
    if not (given.train_mlp or given.train_attn or given.train_unembed):
        yield (
            "model.tinker.train_mlp, train_attn and train_unembed are all false: nothing would be "
            "trained"
        )


def _tinker_mode(c: Config) -> Iterator[str]:
    storage = c.buffer.trainer_input.experience_buffer.storage_type
    if is_remote(c) and (c.mode not in TRAINING or (c.mode == "train" and storage != "file")):
        what = f"mode={c.mode}" + (
            f" and a buffer of storage_type={storage}" if c.mode == "train" else ""
        )
        yield (
            f"{what} with trainer.trainer_type=tinker: explorers of another run do not find the "
            "service's weights; set mode=both, or mode=train with a file"
        )


def _tinker_terms(c: Config) -> Iterator[str]:
    """The service tells log-probabilities of single tokens, of the policy and of the model that it
    began as.
    """
    if not is_remote(c):
        return
    algorithm, name = c.algorithm, f"advantage_fn={c.algorithm.advantage_fn}"
    coefficient = algorithm.entropy_loss_fn_args.get("entropy_coef", 0.0)
    other = "train with Megatron, or set another one"
    if recipe.needs_critic(algorithm):
        why = f"{name} needs a critic", "set advantage_fn=grpo, or another without one"
    elif recipe.needs_teacher(algorithm):
        why = f"{name} needs a teacher", other
    elif recipe.needs_entropy(algorithm):
        why = f"{name} needs entropies", other
    elif algorithm.entropy_loss_fn != "none" and float(coefficient):
        why = "entropy_loss_fn_args.entropy_coef needs entropies", "leave it out"
    else:
        return
    yield (
        f"algorithm.{why[0]} with trainer.trainer_type=tinker, whose service gives "
        f"log-probabilities alone: {why[1]}"
    )


def _tinker_sampling(c: Config) -> Iterator[str]:
    """What is trained must be sampled from the distribution that the service computes
    log-probabilities of.
    """
    for key, taskset, is_eval in tasksets(c):
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
            value = getattr(taskset.rollout_args, name)
            if not is_eval and value not in (None, neutral):
                yield (
                    f"{key}.rollout_args.{name}={value} with trainer.trainer_type=tinker, whose "
                    "service gives log-probabilities of "
                    f"the plain distribution only: leave it out for {neutral:g}"
                )


TINKER_FILLED = (
    Rule("model.tinker trainer.trainer_type", _tinker),
    Rule(f"mode trainer.trainer_type {BUFFER}.storage_type", _tinker_mode),
    Rule(f"{RECIPE} {TYPE} trainer.trainer_type", _tinker_terms, reads="algorithm"),
    Rule(
        "buffer.explorer_input.taskset.rollout_args trainer.trainer_type",
        lambda c: _tinker_sampling(c) if is_remote(c) else (),
        reads=SETS,
    ),
)
