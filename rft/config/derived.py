"""What follows from a config alone: where its run lies, who trains, how long an end may take."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

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


def grace_of(environment: Mapping[str, str]) -> float:
    """Before a terminal somebody waits; a Slurm job may have a large model to save."""
    return 120.0 if "SLURM_JOB_ID" in environment else 20.0
