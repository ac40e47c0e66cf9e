"""A workflow and a reward for `test_explore.py`: some runs never come back, and the reward needs
the explorer's environment.
"""

import asyncio
import os
from typing import Any

from rft.ground.experience import Experience, Task
from rft.rollout.workflows import SingleTurn


class Slow(SingleTurn):
    """Of every fifth task the last run hangs."""

    async def run(self, task: Task, ctx: Any) -> list[Experience]:
        if task.row % 5 == 0 and ctx.request.endswith("/r3"):
            await asyncio.Event().wait()
        return await super().run(task, ctx)


def reward(response: str, truth: str | None, task: Task) -> dict[str, float]:
    return {"right": float(response == truth), os.environ["REWARD_PART"]: 0.25}
