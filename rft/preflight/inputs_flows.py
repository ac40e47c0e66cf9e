"""Rules of workflows, rewards and agents, and of the chat template that their messages need.

In: a filled config, and whether this is a start. Out: what is refused. Only a start imports the
user's own functions and, where programs are to run, begins one empty cell.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rft.agents.workflow import AgentSettings
from rft.config import Config, TasksetConfig
from rft.data import formats
from rft.data.source import names_in
from rft.ground import plugins
from rft.ground.errors import all_of, problems_of
from rft.preflight.rules import tasksets
from rft.preflight.rules_data import BESIDE, agents
from rft.preflight.rules_trainer import BUFFER
from rft.rollout import rewards, sandbox, workflows
from rft.trainer.feed import is_supervised

# a tag of transformers, which Jinja does not know
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
TIMED = ("code_tests", "remote_judge")  # rewards with a limit of their own, `seconds`


def flows(
    c: Config, key: str, taskset: TasksetConfig, readable: bool, at_start: bool
) -> Iterator[str]:
    """`readable`: its rows are there, and may name workflows and rewards of their own.

    Classes and functions say of themselves what they need (`needs_judge`, `needs_cell`,
    `needs_template`).
    """
    named = {
        which: names_in(taskset, which, key) if readable else set()
        for which in ("workflow_key", "reward_fn_key")
    }
    # of a column that has no names in it the first one is told
    yield from all_of(
        said
        for name in sorted({str(taskset.default_workflow_type), *named["workflow_key"]})
        if at_start or not plugins.is_own(name)
        for said in _workflow(c, key, name, taskset.workflow_args, at_start)
    )
    yield from all_of(
        said
        for name in sorted({str(taskset.default_reward_fn_type), *named["reward_fn_key"]})
        if at_start or not plugins.is_own(name)
        for said in _reward(c, key, name, taskset.reward_fn_args, at_start)
    )


def _workflow(
    c: Config, key: str, name: str, args: dict[str, Any], at_start: bool
) -> Iterator[str]:
    flow = workflows.resolve(name)
    steps = args.get("max_step_num")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        yield f"{key}.workflow_args.max_step_num={steps}: must be a number greater than 0"
    if getattr(flow, "needs_judge", False):
        yield from _judge(c, key, name, str(args.get("judge", "")))
    if getattr(flow, "needs_template", False) and not has_template(c):
        yield (
            f"{key}: workflow {name} speaks in chat messages, and the tokenizer of "
            "model.model_path has no chat template: set model.chat_template_path"
        )
    if getattr(flow, "needs_cell", False):
        try:
            limits = msgspec.convert(args.get("limits", {}), sandbox.Limits)
        except msgspec.ValidationError as error:
            known = ", ".join(sandbox.Limits.__struct_fields__)
            yield f"{key}.workflow_args.limits: {error}; known are {known}"
        else:
            at = f"{key}.workflow_args.limits.isolate"
            yield from _cell(limits.isolate and at_start, at, f"workflow {name}")


def _judge(c: Config, key: str, name: str, judge: str) -> Iterator[str]:
    models = [model.name for model in c.explorer.auxiliary_models]
    if not models:
        yield (
            f"{key}: workflow {name} asks a judge, and explorer.auxiliary_models is empty: add "
            "one, [{name: a, model_path: DIR}]"
        )
    elif judge and judge not in models:
        yield (
            f"{key}.workflow_args.judge={judge}: explorer.auxiliary_models has {', '.join(models)}"
        )


def reward_args(c: Config, at_start: bool) -> Iterator[str]:
    """They are given to the reward by name, when the first response is scored."""
    for key, taskset, _ in tasksets(c):
        if at_start or not plugins.is_own(str(taskset.default_reward_fn_type)):
            yield from all_of(_strange_args(key, taskset))


def _strange_args(key: str, taskset: TasksetConfig) -> Iterator[str]:
    name = str(taskset.default_reward_fn_type)
    parameters = inspect.signature(rewards.resolve(name)).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.default is not one.empty]
    known = [one for one in known if one != "response_tokens"]  # given by the workflow
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    for argument in taskset.reward_fn_args:
        if argument not in known:
            yield f"{key}.reward_fn_args.{argument}: {name} does not take it; {takes}"


def _reward(c: Config, key: str, name: str, args: dict[str, Any], at_start: bool) -> Iterator[str]:
    function, key = rewards.resolve(name), f"{key}.reward_fn_args"
    if name == "code_tests":
        isolate = bool(args.get("isolate", True)) and at_start
        yield from _cell(isolate, f"{key}.isolate", f"reward {name}")
    if name == "remote_judge":
        for needed in ("url", "model"):
            if not args.get(needed):
                yield f"{key}.{needed}: remote_judge needs it; set it"
    if name in TIMED:
        seconds = args.get("seconds", inspect.signature(function).parameters["seconds"].default)
        limit = c.explorer.reward_timeout
        if 0 < limit <= seconds:
            yield (
                f"{key}.seconds={seconds:g}: explorer.reward_timeout={limit:g} would end {name} "
                "first; lower the one or raise the other"
            )


def _cell(isolate: bool, key: str, who: str) -> Iterator[str]:
    if isolate and (why := sandbox.obstacle()):
        yield (
            f"{who} runs foreign programs, and this machine cannot isolate them ({why}): allow "
            "user namespaces, run as root with "
            f"CAP_SYS_ADMIN, or set {key}=false, in a container where they may read and write what "
            "you may"
        )


def import_agents(c: Config) -> Iterator[str]:
    for key, given in agents(c):
        settings = AgentSettings.of(given, key)
        yield from problems_of(settings.function) if settings.agent else ()


# --- chat templates -------------------------------------------------------------------------------


def has_template(c: Config) -> bool:
    root = Path(c.model.model_path)
    if c.model.custom_chat_template or list(root.glob("chat_template*")):
        return True
    told = msgspec.json.decode((root / "tokenizer_config.json").read_bytes())
    return bool(told.get("chat_template")) or bool(list(root.glob("additional_chat_templates/*")))


def templates(c: Config) -> Iterator[str]:
    """Chat messages need a template; a base model has none."""
    of_model = "chat_template_path" if c.model.chat_template_path else "custom_chat_template"
    given = c.buffer.trainer_input
    beside = given.auxiliary_buffers.items()
    buffers = [(f"{BESIDE}.{name}", rows) for name, rows in beside]
    read: list[tuple[str, Any]] = [(key, one.format) for key, one, _ in tasksets(c)]
    if template := c.model.custom_chat_template:
        yield from _parsed(f"model.{of_model}", template)
    for key, rows in [(BUFFER, given.experience_buffer), *buffers]:
        if own := rows.format.chat_template:
            yield from _parsed(f"{key}.format.chat_template", own)
        elif rows.storage_type == "file" and (
            rows is not given.experience_buffer or is_supervised(c.algorithm)
        ):
            read.append((key, rows.format))
    if has_template(c):
        return
    for key, form in read:
        if formats.has_messages(form) or form.system_prompt or form.system_prompt_key:
            yield (
                f"{key}.format has chat messages, and the tokenizer of "
                f"model.model_path={c.model.model_path} has no "
                "chat template: set model.chat_template_path or model.custom_chat_template, or "
                "prompt_type=plaintext without a system prompt"
            )


def _parsed(key: str, template: str) -> Iterator[str]:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        yield f"{key}: no Jinja template, in line {error.lineno}: {error.message}; correct it"
