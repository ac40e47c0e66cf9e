"""Both sides of `bench.train_step` on real ranks."""

from typing import Any

from jobs import policy_on

from bench.train_step_ranks import Sides
from bench.train_step_rows import Shape

SHAPE = Shape(rows=8, prompt=4, median=10.0, longest=40, budget=64)


def compare(path: str, **layout: Any) -> list[dict[str, Any]]:
    """Loss and gradient norm of both sides in three steps."""
    with policy_on(path, **layout) as policy:
        sides = Sides(policy, SHAPE)
        return [sides.compare(seed) for seed in range(3)]
