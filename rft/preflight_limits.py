"""What no single value shows: ranges, names, and keys that only make sense together. Called by `preflight`.

In: a config as it was composed (`check_given`, before anything is filled in), then a filled one (`check_limits`). Raises
ConfigError for the first thing that cannot work; changes nothing.
"""

import inspect
import re
from math import isfinite
from typing import Any

from rft.algorithm import mixing
from rft.config import Config, ConfigError, TasksetConfig, get
from rft.feed import is_supervised
from rft.monitor import mlflow
from rft.monitor.sinks import WANDB_ARGS
from rft.preflight_flows import has_template
from rft.preflight_rows import rollouts_per_step
from rft.rollout import rewards

GIVEN = (  # what `fill` derives where it is not given: 0 is not "not given"
    "algorithm.repeat_times", "buffer.train_batch_size", "buffer.total_steps", "trainer.num_ranks", "model.max_model_len",
    "model.max_prompt_tokens", "model.max_response_tokens", "cluster.gpu_per_node", "cluster.ray_num_cpus", "cluster.node_num",
    "explorer.rollout_model.kv_cache_gb", "algorithm.optimizer.eps", "critic.optim.eps", "trainer.checkpoint.host_memory_gb",
    "trainer.stop_at_loss", "trainer.megatron.tensor_model_parallel_size", "trainer.megatron.pipeline_model_parallel_size",
    "trainer.megatron.context_parallel_size", "trainer.megatron.expert_model_parallel_size",
    "trainer.megatron.expert_tensor_parallel_size",
)  # fmt: skip
RUN_NAMES = ("project", "name")
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers, which Jinja does not know
MONITOR_ARGS = {"tensorboard": (), "wandb": WANDB_ARGS, "mlflow": mlflow.ARGS}
WANDB_MODES = ("offline", "online", "disabled")
FORBIDDEN = re.compile(r"[\x00-\x1f\\*?\"<>|]")


def check_given(config: Config) -> None:
    for key in GIVEN:
        if (value := get(config, key)) is not None and not value > 0:
            raise ConfigError(f"{key}={value}: must be greater than 0" + ("" if value else ", or left out"))
    for key in ("seed", "model.min_response_tokens"):
        if get(config, key) < 0:
            raise ConfigError(f"{key}={get(config, key)}: must be 0 or more")
    if config.cluster.master_port > 65535:
        raise ConfigError(
            f"cluster.master_port={config.cluster.master_port} is no port: give one from 1 to 65535, or 0 for any"
        )
    for key in ("algorithm.optimizer.lr", "critic.optim.lr", "algorithm.optimizer.weight_decay", "trainer.grad_clip"):
        if not isfinite(get(config, key)):
            raise ConfigError(f"{key}={get(config, key)}: give a finite number")
    _check_names(config)


def check_limits(config: Config) -> None:
    given = config.buffer.explorer_input
    sets = [("buffer.explorer_input.taskset", given.taskset)] if given.taskset else []
    sets += [(f"buffer.explorer_input.tasksets.{number}", one) for number, one in enumerate(given.tasksets)]
    sets += [(f"buffer.explorer_input.eval_tasksets.{number}", one) for number, one in enumerate(given.eval_tasksets)]
    for key, taskset in sets:
        _check_sampling(config, key, taskset)
        _check_reward_args(key, taskset)
    _check_template(config, [(key, taskset.format) for key, taskset in sets])
    _check_batches(config)
    _check_best(config, [str(one.name) for one in given.eval_tasksets])
    _check_times(config)
    _check_explorer(config)
    _check_monitor(config)


def _check_names(config: Config) -> None:
    """They become directories: <checkpoint_root_dir>/<project>/<name>[/<stage_name>]."""
    for key in RUN_NAMES:
        value = str(get(config, key))
        parts = value.split("/")
        if (
            not value
            or FORBIDDEN.search(value)
            or any(part in ("", ".", "..") or part != part.strip() for part in parts)
        ):
            raise ConfigError(f"{key}={value!r} is no name of a directory: use letters, digits, - and _")
    if (stage := config.stage_name) is not None and (
        not stage or "/" in stage or stage in (".", "..") or FORBIDDEN.search(stage)
    ):
        raise ConfigError(f"stages: stage_name={stage!r} is no name of a directory: use letters, digits, - and _")


def _check_sampling(config: Config, key: str, taskset: TasksetConfig) -> None:
    args, longest = taskset.rollout_args, int(config.model.max_model_len or 0)
    if args.temperature is not None and args.temperature < 0:
        raise ConfigError(
            f"{key}.rollout_args.temperature={args.temperature:g}: must be 0 (the likeliest token) or more"
        )
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"{key}.rollout_args.top_p={args.top_p:g}: a share above 0, at most 1; 1 takes every token")
    if args.top_k < -1 or args.top_k == 0:
        raise ConfigError(f"{key}.rollout_args.top_k={args.top_k}: give 1 or more, or -1 for every token")
    if args.max_tokens is not None and not 0 < args.max_tokens < longest:
        raise ConfigError(
            f"{key}.rollout_args.max_tokens={args.max_tokens}: a response and its prompt must fit model.max_model_len={longest}; "
            f"give 1 to {longest - 1}, or leave it out for model.max_response_tokens"
        )
    if taskset.repeat_times is not None and taskset.repeat_times < 1:
        raise ConfigError(f"{key}.repeat_times={taskset.repeat_times}: must be greater than 0")


def _check_reward_args(key: str, taskset: TasksetConfig) -> None:
    """They are given to the reward by name, when the first response is scored."""
    function = rewards.resolve(str(taskset.default_reward_fn_type))
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    known = [name for name in known if name != "response_tokens"]  # given by the workflow
    for name in taskset.reward_fn_args:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(
                f"{key}.reward_fn_args.{name}: {taskset.default_reward_fn_type} does not take it; {takes}"
            )


def _check_template(config: Config, formats: list[tuple[str, Any]]) -> None:
    """Chat messages need a template; a base model has none."""
    of_model = "model.chat_template_path" if config.model.chat_template_path else "model.custom_chat_template"
    if template := config.model.custom_chat_template:
        _parse_template(of_model, template)
    given = config.buffer.trainer_input
    beside = given.auxiliary_buffers.items()
    buffers = [(f"buffer.trainer_input.auxiliary_buffers.{name}", rows) for name, rows in beside]
    for key, rows in [("buffer.trainer_input.experience_buffer", given.experience_buffer), *buffers]:
        if own := rows.format.chat_template:
            _parse_template(f"{key}.format.chat_template", own)
        elif rows.storage_type == "file" and (rows is not given.experience_buffer or is_supervised(config.algorithm)):
            formats = [*formats, (key, rows.format)]
    if has_template(config):
        return
    for key, form in formats:
        if form.prompt_type == "messages" or form.system_prompt or form.system_prompt_key:
            raise ConfigError(
                f"{key}.format has chat messages, and the tokenizer of model.model_path={config.model.model_path} has no "
                "chat template: set model.chat_template_path or model.custom_chat_template, or prompt_type=plaintext "
                "without a system prompt"
            )


def _parse_template(key: str, template: str) -> None:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{key}: no Jinja template, in line {error.lineno}: {error.message}; correct it") from error


def _check_batches(config: Config) -> None:
    buffer = config.buffer
    step = buffer.batch_size * int(config.algorithm.repeat_times or 1)
    if is_supervised(config.algorithm):
        return
    if mixing.is_mixed(config.algorithm) and rollouts_per_step(config) != step:
        raise ConfigError(
            f"buffer.train_batch_size={buffer.train_batch_size}: less its expert rows it holds {rollouts_per_step(config)} "
            f"rollouts, and a step makes {step} (buffer.batch_size x algorithm.repeat_times); leave it out for "
            f"{mixing.batch_for(config.algorithm, step)}, or change expert_data_ratio"
        )
    if rollouts_per_step(config) != step:
        raise ConfigError(
            f"buffer.train_batch_size={buffer.train_batch_size}: a step takes buffer.batch_size={buffer.batch_size} tasks x "
            f"algorithm.repeat_times={config.algorithm.repeat_times} = {step} experiences; leave it out, or change those two"
        )
    steps, trainer = config.trainer.total_steps, config.trainer
    if trainer.profiler and steps is not None and trainer.profile_steps[0] > steps:
        raise ConfigError(
            f"trainer.profile_steps={trainer.profile_steps}: the run has {steps} steps; give earlier ones"
        )


def _check_best(config: Config, evaluated: list[str]) -> None:
    checkpoint, key = config.trainer.checkpoint, "trainer.checkpoint.best_metric"
    metric = checkpoint.best_metric
    if metric is None or config.mode not in ("both", "train"):
        return
    if not checkpoint.keep_best:
        raise ConfigError(f"{key}={metric} with keep_best=0 keeps nothing: set trainer.checkpoint.keep_best")
    kind, _, rest = metric.partition("/")
    if kind != "eval" or rest.rpartition("/")[0] not in evaluated:
        sets = ", ".join(evaluated) or "buffer.explorer_input.eval_tasksets, which is empty"
        raise ConfigError(f"{key}={metric} is of no evaluation set: give eval/<set>/<metric> with one of {sets}")


def _check_times(config: Config) -> None:
    explorer, checkpoint = config.explorer, config.trainer.checkpoint
    if explorer.reward_timeout > explorer.max_timeout:
        raise ConfigError(
            f"explorer.reward_timeout={explorer.reward_timeout:g} is longer than max_timeout={explorer.max_timeout:g}, which a "
            "task has for everything: lower it"
        )
    if checkpoint.lease_s > checkpoint.agent_deadline_s:
        raise ConfigError(
            f"trainer.checkpoint.lease_s={checkpoint.lease_s:g} is longer than agent_deadline_s={checkpoint.agent_deadline_s:g}: "
            "nobody could take over in time; lower it"
        )


def _check_explorer(config: Config) -> None:
    for name in config.explorer.env_vars:
        if name.startswith("RFT_") or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"explorer.env_vars.{name}: give names of variables of your own; RFT_ are rft's")
    over, key = config.explorer.over_rollout, "explorer.over_rollout"
    if not 0 <= over.ratio < 1:
        raise ConfigError(
            f"{key}.ratio={over.ratio:g}: the share of a step's tasks that is not waited for; 0 to below 1"
        )
    if over.ratio == 0:
        return
    if config.mode != "both":
        raise ConfigError(
            f"{key}.ratio={over.ratio:g} with mode={config.mode}: no step waits for tasks here; set it to 0"
        )
    if config.synchronizer.sync_style == "fixed":
        raise ConfigError(
            f"{key}.ratio={over.ratio:g} with synchronizer.sync_style=fixed, in which every step takes all its tasks: set "
            "sync_style to dynamic_by_explorer, trainer_driven or fully_async"
        )
    if config.deterministic:
        raise ConfigError(
            f"{key}.ratio={over.ratio:g} with deterministic=true: who is late is a matter of time; set it to 0"
        )


def _check_monitor(config: Config) -> None:
    """A monitor is built by the first rank, when engines already run: what it will not take is said now."""
    kind, args = config.monitor.monitor_type, config.monitor.monitor_args
    known = MONITOR_ARGS.get(kind)
    for name in args if known is not None else ():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(f"monitor.monitor_args.{name}: monitor_type={kind} does not take it; {takes}")
    if kind == "wandb" and args.get("mode", "offline") not in WANDB_MODES:
        raise ConfigError(f"monitor.monitor_args.mode={args['mode']}: use {', '.join(WANDB_MODES)}")
