"""All that the recorded tests import of rft: what a command line means, without starting it.
Modules that move are mended here.

`ROOT`, `MODEL`, `TRAIN` and `EVAL` in a recorded word or value stand for a directory of the test
and for what `write_assets` puts there.
"""

import shutil
import sys
import typing
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rft import cli, train
from rft import config as configs
from rft.config import Config, ConfigError, TasksetConfig
from rft.tools.config import composed as compose_as_train_does
from rft.tools.config import plain
from rft.tools.toy import write_arithmetic, write_model

OF_THE_MACHINE = (
    "RAY_ADDRESS",
    "SLURM_JOB_ID",
    "CUDA_VISIBLE_DEVICES",
    "RFT_PLUGIN_DIRS",
    "MLFLOW_TRACKING_URI",
    "TINKER_BASE_URL",
)
GRPO = (
    "experiment=grpo",
    "model.model_path=MODEL",
    "buffer.explorer_input.taskset.path=TRAIN",
    "checkpoint_root_dir=ROOT/runs",
    "model.max_prompt_tokens=16",
    "model.max_response_tokens=8",
    "device=cpu",
)
Refused = ConfigError


def leave_the_machine(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Nothing around this process is to have a say: neither its variables nor the directory that it
    was started in.
    """
    for name in OF_THE_MACHINE:
        patch.delenv(name, raising=False)
    patch.setenv("TINKER_API_KEY", "planted")
    (root / "here").mkdir(exist_ok=True)
    patch.chdir(root / "here")


def clear(root: Path) -> None:
    """Take away what an earlier check has left: the directories of its
    run, with a name that may be relative.
    """
    for path in (*(root / "here").iterdir(), root / "runs"):
        shutil.rmtree(path, ignore_errors=True)


def write_assets(root: Path) -> None:
    write_model(
        root / "model", hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128, context=64
    )
    write_arithmetic(root, num_eval=16)


def placed(text: str, root: Path) -> str:
    """`text` with the names of this directory for those that stand for them."""
    for name, path in _places(root).items():
        text = text.replace(name, path)
    return text


def unplaced(text: str, root: Path) -> str:
    """The opposite of `placed`."""
    for name, path in _places(root).items():
        text = text.replace(path, name)
    return text


def _places(root: Path) -> dict[str, str]:
    """The root last: it is the beginning of the others."""
    parts = {
        "MODEL": root / "model",
        "TRAIN": root / "train.jsonl",
        "EVAL": root / "eval.jsonl",
        "ROOT": root,
    }
    return {name: str(path) for name, path in parts.items()}


def composed(words: list[str]) -> DictConfig:
    """What `rft config` prints and `rft train` starts from; raises Refused."""
    return compose_as_train_does(words)


def as_data(config: DictConfig) -> dict[str, Any]:
    return plain(config)


def check(config: DictConfig) -> None:
    """Everything that is checked before a run starts; raises Refused."""
    train.prepared_stages(config)


def prepared(config: DictConfig) -> list[dict[str, Any]]:
    """What each stage's resolved.yaml would be: filled in and checked."""
    return [plain(OmegaConf.create(asdict(stage))) for stage in train.prepared_stages(config)]


def command(*words: str) -> int:
    """`rft WORDS` in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["rft", *words])
        cli.main()
    return int(ended.value.code or 0)


def schema(node: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of everything in the schema that is no section."""
    hints = typing.get_type_hints(node)
    for item in fields(node):
        name, kind = prefix + item.name, hints[item.name]
        if name == configs.TASKSET_KEY:
            kind = TasksetConfig
        if is_dataclass(kind):
            yield from schema(kind, name + ".")
        else:
            yield name, kind
