"""What engines have answered to groups that are not finished outlives every process that is killed,
and is not asked for again.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rft.ground.experience import Experience
from tests.unit.answer_world import RUNS, TASKS, TURNS, World
from tests.unit.scripted import TOKENIZER

NEEDED = TASKS * RUNS * TURNS


def said(experiences: list[Experience]) -> str:
    return " ".join(TOKENIZER.decode(one.tokens.tolist()) for one in experiences)


def whole(world: World) -> dict[int, Any]:
    """All but which version and session it was."""
    return {
        group: [(one.tokens.tolist(), one.logprobs.tolist(), one.reward) for one in made]
        for group, made in sorted(world.stored.items())
    }


@pytest.mark.parametrize("workload", ["turns", "agent"])
def test_killed_at_every_point_no_turn_that_was_heard_is_generated_again(
    workload: str, tmp_path: Path
) -> None:
    async def every_point() -> int:
        kill_at = 0
        while True:
            kill_at += 1
            world = World(tmp_path / str(kill_at), workload)
            if await world.live(kill_at):
                return kill_at
            heard, lost = set(world.heard), len(world.answered) - len(world.heard)
            if not await world.live(kill_at // 2 + 1):
                heard |= set(world.heard)
                lost = len(world.answered) - len(heard)
                assert await world.live()
            assert sorted(world.stored) == list(range(TASKS))
            assert world.asked_by == set(range(TASKS)), "engines know the group of every request"
            text = " ".join(map(said, world.stored.values()))
            assert all(word in text for word in heard), "what was heard is what is learned from"
            assert len(world.answered) - NEEDED <= lost, "only what nobody had heard came again"

    points = asyncio.run(every_point())
    assert points > 3 * NEEDED, "asked, answered and heard of each turn"
