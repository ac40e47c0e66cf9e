"""Time and retries of one task, on a clock that costs nothing:
what a limit says is what it does (W33).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rft.config import ExplorerConfig, ModelConfig
from rft.config.explorer import DynamicTimeoutConfig, OverRolloutConfig
from rft.ground.experience import Completion, Experience, GenerateRequest, Sampling, Task
from rft.ground.protocols import ActorHandle
from rft.rollout import workflows
from rft.rollout.context import Shared, TokenLimits, WorkflowContext
from rft.rollout.pool import EnginePool
from rft.rollout.runner import CANCEL_S, GroupCancelled, Runner
from tests.unit.virtual_clock import run


class Engine:
    """An actor handle that never answers; notes which requests it was told to drop."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.generate = self.abort = self

    def remote(self, request: Any) -> Any:
        if isinstance(request, bytes):
            self.asked.append("request")
            return asyncio.get_running_loop().create_future()
        self.aborted.append(request)
        return None


def made(reward: float = 1.0) -> list[Experience]:
    return [
        Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0], reward=reward)
    ]


def task(repeats: int = 1, **fields: Any) -> Task:
    return Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="p",
        sampling=Sampling(),
        repeat_times=repeats,
        **fields,
    )


def runner(
    monkeypatch: pytest.MonkeyPatch, behaviour: Callable[..., Any], warmup: int = 1, **config: Any
) -> Runner:
    monkeypatch.setattr(workflows, "run", behaviour)
    settings = ExplorerConfig(**{"max_retry_times": 2, "max_timeout": 900.0, **config})
    return Runner(settings, Shared(settings, ModelConfig(), {"engine_0": None}, None), warmup)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_all_attempts_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gives each of three attempts three times the limit: 8100 s.

    Here it is 900 s, as written.
    """
    begun: list[float] = []

    async def slow(task: Task, context: Any) -> list[Experience]:
        begun.append(now())
        await asyncio.sleep(400)
        raise KeyError("answer")

    async def scenario() -> None:
        runs = runner(monkeypatch, slow)
        with pytest.raises(TimeoutError, match=r"no result in 900 s \(explorer.max_timeout\)"):
            await runs.run(0, task())
        assert (now(), begun) == (900.0, [0.0, 400.0, 800.0])
        assert (
            runs.counts == {"retry_count": 2, "timeout_count": 1, "failed_task_count": 1}
            and not runs.under_way
        )

    run(scenario())


def test_when_time_is_up_the_engine_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    async def asks(task: Task, context: Any) -> list[Experience]:
        await context.generate([1], 1, Sampling())
        raise AssertionError("never answered")

    async def scenario() -> None:
        runs = runner(monkeypatch, asks)
        runs.shared.pool, runs.shared.limits, runs.shared.stop_token = (
            EnginePool({"engine_0": ActorHandle(engine)}),
            TokenLimits(8, 16),
            0,
        )
        with pytest.raises(TimeoutError):
            await runs.run(3, task())
        assert engine.asked == ["request"] and engine.aborted == [f"t/0/0/g3/{runs.life}0/a0/1"]

    run(scenario())


def test_no_two_starts_of_a_task_ask_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As evaluations that overlap do, and an explorer in the place of one whose requests run on."""
    names: list[str] = []

    async def told(task: Task, context: Any) -> list[Experience]:
        names.append(context.request)
        return made()

    async def scenario() -> None:
        first, second = (runner(monkeypatch, told) for _ in range(2))
        await asyncio.gather(first.run(-1, task()), first.run(-1, task()), first.run(4, task()))
        await second.run(4, task())
        assert len(set(names)) == 4, names

    run(scenario())


def test_a_workflow_that_will_not_end_is_left_without_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    async def stubborn(task: Task, context: Any) -> list[Experience]:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)
        try:
            await context.generate([1], 1, Sampling())
        except RuntimeError as error:
            said.append(str(error))
        return made()

    async def scenario() -> None:
        runs = runner(monkeypatch, stubborn)
        runs.shared.limits = TokenLimits(8, 16)
        runs.shared.stop_token = 0
        with pytest.raises(TimeoutError):
            await runs.run(0, task())
        assert now() == 900 + CANCEL_S
        await asyncio.sleep(2000)
        assert said == [f"t/0/0/g0/{runs.life}0/a0 was given up: its time is over"]

    run(scenario())


def test_the_dynamic_limit_follows_the_tasks_that_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lasts = iter([10.0, 30.0, 1000.0, 5000.0])

    async def behaviour(task: Task, context: Any) -> list[Experience]:
        await asyncio.sleep(next(lasts))
        return made()

    async def scenario() -> None:
        runs = runner(
            monkeypatch,
            behaviour,
            warmup=2,
            dynamic_timeout=DynamicTimeoutConfig(enable=True, ratio=3.0),
            max_timeout=2000.0,
        )
        limits = [runs.limit()]
        for group in range(2):
            await runs.run(group, task())
            limits.append(runs.limit())
        # 3 x the mean of 10 and 30, once two have succeeded
        assert limits == [2000.0, 2000.0, 60.0]
        began = now()
        with pytest.raises(TimeoutError, match=r"in 60 s \(explorer.dynamic_timeout\)"):
            await runs.run(2, task())
        assert now() - began == 60.0 and runs.limit() == 60.0  # a failure teaches nothing
        with pytest.raises(TimeoutError, match="in 2000 s"):
            await runs.run(-1, task())  # an evaluation has other tasks, and the whole time
        assert runs.stats()["rollout/task_s"] == 20.0

    run(scenario())


def test_it_is_never_longer_than_max_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def behaviour(task: Task, context: Any) -> list[Experience]:
        await asyncio.sleep(50)
        return made()

    async def scenario() -> None:
        runs = runner(
            monkeypatch,
            behaviour,
            dynamic_timeout=DynamicTimeoutConfig(enable=True, ratio=3.0),
            max_timeout=100.0,
        )
        await runs.run(0, task())
        assert runs.limit() == 100.0

    run(scenario())


def test_a_cut_group_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(task: Task, context: Any) -> list[Experience]:
        await asyncio.Event().wait()
        return made()

    async def scenario() -> None:
        runs = runner(monkeypatch, forever)
        asyncio.get_running_loop().call_later(7, runs.cut, 4)
        with pytest.raises(GroupCancelled, match="over_rollout"):
            await runs.run(4, task())
        assert (
            now() == 7 and runs.counts["cut_task_count"] == 1 and runs.counts["timeout_count"] == 0
        )

    run(scenario())


class PerRun:
    can_repeat = False


async def runs_of(task: Task, context: Any) -> list[Experience]:
    """Run n takes n + 1 seconds; its number is its reward."""
    number = int(context.request.rsplit("/r", 1)[1])
    await asyncio.sleep(number + 1)
    if task.workflow == "second_fails" and number == 1:
        raise KeyError("answer")
    return made(float(number))


@pytest.mark.parametrize(
    ("partial", "name", "cut_at", "found"),
    [
        (False, "mine", 9.0, [0, 1, 2, 3]),  # called once per run, all at the same time
        (True, "single_turn", 9.0, [0, 1, 2, 3]),
        (True, "single_turn", 2.5, [0, 1]),  # those that are finished when its step goes on
        (False, "mine", 2.5, None),
        (True, "second_fails", 9.0, [0, 2, 3]),  # taken, and not tried again
        (False, "second_fails", 9.0, None),
    ],
)
def test_part_of_a_task(
    monkeypatch: pytest.MonkeyPatch,
    partial: bool,
    name: str,
    cut_at: float,
    found: list[int] | None,
) -> None:
    monkeypatch.setitem(workflows.WORKFLOWS, "mine", PerRun)  # type: ignore[arg-type]
    monkeypatch.setitem(workflows.WORKFLOWS, "second_fails", PerRun)  # type: ignore[arg-type]

    async def scenario() -> None:
        over = OverRolloutConfig(ratio=0.5, return_partial_tasks=partial)
        runs = runner(monkeypatch, runs_of, over_rollout=over, max_retry_times=1)
        asyncio.get_running_loop().call_later(cut_at, runs.cut, 5)
        if found is None:
            with pytest.raises((GroupCancelled, KeyError)):
                await runs.run(5, task(4, workflow=name))
            return
        got = await runs.run(5, task(4, workflow=name))
        assert [(e.group, e.sample, e.reward) for e in got] == [(5, n, n) for n in found]
        assert runs.counts["partial_task_count"] == (len(found) < 4)
        assert runs.counts["retry_count"] == 0

    run(scenario())


def test_a_task_whose_baseline_is_not_there_is_not_taken_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is sampled behind the runs, and without it nobody could say what they are worth."""
    monkeypatch.setitem(workflows.WORKFLOWS, "mine", PerRun)  # type: ignore[arg-type]

    async def baseline(task: Task, context: Any) -> list[Experience]:
        await asyncio.sleep(1000)
        raise AssertionError("cut before")

    monkeypatch.setattr(workflows, "greedy", baseline)

    async def scenario() -> None:
        over = OverRolloutConfig(ratio=0.5, return_partial_tasks=True)
        runs = runner(monkeypatch, runs_of, over_rollout=over)
        runs.greedy_baseline = True
        asyncio.get_running_loop().call_later(500.0, runs.cut, 5)
        with pytest.raises(GroupCancelled):
            await runs.run(5, task(4, workflow="mine"))

    run(scenario())


def test_runs_that_are_compared_are_never_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Judge:
        compares_runs = True

    monkeypatch.setitem(workflows.WORKFLOWS, "judge", Judge)  # type: ignore[arg-type]

    async def behaviour(task: Task, context: Any) -> list[Experience]:
        return [one for _ in range(task.repeat_times) for one in made()]

    async def scenario() -> None:
        runs = runner(
            monkeypatch,
            behaviour,
            over_rollout=OverRolloutConfig(ratio=0.5, return_partial_tasks=True),
        )
        assert len(await runs.run(0, task(4, workflow="judge"))) == 4

    run(scenario())


def test_the_report_says_what_every_runner_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(task: Task, context: Any) -> list[Experience]:
        await context._doing("scoring", asyncio.Event().wait())
        return made()

    async def scenario() -> list[str]:
        runs = runner(monkeypatch, forever)
        job = asyncio.create_task(runs.run(0, task()))
        await asyncio.sleep(30)
        found = runs.report()
        job.cancel()
        await asyncio.wait({job})
        assert not runs.under_way
        return found

    first, second = run(scenario())
    assert first.startswith("1 tasks under way; 0 finished_task")
    assert second == "t/0/0: attempt 1, 1 scoring; 30.0 s of at most 900"


class Answers:
    """A pool that answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.asked.append(request)
        return [Completion(tokens=[9], logprobs=[0.0], versions=[], stop="stop")] * request.n


@pytest.mark.parametrize("cuts", [False, True])
def test_a_prompt_that_is_too_long_is_counted_and_cut_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    """D9: it keeps its end, where the question is."""

    class Tokenizer:
        chat_template = None

        def encode(self, text: str) -> list[int]:
            return list(range(len(text)))

    async def scenario() -> None:
        shared = Shared(
            ExplorerConfig(), ModelConfig(enable_prompt_truncation=cuts), {"engine_0": None}, None
        )
        shared.tokenizer, shared.limits, shared.stop_token, shared.pool = (
            Tokenizer(),
            TokenLimits(4, 16),
            0,
            Answers(),
        )  # type: ignore[assignment]
        runs = Runner(ExplorerConfig(), shared)
        context = WorkflowContext(shared, "r", "s")
        prompt = context.render(
            Task(id="t", taskset="t", row=0, prompt="0123456789", sampling=Sampling())
        )
        (answer,) = await context.generate(prompt, 1, Sampling())
        stats = runs.stats()
        if cuts:
            assert (prompt, answer.stop) == ([6, 7, 8, 9], "stop")
        else:
            assert (len(prompt), answer.stop, shared.pool.asked) == (10, "prompt_too_long", [])  # type: ignore[attr-defined]
        assert (stats["rollout/prompts_cut"], stats["rollout/prompts_too_long"]) == (
            (1, 0) if cuts else (0, 1)
        )

    run(scenario())
