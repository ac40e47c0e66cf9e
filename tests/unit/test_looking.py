"""What a step will take is seen before it is taken, and decided only then."""

import asyncio
import operator
import weakref
from pathlib import Path
from typing import Any

import pytest

from rft.algorithm import credit
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import AlgorithmConfig, ExperienceBufferConfig
from rft.data.packing import Cost, Packed, Stacked
from rft.data.stateless import StatelessSource
from rft.ground.experience import Batch, Experience, encode
from rft.trainer import feed as feeds
from rft.trainer.feed import Feed

RECIPE = AlgorithmConfig(algorithm_type="grpo", advantage_fn="grpo", loss_agg_mode="token-mean")


def group(number: int) -> bytes:
    return encode(
        [
            Experience(
                tokens=[number, 1 + n],
                prompt_length=1,
                action_mask=[1],
                logprobs=[-1.0],
                reward=float(n),
                sample=n,
            )
            for n in range(2)
        ]
    )


async def made(where: Path, stored: int) -> ExperienceBuffer:
    buffer = ExperienceBuffer(ExperienceBufferConfig(), str(where), 2, 2, None, None)
    await buffer.attach_trainer(0, 1)
    await buffer.attach_explorer("e")
    numbers = await buffer.admit_some("e", [(b"task", {})] * 6)
    for number in numbers[:stored]:
        await buffer.put(number, group(number))
    return buffer


def test_a_look_leases_nothing_and_a_take_leaves_out_what_was_seen(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = await made(tmp_path, 3)
        before = await buffer.position()
        seen: dict[Any, Any] = {}
        shown = opened(await buffer.look(0), seen)
        assert (await buffer.position(), buffer.stats()["next_step"]) == (before, 0)
        data = await buffer.take(0, "trainer", None, list(seen))
        assert len(data) < len(await buffer.take(0))
        taken = opened(data, seen)
        assert all(map(operator.is_, taken.experiences, shown.experiences))
        assert [one.group for one in taken.experiences] == [0, 0, 1, 1]
        waiting = asyncio.create_task(buffer.look(1))  # one group of two is there
        await asyncio.sleep(0)
        await buffer.put(3, group(3))
        assert [one.group for one in opened(await waiting).experiences] == [2, 2, 3, 3]
        await buffer.take(1)
        for end in (buffer.attach_trainer(1, 2), buffer.stop()):
            waiting = asyncio.create_task(buffer.look(2))
            await asyncio.sleep(0)
            await end
            assert opened(await waiting).experiences == []
        await buffer.shutdown()

    asyncio.run(run())


class Alone:
    rank, dp = 0, 1

    def broadcast(self, item: Any) -> Any:
        return item

    def scatter_parts(self, parts: Any) -> list[Packed]:
        stacked: list[Stacked] = parts[0]
        return [one.packed() for one in stacked]


class Shown:
    """Takes what it has shown, but where it was told to take something else."""

    def __init__(self, other: int | None = None, error: Exception | None = None) -> None:
        self.other, self.error = other, error
        self.batches: dict[int, Batch] = {}

    def _batch(self, step: int) -> Batch:
        experiences = [
            Experience(
                tokens=[step, 1 + n],
                prompt_length=1,
                action_mask=[1],
                logprobs=[-1.0],
                reward=float(n),
                group=step,
            )
            for n in range(2)
        ]
        return self.batches.setdefault(step, Batch(step=step, experiences=experiences))

    def begin_look(self, step: int) -> None:
        self.step = step

    def look(self) -> Batch:
        if self.error is not None:
            raise self.error
        return self._batch(self.step)

    def look_away(self) -> None: ...

    def close(self) -> None: ...

    def take(self, step: int) -> Batch:
        if step == self.other:
            self.batches.pop(step, None)
        return self._batch(step)


class Rows(StatelessSource):
    """Other objects each time that a batch is made."""

    def batch(self, step: int) -> Batch:
        return Shown()._batch(step)


def test_rows_are_freed_before_their_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a step that was read ahead."""
    made: list[Any] = []

    class Sending(Alone):
        def scatter_parts(self, parts: Any) -> list[Packed]:
            made.append(weakref.ref(parts))
            return super().scatter_parts(parts)

    alive: list[bool] = []
    monkeypatch.setattr(
        feeds, "give_back", lambda freed: alive.append(freed > 0 and made[-1]() is not None)
    )
    seen: list[int] = []
    feed = Feed(Shown(), Sending(), RECIPE, 30, 1, Cost())
    assert feed.ahead is not None
    look = feed.ahead.prepare
    feed.ahead.prepare = lambda batch: (seen.append(batch.step), look(batch))[1]
    for step in range(3):
        feed.next(step, stopping=False)
        feed.ahead._thread.submit(int).result(30)  # the thread has let go of what it looked at
    feed.close()
    assert seen == [1, 2, 3] and alive == [False] * 3


@pytest.mark.parametrize("error", [None, OSError("gone")])
def test_the_end_of_each_look_is_told_whatever_came_of_it(error: Exception | None) -> None:
    told: list[int] = []
    feed = Feed(Shown(error=error), Alone(), RECIPE, 30, 1, Cost())
    assert feed.ahead is not None
    feed.ahead.over = lambda: told.append(1)
    for step in range(2):
        feed.next(step, stopping=False)
    feed.close()
    assert len(told) == 2


@pytest.mark.parametrize(
    ("source", "judged"),
    [(Shown(), 4), (Shown(other=2), 5), (Shown(error=OSError("gone")), 3), (Rows(), 4)],
    ids=["as seen", "others are taken", "nothing is seen", "rows of a file"],
)
def test_a_step_trains_on_what_is_taken(
    source: Any, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, real = [], credit.metrics

    def metrics(experiences: list[Experience], step: int) -> dict[str, float]:
        steps.append(step)
        return real(experiences, step)

    monkeypatch.setattr(credit, "metrics", metrics)
    feed = Feed(source, Alone(), RECIPE, 30, 1, Cost())
    plain = Feed(source, Alone(), RECIPE, 30, 1, Cost())
    plain.ahead = None
    found = []
    for step in range(3):
        made = feed.next(step, stopping=False)
        assert made is not None
        found.append(made)
    feed.close()
    assert len(steps) == judged, "each step is made once, but where it was another one"
    for step, made in enumerate(found):
        wanted = plain.next(step, stopping=False)
        assert wanted is not None and made.metrics == wanted.metrics
        assert made.part[0].tokens.tolist() == wanted.part[0].tokens.tolist()
        assert made.part[0].advantage.tolist() == wanted.part[0].advantage.tolist()
