"""Which groups a replay buffer gives out, how long it keeps them,
and that a resume gives out the same.
"""

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.progress import Group
from rft.buffer.selection import PRIORITIES, Replay
from rft.config import ExperienceBufferConfig
from rft.config.buffer import ReplayBufferConfig
from rft.ground.experience import Experience, VersionSpan, encode

LIMITED = "linear_decay_use_count_control_randomization"


def group(number: int, version: int, uses: int = 0, leased_at: float = 0.0) -> Group:
    return Group(
        number,
        "e",
        b"",
        None,
        0,
        stored=True,
        model_version=version,
        uses=uses,
        leased_at=leased_at,
    )


def rows(version: int) -> bytes:
    span = VersionSpan(version=version, start=0, end=1)
    return encode(
        [Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], reward=1.0, versions=[span])]
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(directory: Path, clock: Clock, seed: int = 0, **replay: object) -> ExperienceBuffer:
    settings = ReplayBufferConfig(enable=True, **replay)  # type: ignore[arg-type]
    config = ExperienceBufferConfig(max_read_timeout=0.3, replay_buffer=settings)
    return ExperienceBuffer(
        config, str(directory), 2, 1, None, None, seed=seed, segment_bytes=400, clock=clock
    )


async def store(buffer: ExperienceBuffer, *versions: int) -> None:
    for version in versions:
        number = await buffer.admit("e", b"t", {})
        assert number is not None
        await buffer.put(number, rows(version))


async def taken(buffer: ExperienceBuffer, step: int) -> list[tuple[int, int]]:
    return [(e.group, e.info["use_count"]) for e in opened(await buffer.take(step)).experiences]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_the_priorities_are_those_of_the_documented_formulas() -> None:
    decay = PRIORITIES["linear_decay"](decay=1.5)
    assert decay.priority(7, 3, "s") == 7 - 1.5 * 3 and decay.stays(10**6)
    assert PRIORITIES["linear_decay"]().priority(7, 3, "s") == 7 - 2.0 * 3
    limited = PRIORITIES[LIMITED]()
    assert limited.priority(7, 3, "s") == 1.0, "sigma is 0 unless it is given"
    assert [limited.stays(uses) for uses in (0, 2, 3)] == [True, True, False]
    assert PRIORITIES[LIMITED](use_count_limit=0).stays(10**6)
    noisy = PRIORITIES["decay_limit_randomization"](sigma=0.5)
    drawn = [noisy.priority(7, 3, f"{seed}") - 1.0 for seed in range(4000)]
    assert abs(statistics.mean(drawn)) < 0.03 and abs(statistics.stdev(drawn) - 0.5) < 0.03
    assert drawn == [noisy.priority(7, 3, f"{seed}") - 1.0 for seed in range(4000)]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_by_priority_then_age_and_a_full_buffer_drops_the_lowest(seed: int) -> None:
    draw = random.Random(seed)
    replay = Replay(ReplayBufferConfig(reuse_cooldown_time=10.0, capacity=8), 0)
    groups = [
        group(n, draw.randrange(4), draw.randrange(3), draw.uniform(0, 20))
        for n in range(draw.randrange(1, 20))
    ]
    order = replay.order(groups, 15.0)
    assert {g.number for g in order} == {
        g.number for g in groups if g.uses == 0 or not 5.0 < g.leased_at <= 15.0
    }
    keys = [(-replay.priority(g), g.number) for g in order]
    assert keys == sorted(keys)
    gone = replay.surplus(groups)
    kept = [g for g in groups if g not in gone]
    assert len(kept) == min(8, len(groups))
    for one in gone:
        assert all(
            (replay.priority(one), one.number) < (replay.priority(g), g.number) for g in kept
        )


@pytest.mark.parametrize(
    ("jump", "free"), [(0.0, [3]), (9.0, [3]), (10.0, [1, 3]), (3600.0, [1, 3]), (-3600.0, [1, 3])]
)
def test_a_clock_that_is_set_back_keeps_no_group_for_an_hour(jump: float, free: list[int]) -> None:
    replay = Replay(ReplayBufferConfig(reuse_cooldown_time=10.0, capacity=8), 0)
    groups = [group(1, 1, uses=1, leased_at=5000.0), group(3, 1)]
    assert sorted(one.number for one in replay.order(groups, 5000.0 + jump)) == free
    assert replay.wake(groups, 5000.0 + jump) == (None if 1 in free else 10.0 - jump)


def test_groups_come_again_after_their_cooldown_until_the_limit_and_the_newest_first(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        clock = Clock()
        buffer = make(
            tmp_path,
            clock,
            reuse_cooldown_time=60.0,
            priority_fn=LIMITED,
            priority_fn_args={"use_count_limit": 2},
        )
        await buffer.attach_trainer(0, 1)
        await store(buffer, 0, 5, 1)
        assert await taken(buffer, 0) == [(1, 1), (2, 1)], "versions 5 and 1 before 0"
        await store(buffer, 0)
        assert await taken(buffer, 1) == [(0, 1), (3, 1)], "1 and 2 cool down"
        with pytest.raises(TimeoutError):
            await buffer.take(2)
        clock.now += 60.0
        assert await taken(buffer, 2) == [(1, 2), (2, 2)], "5 - 2 and 1 - 2"
        assert await taken(buffer, 3) == [(0, 2), (3, 2)]
        clock.now += 600.0
        with pytest.raises(TimeoutError):
            await buffer.take(4)
        assert buffer.stats()["kept_groups"] == 0

    run(test)


def test_a_take_that_waits_wakes_when_a_group_has_cooled_down(tmp_path: Path) -> None:
    async def test() -> None:
        config = ExperienceBufferConfig(
            replay_buffer=ReplayBufferConfig(enable=True, reuse_cooldown_time=0.05)
        )
        buffer = ExperienceBuffer(config, str(tmp_path), 2, 1, None, None)
        await buffer.attach_trainer(0, 1)
        await store(buffer, 0, 0)
        for step in range(3):
            assert await taken(buffer, step) == [(0, step + 1), (1, step + 1)]
        await store(buffer, 9)
        await buffer.input_done()
        assert (2, 1) in await taken(buffer, 3)
        assert await taken(buffer, 4) == [], "reuse does not make a run longer than its input"

    run(test)


def test_a_resume_replays_the_same_batches_and_decides_on_as_before(tmp_path: Path) -> None:
    """Two histories: one in one go, one that is cut by a restart
    and a compaction after every step.
    """
    noisy = {
        "reuse_cooldown_time": 1.0,
        "priority_fn": LIMITED,
        "priority_fn_args": {"sigma": 3.0, "use_count_limit": 3},
    }

    async def history(
        directory: Path, restarts: bool, seed: int = 5
    ) -> list[list[tuple[int, int]]]:
        clock, found = Clock(), []
        buffer = make(directory, clock, seed, **noisy)
        await buffer.attach_trainer(0, 1)
        for step in range(12):
            await store(buffer, step, step)
            found.append(await taken(buffer, step))
            clock.now += 1.0
            if restarts:
                await buffer.shutdown()
                buffer = make(directory, clock, seed, **noisy)
                resumed = max(0, step - 2)
                await buffer.attach_trainer(resumed, step + 2)
                for again in range(resumed, step + 1):
                    assert await taken(buffer, again) == found[again]
                    await buffer.consumed(again)
                await buffer.retain(await buffer.position(), resumed)
            else:
                await buffer.consumed(step)
        await buffer.shutdown()
        return found

    async def test() -> None:
        straight = await history(tmp_path / "a", restarts=False)
        assert await history(tmp_path / "b", restarts=True) == straight
        assert await history(tmp_path / "c", restarts=False, seed=6) != straight
        assert any(uses > 1 for batch in straight for _, uses in batch)
        assert list((tmp_path / "b").glob("*.base")), "and the journal was cut"

    run(test)


def test_a_full_buffer_evicts_and_an_old_version_is_dropped_when_read(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path, Clock(), reuse_cooldown_time=0.0, capacity=3)
        await buffer.attach_trainer(0, 1)
        await store(buffer, 4, 4, 4, 1)
        assert buffer.stats()["evicted"] == 1 and buffer.stats()["ready_groups"] == 3, (
            "the new one is the lowest"
        )
        await store(buffer, 6)
        assert [e.group for e in opened(await buffer.take(0)).experiences] == [4, 1], (
            "of the lowest level the oldest went"
        )
        batch = opened(await buffer.take(1, min_model_version=5))
        assert [(e.group, e.info["use_count"]) for e in batch.experiences] == [(4, 2)], (
            "after max_read_timeout, what there is"
        )
        assert buffer.stats()["evicted"] == 4

    run(test)


def test_without_a_replay_buffer_old_groups_are_dropped_too_and_nothing_is_said_of_uses(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        buffer = ExperienceBuffer(ExperienceBufferConfig(), str(tmp_path), 2, 1, None, None)
        await buffer.attach_trainer(0, 1)
        await store(buffer, 0, 3, 1, 3)
        batch = opened(await buffer.take(0, min_model_version=2))
        assert [(e.group, e.info) for e in batch.experiences] == [(1, {}), (3, {})]
        assert buffer.stats()["evicted"] == 2

    run(test)
