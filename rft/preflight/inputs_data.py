"""Rules that look at data: rows and their pipeline, databases, services, packages.

In: a filled config, and whether this is a start. Out: what is refused, and the number of steps.
Only a start imports the user's own operators, and asks databases and services.
"""

import asyncio
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

from rft.algorithm import ALGORITHMS, mixing, recipe
from rft.buffer.experience_file import count_steps, too_few
from rft.buffer.progress import StepSize
from rft.checkpoint.restore import newest_of
from rft.config import (
    TRAINING,
    Config,
    ConfigError,
    OperatorConfig,
    TaskPipelineConfig,
    TasksetConfig,
    is_remote,
)
from rft.data import formats
from rft.data.files import count_rows, task_needs
from rft.data.source import is_table
from rft.data.supervised import check_supervised, row_needs, rows_per_step
from rft.data.taskset import Taskset, check_taskset
from rft.extras.pipeline import tasks
from rft.extras.pipeline.data_juicer import SERVICE as SERVICE_FILE
from rft.extras.pipeline.data_juicer import JuicerClient, JuicerError, own_python
from rft.extras.pipeline.operators import Operator, make
from rft.extras.pipeline.output import destination
from rft.extras.pipeline.output import inputs as raw_files
from rft.extras.pipeline.worker_process import EXPERIENCES, TASKS
from rft.ground import plugins
from rft.ground.errors import Late, all_of, problems_of, refuse_all
from rft.preflight.inputs_flows import (
    asked_of_rows,
    flows,
    import_agents,
    reward_args,
    start_environments,
    templates,
)
from rft.preflight.inputs_hubs import is_unread
from rft.preflight.inputs_models import MODEL
from rft.preflight.rules import SETS, Rule, tasksets
from rft.preflight.rules_data import (
    BATCH,
    BESIDE,
    REPLAY,
    SERVICE,
    TASKSET,
    expert_rows,
    has_buffer,
)
from rft.preflight.rules_trainer import BUFFER, RECIPE, STRATEGY, STRATEGY_ARGS, TYPE
from rft.rollout import workflows
from rft.trainer.feed import is_supervised, reads_files

PACKAGE = "trinity"  # whose server is started where no command is given
ANSWER_S = 5.0
CREDENTIALS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
STORED = Path("~/.tinker/credentials.json")

# --- pipelines ------------------------------------------------------------------------------------


def _experience_operators(c: Config, at_start: bool) -> Iterator[str]:
    given, service = c.data_processor.experience_pipeline.operators, c.service.data_juicer
    for number, one in _operators(given, at_start):
        problems = problems_of(make, EXPERIENCES, number, one, service)
        yield from problems
        if not problems and one.name == "data_juicer" and c.mode in ("both", "explore"):
            yield from _reachable(c, f"{EXPERIENCES}.operators.{number}.name=data_juicer", at_start)


def _operators(given: list[OperatorConfig], at_start: bool) -> list[tuple[int, OperatorConfig]]:
    """(place, operator) of those that can be made: the user's own only at a start."""
    return [
        (number, one)
        for number, one in enumerate(given)
        if at_start or not plugins.is_own(one.name)
    ]


def _made(c: Config, at_start: bool) -> list[Operator]:
    """The operators of the task pipeline."""
    given = _operators(c.data_processor.task_pipeline.operators, at_start)
    service, made, problems = c.service.data_juicer, list[Operator](), list[str]()
    for number, one in given:
        try:
            made.append(make(TASKS, number, one, service))
        except ConfigError as error:
            problems += error.problems
    refuse_all(problems)
    return made


def _task_pipeline(c: Config, at_start: bool) -> Iterator[str]:
    given, reads = c.data_processor.task_pipeline, destination(c)
    if reads is None:
        return
    if not given.operators and not given.config_path:
        yield f"{TASKS}.operators is empty: give at least one, or leave {TASKS}.inputs out"
        return
    key, reader = reads
    needs = (
        row_needs(reader.format, key, _schema(c))
        if c.mode == "train"
        else task_needs(reader.format, key, *asked_of_rows(cast(TasksetConfig, reader), at_start))
    )
    made = tasks.named_columns(given)
    for name, column in needs.columns.items():
        is_there = column in (*given.target_fields, *made) or formats.of(reader.format).translates
        if given.target_fields and not is_there:
            yield (
                f"{TASKS}.target_fields leaves {column!r} out, which {key}.format.{name} names; "
                "add it"
            )
    if tasks.is_delegated(given):
        yield from _delegated(c, at_start)
    else:
        if given.priority_weights:
            yield (
                f"{TASKS}.priority_weights are of Data-Juicer, and these operators are rft's: "
                "leave them out"
            )
        operators = _made(c, at_start)
        if reader.shuffle and any(getattr(one, "ordered", False) for one in operators):
            yield (
                f"{key}.shuffle=true would undo the order that {TASKS}.operators make: set "
                f"{key}.shuffle=false"
            )
    if tasks.is_pending(c) and not any(is_unread(c, one) for one in given.inputs):
        count_rows(raw_files(c), f"{TASKS}.inputs")


def _task_service(c: Config, at_start: bool) -> Iterator[str]:
    if tasks.is_delegated(c.data_processor.task_pipeline) and tasks.is_pending(c):
        yield from _reachable(c, f"{TASKS}.operators", at_start)


def _delegated(c: Config, at_start: bool) -> Iterator[str]:
    given, service = c.data_processor.task_pipeline, c.service.data_juicer
    if given.config_path and given.operators:
        yield f"{TASKS}.config_path and {TASKS}.operators both say what is done: set only one"
    if not given.config_path and not (service.server_url or service.auto_start):
        for problem in problems_of(_made, c, at_start):
            yield (
                f"{problem} Data-Juicer's need {SERVICE}.server_url, or {SERVICE}.auto_start=true."
            )
    own = [operator.name for operator in given.operators if plugins.is_own(operator.name)]
    if own:
        yield (
            f"{TASKS}.operators: {own[0]} is your own, and others are Data-Juicer's, which do not "
            "know it; use one kind"
        )


def _reachable(c: Config, user: str, at_start: bool) -> Iterator[str]:
    given = c.service.data_juicer
    if given.auto_start:
        yield from _command(given.command)
    elif given.server_url is None:
        yield (
            f"{user} needs a Data-Juicer service: set {SERVICE}.server_url, or "
            f"{SERVICE}.auto_start=true"
        )
    elif at_start:
        try:
            asyncio.run(_ask(given.server_url))
        except JuicerError as error:
            said = (
                f"{SERVICE}.server_url: no Data-Juicer service answers: {error}; start it, or set "
                f"{SERVICE}.auto_start=true"
            )
            raise ConfigError(Late(said)) from error


async def _ask(url: str) -> None:
    client = JuicerClient(url, ANSWER_S)
    try:
        await client.health()
    finally:
        await client.close()


def _command(command: str | None) -> Iterator[str]:
    if command is None:
        yield from _own_service() if own_python().is_file() else _theirs()
        return
    program = shlex.split(command)[0]
    if program != "{python}" and shutil.which(program) is None:
        yield f"{SERVICE}.command: there is no program {program!r}; give its path"


def _own_service() -> Iterator[str]:
    """What keeps the environment of py-data-juicer from serving: none, or another version."""
    asked = [str(own_python()), "-I", str(SERVICE_FILE), "--check"]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_S * 6)
    if ran.returncode:
        yield f"{SERVICE}.auto_start=true: {ran.stderr.strip()[-300:]}: make env-data-juicer"


def _theirs() -> Iterator[str]:
    if importlib.util.find_spec(PACKAGE) is None:
        yield (
            f"{SERVICE}.auto_start=true: there is no Data-Juicer to start: make env-data-juicer, "
            f"or install trinity-rft[data], or set {SERVICE}.command or {SERVICE}.server_url"
        )


# --- rows -----------------------------------------------------------------------------------------


def _rows(c: Config, at_start: bool) -> Iterator[str]:
    """What the trainer learns from, where that is not made by this run's explorer."""
    buffer = c.buffer.trainer_input.experience_buffer
    if buffer.storage_type == "file" and is_unread(c, buffer.path):
        return
    if is_supervised(c.algorithm):
        schema, batch = _schema(c), int(c.buffer.train_batch_size or 1)
        if buffer.storage_type == "file" and not tasks.is_pending(c):
            check_supervised(buffer, f"{BUFFER}.path", batch, schema)
    elif has_buffer(c) and buffer.storage_type == "sql":
        if importlib.util.find_spec("sqlalchemy") is None:
            yield f"{BUFFER}.storage_type=sql needs SQLAlchemy: pip install rft[sql]"
            return
        from rft.buffer.sql_tables import check_database

        check_database(buffer, at_start)
    elif buffer.storage_type == "file" and c.mode == "train":
        size = _size(c)
        asked = recipe.needs_sampler(c.algorithm), recipe.needs_baseline(c.algorithm)
        groups, steps = count_steps(str(buffer.path), size, *asked)
        if not steps:
            yield too_few(str(buffer.path), groups, size)


def _makes_one(workflow: str | None, at_start: bool) -> bool:
    """Whether a run of the workflow is known to make one experience."""
    is_known = at_start or workflow in workflows.WORKFLOWS
    return is_known and workflows.said(str(workflow)) == 1


def _size(c: Config) -> StepSize:
    return StepSize(c.buffer.batch_size, mixing.rollouts_per_step(c))


def _schema(c: Config) -> str:
    return ALGORITHMS[c.algorithm.algorithm_type].schema


def _beside(c: Config) -> Iterator[str]:
    """Also of buffers that nothing reads: what is named has to be there."""
    is_mixed = mixing.is_mixed(c.algorithm)
    read = mixing.argument(c.algorithm, "sft_dataset_name") if is_mixed else None
    for name, rows in c.buffer.trainer_input.auxiliary_buffers.items():
        key = f"{BESIDE}.{name}"
        if rows.path is None:
            yield f"{key}.path is not set: give the path of its rows, or leave the buffer out"
        elif rows.storage_type == "file" and not is_unread(c, rows.path):
            least = expert_rows(c) if name == read else 1
            yield from problems_of(check_supervised, rows, f"{key}.path", least)


def _tasksets(c: Config, at_start: bool) -> Iterator[str]:
    if c.algorithm.algorithm_type in ALGORITHMS and is_supervised(c.algorithm):
        return
    to_be_made = tasks.is_pending(c)  # by the task pipeline; looked at when they are there
    for key, taskset, is_eval in tasksets(c):
        readable = (is_eval or not to_be_made) and (at_start or not is_table(taskset))
        prompt, answer = asked_of_rows(taskset, at_start)
        check = partial(check_taskset, prompt=prompt, answer=answer)
        readable = readable and not is_unread(c, taskset.path)
        problems = problems_of(check, taskset, f"{key}.path") if readable else ()
        yield from problems
        yield from all_of(flows(c, key, taskset, readable and not problems, at_start))


def _steps(c: Config, at_start: bool) -> Iterator[str]:
    """The number of steps of a run that ends with its data."""
    buffer, rows = c.buffer, c.buffer.trainer_input.experience_buffer
    if buffer.total_steps is not None:
        c.trainer.total_steps = buffer.total_steps
        return
    if tasks.is_pending(c):
        return
    per_epoch = 0
    if not reads_files(c):
        sets = [(key, one) for key, one, is_eval in tasksets(c) if not is_eval]
        if not sets:  # as many as the experiences fill that explorers store, or stored
            return
        unread = any(is_unread(c, one.path) for _, one in sets)
        if unread or (not at_start and any(is_table(one) for _, one in sets)):
            return
        total = sum(Taskset.count(one, key) for key, one in sets)
        if total < buffer.batch_size:
            paths = ", ".join(str(one.path) for _, one in sets)
            yield (
                f"buffer.batch_size={buffer.batch_size} is more than the {total} rows of {paths}: "
                "lower it"
            )
        per_epoch = total // buffer.batch_size
        if (rollouts := mixing.rollouts_per_step(c)) is not None:
            if not all(_makes_one(one.default_workflow_type, at_start) for _, one in sets):
                return  # as many steps as their experiences fill
            whole = buffer.total_epochs * per_epoch * buffer.batch_size
            c.trainer.total_steps = whole // -(-rollouts // int(c.algorithm.repeat_times or 1))
            return
    elif is_unread(c, rows.path):
        return
    elif is_supervised(c.algorithm):
        own = TasksetConfig(path=str(rows.path), subset_name=rows.subset_name, split=rows.split)
        batch = rows_per_step(int(buffer.train_batch_size or 1), _schema(c))
        per_epoch = Taskset.count(own, BUFFER) // batch
    else:
        per_epoch = count_steps(str(rows.path), _size(c))[1]
    c.trainer.total_steps = buffer.total_epochs * per_epoch


# --- where a new run begins ---------------------------------------------------------------------


def _beginning(c: Config) -> Iterator[str]:
    """`trainer.resume_from_path`; one in an object store is looked at when it is loaded."""
    path, key = str(c.trainer.resume_from_path), "trainer.resume_from_path"
    if is_remote(c):
        yield f"{key}={path}: a Tinker service keeps its own checkpoints; leave it out"
    elif "://" not in path:
        try:
            newest_of(path)
        except OSError as error:
            yield (
                f"{key}: {error}; give <job>/checkpoints/step_N of another run of rft, or the "
                "directory that such checkpoints are in"
            )


# --- the service that trains ----------------------------------------------------------------------


def _has_key() -> bool:
    return any(map(os.environ.get, CREDENTIALS)) or STORED.expanduser().exists()


GIVEN = "buffer.explorer_input"
NAMED = f"{SETS} {GIVEN}.default_workflow_type {GIVEN}.default_reward_fn_type"
TEMPLATES = "model.custom_chat_template model.chat_template_path"
SIZES = f"{BATCH} buffer.batch_size buffer.step_counts algorithm.repeat_times"
OF_SERVICE = (
    Rule(
        "trainer.trainer_type model.tinker mode",
        lambda c: is_remote(c) and importlib.util.find_spec("tinker") is None,
        "trainer.trainer_type=tinker needs the service's client: pip install tinker",
        late=True,
    ),
    Rule(
        "trainer.trainer_type model.tinker mode",
        lambda c: is_remote(c) and not _has_key(),
        "trainer.trainer_type=tinker: the service wants a key; set the variable TINKER_API_KEY",
        late=True,
    ),
)


def rules(at_start: bool) -> tuple[Rule, ...]:
    """`at_start`: those that import the user's own functions, or ask others, may do so."""
    own = (
        Rule(f"{TASKSET}.workflow_args", import_agents, reads=SETS),
        Rule(
            f"{TASKSET}.workflow_args",
            start_environments,
            reads=f"{SETS} explorer.rollout_model.enable_openai_api",
        ),
    )
    return (
        *OF_SERVICE,
        Rule(
            f"{EXPERIENCES}.operators {SERVICE}",
            partial(_experience_operators, at_start=at_start),
            reads="mode",
        ),
        Rule(
            f"{TASKS} {SERVICE} {TYPE} mode",
            partial(_task_pipeline, at_start=at_start),
            applies=lambda c: c.data_processor.task_pipeline != TaskPipelineConfig(),
        ),
        Rule(
            f"{SERVICE}.server_url {SERVICE} {TASKS} {TYPE} mode",
            partial(_task_service, at_start=at_start),
        ),
        Rule(
            f"{BUFFER}.path {BUFFER}.storage_type {TASKS} {TYPE} {SIZES} {REPLAY} mode",
            partial(_rows, at_start=at_start),
            reads=BUFFER,
        ),
        Rule(f"{BESIDE} {STRATEGY} {STRATEGY_ARGS} {RECIPE} {TYPE} {SIZES}", _beside),
        Rule(
            "trainer.resume_from_path",
            _beginning,
            reads="trainer.trainer_type",
            applies=lambda c: c.mode in TRAINING and c.trainer.resume_from_path is not None,
        ),
        Rule(f"{TASKSET}.reward_fn_args", partial(reward_args, at_start=at_start), reads=NAMED),
        Rule(
            f"{TASKSET}.path {TASKSET}s {TASKS}",
            partial(_tasksets, at_start=at_start),
            reads=f"{NAMED} {TYPE} explorer.auxiliary_models explorer.reward_timeout "
            f"{TEMPLATES} {MODEL} model.max_response_tokens",
        ),
        *(own if at_start else ()),
        Rule(
            f"model.chat_template_path {MODEL} {TYPE}",
            templates,
            reads=f"{SETS} {BUFFER} {BESIDE} {TEMPLATES}",
        ),
        Rule(
            f"trainer.total_steps {TASKSET}.path {TASKSET}s {BUFFER}.path {BUFFER}.storage_type "
            f"{TASKS} {TYPE} {SIZES} buffer.total_epochs buffer.total_steps mode",
            partial(_steps, at_start=at_start),
            reads=f"{SETS} {BUFFER}",
            derives=True,
            applies=lambda c: c.trainer.total_steps is None,
        ),
    )
