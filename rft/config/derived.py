"""What follows from a config alone: where its run lies, who trains, how long an end may take."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from rft.config.buffer import TasksetConfig
from rft.config.schema import Config

TRAINING = ("both", "train")  # modes with a trainer


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def job_dir(config: Config) -> Path:
    """<checkpoint_root_dir>/<project>/<name>[/<stage_name>], absolute."""
    parts = [config.project, config.name, config.stage_name or ""]
    return Path(config.checkpoint_root_dir).absolute().joinpath(*filter(None, parts))


def checkpoint_root(config: Config) -> str:
    """One place per job: beside its other files, or under that name in an object store."""
    storage = config.trainer.checkpoint.storage
    if not storage:
        return str(job_dir(config) / "checkpoints")
    return "/".join(
        [storage.rstrip("/"), *filter(None, (config.project, config.name, config.stage_name))]
    )


def is_remote(config: Config) -> bool:
    """Whether a service trains that speaks Tinker's API."""
    return config.trainer.trainer_type == "tinker"


def is_bitwise(config: Config) -> bool:
    """Whether engines have the trainer's bits; a stage without engines has nothing to compare."""
    return config.trainer_engine == "bitwise" and config.mode == "both"


def grace_of(environment: Mapping[str, str]) -> float:
    """Before a terminal somebody waits; a Slurm job may have a large model to save."""
    return 120.0 if "SLURM_JOB_ID" in environment else 20.0


def beat_s(config: Config) -> float:
    """How often ranks hear of rank 0 that it waits for another part: they give up later."""
    return config.trainer.collective_timeout / 4


# arguments of rewards and operators that name the variable of a key, and those that have a default
KEY_ARGUMENTS = ("key_variable", "api_key_env")
ASK_JUDGES = ("remote_judge", "llm")
JUDGES = ("OPENAI_API_KEY", "OPENAI_BASE_URL")


def tasksets(config: Config) -> list[TasksetConfig]:
    given = config.buffer.explorer_input
    return [*filter(None, [given.taskset]), *given.tasksets, *given.eval_tasksets]


def rewards(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments, of each set of tasks; rows that name their own count for nothing."""
    usual = config.buffer.explorer_input.default_reward_fn_type
    return [
        (str(one.default_reward_fn_type or usual), one.reward_fn_args) for one in tasksets(config)
    ]


def variables_of_rewards(config: Config) -> list[str]:
    """Variables that this config names, or means by a default, as keys of what rewards and
    operators ask.
    """
    pipelines = config.data_processor
    operators = [*pipelines.task_pipeline.operators, *pipelines.experience_pipeline.operators]
    asked = [(str(one.name), one.args) for one in operators]
    asked += rewards(config)
    found = [
        str(arguments[key]) for _, arguments in asked for key in KEY_ARGUMENTS if key in arguments
    ]
    if any(word in name for name, _ in asked for word in ASK_JUDGES):
        found += JUDGES
    return found
