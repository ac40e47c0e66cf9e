"""Workflows against a context made of values: no engine, no reward process."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.algorithm import credit
from rft.config import ConfigError
from rft.ground.experience import (
    Completion,
    Experience,
    Sampling,
    Task,
    VersionSpan,
    decode,
    encode,
)
from rft.rollout import workflows
from rft.rollout.reward_worker import RewardResult
from rft.rollout.workflows.dialogue import Dialogue
from tests.unit.environment_world import World


class FakeContext:
    """Answers with the given completions; scores a response by its
    last token; remembers what it was asked.
    """

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        self.generated: list[tuple[list[int], int, Sampling]] = []
        self.scored: list[tuple[str, list[str]]] = []
        self.told: list[str] = []
        self.shared = SimpleNamespace(count=lambda name, told: self.told.append(told))

    def render(self, task: Task) -> list[int]:
        return [ord(character) for character in str(task.prompt)]

    async def generate(self, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.generated.append((prompt, n, sampling))
        return self.completions

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    async def score(
        self, task: Task, responses: list[str], tokens: list[int] | None = None
    ) -> list[RewardResult]:
        self.scored.append((task.reward, responses))
        slow = RewardResult(outcome="timeout", message="slow")
        return [
            slow if text == "hang" else RewardResult(reward=len(text), metrics={"l": 1})
            for text in responses
        ]


def completion(text: str, stop: Any = "stop", version: int = 3) -> Completion:
    return Completion(
        tokens=[ord(character) for character in text],
        logprobs=[-0.5 - i for i in range(len(text))],
        versions=[VersionSpan(version=version, start=0, end=len(text))] if text else [],
        stop=stop,
    )


def task(repeat_times: int, workflow: str = "single_turn", reward: str = "exact_match") -> Task:
    return Task(
        id="t/0/7",
        taskset="t",
        row=7,
        prompt="6*7=",
        truth="42",
        workflow=workflow,
        reward=reward,
        repeat_times=repeat_times,
        sampling=Sampling(temperature=0.7),
    )


def run(of: Task, ctx: FakeContext) -> list[Experience]:
    return asyncio.run(workflows.run(of, ctx))


def test_single_turn_keeps_exact_ids_logprobs_versions_and_asks_once() -> None:
    ctx = FakeContext([completion("42", version=5), completion("hang", stop="length")])
    first, second = run(task(2), ctx)
    prompt = [ord(character) for character in "6*7="]
    assert ctx.generated == [(prompt, 2, Sampling(temperature=0.7))]
    assert ctx.scored == [("exact_match", ["42", "hang"])]
    assert first.tokens.tolist() == [*prompt, ord("4"), ord("2")] and first.prompt_length == 4
    assert (list(first.action_mask), list(first.logprobs)) == ([1, 1], [-0.5, -1.5])
    assert first.versions == [VersionSpan(version=5, start=0, end=2)] and first.oldest_version == 5
    assert (first.reward, first.reward_outcome, first.stop, first.metrics) == (
        2,
        "ok",
        "stop",
        {"l": 1},
    )
    assert (first.temperature, first.task, first.sample, second.sample) == (0.7, "t/0/7", 0, 1)
    assert (second.reward, second.reward_outcome, second.stop) == (0, "timeout", "length")
    assert second.info == {"reward_message": "slow"}
    assert decode(encode([first, second]), list[Experience]) == [first, second]


def test_a_greedy_response_has_a_reward_and_no_token_to_train_on() -> None:
    """One, whatever the group's size, by the task's own workflow."""
    ctx = FakeContext([completion("42")])
    (found,) = asyncio.run(workflows.greedy(task(4), ctx))
    assert [(n, sampling) for _, n, sampling in ctx.generated] == [(1, Sampling(temperature=0.0))]
    assert (found.reward, list(found.action_mask), found.info) == (2, [0, 0], {"baseline": True})


def test_a_greedy_answer_was_not_sampled_and_is_not_trained() -> None:
    """It has its reward, and a temperature that the trainer can divide by."""
    of = msgspec.structs.replace(task(2), sampling=Sampling(temperature=0.0))
    first, second = run(of, FakeContext([completion("42"), completion("hang", stop="length")]))
    assert (first.reward, first.temperature, second.temperature) == (2, 1.0, 1.0)
    assert not first.action_mask.any() and len(first.action_mask) == 2
    assert credit.rows(credit.judge([first, second], "grpo", {}), "token-mean") == []

    talk = Dialogue(of, [1, 2], 0)
    talk.say(completion("4"))
    talk.hear([7, 8])
    talk.say(completion("2!"))
    whole = talk.whole()
    assert whole.action_mask.tolist() == [0] * 5 and whole.temperature == 1.0
    assert talk.said == 3, "a length that is scored counts what is not trained, too"


def test_a_temperature_that_no_engine_samples_at_is_refused(tmp_path: Path) -> None:
    """It would be recorded, and another one sampled at."""
    ctx = workflows.WorkflowContext(World(lambda prompt, n: "x", tmp_path).shared, "a", "a")
    with pytest.raises(ValueError, match="temperature=0.005: give 0, or 0.01"):
        asyncio.run(ctx.generate([1], 1, Sampling(temperature=0.005)))


def test_a_prompt_that_is_too_long_is_not_scored() -> None:
    ctx = FakeContext([completion("", stop="prompt_too_long"), completion("42")])
    too_long, answered = run(task(2), ctx)
    assert ctx.scored == [("exact_match", ["42"])]
    assert (too_long.reward_outcome, too_long.stop, too_long.response_length) == (
        "none",
        "prompt_too_long",
        0,
    )
    assert (answered.reward_outcome, answered.reward) == ("ok", 2)


@pytest.mark.parametrize(
    "completions", [[completion("4", stop="abort"), completion("42")], [completion("42")]]
)
def test_part_of_a_group_is_an_error(completions: list[Completion]) -> None:
    with pytest.raises(RuntimeError, match="asked for 2 responses"):
        run(task(2), FakeContext(completions))


@pytest.mark.parametrize(("named", "used"), [("exact_match", "math"), ("accuracy", "accuracy")])
def test_the_math_workflow_scores_with_math_unless_told_otherwise(named: str, used: str) -> None:
    ctx = FakeContext([completion("42")])
    run(task(1, workflow="math", reward=named), ctx)
    assert ctx.scored == [(used, ["42"])]


USER_WORKFLOWS = """
from rft.ground.experience import Experience, VersionSpan
class Mine:
    async def run(self, task, ctx):
        return [Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[-1.0])]
async def function(task, ctx):
    return await Mine().run(task, ctx)
async def empty(task, ctx):
    return []
async def short_mask(task, ctx):
    return [Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[1], logprobs=[-1.0, -1.0])]
async def short_rewards(task, ctx):
    return [Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[1, 1], logprobs=[0.0, 0.0],
                       token_rewards=[1.0])]
async def no_logprobs(task, ctx):
    return [Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[1, 1])]
async def long_span(task, ctx):
    made = await Mine().run(task, ctx)
    made[0].versions = [VersionSpan(version=3, start=0, end=2)]
    return made
def late(task, ctx):
    import asyncio
    return asyncio.sleep(0)
def not_experiences(task, ctx):
    return [1]
def plain(task, ctx):
    assert ctx.score(task, ["42"])[0].reward == 2
    return [Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[-1.0])]
async def not_finite(task, ctx):
    return [Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[float("-inf")])]
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "flows.py"
    file.write_text(USER_WORKFLOWS)
    return file


@pytest.mark.parametrize("name", ["Mine", "function", "plain"])
def test_a_users_class_or_function_is_a_workflow(name: str, user_file: Path) -> None:
    ctx = FakeContext([])
    (made,) = run(task(1, workflow=f"{user_file}:{name}"), ctx)
    assert made.tokens.tolist() == [1, 2] and made.tokens.dtype == np.int32
    assert len(ctx.told) == 1 and "as lists, or of another dtype" in ctx.told[0]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("empty", ValueError, "no experience"),
        ("short_mask", ValueError, "1 entries of action_mask for 2 response tokens"),
        ("short_rewards", ValueError, "1 entries of token_rewards for 2 response tokens"),
        ("no_logprobs", ValueError, "0 entries of logprobs for 2 response tokens"),
        ("long_span", ValueError, "version 3 of tokens 0 to 2, but the response has 1"),
        ("late", TypeError, "returned something to be awaited"),
        ("not_experiences", TypeError, "must return a list of Experience"),
        ("not_finite", ValueError, "logprobs is not finite"),
    ],
)
def test_a_workflow_that_breaks_the_contract_is_refused(
    name: str, error: type[Exception], message: str, user_file: Path
) -> None:
    with pytest.raises(error, match=message):
        run(task(1, workflow=f"{user_file}:{name}"), FakeContext([]))


def test_an_unknown_workflow_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'single_turn'"):
        workflows.resolve("singleturn")


def test_runs_that_say_nothing_are_numbered_by_place_and_numbers_given_are_kept() -> None:
    def made(*places: tuple[int, int]) -> list[Experience]:
        return [
            Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], sample=s, turn=t)
            for s, t in places
        ]

    silent, told = made((0, 0), (0, 0), (0, 0)), made((0, 0), (0, 1), (1, 0))
    workflows.numbered(task(3), silent)
    workflows.numbered(task(2), told)
    assert [(e.sample, e.turn) for e in silent + told] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    with pytest.raises(ValueError, match="two experiences with sample 1 and turn 0"):
        workflows.numbered(task(2), made((0, 0), (1, 0), (1, 0)))
