"""A user's own reward function: even a model that knows nothing
earns something, and never always the same.
"""

from rft.ground.experience import Task


def reward(response: str, truth: str | None, task: Task) -> float:
    """1.0 for about a third of all responses, judged by their letters."""
    return [0.0, 0.5, 1.0][sum(map(ord, response)) % 3]
