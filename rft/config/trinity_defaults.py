"""What a key that a Trinity-RFT file leaves out has there, where rft's own default is another.

In: a file's keys, translated (`rft.config.file`). Out: the same with these defaults set, and what
was set. Invariants: what the file gives is never replaced; a default that differs is in one of the
two tables, `DEFAULTS`, which a file gets, or `KEPT`, of which rft's is kept, with the reason; both
are of Trinity-RFT VERSION. A file that says `defaults: rft` gets none of them. `docs/trinity.md` is
made of these tables.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

from omegaconf import MISSING, OmegaConf

from rft.config.buffer import TASKSET_KEY
from rft.config.foreign import UNSET
from rft.config.schema import Config

VERSION = "0.6.0"
TYPE = "algorithm.algorithm_type"
TASKSETS, EVALUATIONS = f"{TASKSET_KEY}s", "buffer.explorer_input.eval_tasksets"
ROWS = "buffer.trainer_input.experience_buffer"
AUXILIARY = "buffer.trainer_input.auxiliary_buffers"
# sections of a stage that replace the file's, key for key, and are not merged over it
ANEW = ("algorithm", "buffer", "data_processor", "explorer", "trainer")
ROLLOUT = "explorer.rollout_model"
RETRIES = 2  # explorer.max_retry_times, there and here

VERL_KEEPS = (
    "max_actor_ckpt_to_keep",
    "max_critic_ckpt_to_keep",
    "remove_previous_ckpt_in_save",
)

VERL_RECOMPUTES = (
    "model.enable_gradient_checkpointing",
    "actor.megatron.override_transformer_config.recompute_granularity",
)

Get = Callable[[str], Any]  # what the file says of a key, or None
Found = tuple[str, Any, str, str]  # key, value there, rft's own default, why the file has it


@dataclass(frozen=True)
class Default:
    """`theirs`: as rft's key takes it, or a function of the file's keys, which may say UNSET;
    `ours`: what rft has instead, in words; `shown`: what `theirs` is in general, of a function;
    `passes`: the argument of sampling that the model's section gives in its place; `section`: of a
    stage, the one with which it is asked for, if not the key's own.
    """

    theirs: Any
    ours: str
    why: str
    shown: str = ""
    passes: str = ""
    section: str = ""

    def value(self, get: Get) -> Any:
        return self.theirs(get) if callable(self.theirs) else self.theirs


def of_type(names: dict[str, Any], unless: str = "") -> Callable[[Get], Any]:
    """A default that only some algorithms have, unless another key is given."""

    def value(get: Get) -> Any:
        kind = str(get(TYPE) or "ppo")
        return UNSET if unless and get(unless) is not None else names.get(kind, UNSET)

    return value


def unless(value: Any, *keys: str) -> Callable[[Get], Any]:
    """A default that gives way to veRL's names of the key, in trainer.trainer_config."""
    names = [f"trainer.trainer_config.{key}" for key in keys]
    return lambda get: UNSET if any(get(name) is not None for name in names) else value


def _parallel(get: Get) -> Any:
    size = get("trainer.megatron.tensor_model_parallel_size")
    return True if isinstance(size, int) and size > 1 else UNSET


def _timeout(get: Get) -> Any:
    return 1800 * _attempts(get("explorer.max_retry_times"))


def _attempts(retries: Any) -> int:
    return (retries if isinstance(retries, int) else RETRIES) + 1


def _wandb(get: Get) -> Any:
    if get("monitor.monitor_type") != "wandb" or get("monitor.monitor_args.mode"):
        return UNSET
    given = (get("monitor.monitor_args.api_key"), get("monitor.monitor_args.base_url"))
    known = any(given) or any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_BASE_URL")))
    return "online" if known else "offline"


def _trainer_dtype(get: Get) -> Any:
    return {"bf16": "bf16", "fp32": "fp32"}.get(str(get(f"{ROLLOUT}.dtype")), UNSET)


def _teacher(get: Get) -> Any:
    """It is no auxiliary model any more."""
    models = get("explorer.auxiliary_models")
    if get(TYPE) not in ("on_policy_distill", "jsd") or get("model.teacher_model_path"):
        return UNSET
    has_path = isinstance(models, list) and models and isinstance(models[0], dict)
    return models.pop(0).get("model_path", UNSET) if has_path else UNSET


def _aggregation(get: Get) -> Any:
    args, kind = "algorithm.policy_loss_fn_args", get("algorithm.policy_loss_fn") or get(TYPE)
    if get(f"{args}.loss_agg_mode") is not None:
        return UNSET
    if kind == "rec" and get(f"{args}.clip_mode") == "gspo-one-side":
        return "seq-mean-token-mean"
    return "token-mean" if get(TYPE) == "gspo" else UNSET


def _of_ring(get: Get) -> Any:
    """Where other arguments are given, its class says what is left out, and not its defaults."""
    args, kind = get("algorithm.policy_loss_fn_args"), get("algorithm.policy_loss_fn") or get(TYPE)
    return 0.4 if kind == "rec" and args else UNSET


def _recomputed(get: Get) -> Any:
    said = (f"{there}{key}" for key in VERL_RECOMPUTES for there in ("actor_rollout_ref.", ""))
    return UNSET if get("model.tinker.enable") else unless("full", *said)(get)


def _half_of_pairs(get: Get) -> Any:
    size = get("buffer.train_batch_size")
    known = get(TYPE) == "dpo" and isinstance(size, int) and not size % 4
    return size // 2 if known else UNSET


def _serve_port(get: Get) -> Any:
    return 8010 if get("mode") == "serve" else UNSET


# of a file, and of each of its stages
DEFAULTS: dict[str, Default] = {
    "project": Default("Trinity-RFT", "rft", "the directory of its runs"),
    "name": Default("rft", "must be given", "the same"),
    TYPE: Default("ppo", "grpo", "a file without one is PPO, with a critic"),
    "algorithm.repeat_times": Default(
        1, "the algorithm's own, as 8 of grpo", "a file says it wherever it wants more than one"
    ),
    "algorithm.kl_loss_fn": Default(
        of_type({"grpo": "k2", "dpo": "k2"}),
        "none of grpo and dpo",
        "grpo and dpo have a KL term, with kl_coef 0.001",
        "k2 of grpo and dpo",
    ),
    "algorithm.loss_agg_mode": Default(
        _aggregation,
        "seq-mean-token-mean of gspo, token-mean of rec",
        "a loss is token-mean unless the file says otherwise, and rec has a mask with its own",
        "token-mean of gspo, seq-mean-token-mean of rec with clip_mode gspo-one-side",
    ),
    "algorithm.policy_loss_fn_args.clip_range_high": Default(
        of_type({"dapo": 0.2}, "algorithm.policy_loss_fn_args.clip_range"),
        "0.28 of dapo",
        "clips are what the file says, and 0.2 without",
        "0.2 of dapo",
    ),
    **{
        f"algorithm.policy_loss_fn_args.epsilon_{side}_prime": Default(
            _of_ring,
            ours,
            "of rec, where other arguments of it are given",
            "0.4 of rec with arguments",
        )
        for side, ours in (("low", "0.6 of rec"), ("high", "2.0 of rec"))
    },
    "algorithm.advantage_fn_args.std_threshold": Default(
        of_type({"dapo": None}),
        "0.0 of dapo",
        "groups without a spread are trained on unless the file says a threshold",
        "null of dapo",
    ),
    "algorithm.advantage_fn_args.reward_threshold": Default(
        of_type({"raft": -1e9}, "algorithm.advantage_fn"),
        "raft learns the best of each group",
        "raft learns every response that its workflow returns",
        "-1e9 of raft: any reward",
    ),
    "model.teacher_model_path": Default(
        _teacher,
        "of explorer.auxiliary_models none is a teacher",
        "the first auxiliary model is the teacher; the trainer asks it, and it has no engines",
        "explorer.auxiliary_models[0].model_path of on_policy_distill and jsd",
    ),
    "algorithm.optimizer.min_lr_ratio": Default(
        unless(0.01, "actor_rollout_ref.actor.optim.min_lr_ratio"),
        "0.0",
        "the floor of a falling rate",
        "0.01",
    ),
    "model.enable_prompt_truncation": Default(
        True, "false", "a long prompt keeps its end; here it trains nothing"
    ),
    "model.tinker.rank": Default(
        lambda get: 16 if get("model.tinker.enable") else UNSET,
        "32",
        "of the adapter that a service trains",
        "16 of a service",
    ),
    "explorer.eval_interval": Default(100, "0: at the start and the end", "steps"),
    "explorer.max_timeout": Default(
        _timeout,
        "900",
        "1800 seconds for each of 1 + max_retry_times attempts; here for all together",
        "1800 x (1 + max_retry_times)",
    ),
    "explorer.proxy_port": Default(
        _serve_port, "0: any free one", "clients of mode=serve know it", "8010 of mode=serve"
    ),
    "synchronizer.sync_timeout": Default(3600, "600", "seconds of one round"),
    "trainer.max_checkpoints_to_keep": Default(
        unless(0, *(f"trainer.{one}" for one in VERL_KEEPS)), "2", "all are kept", "0"
    ),
    "trainer.save_hf_checkpoint": Default(
        lambda get: "never" if get("model.tinker.enable") else UNSET,
        "last",
        "a service has the weights",
        "never of a service",
    ),
    "trainer.dtype": Default(
        _trainer_dtype,
        "by the device: bf16 on a GPU",
        "engines and trainer compute in one type",
        "that of explorer.rollout_model.dtype",
    ),
    "trainer.recompute_granularity": Default(
        _recomputed,
        "null: all activations are kept",
        "less memory, the same numbers",
        "full",
    ),
    "trainer.ppo_mini_batch_size": Default(
        _half_of_pairs,
        "the whole batch",
        "an update of dpo has half of a step's pairs",
        "buffer.train_batch_size of dpo, in experiences",
        section="buffer",
    ),
    "trainer.megatron.sequence_parallel": Default(
        _parallel, "false", "less memory, the same numbers", "true with tensor parallelism"
    ),
    "monitor.monitor_args.mode": Default(
        _wandb,
        "offline",
        "wandb is online where an api_key or base_url is set; without one it stays offline",
        "online of wandb, with a key",
    ),
    "data_processor.experience_pipeline.save_input": Default(
        lambda get: True if get("data_processor.experience_pipeline.operators") else UNSET,
        "false",
        "what the operators get is written down",
        "true with operators",
    ),
}
_FORMAT = {
    "format.messages_key": Default("message", "messages", "the column of chat messages"),
}
_SAMPLING = {
    f"rollout_args.{word}": Default(UNSET, "", "as the model's section says", passes=word)
    for word in ("temperature", "top_p", "top_k")
}
# of each set to train on, of each to evaluate, of each buffer of rows
SETS: dict[str, Default] = {
    **_FORMAT,
    **_SAMPLING,
    "task_selector.selector_type": Default(
        "sequential", "shuffle", "tasks come in the order of their rows"
    ),
}
EVALUATED: dict[str, Default] = {
    **_FORMAT,
    **_SAMPLING,
    "rollout_args.temperature": Default(
        1.0,
        "0.0",
        "an evaluation samples as training does",
        "model.temperature, else 1.0",
        passes="temperature",
    ),
}
BUFFERS: dict[str, Default] = {
    "format.messages_key": Default(
        lambda get: "message" if get("storage_type") == "file" else UNSET,
        "messages",
        "the column of chat messages",
        "message",
    ),
    "format.prompt_type": Default(
        lambda get: "messages" if get("storage_type") == "file" else UNSET,
        "plaintext where prompt_key or response_key is given",
        "what rows to learn are",
        "messages",
    ),
    "shuffle": Default(
        lambda get: False if get("storage_type") == "file" else UNSET,
        "true",
        "rows come in their order",
        "false: the selector is sequential",
    ),
}

# defaults that differ and that a file does not get
KEPT: dict[str, tuple[str, str, str]] = {
    "cluster.ray_address": ("auto", "a private cluster", "$RAY_ADDRESS is used where it is asked"),
    "explorer.listen_address": ("0.0.0.0", "127.0.0.1", "an open port is asked for, with a key"),
    "explorer.runner_per_model": ("8", "by the device", "how much is under way changes no result"),
    f"{ROLLOUT}.seed": ("42", "that of the run", "draws are random either way"),
    f"{ROLLOUT}.dtype": ("bfloat16", "trainer.dtype", "the same on a GPU; a CPU computes in fp32"),
    f"{ROLLOUT}.enforce_eager": (
        "false",
        "by the device",
        "the same on a GPU; a CPU has no graphs, and compiles where it is false",
    ),
    f"{ROLLOUT}.enable_chunked_prefill": ("true", "vLLM's own", "it is true"),
    f"{ROLLOUT}.enable_return_routed_experts": (
        "false",
        "where the model has experts",
        "what trainer.router_replay trains with",
    ),
    "algorithm.enable_router_replay": (
        "false",
        "true",
        "as trainer.router_replay: without it mixtures of experts collapse",
    ),
    "monitor.enable_ray_timeline": ("false", "true", "as monitor.trace: the timeline is cheap"),
    "trainer.enable_preview": ("false", "true", "as monitor.num_samples: a few rollouts are small"),
    "trainer.trainer_strategy": ("fsdp2", "megatron", "there is one trainer"),
    "checkpoint_root_dir": ("the current directory", "runs", "runs lie in one directory"),
}


def _per_attempt(value: Any, file: Any) -> tuple[Any, str]:
    retries = OmegaConf.select(file, "explorer.max_retry_times", default=RETRIES)
    times = _attempts(retries)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return (value * times if known and times > 1 else value), (
        f"seconds of one attempt there, of all {times} together here"
    )


def _running_ray(value: Any, file: Any) -> tuple[Any, str]:
    if value == "auto" and not os.environ.get("RAY_ADDRESS"):
        return UNSET, "RAY_ADDRESS is not set here, so the run has a cluster of its own"
    return value, ""


def _warmup(value: Any, file: Any) -> tuple[Any, str]:
    return (UNSET, "not set") if isinstance(value, int) and value < 0 else (value, "")


def _count(value: Any, file: Any) -> tuple[Any, str]:
    return (UNSET, "found at the start") if value == 0 else (value, "")


def _experiences(value: Any, file: Any) -> tuple[Any, str]:
    if value and isinstance(value, int) and _kind(file) == "dpo":
        return 2 * value, "pairs there, and experiences here, two of each pair"
    return _count(value, file)


def _kind(file: Any) -> Any:
    return OmegaConf.select(file, TYPE, default="ppo")


def _with_kl(value: Any, file: Any) -> tuple[Any, str]:
    needs = value == "none" and _kind(file) == "dpo"
    return ("k2", "dpo has a KL term there, whatever is said") if needs else (value, "")


def _arguments(value: Any, file: Any) -> tuple[Any, str]:
    """With rft's names of arguments, and without those that say what is done anyway."""
    if not isinstance(value, dict):
        return value, ""
    made = {
        ARGUMENTS.get(name, name): given
        for name, given in value.items()
        if name not in IDLE and USUAL.get(name, UNSET) != given
    }
    changed = [name for name in value if name not in made]
    return made, f"{', '.join(changed)} are called otherwise, or say what is done anyway"


def _by_mode(value: Any, file: Any) -> tuple[Any, str]:
    apart = OmegaConf.select(file, "mode", default="both") in ("train", "explore", "bench", "serve")
    if _is_service(file) or (apart and str(value) in ("nccl", "online")):
        return UNSET, "there it becomes checkpoint in this mode; here it follows from the mode"
    return value, ""


def _is_service(file: Any) -> bool:
    return bool(OmegaConf.select(file, "model.tinker.enable", default=False))


def _export(value: Any, file: Any) -> tuple[Any, str]:
    return ("never", "a service has the weights") if _is_service(file) else (value, "")


def _of_rows(value: Any, file: Any) -> tuple[Any, str]:
    return (UNSET if value == "messages" else value), (
        "it is for rows to learn: a task's prompt is in prompt_key's column, text or messages"
    )


def _of_tasks(value: Any, file: Any) -> tuple[Any, str]:
    return (
        UNSET,
        "rows are learned, and no workflow runs them" if value else "an empty text is none",
    )


def _nothing(value: Any, file: Any) -> tuple[Any, str]:
    return (UNSET, "an empty text is none") if value == "" else (value, "")


# arguments of losses and advantages: rft's names; those that change no number; and those that are
# taken with this value alone
ARGUMENTS = {"enable_mask_clip": "enable_mask", "delta_sequence_masking": "delta"}
IDLE = ("chunk_size",)
USUAL = {
    "step_reward_key": "step_reward",
    "env_state_hash_key": "env_state_hash",
    "temperature": 1.0,
}
# keys of one name that mean something else: the value, and the file, to what it is here
OTHERWISE: dict[str, Callable[[Any, Any], tuple[Any, str]]] = {
    "explorer.max_timeout": _per_attempt,
    "cluster.ray_address": _running_ray,
    "algorithm.optimizer.lr_warmup_steps": _warmup,
    "cluster.gpu_per_node": _count,
    "cluster.node_num": _count,
    "buffer.train_batch_size": _experiences,
    "algorithm.kl_loss_fn": _with_kl,
    "algorithm.policy_loss_fn_args": _arguments,
    "algorithm.advantage_fn_args": _arguments,
    "model.critic_model_path": _nothing,
    "synchronizer.sync_method": _by_mode,
    "trainer.save_hf_checkpoint": _export,
    "ray_namespace": _nothing,
    "checkpoint_root_dir": _nothing,
    f"{TASKSET_KEY}.name": _nothing,
    f"{TASKSET_KEY}.format.workflow_key": _nothing,
    f"{TASKSET_KEY}.format.reward_fn_key": _nothing,
    f"{ROWS}.name": _nothing,
    f"{ROWS}.format.workflow_key": _of_tasks,
    f"{ROWS}.format.reward_fn_key": _of_tasks,
    f"{TASKSET_KEY}.format.prompt_type": _of_rows,
}


# --- from a file to its defaults ------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file's keys, by rft's names, as their defaults are asked for.

    `part`: what gets them, the file or a stage of it; `whole`: the file, of a stage; `beside`: keys
    that rft does not have; `kind`: the algorithm of the command line, which wins.
    """

    part: dict[str, Any]
    whole: dict[str, Any]
    beside: dict[str, Any]
    kind: str | None = None

    def __call__(self, key: str) -> Any:
        if key == TYPE and self.kind:
            return self.kind
        found = (self.beside.get(key), _at(self.part, key), _at(self.whole, key))
        return next((one for one in found if one is not None), None)

    def sampled(self, word: str) -> Any:
        """An argument of sampling, as the sections of the model give it for all sets."""
        found = (self(f"{section}.{word}") for section in (ROLLOUT, "model"))
        return next((one for one in found if one is not None), UNSET)


def fill(
    file: dict[str, Any], beside: dict[str, Any], kind: str | None = None, theirs: bool = True
) -> list[Found]:
    """Set what the file leaves out, its stages too; returns what was set.

    `theirs`: without it nothing but what other keys of the file say.
    """
    found = list(_filled(File(file, {}, beside, kind), DEFAULTS, theirs))
    for number, stage in enumerate(_list(file.get("stages"))):
        if not isinstance(stage, dict):
            continue
        anew = [name for name in ANEW if theirs and isinstance(stage.get(name), dict)]
        others = {name: one for name, one in file.items() if name not in anew}
        table = {
            key: one
            for key, one in DEFAULTS.items()
            if (one.section or key.partition(".")[0]) in anew
        }
        for key, *rest in _filled(File(stage, others, beside, kind), table, theirs):
            found.append((f"stages.{number}.{key}", *rest))  # type: ignore[arg-type]
        for name in anew:
            _begin_anew(stage[name], file.get(name) or {}, getattr(Config(), name))
    return found


def _begin_anew(stage: dict[str, Any], whole: dict[str, Any], default: Any) -> None:
    """A section of a stage replaces the file's: what only the file gives is as if left out."""
    for word, value in whole.items():
        own = getattr(default, word, None)
        if is_dataclass(own) and isinstance(value, dict):
            _begin_anew(stage.setdefault(word, {}), value, own)
        elif word not in stage:
            stage[word] = None if own == MISSING else own


def _filled(file: File, table: dict[str, Default], theirs: bool) -> Iterator[Found]:
    for key, default in table.items() if theirs else ():
        yield from _set(file.part, key, default.value(file), default)
    for place, item, kind in _items(file.part):
        for word, default in kind.items():
            value = file.sampled(default.passes) if default.passes else UNSET
            if value is UNSET and theirs:
                value = default.value(partial(_at, item))
            for _, *rest in _set(item, word, value, default):
                yield (f"{place}.{word}", *rest)  # type: ignore[misc]


def _items(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Default]]]:
    """(key, keys of it, its defaults) of every set and buffer."""
    there = {key: _at(part, key) for key in (TASKSET_KEY, TASKSETS, EVALUATIONS, ROWS, AUXILIARY)}
    named = [(TASKSET_KEY, there[TASKSET_KEY], SETS), (ROWS, there[ROWS], BUFFERS)]
    for key, kind in ((TASKSETS, SETS), (EVALUATIONS, EVALUATED)):
        named += [(f"{key}.{number}", one, kind) for number, one in enumerate(_list(there[key]))]
    beside = there[AUXILIARY] if isinstance(there[AUXILIARY], dict) else {}
    named += [(f"{AUXILIARY}.{name}", one, BUFFERS) for name, one in beside.items()]
    yield from (one for one in named if isinstance(one[1], dict))


def _list(found: Any) -> list[Any]:
    """What is no list is refused by its type."""
    return found if isinstance(found, list) else []


def _set(node: Any, key: str, value: Any, default: Default) -> Iterator[Found]:
    *sections, word = key.split(".")
    if value is UNSET or _at(node, key) is not None:
        return
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            return
    node[word] = value
    yield key, value, default.ours, default.why


def _at(node: Any, key: str) -> Any:
    for word in key.split("."):
        if not isinstance(node, dict):
            return None
        node = node.get(word)
    return node
