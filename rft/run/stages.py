"""What one stage of a run hands to the next: the model that it exported.

In: the stages' configs, filled and checked. Out: for each stage the one that it goes on from, or a
`ConfigError` before anything starts; when its turn comes, its config with that model and with the
rows of its task pipeline; and whether an earlier attempt has finished
it. A stage goes on from the
newest stage before it that trains and was given the same `model.model_path`; one with a path of its
own begins there.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.config import Config, ConfigError, job_dir
from rft.extras.pipeline import tasks
from rft.ground.errors import refuse_all
from rft.run.exports import exports
from rft.run.supervisor import StageFailed, say

TRAINING = ("both", "train")


def source(stages: list[Config], index: int) -> Config | None:
    """The stage whose export stage `index` begins with; None: it begins with its own
    `model.model_path`.
    """
    given = stages[index].model.model_path
    before = [
        stage
        for stage in stages[:index]
        if stage.mode in TRAINING and stage.model.model_path == given
    ]
    return before[-1] if before else None


def check(stages: list[Config]) -> None:
    """Raise ConfigError for everything that cannot be handed over."""
    refuse_all(_problems(stages))


def _problems(stages: list[Config]) -> Iterator[str]:
    for index, stage in enumerate(stages):
        if stage.mode == "bench" and len(stages) > 1 and not exports(job_dir(stage)):
            yield (
                f"stages: {stage.stage_name} has mode=bench, which evaluates exports of its own "
                "run: set "
                "explorer.eval_interval in the stage that trains, or run mode=bench on its own"
            )
        before = source(stages, index)
        if before is None:
            continue
        going_on = f"stages: {stage.stage_name} would go on from {before.stage_name}, which exports"
        fix = f"give {stage.stage_name} a model.model_path of its own, or"
        if before.model.lora_configs:
            yield (
                f"{going_on} an adapter and no model: {fix} train {before.stage_name} without "
                "model.lora_configs"
            )
        if before.trainer.save_hf_checkpoint == "never":
            yield (
                f"{going_on} nothing: {fix} set trainer.save_hf_checkpoint=last in "
                f"{before.stage_name}"
            )


def ready(stages: list[Config], index: int, check: Callable[[Config], None]) -> Config:
    """Stage `index` with the model that it begins with, and the rows that its task pipeline makes.

    `check` refuses a config that cannot run (`rft.preflight`).
    """
    config = with_model(stages, index)
    if tasks.is_pending(config):
        try:
            tasks.run(config, say)
        except tasks.TaskPipelineFailed as error:
            raise StageFailed(error.code, str(error)) from error
        check(config)
    return config


def with_model(stages: list[Config], index: int) -> Config:
    """Stage `index` with the model that it begins with."""
    config, before = stages[index], source(stages, index)
    if before is None:
        return config
    export = result(before)["huggingface"]
    if not Path(export).is_dir():
        raise ConfigError(
            f"stages: {config.stage_name} goes on from {export}, which is gone: export it again "
            "with `rft ckpt export`, or "
            f"give {config.stage_name} a model.model_path of its own"
        )
    return replace(config, model=replace(config.model, model_path=str(export)))


def result(config: Config) -> dict[str, Any]:
    """What rank 0 wrote down at the end of the stage."""
    return json.loads((job_dir(config) / "result.json").read_text(encoding="utf-8"))


def finished(config: Config) -> bool:
    """Whether an earlier attempt completed this stage, with at least as many steps as are asked for
    now.
    """
    path = job_dir(config) / "result.json"
    if config.mode not in TRAINING or not path.exists():
        return False
    last = result(config)
    return last["complete"] and (last["asked"] or 0) >= int(config.trainer.total_steps or 0)
