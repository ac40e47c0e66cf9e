"""`rft config` prints what was composed, in a form that composes to the same; the command line's
words are those of `rft train`.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import cli
from rft import config as configs
from rft.config import file as config_file
from rft.ground.redact import HIDDEN
from rft.tools import config as tool

FLAT = Path(__file__).parent / "flat"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert tool.main(list(words)) == 0
    return capsys.readouterr().out


def test_only_what_differs_from_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(
        capsys, "experiment=ppo", "trainer.grad_clip=1.0", "buffer.batch_size=3", "name=mine"
    )
    assert OmegaConf.to_container(OmegaConf.create(shown)) == {
        "defaults": "rft",
        "name": "mine",
        "algorithm": {"algorithm_type": "ppo"},
        "buffer": {
            "batch_size": 3,
            "explorer_input": {
                "taskset": {"format": {"prompt_type": "plaintext"}},
                "default_reward_fn_type": "math",
            },
        },
        "synchronizer": {"max_staleness": 1},
        "trainer": {"save_interval": 50, "critic_warmup": 5},
    }


def test_all_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    shown = OmegaConf.to_container(OmegaConf.create(printed(capsys, "--all", "experiment=grpo")))
    for key in configs.leaf_keys():
        node: Any = shown
        for word in key.split("."):
            assert word in node, key
            node = node[word]


@pytest.mark.parametrize("file", ["both", "stages", "explore"])
def test_what_is_printed_is_a_file_that_means_the_same(
    file: str,
    tmp_path: Path,
    assets: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("ROOT", tmp_path), ("MODEL", assets / "model"), ("DATA", assets)):
        monkeypatch.setenv(f"FLAT_{name}", str(value))
    shown = printed(capsys, "--config", str(FLAT / f"{file}.yaml"), "buffer.batch_size=2")
    assert "planted" not in shown and (file != "both" or HIDDEN in shown)
    (tmp_path / "again.yaml").write_text(shown, encoding="utf-8")
    assert printed(capsys, "--config", str(tmp_path / "again.yaml")) == shown
    once, again = (
        configs.stage_configs(
            configs.compose(config_file.registered(["--config", str(path), *more]))
        )
        for path, more in (
            (FLAT / f"{file}.yaml", ["buffer.batch_size=2"]),
            (tmp_path / "again.yaml", []),
        )
    )
    for config in (*once, *again):
        config.monitor.monitor_args.pop("api_key", None)
    assert once == again


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--explain", "trainer.dtype").startswith(
        "trainer.dtype: fp32 | bf16 | auto, or null; default null\n    "
    )
    section = printed(capsys, "--explain", "cluster")
    assert "cluster.node_num: int > 0; default 1" in section
    assert "cluster.gpu_per_node: int > 0, or null; default null" in section
    assert tool.main(["--explain", "trainer.dtyp"]) == 2
    assert "did you mean `trainer.dtype`" in capsys.readouterr().err


def test_what_cannot_be_composed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["trainer.totl_steps=1"], "trainer.total_steps"),
        (["--cfg", "job"], "--cfg: only --config FILE"),
    ):
        assert tool.main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said", "number"),
    [
        (["nonsense"], "`nonsense` is no override", 1),
        (["buffer.explorer_input.taskset.path=x"], "model.model_path is not set", 2),
        (["trainer.total_steps.x=3"], "trainer.total_steps", 3),
        ([], "model.model_path is not set: give it a value", 2),
    ],
)
def test_words_that_are_no_config(words: list[str], said: str, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rft.train", *words], capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("rft: config refused")
        and said in done.stderr
    )
    assert len(done.stderr.splitlines()) == (1 if number == 1 else 1 + number)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.model_path=~/model", "model.model_path: Hydra cannot read its value: write $HOME"),
        ("name=a [b", "name: Hydra cannot read its value: give it in quotes, 'name=\"a b\"'"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_told_with_the_others(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["experiment=grpo", "trainer.num_ranks=0", word]) == 2
    told = capsys.readouterr().err
    assert "2 problems" in told and said in told and "trainer.num_ranks=0" in told
    assert tool.main(["experiment=grpo", 'name="a [b"']) == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("experiment=qrpo", "experiment=qrpo is unknown; did you mean `grpo`? Known: demo, "),
        ("size=none", "size=none is unknown. Known: llama3_70b_64gpu, "),
        ("+size=qwen3_8b_8gpu", "size has a value; write size=qwen3_8b_8gpu, without the +"),
    ],
)
def test_a_recipe_that_there_is_not_is_told_of_those_that_are(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["experiment=grpo", word] if "size" in word else [word]) == 2
    assert said in capsys.readouterr().err


def test_every_word_of_the_command_has_its_tool() -> None:
    for word, module in cli.TOOLS.items():
        assert f"rft {word} " in cli.USAGE
        assert callable(importlib.import_module(f"rft.tools.{module}").main)


def test_the_command_prints_a_config(tmp_path: Path) -> None:
    """As a user types it, in a directory of their own."""
    words = ["config", "experiment=quickstart", "trainer.grad_clip=0.5"]
    code = "from rft.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and OmegaConf.create(done.stdout).trainer.grad_clip == 0.5
    assert not list(tmp_path.iterdir()), "nothing is written"
