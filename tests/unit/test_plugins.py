"""Plug-ins: files that add names to the tables, and what is refused of them."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.algorithm.advantages import Columns
from rft.config import ConfigError
from rft.ground import plugins
from rft.ground.experience import Experience, Sampling, Task
from rft.rollout import rewards, workflows
from rft.rollout.reward_pool import RewardPool

PLUGIN = """
    from dataclasses import dataclass

    from rft.algorithm.advantages import Advantage, Credit
    from rft.ground.plugins import register

    @register("reward", "length_of")
    def length_of(response, truth, task):
        return float(len(response))

    @register("advantage", "none_at_all")
    def none_at_all(columns):
        return Credit(columns.rewards * 0)

    register("advantage", "of_two")(Advantage(none_at_all, fewest=2))

    @register("policy_loss", "flat")
    def flat(logprobs, fields):
        return logprobs * 0, {}

    @register("workflow", "quiet")
    @dataclass
    class Quiet:
        turns: int = 1

        async def run(self, task, ctx):
            return []
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a plug-in, and one that is not to be read. The tables are put back."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(PLUGIN))
    (tmp_path / "_not_this.py").write_text("raise RuntimeError")
    before: dict[str, dict[str, Any]] = {
        kind: dict(plugins.table_of(kind)) for kind in plugins.TABLES
    }
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield tmp_path
    for kind, table in before.items():
        plugins.table_of(kind).clear()
        plugins.table_of(kind).update(table)


def test_every_table_can_be_added_to(directory: Path) -> None:
    assert plugins.load([str(directory)]) == [str(directory)]
    assert rewards.resolve("length_of")("abc", None, None) == 3.0
    assert workflows.resolve("quiet")().turns == 1
    advantages, losses = plugins.table_of("advantage"), plugins.table_of("policy_loss")
    columns = Columns.of([Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], reward=3.0)])
    assert (
        advantages["none_at_all"].function(columns).advantages.tolist() == [0.0]
        and advantages["of_two"].fewest == 2
    )
    assert "flat" in losses
    plugins.load([str(directory)])  # once more, as a process does that inherits them
    assert os.environ[plugins.VARIABLE] == str(directory)
    with pytest.raises(ConfigError, match="did you mean 'length_of'"):
        rewards.resolve("lenght_of")


def test_reward_workers_know_them(directory: Path) -> None:
    plugins.load([str(directory)])
    task = Task(id="t", taskset="t", row=0, prompt="p", reward="length_of", sampling=Sampling())

    async def scored() -> float:
        async with RewardPool(1, 30.0) as pool:
            return (await pool.score([(task, "four")]))[0].reward

    assert asyncio.run(scored()) == 4.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'from rft.ground.plugins import register\n@register("reward", "math")\ndef f(): ...',
            "reward 'math' is registered twice, in ",
        ),
        (
            'from rft.ground.plugins import register\n@register("rewards", "a")\ndef f(): ...',
            "as 'rewards': known are workflow, reward",
        ),
        (
            'from rft.ground.plugins import register\nregister("algorithm", "a")({})',
            "algorithm 'a' is registered as dict: register Algorithm",
        ),
        (
            "from rft.algorithm import Algorithm\nfrom rft.ground.plugins import register\n"
            'register("algorithm", "grpo")(Algorithm("rollouts", "ppo", "grpo", "token-mean", 2))',
            "algorithm 'grpo' is registered twice, in rft.algorithm and in .*other.py",
        ),
        (
            'from rft.ground.plugins import register\n@register("monitor", "a")\nclass A: ...',
            "monitor 'a' has no method 'log'",
        ),
        ("import no_such_module", "other.py cannot be imported: ModuleNotFoundError"),
        ("def f(:", "other.py cannot be imported: SyntaxError"),
    ],
)
def test_a_name_means_one_thing_and_a_broken_file_is_named(
    directory: Path, text: str, message: str
) -> None:
    (directory / "other.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        plugins.load([str(directory)])


def test_a_run_takes_them_from_the_key_or_the_variable(directory: Path, assets: Path) -> None:
    words = [
        "experiment=grpo",
        f"model.model_path={assets / 'model'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        f"checkpoint_root_dir={directory / 'runs'}",
        "buffer.explorer_input.default_reward_fn_type=length_of",
    ]
    program = f"""
import sys
from rft.config import ConfigError, compose
from rft.train import prepared_stages
try:
    print(prepared_stages(compose({words!r} + sys.argv[1:]))[0].plugin_dirs)
except ConfigError as error:
    print(error)
"""

    def said(*more: str, **environment: str) -> str:
        command = [sys.executable, "-c", program, *more]
        return subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        ).stdout

    assert (
        said(f"plugin_dirs=[{directory}]")
        == said(RFT_PLUGIN_DIRS=str(directory))
        == f"['{directory}']\n"
    )
    assert "unknown reward 'length_of'" in said()
    assert "plugin_dirs: /nowhere is no directory" in said("plugin_dirs=[/nowhere]")
