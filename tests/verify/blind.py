"""A reward that ignores the answer: what the quickstart must not be able to learn from."""

import random

from rft.ground.experience import Task


def coin(response: str, truth: str | None, task: Task) -> float:
    return float(random.random() < 0.5)
