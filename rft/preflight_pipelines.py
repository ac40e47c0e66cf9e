"""What a config says of its two pipelines and of the Data-Juicer service: refused here, or it can begin.

In: a filled config. Out: whether the stage's rows have still to be made. Raises ConfigError for the first thing that cannot work.
Imports the user's operators; starts nothing; asks a service that should be there whether it is.
"""

import asyncio
import importlib.util
import shlex
import shutil
from urllib.parse import urlsplit

from rft.buffer.data_files import count_rows, task_needs
from rft.buffer.sft_rows import row_needs
from rft.config import Config, ConfigError, DataJuicerConfig, get
from rft.pipeline import tasks
from rft.pipeline.juicer_client import JuicerClient, JuicerError
from rft.pipeline.messages import EXPERIENCES, TASKS
from rft.pipeline.operators import build
from rft.pipeline.output import destination, inputs

SERVICE = "service.data_juicer"
PACKAGE = "trinity"  # whose server is started where no command is given
ANSWER_S = 5.0
POSITIVE = (
    f"{TASKS}.num_process", f"{TASKS}.timeout", f"{EXPERIENCES}.timeout", f"{EXPERIENCES}.max_dropped_groups",
    f"{SERVICE}.start_timeout", f"{SERVICE}.timeout",
)  # fmt: skip


def check_pipelines(config: Config) -> bool:
    """Refuse what cannot work; whether the task pipeline of this stage has still to run."""
    for key in POSITIVE:
        if (value := get(config, key)) is not None and not value > 0:
            raise ConfigError(f"{key}={value}: must be greater than 0")
    _check_service(config.service.data_juicer)
    _check_experiences(config)
    return _check_tasks(config)


def _check_experiences(config: Config) -> None:
    given = config.data_processor.experience_pipeline
    build(EXPERIENCES, given.operators, config.service.data_juicer)
    if given.input_save_path is not None:
        if not given.save_input:
            raise ConfigError(
                f"{EXPERIENCES}.input_save_path={given.input_save_path} with save_input=false: nothing is written there; set "
                "save_input=true, or leave the path out"
            )
        if not given.input_save_path.endswith(".jsonl"):
            raise ConfigError(
                f"{EXPERIENCES}.input_save_path={given.input_save_path}: it is JSON lines; name it .jsonl"
            )
    if config.mode in ("both", "explore"):
        for number, operator in enumerate(given.operators):
            if operator.name == "data_juicer":
                _check_reachable(config.service.data_juicer, f"{EXPERIENCES}.operators.{number}.name=data_juicer")


def _check_tasks(config: Config) -> bool:
    given, found = config.data_processor.task_pipeline, destination(config)
    if given.top_k < -1 or given.top_k == 0:
        raise ConfigError(f"{TASKS}.top_k={given.top_k}: give 1 or more, or -1 for all rows")
    if not given.inputs and (given.operators or given.config_path):
        raise ConfigError(f"{TASKS}.inputs is empty: give the data files that the operators read")
    if found is None:
        return False
    if not given.operators and not given.config_path:
        raise ConfigError(f"{TASKS}.operators is empty: give at least one, or leave {TASKS}.inputs out")
    key, reader = found
    needs = row_needs(reader.format, key) if config.mode == "train" else task_needs(reader.format, key)
    for name, column in (*needs.text.items(), *needs.messages.items()):
        if given.target_fields and column not in given.target_fields:
            raise ConfigError(f"{TASKS}.target_fields leaves {column!r} out, which {key}.format.{name} names; add it")
    if tasks.is_delegated(given):
        _check_delegated(config)
        shuffled = False
    else:
        if given.priority_weights:
            raise ConfigError(
                f"{TASKS}.priority_weights are of Data-Juicer, and these operators are rft's: leave them out"
            )
        made = build(TASKS, given.operators, config.service.data_juicer)
        shuffled = reader.shuffle and any(getattr(operator, "ordered", False) for operator in made)
    if shuffled:
        raise ConfigError(
            f"{key}.shuffle=true would undo the order that {TASKS}.operators make: set {key}.shuffle=false"
        )
    if not tasks.is_pending(config):
        return False
    count_rows(inputs(config), f"{TASKS}.inputs")
    if tasks.is_delegated(given):
        _check_reachable(config.service.data_juicer, f"{TASKS}.operators")
    return True


def _check_delegated(config: Config) -> None:
    given, service = config.data_processor.task_pipeline, config.service.data_juicer
    if given.config_path and given.operators:
        raise ConfigError(f"{TASKS}.config_path and {TASKS}.operators both say what is done: set only one")
    if not given.config_path and not (service.server_url or service.auto_start):
        try:
            build(TASKS, given.operators, service)
        except ConfigError as error:
            raise ConfigError(
                f"{error} Data-Juicer's need {SERVICE}.server_url, or {SERVICE}.auto_start=true."
            ) from error
    own = [operator.name for operator in given.operators if ":" in operator.name]
    if own:
        raise ConfigError(
            f"{TASKS}.operators: {own[0]} is your own, and others are Data-Juicer's, which do not know it; use one kind"
        )


def _check_service(given: DataJuicerConfig) -> None:
    if given.port is not None and not 0 < given.port < 65536:
        raise ConfigError(
            f"{SERVICE}.port={given.port} is no port: give one from 1 to 65535, or leave it out for a free one"
        )
    if given.server_url is not None:
        parts = urlsplit(given.server_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{SERVICE}.server_url={given.server_url} is no URL like http://127.0.0.1:5005")
    if given.command is not None and "{port}" not in given.command:
        raise ConfigError(f"{SERVICE}.command does not say where the port goes: write {{port}} in it")


def _check_reachable(given: DataJuicerConfig, user: str) -> None:
    if given.auto_start:
        _check_command(given)
        return
    if given.server_url is None:
        raise ConfigError(f"{user} needs a Data-Juicer service: set {SERVICE}.server_url, or {SERVICE}.auto_start=true")
    try:
        asyncio.run(_ask(given.server_url))
    except JuicerError as error:
        raise ConfigError(
            f"{SERVICE}.server_url: no Data-Juicer service answers: {error}; start it, or set {SERVICE}.auto_start=true"
        ) from error


async def _ask(url: str) -> None:
    client = JuicerClient(url, ANSWER_S)
    try:
        await client.health()
    finally:
        await client.close()


def _check_command(given: DataJuicerConfig) -> None:
    if given.command is None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                f"{SERVICE}.auto_start=true: the package trinity-rft, whose server it starts, is not installed; install "
                f"trinity-rft[data], or set {SERVICE}.command or {SERVICE}.server_url"
            )
        return
    program = shlex.split(given.command)[0]
    if program != "{python}" and shutil.which(program) is None:
        raise ConfigError(f"{SERVICE}.command: there is no program {program!r}; give its path")
