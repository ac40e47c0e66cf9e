"""Keys of a veRL command line that have a meaning only together: what they are here.

In: veRL's config by dotted keys, with its own defaults (`VerlKeys`). Out: rft's keys and values, by
one of `JOINTS`, or a ConfigError that names veRL's key and the fix. Keys that say something alone
are rows of `rft.config.verl_run` and `rft.config.verl`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import PurePath
from typing import Any

from rft.config.buffer import TASKSET_KEY
from rft.config.foreign import Note
from rft.ground.errors import ConfigError

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_RM, _CORR = "reward_model", "algorithm.rollout_correction"
ENGINE = "explorer.rollout_model"


class VerlKeys:
    """veRL's config, by dotted key: what was given, else veRL's default, else None."""

    def __init__(self, given: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given, self._defaults = given, defaults

    def __call__(self, name: str) -> Any:
        return self.given.get(name, self._defaults.get(name))

    def under(self, section: str) -> dict[str, Any]:
        """What was given of a section, nested as it was."""
        found: dict[str, Any] = {}
        for name, value in self.given.items():
            if name.startswith(f"{section}."):
                *sections, word = name.removeprefix(f"{section}.").split(".")
                node = found
                for one in sections:
                    node = node.setdefault(one, {})
                node[word] = value
        return found


@dataclass(frozen=True)
class Joint:
    """Keys of veRL that have a meaning together: `make` says rft's keys and values, and raises
    ConfigError with what they cannot be here; `notes`: what of a value is taken otherwise.
    """

    reads: str
    sets: str
    make: Callable[[VerlKeys], Iterator[tuple[str, Any]]]
    notes: Callable[[VerlKeys], Iterator[Note]] = lambda ask: iter(())


def whole_path(value: Any) -> Any:
    return expanduser(value) if isinstance(value, str) else value


# --- what only several keys together say ----------------------------------------------------------

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforceplusplus",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
}
REJECTED = {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
}
SERVICES = ("wandb", "tensorboard", "mlflow")
MANAGERS = ("naive", "dapo", "prime", "remote")  # all but dapo differ in where they score
LARGEST_SHARE = 0.6  # of a card's memory, for an engine beside a trainer


def one_of(name: str, value: Any, table: dict[str, str], why: str = "") -> str:
    if value not in table:
        raise ConfigError(
            f"{name}={value} is refused: {why or 'rft has no such one'}; use one of "
            f"{', '.join(table)}"
        )
    return table[value]


def advantages(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    kind = one_of("algorithm.adv_estimator", ask("algorithm.adv_estimator"), ESTIMATORS)
    yield "algorithm.algorithm_type", kind
    args = {"gamma": ask("algorithm.gamma"), "lam": ask("algorithm.lam")}
    if kind == "ppo":
        yield "algorithm.advantage_fn_args", args
    elif kind == "reinforceplusplus":
        yield "algorithm.advantage_fn_args", {"gamma": args["gamma"]}
    elif kind == "grpo" and not ask("algorithm.norm_adv_by_std_in_grpo"):
        yield "algorithm.advantage_fn_args", {"normalize_std": False}


def policy_loss(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    name, low, high = f"{_A}.policy_loss.loss_mode", f"{_A}.clip_ratio_low", f"{_A}.clip_ratio_high"
    kind = "ppo" if ask(f"{_CORR}.bypass_mode") else one_of(name, ask(name), LOSSES)
    ratio = ask(f"{_A}.clip_ratio")
    if ratio != ask(low) and not {low, high} <= set(ask.given):
        raise ConfigError(
            f"{_A}.clip_ratio={ratio} does nothing in veRL, where clip_ratio_low and "
            f"clip_ratio_high (0.2) win over it: set {low} and {high}"
        )
    args: dict[str, Any] = {"clip_range_low": ask(low), "clip_range_high": ask(high)}
    if kind == "ppo":
        args["clip_ratio_c"] = ask(f"{_A}.clip_ratio_c")
    elif kind in ("dppo_tv", "dppo_kl"):
        cap = ask(f"{_A}.clip_ratio_c")
        args = {"delta_low": ask(low), "delta_high": ask(high), "ratio_cap": cap}
    elif kind == "sapo":
        args = {"tau_pos": ask(f"{_A}.tau_pos"), "tau_neg": ask(f"{_A}.tau_neg")}
    yield "algorithm.policy_loss_fn", kind
    yield "algorithm.policy_loss_fn_args", args
    mode = ask(f"{_A}.loss_agg_mode")
    yield "algorithm.loss_agg_mode", "seq-mean-token-mean" if kind in ("gspo", "sapo") else mode


def bypassed_loss(ask: VerlKeys) -> Iterator[Note]:
    name = f"{_A}.policy_loss.loss_mode"
    if ask(f"{_CORR}.bypass_mode") and ask(name) not in (None, "vanilla", "bypass_mode"):
        why = "in veRL bypass_mode has a loss of its own, PPO's, whatever loss_mode says"
        yield Note(name, ask(name), "algorithm.policy_loss_fn=ppo", why)


def kl_in_loss(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    if not ask(f"{_A}.use_kl_loss"):
        yield "algorithm.kl_loss_fn", "none"
        return
    name = f"{_A}.kl_loss_type"
    yield "algorithm.kl_loss_fn", one_of(name, ask(name), KL)
    yield "algorithm.kl_loss_fn_args", {"kl_coef": ask(f"{_A}.kl_loss_coef")}


def kl_in_reward(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    if not ask("algorithm.use_kl_in_reward"):
        yield "algorithm.kl_penalty_fn", "none"
        return
    name, control = "algorithm.kl_penalty", "algorithm.kl_ctrl"
    args = {"kl_coef": ask(f"{control}.kl_coef")}
    if ask(f"{control}.type") == "adaptive":
        words = ("target_kl", "horizon")
        args |= {"adaptive": True, **{word: ask(f"{control}.{word}") for word in words}}
    yield "algorithm.kl_penalty_fn", one_of(name, ask(name), KL)
    yield "algorithm.kl_penalty_fn_args", args


def entropy(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    weight = ask(f"{_A}.entropy_coeff")
    yield "algorithm.entropy_loss_fn", "default" if weight else "none"
    if weight:
        yield "algorithm.entropy_loss_fn_args", {"entropy_coef": weight}


def correction(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """Of a range `lower_upper` of `rollout_is_threshold` weights outside are 0, which is a mask
    with the same range. Ranges of masks named k1 are of engine / policy, all others, and rft's, of
    policy / engine.
    """
    weighed, kind = ask(f"{_CORR}.rollout_is"), ask(f"{_CORR}.rollout_rs")
    yield "algorithm.proximal_logprobs", not ask(f"{_CORR}.bypass_mode")
    low, high = span(f"{_CORR}.rollout_is_threshold", ask(f"{_CORR}.rollout_is_threshold"))
    if ask(f"{_CORR}.bypass_mode"):
        if kind:
            raise ConfigError(
                f"{_CORR}.rollout_rs={kind} with {_CORR}.bypass_mode=True is refused: what is left "
                "out is judged once, before a step: set bypass_mode=False"
            )
        weighed = low = None
    yield f"{_CORR}.rollout_is", weighed or "none"
    if high is not None:
        yield f"{_CORR}.rollout_is_threshold", high
    if weighed and low is not None:
        if kind:
            raise ConfigError(
                f"{_CORR}.rollout_is_threshold={ask(f'{_CORR}.rollout_is_threshold')} and "
                f"{_CORR}.rollout_rs={kind} both leave tokens out: set only one range"
            )
        yield from masked(weighed, low, high)
    elif kind:
        bounds = f"{_CORR}.rollout_rs_threshold"
        low, high = span(bounds, ask(bounds))
        if low is None:
            _, low = span(f"{bounds}_lower", ask(f"{bounds}_lower"))
        if str(kind).endswith("_k1") and low is not None and high is not None:
            low, high = 1 / high, 1 / low
        yield from masked(one_of(f"{_CORR}.rollout_rs", kind, REJECTED), low, high)


def masked(unit: str, low: Any, high: Any) -> Iterator[tuple[str, Any]]:
    for word, value in (("", unit), ("_threshold", high), ("_threshold_lower", low)):
        if value is not None:
            yield f"{_CORR}.rollout_rs{word}", value


def span(name: str, value: Any) -> tuple[float | None, float | None]:
    """(lower, upper) of a number, or of a text `lower_upper`."""
    if value is None:
        return None, None
    try:
        low, _, high = str(value).rpartition("_")
        found = (float(low) if low else None, float(high))
    except ValueError as error:
        raise ConfigError(f"{name}={value}: give a number, or lower_upper, like 0.5_2.0") from error
    if any(one is not None and one <= 0 for one in found):
        raise ConfigError(f"{name}={value}: give numbers greater than 0")
    return found


def unweighed(ask: VerlKeys) -> Iterator[Note]:
    weighed = ask(f"{_CORR}.rollout_is")
    if weighed and ask(f"{_CORR}.bypass_mode"):
        why = "in bypass_mode the loss's own ratio is to the engine, and veRL weighs nothing either"
        yield Note(f"{_CORR}.rollout_is", weighed, "none", why)


def lowest_rate(role: str, to: str) -> Callable[[VerlKeys], Iterator[tuple[str, Any]]]:
    """Megatron's floor is a rate; rft's a share of the rate."""

    def floor(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
        least, rate = ask(f"{role}.optim.min_lr"), ask(f"{role}.optim.lr")
        if least and float(rate):  # a rate of 0 is refused by its own key
            yield f"{to}.min_lr_ratio", float(least) / float(rate)

    return floor


def batches(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """veRL's mini-batches are of prompts; rft's of experiences."""
    tasks, each, mini = (
        ask("data.train_batch_size"),
        ask(f"{_R}.n"),
        ask(f"{_A}.ppo_mini_batch_size"),
    )
    if not ask("algorithm.filter_groups.enable"):  # what veRL's loader draws is the batch
        tasks = ask("data.gen_batch_size") or tasks
    yield "buffer.batch_size", tasks
    yield "algorithm.repeat_times", each
    own = ask("critic.ppo_mini_batch_size")
    if own not in (None, mini):
        raise ConfigError(
            f"critic.ppo_mini_batch_size={own} is not that of the actor ({mini}): critic and "
            "policy go through the same mini-batches; set both alike"
        )
    if isinstance(mini, int) and isinstance(tasks, int) and mini > tasks:
        raise ConfigError(
            f"{_A}.ppo_mini_batch_size={mini} is more than data.train_batch_size={tasks}: lower it"
        )
    if mini != tasks:
        yield "trainer.ppo_mini_batch_size", mini * each


def sampled_again(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    if not ask("algorithm.filter_groups.enable"):
        return
    metric = ask("algorithm.filter_groups.metric")
    args = {"metric_key": metric or "acc"}
    operators = [{"name": "dapo_dynamic_sampling", "args": args}]
    yield "data_processor.experience_pipeline.operators", operators


def machines(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """On one machine ranks and engines take turns on its cards, as in veRL; over several each has
    its own.
    """
    cards, nodes = ask("trainer.n_gpus_per_node"), ask("trainer.nnodes")
    size, share = ask(f"{_R}.tensor_model_parallel_size"), ask(f"{_R}.gpu_memory_utilization")
    for name, value in ((f"{_R}.tensor_model_parallel_size", size), ("trainer.nnodes", nodes)):
        if value < 1:
            raise ConfigError(f"{name}={value}: give 1 or more")
    yield "cluster.gpu_per_node", cards
    yield "cluster.node_num", nodes
    yield f"{ENGINE}.tensor_parallel_size", size
    if nodes != 1:
        yield f"{ENGINE}.engine_num", max(1, nodes * cards // 2 // size)
        yield f"{ENGINE}.gpu_memory_utilization", share
        return
    if cards % size:
        raise ConfigError(
            f"{_R}.tensor_model_parallel_size={size} does not divide "
            f"trainer.n_gpus_per_node={cards}: engines of that size share the cards; change one"
        )
    yield "cluster.colocate", True
    yield "trainer.num_ranks", cards
    yield f"{ENGINE}.engine_num", cards // size
    yield f"{ENGINE}.gpu_memory_utilization", min(share, LARGEST_SHARE)


def lowered(ask: VerlKeys) -> Iterator[Note]:
    share = ask(f"{_R}.gpu_memory_utilization")
    if ask("trainer.nnodes") == 1 and share > LARGEST_SHARE:
        here = f"{ENGINE}.gpu_memory_utilization={LARGEST_SHARE}"
        why = "the trainer keeps its part of a card that they share, also while engines answer"
        yield Note(f"{_R}.gpu_memory_utilization", share, here, why)


def logger(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    said = ask("trainer.logger")
    every = [said] if isinstance(said, str) else said
    named = [one for one in every if one not in ("console", "file")]
    if len(named) > 1 or not set(named) <= set(SERVICES):
        raise ConfigError(
            f"trainer.logger={said} is refused: the console and metrics.jsonl are always written, "
            f"and one service beside them: give one of {', '.join(SERVICES)}"
        )
    yield "monitor.monitor_type", named[0] if named else "none"


def place(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """A run lies in <checkpoint_root_dir>/<project>/<name>, which is veRL's own default."""
    project, name = ask("trainer.project_name"), ask("trainer.experiment_name")
    yield "project", project
    yield "name", name
    root = ask("trainer.default_local_dir")
    if root is not None:
        path = PurePath(expanduser(root))
        is_theirs = path.parts[-2:] == (project, name)
        yield "checkpoint_root_dir", str(path.parent.parent if is_theirs else path)
    else:
        yield "checkpoint_root_dir", "checkpoints"


def going_on(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    mode, path = ask("trainer.resume_mode"), ask("trainer.resume_from_path")
    modes = {"auto": "", "disable": "", "resume_path": ""}
    one_of("trainer.resume_mode", mode, modes)
    yield "continue_from_checkpoint", mode != "disable"
    if mode == "resume_path":
        if not path:
            raise ConfigError("trainer.resume_mode=resume_path: set trainer.resume_from_path")
        yield "trainer.resume_from_path", path


def saving(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """Without a number of steps veRL saves never; here it would be by time."""
    steps = ask("trainer.save_freq")
    yield "trainer.save_interval", max(0, steps) if isinstance(steps, int) else steps
    if isinstance(steps, int) and steps <= 0:
        yield "trainer.save_minutes", 0.0


def adapter(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    rank = ask(f"{_M}.lora_rank") or ask(f"{_M}.lora.rank")
    if not rank:
        return
    section = f"{_M}.lora_" if ask(f"{_M}.lora_rank") else f"{_M}.lora."
    modules = ask(f"{_M}.target_modules")
    modules = [modules] if isinstance(modules, str) else modules
    one = {"lora_rank": rank, "lora_alpha": ask(f"{section}alpha"), "target_modules": modules}
    yield "model.lora_configs", [one]


def parallel_sequences(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    section = f"{_A}.megatron"
    if ask(f"{_A}.strategy") != "megatron":
        return
    size = ask(f"{section}.tensor_model_parallel_size") or 1
    wanted = ask(f"{section}.sequence_parallel")
    yield "trainer.megatron.sequence_parallel", size > 1 and wanted is not False


def prompts(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    side, are_filtered = ask("data.truncation"), ask("data.filter_overlong_prompts")
    if side not in ("error", "left") and not are_filtered:
        raise ConfigError(
            f"data.truncation={side} is refused: a prompt that is too long keeps its end, or is "
            "left out; set left, or data.filter_overlong_prompts=True"
        )
    yield "model.enable_prompt_truncation", side == "left" and not are_filtered
    for kind in ("prompt", "response"):
        length, own = ask(f"data.max_{kind}_length"), ask(f"{_R}.{kind}_length")
        if own not in (None, length):
            raise ConfigError(
                f"{_R}.{kind}_length={own} is not data.max_{kind}_length={length}: set only that"
            )
        yield f"model.max_{kind}_tokens", length


def tasks(ask: VerlKeys) -> Iterator[tuple[str, Any]]:
    """Training rows and those of the evaluation, with their rewards and how they are sampled."""
    common = {
        "format": {"prompt_type": "messages", "messages_key": ask("data.prompt_key")},
        "default_reward_fn_type": "verl",
        "reward_fn_args": reward_args(ask),
    }
    sampling = {word: ask(f"{_R}.{word}") for word in ("temperature", "top_p", "top_k")}
    training: dict[str, Any] = {"shuffle": ask("data.shuffle"), "rollout_args": sampling}
    if ask("data.seed") is not None:
        training["task_selector"] = {"seed": ask("data.seed")}
    sets = [{"path": path, **common, **training} for path in files(ask("data.train_files"))]
    section = "buffer.explorer_input"
    yield (TASKSET_KEY, sets[0]) if len(sets) == 1 else (f"{section}.tasksets", sets)
    own = {word: ask(f"{_R}.val_kwargs.{word}") for word in ("temperature", "top_p", "top_k")}
    greedy = {"temperature": 0.0}
    beside = {
        "rollout_args": own if ask(f"{_R}.val_kwargs.do_sample") else greedy,
        "repeat_times": ask(f"{_R}.val_kwargs.n"),
    }
    paths = files(ask("data.val_files"))
    names = [PurePath(path).stem for path in paths]
    if len(set(names)) < len(names):
        names = ["_".join(PurePath(path).with_suffix("").parts[-2:]) for path in paths]
    held = [
        {"name": name, "path": path, **common, **beside}
        for name, path in zip(names, paths, strict=True)
    ]
    yield f"{section}.eval_tasksets", held


def files(given: Any) -> list[str]:
    return [expanduser(str(one)) for one in (given if isinstance(given, list) else [given])]


def reward_args(ask: VerlKeys) -> dict[str, Any]:
    """Of the reward `verl`: a function of the user's, or veRL's own by the row's data source."""
    if ask(f"{_RM}.enable"):
        raise ConfigError(
            f"{_RM}.enable=True is refused: no model with a head of its own scores here; give "
            "custom_reward_function.path, which may ask a service, or score by rule"
        )
    name = f"{_RM}.reward_manager"
    one_of(name, ask(name), dict.fromkeys(MANAGERS, ""))
    args: dict[str, Any] = {}
    if path := ask("custom_reward_function.path"):
        args |= {"path": whole_path(path), "function": ask("custom_reward_function.name")}
        if more := ask.under("custom_reward_function.reward_kwargs"):
            args["kwargs"] = more
    if ask("data.reward_fn_key") != "data_source":
        args["source_key"] = ask("data.reward_fn_key")
    long = f"{_RM}.reward_kwargs.overlong_buffer_cfg"
    old = f"{_RM}.overlong_buffer"
    for section in (long, old):
        if ask(f"{section}.enable"):
            args |= {
                "overlong": ask(f"{section}.len"),
                "penalty_factor": ask(f"{section}.penalty_factor"),
            }
            longest = ask(f"{_RM}.reward_kwargs.max_resp_len")
            args["max_response_tokens"] = longest or ask("data.max_response_length")
    return args


_SAMPLING = " ".join(f"{_R}.{word}" for word in ("temperature", "top_p", "top_k"))
_HELD = " ".join(
    f"{_R}.val_kwargs.{word}" for word in ("temperature", "top_p", "top_k", "n", "do_sample")
)
_LONG = " ".join(
    f"{_RM}.{section}.{word}"
    for section in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer")
    for word in ("enable", "len", "penalty_factor")
)
JOINTS = (
    Joint(
        "algorithm.adv_estimator algorithm.gamma algorithm.lam algorithm.norm_adv_by_std_in_grpo",
        "algorithm.algorithm_type algorithm.advantage_fn_args",
        advantages,
    ),
    Joint(
        f"{_A}.policy_loss.loss_mode {_A}.clip_ratio {_A}.clip_ratio_low {_A}.clip_ratio_high "
        f"{_A}.clip_ratio_c {_A}.tau_pos {_A}.tau_neg {_A}.loss_agg_mode",
        "algorithm.policy_loss_fn algorithm.policy_loss_fn_args algorithm.loss_agg_mode",
        policy_loss,
        bypassed_loss,
    ),
    Joint(
        f"{_A}.use_kl_loss {_A}.kl_loss_coef {_A}.kl_loss_type",
        "algorithm.kl_loss_fn algorithm.kl_loss_fn_args",
        kl_in_loss,
    ),
    Joint(
        "algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.type "
        "algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        "algorithm.kl_penalty_fn algorithm.kl_penalty_fn_args",
        kl_in_reward,
    ),
    Joint(
        f"{_A}.entropy_coeff",
        "algorithm.entropy_loss_fn algorithm.entropy_loss_fn_args",
        entropy,
    ),
    Joint(
        f"{_CORR}.bypass_mode {_CORR}.rollout_is {_CORR}.rollout_is_threshold {_CORR}.rollout_rs "
        f"{_CORR}.rollout_rs_threshold {_CORR}.rollout_rs_threshold_lower",
        "algorithm.proximal_logprobs algorithm.rollout_correction",
        correction,
        unweighed,
    ),
    *(
        Joint(f"{role}.optim.min_lr {role}.optim.lr", f"{to}.min_lr_ratio", lowest_rate(role, to))
        for role, to in ((_A, "algorithm.optimizer"), ("critic", "critic.optim"))
    ),
    Joint(
        f"data.train_batch_size data.gen_batch_size {_R}.n {_A}.ppo_mini_batch_size "
        "critic.ppo_mini_batch_size algorithm.filter_groups.enable",
        "buffer.batch_size algorithm.repeat_times trainer.ppo_mini_batch_size",
        batches,
    ),
    Joint(
        "algorithm.filter_groups.enable algorithm.filter_groups.metric",
        "data_processor.experience_pipeline.operators",
        sampled_again,
    ),
    Joint(
        f"trainer.n_gpus_per_node trainer.nnodes {_R}.tensor_model_parallel_size "
        f"{_R}.gpu_memory_utilization",
        f"cluster.gpu_per_node cluster.node_num cluster.colocate trainer.num_ranks "
        f"{ENGINE}.engine_num {ENGINE}.tensor_parallel_size {ENGINE}.gpu_memory_utilization",
        machines,
        lowered,
    ),
    Joint("trainer.logger", "monitor.monitor_type", logger),
    Joint(
        "trainer.project_name trainer.experiment_name trainer.default_local_dir",
        "project name checkpoint_root_dir",
        place,
    ),
    Joint(
        "trainer.resume_mode trainer.resume_from_path",
        "continue_from_checkpoint trainer.resume_from_path",
        going_on,
    ),
    Joint("trainer.save_freq", "trainer.save_interval trainer.save_minutes", saving),
    Joint(
        f"{_M}.lora_rank {_M}.lora_alpha {_M}.target_modules {_M}.lora.rank {_M}.lora.alpha",
        "model.lora_configs",
        adapter,
    ),
    Joint(
        f"{_A}.megatron.sequence_parallel {_A}.megatron.tensor_model_parallel_size {_A}.strategy",
        "trainer.megatron.sequence_parallel",
        parallel_sequences,
    ),
    Joint(
        "data.truncation data.filter_overlong_prompts data.max_prompt_length "
        f"data.max_response_length {_R}.prompt_length {_R}.response_length",
        "model.enable_prompt_truncation model.max_prompt_tokens model.max_response_tokens",
        prompts,
    ),
    Joint(
        "data.train_files data.val_files data.prompt_key data.reward_fn_key data.shuffle data.seed "
        f"custom_reward_function.path custom_reward_function.name {_RM}.enable "
        f"{_RM}.reward_manager {_RM}.reward_kwargs.max_resp_len {_LONG} {_SAMPLING} {_HELD}",
        f"{TASKSET_KEY} buffer.explorer_input.tasksets buffer.explorer_input.eval_tasksets",
        tasks,
    ),
)
