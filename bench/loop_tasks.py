"""What the rollouts of `bench.loop` do: one turn, told to the benchmark as it begins and as it
ends, and a reward that varies.

In: tasks. Out: experiences, and for every group two lines of JSON, {"at": seconds of
CLOCK_MONOTONIC, "tokens": none as it begins, then those that were sampled}, in the pipe that
`workflow_args.pipe` names. Every line is written whole.
"""

import json
import os
import time
from typing import Any

from rft.ground.experience import Experience, Task
from rft.rollout.workflows import SingleTurn, WorkflowContext


def reward(response: str, truth: str | None, task: Task) -> float:
    """Share of digits: something to learn from also for a model that knows nothing.

    `bench/loop_trl.py` has the same.
    """
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


class Timed(SingleTurn):
    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        pipe = task.workflow_args["pipe"]
        tell(pipe, at=time.monotonic())
        made = await super().run(task, ctx)
        tell(
            pipe, at=time.monotonic(), tokens=sum(experience.response_length for experience in made)
        )
        return made


def tell(pipe: str, **said: Any) -> None:
    """Less than PIPE_BUF bytes: they arrive in one piece.

    The pipe holds a thousand lines, so this does not block.
    """
    file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(file, (json.dumps(said) + "\n").encode())
    finally:
        os.close(file)
