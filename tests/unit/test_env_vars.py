"""`explorer.env_vars`: in the process that runs workflows, and from there in those that run
rewards; in no other part.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rft.config import Config
from rft.ground.experience import Sampling, Task
from rft.rollout.reward_pool import RewardPool
from rft.run.actors import Actors
from rft.run.parts import ActorSpec


class Part: ...


def test_the_explorer_alone_is_started_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, dict[str, str]] = {}

    class Remote:
        def __init__(self, _: type): ...

        def options(self, **options: Any) -> "Remote":
            started[options["name"]] = options["runtime_env"]["env_vars"]
            return self

        def remote(self) -> None: ...

    monkeypatch.setattr(ray, "remote", Remote)
    config = Config(name="a", checkpoint_root_dir=str(tmp_path))
    config.explorer.env_vars = {"MY_JUDGE": "http://127.0.0.1:1"}
    actors = Actors(config, tmp_path, lambda *_: None, print)
    for part in ("explorer", "buffer", "engine_0"):
        actors._create(ActorSpec(part, part, partial(Part)))
    assert (
        started["explorer"]["MY_JUDGE"] == "http://127.0.0.1:1"
        and "RFT_LOG_FILE" in started["explorer"]
    )
    assert "MY_JUDGE" not in started["buffer"] | started["engine_0"]


def test_rewards_inherit_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "import os\ndef judge(response, truth, task):\n    return float(os.environ['MY_SCORE'])\n"
    )
    monkeypatch.setenv("MY_SCORE", "0.625")
    task = Task(id="t", taskset="t", row=0, prompt="p", sampling=Sampling(), reward=f"{file}:judge")

    async def scenario() -> float:
        async with RewardPool(1, 30.0) as pool:
            return (await pool.score([(task, "")]))[0].reward

    assert asyncio.run(scenario()) == 0.625
