"""Which experiences of a step are trained on: `algorithm.sample_strategy`. One function each, and
one entry in `SAMPLE_STRATEGIES`.

In: the experiences of a step as they were taken, and the step, which is the policy version that
trains on them; more arguments are the keys of `algorithm.sample_strategy_args`. Out: those that are
trained on, and metrics. Called at rank 0 only. Invariant: counts over the step are taken of what
stays, so what is left out weighs nothing.
"""

from collections.abc import Callable

from rft.algorithm import mixing
from rft.ground.experience import Experience

Kept = tuple[list[Experience], dict[str, float]]


def everything(experiences: list[Experience], step: int) -> Kept:
    return experiences, {}


def staleness_control(experiences: list[Experience], step: int, *, max_staleness: int) -> Kept:
    """Leaves out experiences with a token of a version that is too old."""
    oldest = step - int(max_staleness)
    fresh = [e for e in experiences if e.oldest_version is None or e.oldest_version >= oldest]
    return fresh, {"sample/dropped_stale": float(len(experiences) - len(fresh))}


def mix(
    experiences: list[Experience],
    step: int,
    expert_data_ratio: float = mixing.DEFAULTS["expert_data_ratio"],
    sft_dataset_name: str = mixing.DEFAULTS["sft_dataset_name"],
) -> Kept:
    """All of them: the feed has put the expert rows beside the rollouts (`mixing`)."""
    return experiences, {}


SAMPLE_STRATEGIES: dict[str, Callable[..., Kept]] = {
    "default": everything,
    "warmup": everything,
    "staleness_control": staleness_control,
    "mix": mix,
}
