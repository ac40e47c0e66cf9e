"""What workflows and rewards need of a run: to be there, a judge, cells, a chat template, times that fit into each other.

In: a filled config and one of its tasksets. Raises ConfigError for the first thing that cannot work; changes nothing. Reads what
classes and functions say of themselves (`needs_judge`, `needs_cell`, `needs_template`) and starts nothing but, where programs are
to run, one empty cell.
"""

import inspect
from pathlib import Path
from typing import Any

import msgspec

from rft.buffer.task_source import names_in
from rft.config import Config, ConfigError, TasksetConfig
from rft.rollout import rewards, sandbox, workflows

TIMED = ("code_tests", "remote_judge")  # rewards with a limit of their own, `seconds`


def check_flows(config: Config, key: str, taskset: TasksetConfig, readable: bool) -> None:
    """`readable`: its rows are there, and may name workflows and rewards of their own."""
    named = {which: names_in(taskset, which, key) if readable else set() for which in ("workflow_key", "reward_fn_key")}
    for name in sorted({str(taskset.default_workflow_type), *named["workflow_key"]}):
        _check_workflow(config, key, name, taskset.workflow_args)
    for name in sorted({str(taskset.default_reward_fn_type), *named["reward_fn_key"]}):
        _check_reward(config, key, name, taskset.reward_fn_args)


def _check_workflow(config: Config, key: str, name: str, args: dict[str, Any]) -> None:
    flow = workflows.resolve(name)
    steps = args.get("max_step_num")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"{key}.workflow_args.max_step_num={steps}: must be a number greater than 0")
    if getattr(flow, "needs_judge", False):
        _check_judge(config, key, name, str(args.get("judge", "")))
    if getattr(flow, "needs_template", False) and not has_template(config):
        raise ConfigError(
            f"{key}: workflow {name} speaks in chat messages, and the tokenizer of model.model_path has no chat template: set "
            "model.chat_template_path"
        )
    if getattr(flow, "needs_cell", False):
        try:
            limits = msgspec.convert(args.get("limits", {}), sandbox.Limits)
        except msgspec.ValidationError as error:
            known = ", ".join(sandbox.Limits.__struct_fields__)
            raise ConfigError(f"{key}.workflow_args.limits: {error}; known are {known}") from error
        _check_cell(limits.isolate, f"{key}.workflow_args.limits.isolate", f"workflow {name}")


def _check_judge(config: Config, key: str, name: str, judge: str) -> None:
    models = [model.name for model in config.explorer.auxiliary_models]
    if not models:
        raise ConfigError(
            f"{key}: workflow {name} asks a judge, and explorer.auxiliary_models is empty: add one, [{{name: a, model_path: DIR}}]"
        )
    if judge and judge not in models:
        raise ConfigError(f"{key}.workflow_args.judge={judge}: explorer.auxiliary_models has {', '.join(models)}")


def _check_reward(config: Config, key: str, name: str, args: dict[str, Any]) -> None:
    function = rewards.resolve(name)
    if name == "code_tests":
        _check_cell(bool(args.get("isolate", True)), f"{key}.reward_fn_args.isolate", f"reward {name}")
    if name == "remote_judge":
        for needed in ("url", "model"):
            if not args.get(needed):
                raise ConfigError(f"{key}.reward_fn_args.{needed}: remote_judge needs it; set it")
    if name in TIMED:
        seconds = args.get("seconds", inspect.signature(function).parameters["seconds"].default)
        limit = config.explorer.reward_timeout
        if not seconds < limit:
            raise ConfigError(
                f"{key}.reward_fn_args.seconds={seconds:g}: explorer.reward_timeout={limit:g} would end {name} first; "
                "lower the one or raise the other"
            )


def _check_cell(isolate: bool, key: str, who: str) -> None:
    if isolate and (why := sandbox.obstacle()):
        raise ConfigError(
            f"{who} runs foreign programs, and this machine cannot isolate them ({why}): allow user namespaces, run as root with "
            f"CAP_SYS_ADMIN, or set {key}=false, in a container where they may read and write what you may"
        )


def has_template(config: Config) -> bool:
    root = Path(config.model.model_path)
    if config.model.custom_chat_template or list(root.glob("chat_template*")):
        return True
    told = msgspec.json.decode((root / "tokenizer_config.json").read_bytes())
    return bool(told.get("chat_template")) or bool(list(root.glob("additional_chat_templates/*")))
