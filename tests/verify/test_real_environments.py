"""The adapters against the real packages, each in the virtual environment that `make env-NAME`
builds, through the real runner and workflow; a scripted policy stands where the engine is.
"""

import collections
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rft.rollout.environments import (
    ADAPTERS,
    EnvironmentFailed,
    EnvironmentSettings,
    asked_once,
    problems,
)
from tests.unit.environment_world import World, task
from tests.unit.scripted import TOKENIZER

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]
LETTERS = str(Path(__file__).with_name("letters_env"))
LAKE = {"env_id": "FrozenLake-v1", "env_args": {"is_slippery": False}, "max_step_num": 20}


def settings(environment: str, **given: Any) -> EnvironmentSettings:
    made = EnvironmentSettings.of({"environment": environment, **given})
    if not made.interpreter.is_file():
        pytest.skip(f"there is no {made.interpreter}: make env-{made.interpreter.parts[-3][10:]}")
    return made


def refusal(environment: str, **given: Any) -> str:
    (said,) = problems(settings(environment, **given), "k", True)
    return said


# gymnasium


def walker(prompt: str, n: int) -> str:
    """Knows the way over every lake that it sees: breadth first."""
    rows = re.findall(r"^[PSFHG]+$", prompt.split("<|user|>")[-1].split("<|end|>")[0], re.M)
    place = {(y, x): letter for y, row in enumerate(rows) for x, letter in enumerate(row)}
    start = next(at for at, letter in place.items() if letter == "P")
    todo, seen = collections.deque([(start, "")]), {start}
    while todo:
        (y, x), first = todo.popleft()
        if place[y, x] == "G":
            return first
        for word, at in (
            ("left", (y, x - 1)),
            ("down", (y + 1, x)),
            ("right", (y, x + 1)),
            ("up", (y - 1, x)),
        ):
            if place.get(at, "H") != "H" and at not in seen:
                seen.add(at)
                todo.append((at, first or word))
    raise AssertionError("there is no way")


def test_frozen_lake_rewards_who_crosses_it(tmp_path: Path) -> None:
    settings("gymnasium", **LAKE)
    world = World(walker, tmp_path)
    ((made, twin),) = world.run(task("gymnasium", repeat=2, **LAKE))
    assert (made.reward, made.metrics["turns"], made.metrics["environment/terminated"]) == (1, 6, 1)
    assert TOKENIZER.decode(made.tokens.tolist()).count("<|user|>") == 6 and list(
        made.tokens
    ) == list(twin.tokens)
    drowned = World(lambda prompt, n: "<action>left</action> up </action>", tmp_path)
    right = World(
        lambda prompt, n: "3, no: right" if prompt.count("<|user|>") > 1 else "1", tmp_path
    )
    ((fell,),) = right.run(task("gymnasium", **LAKE))
    assert (fell.reward, fell.metrics["turns"], fell.metrics["environment/done"]) == (0.0, 2.0, 1.0)
    ((lost,),) = drowned.run(task("gymnasium", **{**LAKE, "max_step_num": 3}))
    assert (lost.reward, lost.metrics["environment/done"]) == (0.0, 0.0)
    ((silent,),) = World(lambda prompt, n: "well", tmp_path).run(
        task("gymnasium", **{**LAKE, "max_step_num": 2})
    )
    assert silent.metrics["environment/unread"] == 1.0
    ((long,),) = World(lambda prompt, n: "9" * 5000, tmp_path, room=20_000).run(
        task("gymnasium", **{**LAKE, "max_step_num": 1})
    )
    assert (long.reward_outcome, long.metrics["environment/unread"]) == ("ok", 1.0)


def test_every_seed_has_a_lake_of_its_own(tmp_path: Path) -> None:
    args = {**LAKE, "env_args": {"is_slippery": False, "random_map": {"size": 3, "p": 0.7}}}
    rows = asked_once(settings("gymnasium", **args), "--rows", count=4, seed=5)
    assert rows == [{"prompt": "FrozenLake-v1", "response": "", "seed": 5 + n} for n in range(4)]
    found = World(walker, tmp_path).run(*[task("gymnasium", raw=row, **args) for row in rows])
    assert [made.reward for (made,) in found] == [1.0] * 4
    shown = {TOKENIZER.decode(made.prompt_ids) for (made,) in found}
    assert len(shown) > 1


@pytest.mark.parametrize("env_id", ["CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1"])
def test_other_environments_of_few_actions(tmp_path: Path, env_id: str) -> None:
    args = {"env_id": env_id, "max_step_num": 2}
    settings("gymnasium", **args)
    word = {"Taxi-v4": "south", "Blackjack-v1": "stick", "CartPole-v1": "1"}.get(env_id, "up")
    ((made,),) = World(lambda prompt, n: word, tmp_path).run(task("gymnasium", **args))
    assert made.reward_outcome == "ok" and "environment/unread" not in made.metrics


def test_what_gymnasium_does_not_have_is_refused_before_the_start() -> None:
    assert "Environment `FrozenLak` doesn't exist" in refusal("gymnasium", env_id="FrozenLak-v1")
    assert "env_id" in refusal("gymnasium")
    assert "only numbered ones" in refusal("gymnasium", env_id="Pendulum-v1")


# reasoning-gym


def test_procedural_tasks_are_scored_by_their_own_scorer(tmp_path: Path) -> None:
    args = {"env_id": "chain_sum", "env_args": {"max_terms": 2, "max_digits": 2}}
    rows = asked_once(settings("reasoning_gym", **args), "--rows", count=3, seed=7)

    def adds(prompt: str, n: int) -> str:
        (sum_,) = re.findall(r"([\d +-]+) =", prompt)
        return f"<answer>{eval(sum_)}</answer>"

    found = World(adds, tmp_path).run(*[task("reasoning_gym", raw=row, **args) for row in rows])
    for (made,), row in zip(found, rows, strict=True):
        text = TOKENIZER.decode(made.tokens.tolist())
        assert row["prompt"] in text and f"<answer>{row['response']}</answer>" in text
        assert (made.reward, made.metrics["turns"], made.metrics["environment/tagged"]) == (1, 1, 1)
    ((wrong,),) = World(lambda prompt, n: "no idea", tmp_path).run(
        task("reasoning_gym", raw=rows[0], **args)
    )
    assert wrong.reward < 0.5 and wrong.metrics["environment/tagged"] == 0.0
    assert "not registered" in refusal("reasoning_gym", env_id="nonsense")


@pytest.mark.parametrize("env_id", ["countdown", "spiral_matrix", "simple_integration"])
def test_an_answer_is_not_run_as_python(tmp_path: Path, env_id: str) -> None:
    """The scorers of these evaluate what they are given."""
    settings("reasoning_gym")
    (row,) = asked_once(settings("reasoning_gym", env_id=env_id), "--rows", count=1, seed=7)
    mark = tmp_path / "ran"
    answers = [
        row["response"],
        f"__import__('pathlib').Path('{mark}').touch()",
        f"[one for one in [open('{mark}', 'w')]]",
        f"(lambda: open('{mark}', 'w'))()",
        f"5! + open('{mark}', 'w')",
    ]
    said = iter(answers)
    found = World(lambda prompt, n: next(said), tmp_path, room=20_000).run(
        *[task("reasoning_gym", raw=row, env_id=env_id) for _ in answers]
    )
    told = sorted((made.metrics["environment/unread"], made.reward) for (made,) in found)
    assert told[0] == (0.0, 1.0) and not mark.exists()
    assert [unread for unread, reward in told[1:] if reward < 0.1] == [1.0] * 4


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_fails_nothing(tmp_path: Path) -> None:
    args = {"env_id": "prime_factorization"}
    settings("reasoning_gym", **args)
    ((made,),) = World(lambda prompt, n: "I do not know", tmp_path).run(
        task("reasoning_gym", **args)
    )
    assert (made.reward, made.reward_outcome) == (0.0, "ok")
    assert made.metrics["environment/unread"] == 1.0


# verifiers


def test_an_environment_of_verifiers_asks_the_model_itself(tmp_path: Path) -> None:
    args = {"env_id": LETTERS}
    rows = asked_once(settings("verifiers", **args), "--rows", count=3, seed=0)
    answers = {row["prompt"]: row["response"] for row in rows}
    assert answers["how many a in banana?"] == "3" and len(answers) == 3
    world = World(lambda prompt, n: next(a for q, a in answers.items() if q in prompt), tmp_path)
    found = world.run(*[task("verifiers", repeat=2, raw=row, **args) for row in rows])
    for made, row in zip(found, rows, strict=True):
        assert [(one.sample, one.reward, one.metrics["right"]) for one in made] == [
            (0, 1.25, 1.0),
            (1, 1.25, 1.0),
        ]
        assert made[0].metrics["easy"] == 1.0, "a reward function has the row's other columns"
        text = f"<|user|>{row['prompt']}<|end|><|assistant|>{row['response']}<|end|>"
        assert TOKENIZER.decode(made[0].tokens.tolist()) == text
        assert sum(made[0].action_mask) == len(row["response"]) + 1
    ((wrong,),) = World(lambda prompt, n: "many", tmp_path).run(
        task("verifiers", raw=rows[0], **args)
    )
    assert (wrong.reward, wrong.reward_outcome) == (0.0, "ok")


def test_several_turns_of_verifiers_are_one_experience(tmp_path: Path) -> None:
    args = {"env_id": LETTERS, "env_args": {"kind": "multi"}}
    settings("verifiers", **args)

    def bisects(prompt: str, n: int) -> str:
        return "5" if "higher" in prompt.split("<|assistant|>")[-2] else "4"

    world = World(bisects, tmp_path)
    ((made,),) = world.run(task("verifiers", raw={"seed": 0}, row=0, **args))
    text = TOKENIZER.decode(made.tokens.tolist())
    assert text.endswith("<|assistant|>4<|end|><|user|>higher<|end|><|assistant|>5<|end|>")
    assert (made.reward, sum(made.action_mask)) == (1.25, 4)


@pytest.mark.parametrize("kind", ["single", "group"])
def test_what_verifiers_takes_for_zero_is_a_failure(tmp_path: Path, kind: str) -> None:
    args = {"env_id": LETTERS, "env_args": {"broken": True, "kind": kind}}
    settings("verifiers", **args)
    world = World(lambda prompt, n: "3", tmp_path, max_retry_times=1)
    (error,) = world.run(task("verifiers", raw={}, row=0, **args))
    assert isinstance(error, EnvironmentFailed) and "KeyError: 'no such answer'" in str(error)
    assert world.runner.counts == {"retry_count": 1, "failed_task_count": 1}
    assert "no_such_package" in refusal("verifiers", env_id="no_such_package")


def test_a_rubric_of_verifiers_that_compares_answers_is_refused() -> None:
    args = {"env_id": LETTERS, "env_args": {"kind": "compared"}}
    assert "compares the answers of a group" in refusal("verifiers", **args)


def test_environments_of_verifiers_may_be_several(tmp_path: Path) -> None:
    args = {"env_id": LETTERS, "env_args": {"kind": "group"}}
    rows = asked_once(settings("verifiers", **args), "--rows", count=5, seed=0)
    assert len(rows) == 5
    (row,) = [row for row in rows if "banana" in row["prompt"]]
    ((made,),) = World(lambda prompt, n: "3", tmp_path).run(task("verifiers", raw=row, **args))
    assert (made.reward, made.metrics["right"]) == (1.25, 1.0)


def test_a_taskset_of_verifiers_is_rewarded_by_its_own_functions(tmp_path: Path) -> None:
    args = {"env_id": str(Path(__file__).with_name("letters_tasks"))}
    rows = asked_once(settings("verifiers_v1", **args), "--rows", count=9, seed=0)
    assert [(row["response"], row["index"]) for row in rows] == [("3", 0), ("2", 1), ("0", 2)]
    answers = {row["prompt"]: row["response"] for row in rows}
    world = World(lambda prompt, n: next(a for q, a in answers.items() if q in prompt), tmp_path)
    found = world.run(*[task("verifiers_v1", repeat=2, raw=row, **args) for row in rows])
    for made, row in zip(found, rows, strict=True):
        told = [
            (one.sample, one.reward, one.metrics["right"], one.metrics["length"]) for one in made
        ]
        assert told == [(0, 1.25, 1.0, 1.0), (1, 1.25, 1.0, 1.0)]
        text = f"<|user|>{row['prompt']}<|end|><|assistant|>{row['response']}<|end|>"
        assert TOKENIZER.decode(made[0].tokens.tolist()) == text
    ((wrong,),) = World(lambda prompt, n: "many", tmp_path).run(
        task("verifiers_v1", raw={}, row=1, **args)
    )
    assert (wrong.reward, wrong.reward_outcome) == (0.0, "ok")
    broken = World(lambda prompt, n: "3", tmp_path)
    (error,) = broken.run(task("verifiers_v1", raw=rows[0], env_args={"broken": True}, **args))
    assert isinstance(error, EnvironmentFailed) and "no such answer" in str(error)
    assert "no_such_package" in refusal("verifiers_v1", env_id="no_such_package")
    assert "nonsense" in refusal("verifiers_v1", env_args={"nonsense": 1}, **args)
    other = settings("verifiers_v1", python="verifiers", **args)
    (said,) = problems(other, "k", True)
    assert "verifiers 0.2.1 is of another" in said or "verifiers.v1" in said


# textworld


def test_a_game_of_textworld_is_won_by_its_own_commands(tmp_path: Path) -> None:
    args = {"env_args": {"games": str(tmp_path / "games"), "rooms": 1}, "max_step_num": 4}
    settings("textworld", **args)
    world = World(
        lambda prompt, n: prompt.split("You may: ")[-1].split(",")[0].split("<")[0],
        tmp_path,
        room=9000,
    )
    ((made,),) = world.run(task("textworld", **args))
    assert made.reward_outcome == "ok" and 0.0 <= made.reward <= 1.0
    assert "You may: " in TOKENIZER.decode(made.tokens.tolist()) and made.metrics["turns"] >= 1
    assert "no game /no/game.z8" in refusal("textworld", env_id="/no/game.z8")


COMMANDS = r"""
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("adapter", sys.argv[1])
adapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(adapter)
made = adapter.TextWorld(games="games")
made.reset({"seed": 1, "raw": {}})
commands = ("look\0", "\0look", "open type Q box", "take Q-key", "look. SAVE", "look. q", "quit")
found = [made.step(words)[3].get("unread", 0) for words in commands]
print(json.dumps([found, [name for name in os.listdir(".") if os.path.isfile(name)]]))
"""


def test_a_command_of_textworld_reaches_its_game_alone(tmp_path: Path) -> None:
    """A zero ended the interpreter's process, with all its games; it saved where it stood. Things
    are named by letters.
    """
    python = settings("textworld").interpreter
    adapter = str(ADAPTERS / "textworld_adapter.py")
    ran = subprocess.run(
        [python, "-c", COMMANDS, adapter],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={"HOME": str(tmp_path)},
        timeout=100,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [[0, 0, 0, 0, 1, 1, 1], []]


# ScienceWorld

GOLD = """
import json, sys
from scienceworld import ScienceWorldEnv
world = ScienceWorldEnv()
world.load("find-living-thing", 4, "easy", True)
print(json.dumps(world.get_gold_action_sequence()))
world.close()
"""


def test_an_experiment_of_scienceworld_is_done_by_its_own_path(tmp_path: Path) -> None:
    """The way that the simulator itself knows, command by command, in the form of the reference."""
    args = {"env_id": "find-living-thing", "max_step_num": 12}
    python = settings("scienceworld", **args).interpreter
    ran = subprocess.run([python, "-c", GOLD], capture_output=True, check=True)
    way = json.loads(ran.stdout)

    def walks(prompt: str, n: int) -> str:
        return f"<think>?</think><action>{way[prompt.count('<|assistant|>') - 1]}</action>"

    described = '{"task_name": "find-living-thing", "var_num": 4, "jar_path": "/their/own.jar"}'
    rows: list[Any] = [{"task_name": "find-living-thing", "var_num": 4}, {}]
    asked = [task("scienceworld", raw=row, **args) for row in rows]
    asked[1].prompt = described
    world = World(walks, tmp_path, room=12000)
    for (made,) in world.run(*asked):
        text = TOKENIZER.decode(made.tokens.tolist())
        assert "focus on the thing" in text and "Commands: activate OBJ" in text
        assert made.metrics["environment/score"] == 100.0 == made.metrics["environment/done"] * 100
        assert made.reward == pytest.approx(0.92), "what it had before the first command is no gain"
    ((lost,),) = World(lambda prompt, n: "well", tmp_path, room=12000).run(
        task("scienceworld", raw={"seed": 1}, **{**args, "max_step_num": 2})
    )
    assert (lost.reward, lost.metrics["environment/unread"]) == (0.0, 1.0)


def test_tasks_of_scienceworld_are_variations_of_a_split() -> None:
    rows = asked_once(settings("scienceworld", env_id="boil"), "--rows", count=3, seed=1)
    assert [(row["task_name"], row["var_num"], row["seed"]) for row in rows] == [
        ("boil", 1, 1),
        ("boil", 2, 2),
        ("boil", 3, 3),
    ]
    assert "Unknown taskName: 'cook'" in refusal("scienceworld", env_id="cook")
    assert "split=exam" in refusal("scienceworld", env_id="boil", env_args={"split": "exam"})


# AgentScope


def test_agentscopes_own_agent_is_judged_by_the_tasks_reward(tmp_path: Path) -> None:
    settings("agentscope")
    world = World(lambda prompt, n: "42", tmp_path)
    world.shared.rewards = Scores()  # type: ignore[assignment]
    ((made,),) = world.run(task("agentscope"))
    assert "6*7=" in TOKENIZER.decode(made.tokens.tolist()) and made.reward == 0.5
    assert "nonsense" in refusal("agentscope", env_args={"type": "nonsense"})
    assert not list(problems(settings("agentscope", env_args={"type": "gsm8k"}), "k", True))


def test_agentscope_leads_a_function_of_yours(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentscope.message import UserMsg\n"
        "async def ask(task, model, reward=0.75):\n"
        "    said = await model([UserMsg(name='user', content=task['prompt'])])\n"
        "    return reward, {'parts': len(said.content)}\n"
    )
    args = {"env_id": f"{file}:ask", "env_args": {"reward": 0.5}}
    settings("agentscope", **args)
    ((made,),) = World(lambda prompt, n: "42", tmp_path).run(task("agentscope", **args))
    assert (made.reward, made.metrics["parts"]) == (0.5, 1.0)
    assert "nonsense" in refusal("agentscope", env_id=f"{file}:ask", env_args={"nonsense": 1})


class Scores:
    """In the place of the reward workers."""

    async def score(self, items: list[tuple[Any, ...]]) -> list[Any]:
        from rft.rollout.reward_worker import RewardResult

        return [RewardResult(reward=0.5)] * len(items)

    async def close(self) -> None: ...
