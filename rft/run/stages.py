"""What one stage of a run hands to the next: the model that it exported, and how it ended.

In: the stages' configs, filled and checked. Out: for each stage the one that it goes on from, or a
`ConfigError` before anything starts; when its turn comes, its config with that model and with the
rows of its task pipeline; whether an earlier attempt has finished it; and where its exports lie, of
which a directory has its name when the export in it is complete. A stage goes on from the newest
stage before it that trains and was given the same `model.model_path`; one with a path of its own
begins there.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from rft.checkpoint import catalog
from rft.checkpoint.storage import open_storage
from rft.config import TRAINING, Config, ConfigError, checkpoint_root, is_remote, job_dir
from rft.extras.pipeline import tasks
from rft.ground import hubs
from rft.ground.errors import refuse_all
from rft.ground.rounds import InSave

RESULT = "result.json"  # in the job's directory


class StageFailed(RuntimeError):
    """A stage that ended badly: the process exit code and the one message for the user."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class StageResult:
    """What rank 0 wrote down at the end of a stage that trains.

    `asked`: for so many steps in all; `huggingface`: the last export's directory.
    """

    version: int
    complete: bool
    asked: int | None
    huggingface: str


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

    for stage in stages[index:]:  # not only when its turn comes
        bring_models(stage, everywhere=not stage.cluster.ray_address)
    config = with_model(stages, index)
    if tasks.is_pending(config):
        try:
            tasks.run(config, say)
        except tasks.TaskPipelineFailed as error:
            raise StageFailed(error.code, str(error)) from error
        check(config)
    return config


def bring_models(config: Config, everywhere: bool = False) -> None:
    """Have the models of the trainer on this node, those of a hub once they are needed;
    `everywhere`: all parts are here, so those of the engines as well.
    """
    model = config.model
    paths = {model.ref_model_path, model.teacher_model_path, model.critic_model_path}
    code = {path: model.trust_remote_code for path in paths | {model.model_path} if path}
    for one in config.explorer.auxiliary_models if everywhere else ():
        code[one.model_path] = one.trust_remote_code
    for path, wanted in code.items():
        hubs.bring(path, path != model.model_path or not is_remote(config), wanted)


def with_model(stages: list[Config], index: int) -> Config:
    """Stage `index` with the model that it begins with."""
    config, before = stages[index], source(stages, index)
    if before is None:
        return config
    export = result(before).huggingface
    if not Path(export).is_dir():
        raise ConfigError(
            f"stages: {config.stage_name} goes on from {export}, which is gone: export it again "
            "with `rft ckpt export`, or "
            f"give {config.stage_name} a model.model_path of its own"
        )
    return replace(config, model=replace(config.model, model_path=export))


def result(config: Config) -> StageResult:
    """Raises FileNotFoundError when the stage has not come to an end."""
    written = (job_dir(config) / RESULT).read_bytes()
    return msgspec.json.decode(written, type=StageResult)


def write_result(config: Config, version: int, complete: bool) -> None:
    """For the next stage, and for the next start of this one. Durable."""
    from rft.checkpoint.storage import Disk, LocalStorage

    job = job_dir(config)
    ended = StageResult(
        version, complete, config.trainer.total_steps, str(export_dir(job, version))
    )
    LocalStorage(job, Disk()).put(RESULT, json.dumps(asdict(ended), indent=1).encode())


def finished(config: Config) -> bool:
    """Whether an earlier attempt completed this stage, with at least as many steps as are asked for
    now.
    """
    if config.mode not in TRAINING or not (job_dir(config) / RESULT).exists():
        return False
    last = result(config)
    return last.complete and (last.asked or 0) >= int(config.trainer.total_steps or 0)


def export_dir(job: Path, step: int) -> Path:
    return job / "huggingface" / f"step_{step:08d}"


def saved_version(config: Config, version: int) -> InSave:
    """The save with the weights of that policy version."""
    root = checkpoint_root(config)
    path = catalog.weights_of(open_storage(root), version)
    if path is None:
        raise ConfigError(
            f"explorer.version={version}: {root} has no weights of that version; `rft ckpt ls` "
            "tells which there are, and trainer.checkpoint.versions=all keeps every one"
        )
    return InSave(root=root, path=path)


def check_exports(config: Config) -> None:
    """Refuse a bench that has nothing to evaluate, or a version that is not there."""
    if config.explorer.version is not None:
        saved_version(config, config.explorer.version)
        return
    job = job_dir(config)
    if not exports(job):
        raise ConfigError(
            f"mode=bench: no Hugging Face export under {job / 'huggingface'}; train with "
            "trainer.save_hf_checkpoint=always first"
        )


def exports(job: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete export, oldest first."""
    names = [
        p for p in (job / "huggingface").glob("step_*") if p.name.removeprefix("step_").isdigit()
    ]
    return sorted((int(p.name.removeprefix("step_")), p) for p in names)


def say(line: str) -> None:
    """A line for the user, whole among those of other threads and of the trainer."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
