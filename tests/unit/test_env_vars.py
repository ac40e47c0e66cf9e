"""`explorer.env_vars`: in the process that runs workflows, and from there in those that run
rewards; in no other part, and in nothing that Ray writes down. What else those processes are told.
"""

import asyncio
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rft.agents import agent_process
from rft.config import Config, ConfigError, TasksetConfig
from rft.config.derived import variables_of_rewards
from rft.ground import surroundings
from rft.ground.experience import Sampling, Task
from rft.rollout import environments
from rft.rollout.reward_pool import RewardPool
from rft.run import actors as actors_module
from rft.run import cluster
from rft.run.actors import Actors
from rft.run.parts import ActorSpec
from tests.unit.test_config import grpo


class Part: ...


def test_the_explorer_alone_is_started_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, dict[str, str]] = {}
    made: dict[str, type] = {}

    class Remote:
        def __init__(self, cls: type):
            self.cls = cls

        def options(self, **options: Any) -> "Remote":
            started[options["name"]] = options["runtime_env"]["env_vars"]
            made[options["name"]] = self.cls
            return self

        def remote(self) -> None: ...

    monkeypatch.setattr(ray, "remote", Remote)
    monkeypatch.setattr(actors_module.logs, "redirect", lambda *_: None)
    monkeypatch.setattr(actors_module, "die_with_parent", lambda: None)
    monkeypatch.setattr(actors_module, "wait_for_turn", lambda: None)
    for name in ("MY_JUDGE", "RFT_LOG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RFT_SECRET_EXPLORER_X", "RFT_ENDPOINT_TOKEN", "WANDB_API_KEY", "MY_CLOUD_TOKEN"):
        monkeypatch.setenv(name, "planted-secret")
    config = Config(name="a", checkpoint_root_dir=str(tmp_path))
    config.explorer.env_vars = {"MY_JUDGE": "planted-judge"}
    actors = Actors(config, tmp_path, lambda *_: None, print)
    for part in ("explorer", "buffer", "engine_0"):
        actors._create(ActorSpec(part, part, partial(Part)))
    assert "planted" not in json.dumps(started), "Ray writes this to its logs"
    seen = {}
    for part, cls in made.items():
        with monkeypatch.context() as own:
            for name, value in started[part].items():
                own.setenv(name, value)
            own.setenv("MY_JUDGE", "")
            cls()
            seen[part] = dict(os.environ)
    assert seen["explorer"]["MY_JUDGE"] == "planted-judge"
    assert "planted" not in seen["buffer"]["MY_JUDGE"] + seen["engine_0"]["MY_JUDGE"]
    assert "RFT_ENDPOINT_TOKEN" in seen["explorer"]
    theirs = {name for name, value in seen["engine_0"].items() if value == "planted-secret"}
    assert theirs == {"MY_CLOUD_TOKEN"}, "the user's own environment, less other parts' secrets"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment as users have it."""
    for name in [name for name in os.environ if name.startswith("RFT_SECRET_")]:
        monkeypatch.delenv(name)  # of a config that another test has saved
    for name in surroundings.NAMED.values():
        monkeypatch.setenv(name, "")
    for name, value in {
        "HF_HOME": "/models",
        "HF_TOKEN": "planted-1",
        "AWS_ACCESS_KEY_ID": "planted-2",
        "SOMETHING": "planted-3",
        "https_proxy": "http://me:planted-4@proxy:1",
        "http_proxy": "http://proxy:1",
        "OPENAI_API_KEY": "planted-5",
        "RFT_SECRET_MONITOR_X": "planted-6",
        "MY_TOKEN": "planted-7",
    }.items():
        monkeypatch.setenv(name, value)


def planted(environment: dict[str, str]) -> set[str]:
    return {name for name, value in environment.items() if "planted" in value}


def test_foreign_processes_have_what_is_allowed_and_what_is_named(crowded: None) -> None:
    for kind in ("programs", "rewards"):
        found = surroundings.foreign(kind)
        assert planted(found) == set()
        assert (found["HF_HOME"], found["http_proxy"]) == ("/models", "http://proxy:1")
        assert found["PATH"] == os.environ["PATH"]
    surroundings.pass_on(["MY_TOKEN"], ["OPENAI_API_KEY"])
    surroundings.pass_on(["SOMETHING"], [])
    assert planted(surroundings.foreign("programs")) == {"MY_TOKEN", "SOMETHING"}
    rewards = surroundings.foreign("rewards")
    assert planted(rewards) == {"MY_TOKEN", "SOMETHING", "OPENAI_API_KEY"}
    for started in (environments.surroundings(), agent_process._environment("http://a", "key")):
        assert planted(started) == {"MY_TOKEN", "SOMETHING"}


def test_a_rank_has_the_users_environment_less_other_parts_secrets(
    crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SECRET_EXPLORER_ENV_VARS_A", "planted-8")
    surroundings.pass_on([], ["OPENAI_API_KEY"])
    others = surroundings.others_secrets("rank")
    found = surroundings.without(os.environ, others)
    taken = planted(dict(os.environ)) - planted(found)
    assert taken == {"RFT_SECRET_EXPLORER_ENV_VARS_A", "OPENAI_API_KEY"}
    assert found["OPENAI_API_KEY"], "the config that it reads may mention it"
    more = set(surroundings.others_secrets("engine")) - set(others)
    assert more == {"RFT_SECRET_MONITOR_X"}


def test_keys_of_judges_are_found_in_the_config() -> None:
    config = Config(name="a")
    config.buffer.explorer_input.taskset = TasksetConfig(
        path="t", default_reward_fn_type="remote_judge", reward_fn_args={"key_variable": "MY_KEY"}
    )
    assert variables_of_rewards(config) == ["MY_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"]


def test_rewards_inherit_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "import os\ndef judge(response, truth, task):\n    return float(os.environ['MY_SCORE'])\n"
    )
    monkeypatch.setenv("MY_SCORE", "0.625")
    monkeypatch.setenv("RFT_PASSED_VARIABLES", "MY_SCORE")
    task = Task(id="t", taskset="t", row=0, prompt="p", sampling=Sampling(), reward=f"{file}:judge")

    async def scenario() -> float:
        async with RewardPool(1, 30.0) as pool:
            return (await pool.score([(task, "")]))[0].reward

    assert asyncio.run(scenario()) == 0.625


def test_a_home_that_keeps_no_token_is_refused(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in cluster.TOKENS:
        monkeypatch.delenv(variable, raising=False)
    assert not cluster.token_refused(tmp_path / "new", {})
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"^HOME=\S+/file: .* be made: .* RAY_AUTH_TOKEN$"):
        grpo(assets, tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    assert grpo(assets, tmp_path)
    (tmp_path / ".ray" / "auth_token").mkdir(parents=True)
    assert "cannot be read" in cluster.token_refused(tmp_path, {})


def test_rays_token_is_readable_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    cluster.keep_token(tmp_path, {"RAY_AUTH_MODE": "disabled"})
    assert not file.exists()
    cluster.keep_token(tmp_path, {})
    made = file.read_text()
    assert len(made) == 64 and stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)  # as Ray makes it
    cluster.keep_token(tmp_path, {})
    assert file.read_text() == made and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
