"""What the rollouts of `bench.loop` do: one turn, told to the benchmark as it begins and as it
ends, and a reward that varies; and the prompts.

In: tasks. Out: experiences, and for every group two lines of JSON, {"at": seconds of
CLOCK_MONOTONIC, "tokens": none as it begins, then those that were sampled}, in the pipe that
`workflow_args.pipe` names; before these, {"held": true} where the group waits for the file
`workflow_args.gate`. Every line is written whole.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from rft.ground.experience import Experience, Task
from rft.rollout.workflows import SingleTurn, WorkflowContext

LOOK_S = 0.01
COUNT = 512  # prompts: more than any run here takes


def write_prompts(path: Path, tokens: int) -> Path:
    """Tasks whose prompts have exactly so many tokens, which are characters: sums behind one
    another, no two beginnings alike.
    """
    rng = random.Random(tokens)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(COUNT):
            sums = (f"{rng.randrange(10, 100)}+{rng.randrange(10, 100)}=" for _ in range(tokens))
            prompt = "".join(sums)[-tokens:]
            file.write(json.dumps({"prompt": prompt, "response": "0"}) + "\n")
    return path


def reward(response: str, truth: str | None, task: Task) -> float:
    """Share of digits: something to learn from also for a model that knows nothing.

    `bench/loop_trl.py` has the same.
    """
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


class Timed(SingleTurn):
    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        pipe, gate = task.workflow_args["pipe"], task.workflow_args["gate"]
        if gate and not os.path.exists(gate):
            tell(pipe, held=True)
            while not os.path.exists(gate):
                await asyncio.sleep(LOOK_S)
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
