"""reward_shaping_mapper: add to rewards what something else has measured."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from rft.experience import Experience

OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, value: reward + value,
    "SUB": lambda reward, value: reward - value,
    "MUL": lambda reward, value: reward * value,
    "DIV": lambda reward, value: reward / value if value else reward,
}
KEYS = {"stats_key", "op_type", "weight"}


class RewardShaping:
    """reward <- reward op (weight * info[stats_key]), in the order of `reward_shaping_configs`.

    Unchanged where the experience has no such number, no valid reward, or DIV would divide by 0. `op_type`: ADD (default), SUB,
    MUL or DIV; `weight`: 1 by default.
    """

    def __init__(self, reward_shaping_configs: list[dict[str, Any]]) -> None:
        self.steps: list[tuple[str, Callable[[float, float], float], float]] = []
        for number, given in enumerate(reward_shaping_configs):
            where = f"reward_shaping_configs.{number}"
            if strange := set(given) - KEYS:
                raise ValueError(f"{where} has {', '.join(sorted(strange))}; known are {', '.join(sorted(KEYS))}")
            if not given.get("stats_key"):
                raise ValueError(f"{where} needs a stats_key")
            kind, weight = given.get("op_type", "ADD"), given.get("weight", 1.0)
            if kind not in OPERATIONS:
                raise ValueError(f"{where}.op_type is {kind}; known are {', '.join(OPERATIONS)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
                raise ValueError(f"{where}.weight is {weight}; give a number")
            self.steps.append((given["stats_key"], OPERATIONS[kind], float(weight)))

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        changes = []
        for experience in experiences:
            before = experience.reward
            if has_reward(experience):
                for key, operation, weight in self.steps:
                    if is_number(value := experience.info.get(key)):
                        experience.reward = operation(experience.reward, weight * value)
                changes.append(experience.reward - before)
        if not changes:
            return experiences, {}
        return experiences, {
            "reward_diff/mean": sum(changes) / len(changes),
            "reward_diff/min": min(changes),
            "reward_diff/max": max(changes),
        }


def has_reward(experience: Experience) -> bool:
    """Whether its reward is one: not that of a reward function that failed, and no NaN."""
    return experience.reward_outcome not in ("timeout", "error") and isfinite(experience.reward)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
