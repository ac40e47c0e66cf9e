"""The experience pipeline with its real worker process, between a real explorer and the real,
durable buffer.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import (
    DataJuicerConfig,
    ExperienceBufferConfig,
    ExperiencePipelineConfig,
    OperatorConfig,
)
from rft.extras.pipeline.experiences import ExperiencePipeline
from rft.extras.pipeline.output import recorded_groups
from rft.extras.pipeline.worker_process import OperatorFailed
from rft.ground.experience import Batch, Experience, Sampling, Task
from rft.ground.protocols import ActorHandle
from rft.rollout.runner import AllTasksFail
from tests.unit.test_explorer import Remote, explorer
from tests.unit.test_explorer import Tasks as ListedTasks

ODD = Path(__file__).with_name("odd_operators.py")


def own(name: str, **args: Any) -> OperatorConfig:
    return OperatorConfig(name=f"{ODD}:{name}", args=args)


def pipeline(directory: Path, *operators: OperatorConfig, **settings: Any) -> ExperiencePipeline:
    config = ExperiencePipelineConfig(operators=list(operators), **settings)
    return ExperiencePipeline(config, DataJuicerConfig(), directory, batch_size=2)


def group(number: int, *rewards: float) -> list[Experience]:
    return [
        Experience(
            tokens=[number, i, 9],
            prompt_length=1,
            action_mask=[1, 1],
            logprobs=[-0.5, -0.25],
            reward=r,
            group=number,
        )
        for i, r in enumerate(rewards)
    ]


def task(number: int = 0) -> Task:
    return Task(
        id=f"tasks/0/{number}",
        taskset="tasks",
        row=number,
        prompt=f"prompt {number}",
        sampling=Sampling(),
    )


def is_dead(pid: int) -> bool:
    """Gone, or not yet collected by whoever has inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_operators_change_a_group_in_order_and_remember(tmp_path: Path) -> None:
    async def scenario() -> list[list[Experience]]:
        made = pipeline(
            tmp_path,
            own("Doubles"),
            own("Doubles", factor=5.0),
            OperatorConfig(name="reward_filter", args={"threshold": 10}),
        )
        await made.start(words)
        try:
            found = [
                (await made.process(n, task(n), group(n, 0.5, 2.0))).experiences for n in range(2)
            ]
            told = made.pop_metrics()
            assert (
                told["experience_pipeline/stored_groups_count"] == 2
                and told["experience_pipeline/filtered_count"] == 2
            )
            assert (
                told["experience_pipeline/experience_count"] == 2
                and told["experience_pipeline/input_experience_count"] == 4
            )
            assert (
                "experience_pipeline/time/operator/2_reward_filter" in told
                and not made.pop_metrics()
            )
            return found
        finally:
            await made.close()

    first, second = asyncio.run(scenario())
    assert (
        [one.reward for one in first] == [20.0]
        and first[0].tokens.tolist() == [0, 1, 9]
        and first[0].logprobs.tolist() == [-0.5, -0.25]
    )
    assert first[0].info == {"seen": 1, "said": "1 9"}, (
        "its texts are there for operators, and not stored"
    )
    assert second[0].info["seen"] == 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "KeyError: 'answer'"),
        ("exits", "SystemExit: 3"),
        ("dies", "its process exited with code 9"),
        ("hangs", "ran longer than 2 s and was killed"),
        ("no_tuple", "must return (a list, a dict of metrics)"),
        ("no_items", "1 among its items, which is no Experience"),
        ("no_metrics", "3 as its metrics, which is no dict"),
        ("other_tokens", "tokens that no engine sampled"),
        ("short_mask", "0 entries of action_mask for 2 response tokens"),
        ("no_number", "reward is not finite"),
    ],
)
def test_an_operator_that_misbehaves_costs_its_group_and_is_named(
    tmp_path: Path, what: str, said: str
) -> None:
    async def scenario() -> None:
        timeout = 2.0 if what == "hangs" else 60.0
        made = pipeline(
            tmp_path, own("Does", what=what, mark=str(tmp_path / "pid")), timeout=timeout
        )
        await made.start(words)
        try:
            with pytest.raises(OperatorFailed) as failed:
                await made.process(1, task(1), group(1, 1.0))
            assert said in str(failed.value) and "\n" not in str(failed.value), failed.value
            assert "odd_operators.py:Does" in failed.value.operator
            assert (await made.process(2, task(2), group(2, 1.0))).experiences[
                0
            ].tokens.tolist() == [
                2,
                0,
                9,
            ], "the next one is served"
            assert made.pop_metrics()["experience_pipeline/failed_groups_count"] == 1
        finally:
            await made.close()

    asyncio.run(scenario())
    if what == "hangs":
        assert is_dead(int((tmp_path / "pid").read_text())), "nor is anything left that it started"


def test_prepare_and_close_are_called_and_a_bad_start_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = pipeline(tmp_path, own("Lives", path=str(tmp_path / "life")))
        await made.start(words)
        assert (tmp_path / "life").read_text() == "prepared"
        await made.close()
        assert (tmp_path / "life").read_text() == "closed"
        broken = pipeline(tmp_path, own("Lives", path=str(tmp_path / "no" / "where")))
        with pytest.raises(OperatorFailed, match="Lives: FileNotFoundError"):
            await broken.start(words)

    asyncio.run(scenario())
    alive = (
        one
        for one in psutil.Process().children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE
    )
    assert not any("rft.extras.pipeline.worker" in " ".join(child.cmdline()) for child in alive)


def test_what_came_in_can_be_read_back_and_gives_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "in" / "groups.jsonl"

    async def run(groups: list[list[Experience]], **settings: Any) -> list[list[Experience]]:
        made = pipeline(
            tmp_path, own("Doubles"), OperatorConfig(name="dapo_dynamic_sampling"), **settings
        )
        await made.start(words)
        try:
            return [
                (await made.process(one[0].group, task(one[0].group), one)).experiences
                for one in groups
            ]
        finally:
            await made.close()

    groups = [group(0, 0.0, 1.0), group(1, 1.0, 1.0)]
    first = asyncio.run(run(groups, save_input=True, input_save_path=str(path)))
    assert len(first[0]) == 2 and first[1] == []
    with path.open("ab") as file:
        file.write(b'{"group": 5, "prom')  # the process was killed in the middle of a line
    asyncio.run(run([group(0, 0.0, 3.0)], save_input=True, input_save_path=str(path)))
    found = list(recorded_groups(path))
    assert [(one.group, one.prompt) for one in found] == [(1, "prompt 1"), (0, "prompt 0")], (
        "the last line of a group counts"
    )
    assert found[0].experiences == groups[1], "as it was before any operator"
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert asyncio.run(run([one.experiences for one in found]))[0] == []
    for place, why in (("/dev/full", "No space left"), (str(tmp_path), "IsADirectoryError")):
        with pytest.raises(OperatorFailed, match=f"operator save_input: .*{why}"):
            asyncio.run(run(groups, save_input=True, input_save_path=place))


class Endless(ListedTasks):
    """Tasks without end; a cursor that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    @property
    def cursor(self) -> dict[str, Any]:  # type: ignore[override]
        return {"at": self.at}

    def seek(self, cursor: dict[str, Any]) -> None:
        self.at = cursor["at"]

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield task(self.at - 1)


class Called:
    """A buffer called as Ray calls an actor."""

    def __init__(self, buffer: ExperienceBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return Remote(getattr(self._buffer, name))


STEPS, TASKS = 4, 3


def exploring(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Any,
    *operators: OperatorConfig,
    **settings: Any,
) -> tuple[Any, ExperienceBuffer]:
    """An explorer with a pipeline over endless tasks, in front of a
    buffer for STEPS steps of TASKS groups.
    """
    buffer = ExperienceBuffer(
        ExperienceBufferConfig(max_read_timeout=60.0),
        str(directory / "journal"),
        TASKS,
        2,
        0,
        STEPS,
    )
    actor = explorer(behaviour, monkeypatch)
    actor.taskset, actor.buffer = Endless(), ActorHandle(Called(buffer))
    actor.pipeline = pipeline(directory, *operators, **settings)
    return actor, buffer


async def train(actor: Any, buffer: ExperienceBuffer) -> tuple[list[Batch], dict[str, Any]]:
    """What a trainer of the whole run takes, and the buffer's numbers at the end."""
    await actor.pipeline.start(words)
    broken = asyncio.ensure_future(actor.watch())
    await buffer.attach_trainer(0, 0)
    await actor.explore()

    async def steps() -> list[Batch]:
        batches = []
        for step in range(STEPS):
            batches.append(opened(await buffer.take(step)))
            await buffer.consumed(step)
            await buffer.published(step + 1)
        await actor.finished()
        return batches

    taken = asyncio.ensure_future(steps())
    try:
        async with asyncio.timeout(120):
            await asyncio.wait([taken, broken], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            await broken
        return await taken, buffer.stats()
    finally:
        taken.cancel()
        await actor.shutdown()
        broken.cancel()
        await buffer.shutdown()


def test_dropped_groups_are_replaced_and_every_step_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three groups have equal rewards: max_staleness=0 leaves no slot to spare, and each
    step gets its TASKS groups.
    """

    async def scenario() -> tuple[list[Batch], dict[str, Any], dict[str, float]]:
        actor, buffer = exploring(
            tmp_path,
            monkeypatch,
            lambda t: group(t.row, 1.0, float(t.row % 3 > 0)),
            OperatorConfig(name="dapo_dynamic_sampling"),
        )
        return *await train(actor, buffer), actor.pipeline.pop_metrics()

    batches, stats, told = asyncio.run(scenario())
    for batch in batches:
        groups = {one.group for one in batch.experiences}
        assert len(groups) == TASKS and len(batch.experiences) == 2 * TASKS
        assert all(one.tokens[0] % 3 == 0 for one in batch.experiences), "whose rewards differ"
    assert (
        stats["stored"] == STEPS * TASKS
        and stats["incomplete_batches"] == 0
        and stats["over_stale_groups"] == 0
    )
    assert (
        stats["failed"]
        == told["experience_pipeline/dropped_groups_count"]
        >= 2 * (STEPS * TASKS - 1)
    )


def test_a_run_of_which_nothing_is_left_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(name: str, operator: OperatorConfig, **settings: Any) -> None:
        await train(
            *exploring(
                tmp_path / name, monkeypatch, lambda t: group(1, 1.0, 1.0), operator, **settings
            )
        )

    with pytest.raises(
        AllTasksFail, match="12 groups in a row were dropped, the last by dapo_dynamic_sampling"
    ):
        asyncio.run(
            scenario("drops", OperatorConfig(name="dapo_dynamic_sampling"), max_dropped_groups=12)
        )
    with pytest.raises(
        AllTasksFail, match=r"8 tasks in a row failed, the last with .*Does: KeyError"
    ):
        asyncio.run(scenario("fails", own("Does", what="raises", always=True)))


def test_sampling_goes_on_beside_a_slow_pipeline_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runner, and a pipeline that never answers: further groups
    are sampled until as many wait as may.
    """
    sampled: list[int] = []

    class Stuck:
        room = asyncio.Semaphore(3)

        async def process(self, *_: Any) -> Any:
            await asyncio.Event().wait()

        def pop_metrics(self) -> dict[str, float]:
            return {}

        async def close(self) -> None: ...

    def behaviour(one: Task) -> list[Experience]:
        sampled.append(one.row)
        return group(one.row, 1.0)

    async def scenario() -> None:
        actor = explorer(behaviour, monkeypatch, runner_per_model=1)
        actor.taskset, actor.pipeline = Endless(), Stuck()
        await actor.explore()
        async with asyncio.timeout(10):
            while len(sampled) < 4:
                await asyncio.sleep(0)
        for _ in range(50):  # turns of the loop, in which nothing may happen
            await asyncio.sleep(0)
        assert sampled == [0, 1, 2, 3], "three wait in the pipeline, one holds the runner"
        await actor.shutdown()
        assert not actor.buffer.actor.stored, "none counts before it came out"

    asyncio.run(scenario())


def test_a_group_that_was_in_the_pipeline_at_a_crash_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer dies while group 1 is in the worker: the next attempt begins with it, and all
    steps are there, once each.
    """
    mark = tmp_path / "pid"

    async def crash() -> None:
        actor, buffer = exploring(
            tmp_path,
            monkeypatch,
            lambda t: group(t.row, 0.0, 1.0),
            own("Does", what="hangs", mark=str(mark)),
        )
        await actor.pipeline.start(words)
        await buffer.attach_trainer(0, 0)
        await actor.explore()
        async with asyncio.timeout(60):
            while not mark.exists():
                await asyncio.sleep(0.01)
        await actor.shutdown()
        await buffer.shutdown()

    async def resume() -> tuple[list[Batch], int]:
        actor, buffer = exploring(
            tmp_path, monkeypatch, lambda t: group(t.row, 0.0, 1.0), own("Doubles")
        )
        unfinished = len((await buffer.attach_explorer(actor.config.name))["reissue"])
        return (await train(actor, buffer))[0], unfinished

    asyncio.run(crash())
    batches, unfinished = asyncio.run(resume())
    assert unfinished >= 1
    seen = [one.tokens[0] for batch in batches for one in batch.experiences]
    assert len(seen) == len(set(seen)) * 2 == STEPS * TASKS * 2 and 1 in seen


@pytest.mark.parametrize(
    ("operator", "rewards", "left"),
    [
        (OperatorConfig(name="reward_filter", args={"threshold": 1.0}), (2.0, 0.5, 0.0), 1),
        (OperatorConfig(name="reward_filter", args={"threshold": 1.0}), (0.5, 0.5, 2.0), 0),
        (OperatorConfig(name="length_filter", args={"min_tokens": 2}), (2.0, 0.5, 0.0), 2),
    ],
)
def test_a_greedy_response_goes_where_those_go_that_are_compared_with_it(
    tmp_path: Path, operator: OperatorConfig, rewards: tuple[float, ...], left: int
) -> None:
    """A trainer of `remax` has nothing to learn from samples without one, or from one alone."""

    async def scenario() -> list[Experience]:
        made = pipeline(tmp_path, operator)
        await made.start(words)
        try:
            *samples, greedy = group(0, *rewards)
            short = Experience(tokens=[0, 9], prompt_length=1, action_mask=[1], logprobs=[-0.5])
            greedy = short if left == 2 else greedy
            greedy.info = {"baseline": True}
            return (await made.process(0, task(), [*samples, greedy])).experiences
        finally:
            await made.close()

    kept = asyncio.run(scenario())
    assert [e.reward for e in kept if "baseline" not in e.info] == [*rewards[:left]]
    assert sum("baseline" in e.info for e in kept) == (left > 0)
