"""Steps that go on without their slowest groups, through the real buffer and explorer, on a clock
that costs nothing.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.progress import StepSize
from rft.buffer.selection import OverRollout
from rft.config import ExperienceBufferConfig, ExplorerConfig, ModelConfig
from rft.config.explorer import OverRolloutConfig
from rft.ground.experience import Experience, Sampling, Task, encode
from rft.ground.protocols import ActorHandle
from rft.rollout import workflows
from rft.rollout.explorer import Explorer
from tests.unit.virtual_clock import run

STEPS, TASKS = 4, 4


@pytest.mark.parametrize(
    ("ratio", "size", "minimum"), [(0.25, 4, 3), (0.1, 4, 4), (0.3, 10, 7), (0.99, 4, 1)]
)
def test_the_minimum_is_rounded_up(ratio: float, size: int, minimum: int) -> None:
    assert OverRollout(OverRolloutConfig(ratio=ratio), StepSize(size)).minimum == minimum


class Actor:
    """The buffer as a Ray actor of it would answer: nobody has to wait for what it answers."""

    def __init__(self, target: Any):
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)

        def remote(_: Any, *given: Any) -> Any:
            answer = asyncio.ensure_future(method(*given))
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            return answer

        return type("Method", (), {"remote": remote})()


class Tasks:
    """Endless tasks."""

    name, learns = "t", False

    def __init__(self) -> None:
        self.cursor = {"epoch": 0, "index": 0}

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Task:
        row = self.cursor["index"]
        self.cursor = {"epoch": 0, "index": row + 1}
        return Task(
            id=f"t/0/{row}", taskset="t", row=row, prompt="p", sampling=Sampling(), repeat_times=2
        )

    def seek(self, cursor: dict[str, int]) -> None:
        self.cursor = dict(cursor)


def buffer_in(directory: Path, over: OverRolloutConfig, staleness: int = 1) -> ExperienceBuffer:
    config = ExperienceBufferConfig(max_read_timeout=5000.0)
    return ExperienceBuffer(config, str(directory), TASKS, 2, staleness, STEPS, over_rollout=over)


async def slow_second(task: Task, context: Any) -> list[Experience]:
    """Every fourth task, from the second on, takes an hour (its second run, where runs are apart);
    the others take a second.
    """
    is_slow = task.row % 4 == 1 and (task.repeat_times > 1 or context.request.endswith("/r1"))
    await asyncio.sleep(3600 if is_slow else 1 + task.row / 100)
    return [one_token() for _ in range(task.repeat_times)]


def one_token() -> Experience:
    return Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0])


def explorer(buffer: ExperienceBuffer, over: OverRolloutConfig, name: str = "explorer") -> Explorer:
    settings = ExplorerConfig(name=name, over_rollout=over, max_timeout=9000.0, runner_per_model=64)
    made = Explorer(
        settings, ModelConfig(), Tasks(), [], {"engine_0": None}, ActorHandle(Actor(buffer)), TASKS
    )
    made.prepared.set()
    return made


async def train(buffer: ExperienceBuffer, first: int, last: int) -> list[list[tuple[int, int]]]:
    """(group, sample) of every experience of each step, and what the
    clock says when the step has its batch.
    """
    found = []
    for step in range(first, last):
        batch = opened(await buffer.take(step))
        found.append([(e.group, e.sample) for e in batch.experiences])
        await buffer.consumed(step)
        await buffer.published(step + 1)
    return found


def groups(batch: list[tuple[int, int]]) -> list[int]:
    return sorted({group for group, _ in batch})


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_while_a_step_waits_for_its_slowest_all_tasks_run_that_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    begun: dict[int, float] = {}

    async def noted(task: Task, context: Any) -> list[Experience]:
        begun[task.row] = asyncio.get_running_loop().time()
        return await slow_second(task, context)

    monkeypatch.setattr(workflows, "run", noted)
    may = (staleness + 1) * TASKS

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, OverRolloutConfig(), staleness)
        await buffer.attach_trainer(0, 0)
        exploring = explorer(buffer, OverRolloutConfig())
        exploring.runners.each = exploring.runners.size = TASKS  # the slow ones keep theirs
        await exploring.explore()
        taking = asyncio.ensure_future(buffer.take(0))
        await asyncio.sleep(60)
        assert sorted(begun) == list(range(may)) and max(begun.values()) < 10
        assert len(exploring.groups) == staleness + 1
        assert not taking.done()
        await taking  # an hour later
        assert asyncio.get_running_loop().time() < 3700 and len(begun) == may
        await exploring.shutdown()
        await buffer.shutdown()

    run(scenario())


def test_a_step_waits_for_its_minimum_then_so_long_and_cuts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "run", slow_second)
    over = OverRolloutConfig(ratio=0.25, wait_after_min=30.0)

    async def scenario() -> tuple[list[Any], list[Any]]:
        buffer = buffer_in(tmp_path, over)
        await buffer.attach_trainer(0, 0)
        exploring = explorer(buffer, over)
        await exploring.explore()
        first = await train(buffer, 0, 1)
        assert groups(first[0]) == [0, 2, 3] and 31 < asyncio.get_running_loop().time() < 32
        rest = await train(buffer, 1, STEPS)
        stats = buffer.stats()
        assert (
            stats["cut_groups"]
            == stats["failed"]
            == exploring.runner.counts["cut_task_count"]
            >= STEPS - 1
        )
        assert stats["over_stale_groups"] == 0 and exploring.failures == 0
        assert asyncio.get_running_loop().time() < 200
        await exploring.shutdown()
        await buffer.shutdown()

        # killed at the end: a trainer that resumes gets the same batches
        again = buffer_in(tmp_path, over)
        await again.attach_trainer(0, 1)
        replayed = await train(again, 0, STEPS)
        await again.shutdown()
        return first + rest, replayed

    found, replayed = run(scenario())
    assert found == replayed
    assert all(len(groups(batch)) >= 3 for batch in found)
    assert len({group for batch in found for group in groups(batch)}) == sum(
        len(groups(batch)) for batch in found
    )


def test_finished_runs_of_a_cut_task_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "run", slow_second)
    over = OverRolloutConfig(ratio=0.25, wait_after_min=30.0, return_partial_tasks=True)

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, over)
        await buffer.attach_trainer(0, 0)
        exploring = explorer(buffer, over)
        await exploring.explore()
        (batch,) = await train(buffer, 0, 1)
        assert batch == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
        assert buffer.stats()["short_groups"] == 1 and buffer.stats()["failed"] == 0
        assert exploring.runner.stats()["rollout/partial_task_count"] == 1
        await exploring.shutdown()
        await buffer.shutdown()

    run(scenario())


def test_nothing_is_cut_of_a_step_that_is_soon_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def quick(task: Task, context: Any) -> list[Experience]:
        await asyncio.sleep(1 + 10 * (task.row % 4))
        return [one_token()]

    monkeypatch.setattr(workflows, "run", quick)
    over = OverRolloutConfig(ratio=0.5, wait_after_min=30.0)

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, over)
        await buffer.attach_trainer(0, 0)
        exploring = explorer(buffer, over)
        await exploring.explore()
        assert [groups(batch) for batch in await train(buffer, 0, 2)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
        assert buffer.stats()["cut_groups"] == 0
        await exploring.shutdown()
        await buffer.shutdown()

    run(scenario())


def test_two_explorers_share_a_buffer_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group is of one of them, every step is filled, and each hears of its own cuts only."""
    monkeypatch.setattr(workflows, "run", slow_second)
    over = OverRolloutConfig(ratio=0.5, wait_after_min=30.0)

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, over)
        await buffer.attach_trainer(0, 0)
        both = [explorer(buffer, over, name) for name in ("east", "west")]
        for one in both:
            await one.explore()
        found = await train(buffer, 0, STEPS)
        taken = [group for batch in found for group in groups(batch)]
        assert len(taken) == len(set(taken)) and all(len(groups(batch)) >= 2 for batch in found)
        assert all(one.runner.counts["finished_task_count"] for one in both)
        assert (
            sum(one.runner.counts["cut_task_count"] for one in both)
            == buffer.stats()["cut_groups"]
            > 0
        )
        for one in both:
            await one.shutdown()
        await buffer.shutdown()

    run(scenario())


async def begun_and_stored(buffer: ExperienceBuffer, but_for: int) -> None:
    """By a process that is explorer `explorer`: a step's groups, of which one has no end."""
    tasks = Tasks()
    asked = [(encode(next(tasks)), tasks.cursor) for _ in range(TASKS)]
    assert await buffer.admit_some("explorer", asked) == list(range(TASKS))
    for group in set(range(TASKS)) - {but_for}:
        await buffer.put(group, encode([one_token()]))


def test_a_dead_explorers_call_hears_of_no_cuts(tmp_path: Path) -> None:
    """Ray lets it go on: what it heard, nobody would do."""

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, OverRolloutConfig(ratio=0.25, wait_after_min=30.0))
        await buffer.attach_trainer(0, 0)
        calls = []
        for _ in ("dead", "alive"):
            await buffer.attach_explorer("explorer")
            calls.append(asyncio.create_task(buffer.cuts("explorer")))
            await asyncio.sleep(1.0)
        await begun_and_stored(buffer, but_for=1)
        taking = asyncio.create_task(train(buffer, 0, 1))
        assert await calls[1] == [1] and await calls[0] == []
        await buffer.abandon(1, "cut")
        assert [groups(batch) for batch in await taking] == [[0, 2, 3]]
        assert asyncio.get_running_loop().time() < 100
        await buffer.shutdown()

    run(scenario())


def test_what_an_explorer_heard_and_did_not_live_to_do_the_next_one_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "run", slow_second)
    over = OverRolloutConfig(ratio=0.25, wait_after_min=30.0)

    async def scenario() -> None:
        buffer = buffer_in(tmp_path, over)
        await buffer.attach_trainer(0, 0)
        await buffer.attach_explorer("explorer")
        await begun_and_stored(buffer, but_for=1)
        taking = asyncio.create_task(train(buffer, 0, 1))
        assert await buffer.cuts("explorer") == [1]
        exploring = explorer(buffer, over)
        await exploring.explore()
        assert [groups(batch) for batch in await taking] == [[0, 2, 3]]
        assert asyncio.get_running_loop().time() < 100
        assert buffer.stats()["cut_groups"] == buffer.stats()["failed"] == 1
        await exploring.shutdown()
        await buffer.shutdown()

    run(scenario())
