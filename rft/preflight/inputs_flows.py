"""Rules of workflows, rewards and agents, and of the chat template that their messages need.

In: a filled config, and whether this is a start. Out: what is refused. Only a start imports the
user's own functions and, where programs are to run, begins one empty cell.
"""

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rft.agents.workflow import AgentSettings
from rft.config import Config, ConfigError, TasksetConfig
from rft.config.keys import spelled
from rft.config.trinity_flows import refusal
from rft.data import formats
from rft.data.source import column, names_in
from rft.ground import plugins
from rft.ground.errors import all_of, problems_of
from rft.preflight.rules import tasksets
from rft.preflight.rules_data import BESIDE, agents, environments
from rft.preflight.rules_trainer import BUFFER
from rft.rollout import rewards, sandbox, workflows
from rft.rollout.environments import EnvironmentSettings, problems
from rft.rollout.rewards import data_sources
from rft.rollout.rewards.trinity import GALLERY
from rft.trainer.feed import is_supervised

# a tag of transformers, which Jinja does not know
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
CALLED = ("response", "truth", "task")  # what a reward is called with, in this order
GIVEN = ("response_tokens",)  # arguments of rewards that the workflow gives
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
    names = [
        name
        for name in sorted({str(taskset.default_workflow_type), *named["workflow_key"]})
        if at_start or not plugins.is_own(name)
    ]
    # of a column that has no names in it the first one is told
    yield from all_of(
        said
        for name in names
        for said in _named(
            _place(c, key, taskset, "workflow", name),
            _workflow(c, key, name, taskset.workflow_args, at_start),
        )
    )
    if not [one for name in names for one in problems_of(workflows.resolve, name)]:
        yield from _strange(f"{key}.workflow_args", names, taskset.workflow_args)
    yield from all_of(
        said
        for name in sorted({reward_name(taskset), *named["reward_fn_key"]})
        if at_start or not plugins.is_own(name)
        for said in _named(
            _place(c, key, taskset, "reward_fn", name),
            _reward(c, key, name, taskset.reward_fn_args, at_start),
        )
    )
    if readable and "verl" in {taskset.default_reward_fn_type, *named["reward_fn_key"]}:
        yield from verl_rows(key, taskset)


def _place(c: Config, key: str, taskset: TasksetConfig, kind: str, name: str) -> str:
    """The key that this name is from: that of a column, of all sets, or of this one."""
    default = f"default_{kind}_type"
    if name != str(getattr(taskset, default)):
        return f"{key}.format.{kind}_key"
    is_usual = name == getattr(c.buffer.explorer_input, default)
    return f"buffer.explorer_input.{default}" if is_usual else f"{key}.{default}"


def _named(place: str, sentences: Iterable[str]) -> Iterator[str]:
    """The sentences; what is said of a name that cannot be found, with its key."""
    try:
        yield from sentences
    except ConfigError as error:
        raise ConfigError(*(f"{place}: {said}" for said in error.problems)) from error


def asked_of_rows(taskset: TasksetConfig, at_start: bool) -> tuple[bool, bool]:
    """Whether a prompt and an answer of every row are asked for: by the workflow, and by the reward
    that it is scored with. What a name that there is not would read is told nobody.
    """
    flow, reward = str(taskset.default_workflow_type), str(taskset.default_reward_fn_type)
    if not at_start and plugins.is_own(flow):
        return False, False
    if problems_of(workflows.resolve, flow):
        return False, False
    found = workflows.resolve(flow)
    scores = getattr(found, "scores", False) and reward in rewards.REWARDS
    return getattr(found, "needs_prompt", False), scores and reward not in rewards.WITHOUT_TRUTH


def _workflow(
    c: Config, key: str, name: str, args: dict[str, Any], at_start: bool
) -> Iterator[str]:
    if name not in workflows.WORKFLOWS and (why := refusal(name)):
        yield f"{key}.default_workflow_type={name}: {why}"
        return
    flow = workflows.resolve(name)
    steps = args.get("max_step_num")
    counts = hasattr(flow, "max_step_num") and not getattr(flow, "has_settings", False)
    if counts and isinstance(steps, int) and steps < 1:
        yield f"{key}.workflow_args.max_step_num={steps}: must be a number greater than 0"
    for needed in getattr(flow, "REQUIRED", ()):
        if needed not in args:
            yield f"{key}.workflow_args.{needed}: workflow {name} needs it; set it"
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
            runs = limits.isolate and at_start and args.get("python", True)
            yield from _cell(bool(runs), at, f"workflow {name}")


def _strange(key: str, names: list[str], args: dict[str, Any]) -> Iterator[str]:
    """Arguments that none of these workflows reads, or not as they are."""
    known: dict[str, Any] = {}
    for name in names:
        declared = _declared(name)
        if declared is None:
            return
        known |= declared
    yield from _arguments(key, f"workflow {' or '.join(names)}", known, args)


def _declared(name: str) -> Mapping[str, Any] | None:
    """What a workflow reads; None: anything, or its settings say themselves what is wrong. A user's
    own has said it where it declares ARGUMENTS itself: what it inherits says nothing of what it
    reads.
    """
    flow = workflows.resolve(name)
    if getattr(flow, "has_settings", False):
        return None
    own = getattr(flow, "__dict__", {}).get("ARGUMENTS")
    return getattr(flow, "ARGUMENTS", None) if flow.__module__.startswith("rft.") else own


def _arguments(
    key: str, who: str, known: Mapping[str, Any], given: dict[str, Any]
) -> Iterator[str]:
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            yield f"{key}.{name}: {who} does not take it; {hint}{takes}"
            continue
        try:
            msgspec.convert(value, known[name])
        except msgspec.ValidationError:
            yield f"{key}.{name}={value!r}: give a value of type {spelled(known[name])}"


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
        flow = str(taskset.default_workflow_type)
        if flow not in workflows.WORKFLOWS and refusal(flow):
            continue  # what it would score by is nobody's business
        if at_start or not plugins.is_own(reward_name(taskset)):
            place = _place(c, key, taskset, "reward_fn", reward_name(taskset))
            yield from all_of(_named(place, _strange_args(key, taskset)))


def reward_name(taskset: TasksetConfig) -> str:
    """Of the workflow, where the config names none; what there is not is told elsewhere."""
    flow, reward = str(taskset.default_workflow_type), str(taskset.default_reward_fn_type)
    return workflows.reward_of(flow, reward) if flow in workflows.WORKFLOWS else reward


def _strange_args(key: str, taskset: TasksetConfig) -> Iterator[str]:
    name = reward_name(taskset)
    if name not in rewards.REWARDS and refusal(name):
        return  # told as a name
    function = rewards.resolve(name)
    signature = inspect.signature(function)
    if any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        return
    if not is_ours(function) and list(own_reward(key, name, taskset.reward_fn_args)):
        return  # told there
    beside = (*signature.bind_partial(*CALLED).arguments, *GIVEN)
    known = {n: one.annotation for n, one in signature.parameters.items() if n not in beside}
    # of the user's own, annotations may be anything
    known = known if is_ours(function) else dict.fromkeys(known, Any)
    yield from _arguments(f"{key}.reward_fn_args", name, known, dict(taskset.reward_fn_args))


def _reward(c: Config, key: str, name: str, args: dict[str, Any], at_start: bool) -> Iterator[str]:
    if name not in rewards.REWARDS and (why := refusal(name)):
        yield f"{key}.default_reward_fn_type={name}: {why}"
        return
    function = rewards.resolve(name)
    if not is_ours(function):
        yield from own_reward(key, name, args)
    key = f"{key}.reward_fn_args"
    if name == "code_tests":
        isolate = bool(args.get("isolate", True)) and at_start
        yield from _cell(isolate, f"{key}.isolate", f"reward {name}")
    if name == "remote_judge":
        for needed in ("url", "model"):
            if not args.get(needed):
                yield f"{key}.{needed}: remote_judge needs it; set it"
    if name == "verl" and args.get("path") and at_start:
        yield from all_of(verl_function(key, args))
    if name == "rm_gallery_reward" and args.get("reward_name") not in GALLERY:
        yield (
            f"{key}.reward_name={args.get('reward_name')}: of RM-Gallery {', '.join(GALLERY)} is "
            "scored here; set it, or give default_reward_fn_type a function of your own"
        )
    longest = args.get("max_response_length") or c.model.max_response_tokens
    if args.get("enable_overlong_penalty") and longest:
        cache = args.get("cache_length", 4096)
        if isinstance(longest, int) and isinstance(cache, int) and not 0 < cache < longest:
            yield (
                f"{key}.cache_length={cache}: the penalty grows over the last cache_length tokens "
                f"of max_response_length={longest}; give 1 to {longest - 1}"
            )
    if name in TIMED:
        seconds = args.get("seconds", inspect.signature(function).parameters["seconds"].default)
        limit = c.explorer.reward_timeout
        if 0 < limit <= seconds:
            yield (
                f"{key}.seconds={seconds:g}: explorer.reward_timeout={limit:g} would end {name} "
                "first; lower the one or raise the other"
            )


def is_ours(function: Any) -> bool:
    return str(function.__module__).startswith("rft.")


def own_reward(key: str, name: str, args: dict[str, Any]) -> Iterator[str]:
    """Why a call of the user's own would fail, or would give veRL's parameters other values."""
    signature = inspect.signature(rewards.resolve(name))
    if "solution_str" in signature.parameters:
        place, _, function = name.rpartition(":")
        yield (
            f"{key}.default_reward_fn_type={name} has veRL's parameters: set it to verl, and "
            f"{key}.reward_fn_args to {{path: {place}, function: {function}}}"
        )
        return
    given = {n: one for n, one in args.items() if n in signature.parameters}
    given |= {n: 0 for n in GIVEN if n in signature.parameters}
    try:
        signature.bind(*CALLED, **given)
    except TypeError as error:
        yield (
            f"{key}.default_reward_fn_type={name} is called with {', '.join((*CALLED, *given))}: "
            f"{error}; correct it, or write one that calls it (docs/workflows.md: From TRL)"
        )


def verl_function(key: str, args: dict[str, Any]) -> Iterator[str]:
    named = args.get("function", "compute_score")
    said = data_sources.problem_of(data_sources.own(args["path"], named), args.get("kwargs") or {})
    if said:
        yield f"{key}.function={named}: {said}; correct it"


def verl_rows(key: str, taskset: TasksetConfig) -> Iterator[str]:
    """What the reward `verl` needs of every row: a source with a formula, and a ground truth."""
    args, unknown = taskset.reward_fn_args, set[str]()
    name = args.get("source_key", "data_source")
    for where, source in column(taskset, name, key):
        if source is None:
            yield f"{key}: {where} has no {name!r}, by which the reward verl scores; add it"
            break
        unknown |= set() if args.get("path") else set(problems_of_source(str(source)))
    yield from (f"{key}: {said}" for said in sorted(unknown))
    for where, model in column(taskset, "reward_model", key):
        if not isinstance(model, dict) or model.get("ground_truth") is None:
            yield f"{key}: {where} has no reward_model.ground_truth, with which verl compares"
            break
        if model.get("style") == "model" and not args.get("path"):
            yield (
                f"{key}: {where} has reward_model.style=model, and no model with a head of its own "
                "scores here: give custom_reward_function.path"
            )
            break
    for kind in ("images", "videos"):
        if found := next((where for where, value in column(taskset, kind, key) if value), None):
            yield f"{key}: {found} has {kind}: rft trains on text only, so leave those rows out"


def problems_of_source(source: str) -> Iterator[str]:
    try:
        data_sources.formula(source)
    except ValueError as error:
        yield str(error)


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


def start_environments(c: Config) -> Iterator[str]:
    """Each once, for a moment, in its own Python, also where several tasksets have it."""
    has_api = bool(c.explorer.rollout_model.enable_openai_api)
    asked: list[EnvironmentSettings] = []
    for key, given in environments(c):
        settings = EnvironmentSettings.of(given, key)
        if settings not in asked:
            asked.append(settings)
            yield from problems(settings, key, has_api)


# --- chat templates -------------------------------------------------------------------------------


def has_template(c: Config) -> bool:
    """Of a model that is not there only that is told."""
    root = Path(c.model.model_path)
    if c.model.custom_chat_template or list(root.glob("chat_template*")):
        return True
    if not (root / "tokenizer_config.json").is_file():
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
        if formats.has_messages(form) or form.system_prompt is not None or form.system_prompt_key:
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
