"""What one stage of a run hands to the next: the model that it exported.

In: the stages' configs, filled and checked. Out: for each stage the one that it goes on from, or a `ConfigError` before
anything starts. A stage goes on from the newest stage before it that trains and was given the same `model.model_path`; one
with a path of its own begins there.
"""

import re

from omegaconf import DictConfig, OmegaConf

from rft.config import Config, ConfigError, job_dir
from rft.modes import exports

TRAINING = ("both", "train")


def source(stages: list[Config], index: int) -> Config | None:
    """The stage whose export stage `index` begins with; None: it begins with its own `model.model_path`."""
    given = stages[index].model.model_path
    before = [stage for stage in stages[:index] if stage.mode in TRAINING and stage.model.model_path == given]
    return before[-1] if before else None


def check(stages: list[Config]) -> None:
    """Refuse what cannot be handed over."""
    for index, stage in enumerate(stages):
        if stage.mode == "bench" and len(stages) > 1 and not exports(job_dir(stage)):
            raise ConfigError(
                f"stages: {stage.stage_name} has mode=bench, which evaluates exports of its own run: set "
                "explorer.eval_interval in the stage that trains, or run mode=bench on its own"
            )
        before = source(stages, index)
        if before is None:
            continue
        going_on = f"stages: {stage.stage_name} would go on from {before.stage_name}, which exports"
        fix = f"give {stage.stage_name} a model.model_path of its own, or"
        if before.model.lora_configs:
            raise ConfigError(
                f"{going_on} an adapter and no model: {fix} train {before.stage_name} without model.lora_configs"
            )
        if before.trainer.save_hf_checkpoint == "never":
            raise ConfigError(f"{going_on} nothing: {fix} set trainer.save_hf_checkpoint=last in {before.stage_name}")


def check_overrides(raw: DictConfig, overrides: list[str]) -> None:
    """Refuse a key of the command line that would do nothing, because every stage sets it for itself."""
    stages = [stage for stage in raw.stages if isinstance(stage, DictConfig)]  # others are refused later, by name
    for line in overrides if stages else []:
        key = line.split("=", 1)[0].lstrip("+~")
        inner = re.sub(r"^stages\.\d+\.", "", key)
        if OmegaConf.select(raw, f"every_stage.{inner}") is not None:
            raise ConfigError(
                f"{key}: every_stage.{inner} wins over it, so it would do nothing: set every_stage.{inner}"
            )
        if all(OmegaConf.select(stage, key) is not None for stage in stages):
            names = " or ".join(f"stages.{number}.{key}" for number in range(len(stages)))
            raise ConfigError(
                f"{key} is set by every stage for itself, so the command line's would do nothing: set {names}, or "
                f"+every_stage.{key}"
            )
