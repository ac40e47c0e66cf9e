"""Training on a group more than once: which groups come first, and which stay for another time.

In: what is known of a group (the version that sampled it, how often it was trained on, when last),
the time, a seed. Out: an order of groups, and after each use whether the group stays. Pure
functions of these, so a resumed run decides as the one before did; what was decided is in the
journal anyway.

    linear_decay                                    priority = version - decay * uses; always stays
    linear_decay_use_count_control_randomization    the same + N(0, sigma); stays while uses <
                                                    use_count_limit (0: always)
    decay_limit_randomization                       another name of the second

A group cools down for `reuse_cooldown_time` seconds after each use; without that time nothing is
used again, and only the order is another than that of admission.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rft.buffer.progress import Group
from rft.config.buffer import ReplayBufferConfig

DECAY, SIGMA, USE_COUNT_LIMIT = 2.0, 0.0, 3
CONTROLLED = "linear_decay_use_count_control_randomization"


@dataclass(frozen=True)
class LinearDecay:
    decay: float = DECAY

    def priority(self, version: float, uses: int, _seed: str) -> float:
        return version - self.decay * uses

    def stays(self, uses: int) -> bool:
        """Whether a group that was used so often may be used again."""
        return True


@dataclass(frozen=True)
class LinearDecayUseCountControl(LinearDecay):
    use_count_limit: int = USE_COUNT_LIMIT
    sigma: float = SIGMA

    def priority(self, version: float, uses: int, seed: str) -> float:
        """The same seed gives the same noise, in every process."""
        noise = random.Random(seed).gauss(0.0, self.sigma) if self.sigma > 0 else 0.0
        return version - self.decay * uses + noise

    def stays(self, uses: int) -> bool:
        return self.use_count_limit <= 0 or uses < self.use_count_limit


PRIORITIES: dict[str, Callable[..., LinearDecay]] = {
    "linear_decay": LinearDecay,
    CONTROLLED: LinearDecayUseCountControl,
    "decay_limit_randomization": LinearDecayUseCountControl,
}
ARGUMENTS: dict[str, dict[str, type]] = {
    "linear_decay": {"decay": float},
    CONTROLLED: {"decay": float, "use_count_limit": int, "sigma": float},
    "decay_limit_randomization": {"decay": float, "use_count_limit": int, "sigma": float},
}


class Replay:
    """The order and the life of groups under one config."""

    def __init__(self, config: ReplayBufferConfig, seed: int) -> None:
        self.function = PRIORITIES[config.priority_fn](**arguments(config.priority_fn_args))
        self.cooldown = config.reuse_cooldown_time
        self.capacity = config.capacity
        self.seed = seed

    def priority(self, group: Group) -> float:
        return self.function.priority(
            group.model_version or 0, group.uses, f"{self.seed}/{group.number}/{group.uses}"
        )

    def stays(self, group: Group) -> bool:
        """After its next use."""
        return self.cooldown is not None and self.function.stays(group.uses + 1)

    def free_at(self, group: Group) -> float:
        """When a group may be taken: at once if it never was."""
        return group.leased_at + (self.cooldown or 0.0) if group.uses else 0.0

    def order(self, groups: Iterable[Group], now: float) -> list[Group]:
        """Those that may be taken, the highest priority first, of equal ones the oldest."""
        free = [group for group in groups if self.free_at(group) <= now]
        return sorted(free, key=lambda group: (-self.priority(group), group.number))

    def wake(self, groups: Iterable[Group], now: float) -> float | None:
        """Seconds until the next one has cooled down."""
        return min(
            (at - now for group in groups if (at := self.free_at(group)) > now), default=None
        )

    def surplus(self, groups: list[Group]) -> list[Group]:
        """Those that must go while there are more than `capacity`:
        of the lowest priority, the oldest.
        """
        over = len(groups) - self.capacity
        return (
            sorted(groups, key=lambda group: (self.priority(group), group.number))[:over]
            if over > 0
            else []
        )


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Names are checked before the run; numbers may have come as text."""
    return {
        name: int(value) if name == "use_count_limit" else float(value)
        for name, value in given.items()
    }
