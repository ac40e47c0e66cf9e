"""Operators of the experience pipeline: classes whose `process` gets the experiences of one group,
and gives back those that stay, changed or not, with metrics. One class each, and one entry in
`EXPERIENCE_OPERATORS` (`rft.extras.pipeline.operators`).
"""

from collections.abc import Callable
from math import isfinite
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from rft.ground.experience import Experience

SHAPING_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, value: reward + value,
    "SUB": lambda reward, value: reward - value,
    "MUL": lambda reward, value: reward * value,
    "DIV": lambda reward, value: reward / value if value else reward,
}
SHAPING_KEYS = {"stats_key", "op_type", "weight"}
SIXTEENTH = 1 / 16 + 1e-3


class RewardShaping:
    """reward_shaping_mapper: add to rewards what something else has measured.

    reward <- reward op (weight * info[stats_key]), in the order of `reward_shaping_configs`.

    Unchanged where the experience has no such number, no valid reward, or DIV would divide by 0.
    Where tokens have rewards of their own, the last one gets the difference.
    `op_type`: ADD (default), SUB, MUL or DIV; `weight`: 1 by default.
    """

    def __init__(self, reward_shaping_configs: list[dict[str, Any]]) -> None:
        self.steps: list[tuple[str, Callable[[float, float], float], float]] = []
        for number, given in enumerate(reward_shaping_configs):
            where = f"reward_shaping_configs.{number}"
            if strange := set(given) - SHAPING_KEYS:
                raise ValueError(
                    f"{where} has {', '.join(sorted(strange))}; known are "
                    f"{', '.join(sorted(SHAPING_KEYS))}"
                )
            if not given.get("stats_key"):
                raise ValueError(f"{where} needs a stats_key")
            kind, weight = given.get("op_type", "ADD"), given.get("weight", 1.0)
            if kind not in SHAPING_OPERATIONS:
                raise ValueError(
                    f"{where}.op_type is {kind}; known are {', '.join(SHAPING_OPERATIONS)}"
                )
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not isfinite(weight)
            ):
                raise ValueError(f"{where}.weight is {weight}; give a number")
            self.steps.append((given["stats_key"], SHAPING_OPERATIONS[kind], float(weight)))

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        changes = []
        for experience in experiences:
            before = experience.reward
            if has_reward(experience):
                for key, operation, weight in self.steps:
                    if is_number(value := experience.info.get(key)):
                        experience.reward = operation(experience.reward, weight * value)
                change = experience.reward - before
                if change and len(experience.token_rewards):  # whose sum is what is learned from
                    tokens = np.array(experience.token_rewards)
                    tokens[-1] += change
                    experience.token_rewards = tokens
                changes.append(change)
        if not changes:
            return experiences, {}
        return experiences, {
            "reward_diff/mean": sum(changes) / len(changes),
            "reward_diff/min": min(changes),
            "reward_diff/max": max(changes),
        }


class RewardFilter:
    """reward_filter: keep what was rewarded enough.

    Keep the experiences whose reward is at least `threshold`.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = float(threshold)

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [experience for experience in experiences if experience.reward >= self.threshold]
        return kept, {"filtered_count": len(experiences) - len(kept)}


class RewardStdFilter:
    """reward_std_filter: drop groups whose rewards say too little.

    Drop a group whose rewards have a (population) standard deviation of at most `threshold`; a
    group of one has none. A reward whose function failed is none.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = float(threshold)
        if self.threshold < 0:
            raise ValueError("threshold must be 0 or more")

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        rewards = [experience.reward for experience in experiences if has_reward(experience)]
        if len(rewards) < 2:
            return [], {"filtered_count": len(experiences)}
        spread = pstdev(rewards)
        kept = experiences if spread > self.threshold else []
        metrics = {
            "origin_group_advantages/reward_mean": fmean(rewards),
            "origin_group_advantages/reward_std": spread,
        }
        return kept, {"filtered_count": len(experiences) - len(kept), **metrics}


class DynamicSampling:
    """dapo_dynamic_sampling: groups that teach nothing are dropped, and others are sampled in their
    place.

    DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) keeps a group of G responses only if 0 <
    number of right ones < G: all others have advantages of 0. The buffer admits another task for
    every group that is dropped, so a step still gets all of its groups.

    Keep a group only if its outcomes differ. The outcome of a response is `metrics[metric_key]`,
    else its reward: shaping that came before does not count where a reward function tells its
    accuracy. With `correct_threshold`, an outcome above it is right and any other wrong; without,
    outcomes are compared as they are. A response whose reward function failed has none.
    """

    def __init__(
        self, metric_key: str = "accuracy", correct_threshold: float | None = None
    ) -> None:
        self.metric_key = metric_key
        self.threshold = None if correct_threshold is None else float(correct_threshold)

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        outcomes = [
            experience.metrics.get(self.metric_key, experience.reward)
            for experience in experiences
            if has_reward(experience)
        ]
        border = 0.0 if self.threshold is None else self.threshold
        differ = (
            len(set(outcomes))
            if self.threshold is None
            else len({outcome > border for outcome in outcomes})
        )
        count = len(experiences)
        if differ > 1:
            return experiences, {
                "filtered_count": 0,
                "dropped_all_correct_count": 0,
                "dropped_all_wrong_count": 0,
            }
        right = bool(outcomes) and outcomes[0] > border
        return [], {
            "filtered_count": count,
            "dropped_all_correct_count": count if right else 0,
            "dropped_all_wrong_count": 0 if right else count,
        }


class MaskTruncated:
    """mask_response_truncated: a response that was cut off teaches nothing, and still counts for
    the baseline of its group.

    DAPO's overlong filtering (arXiv:2503.14476, section 3.4).
    """

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        cut = [experience for experience in experiences if experience.stop == "length"]
        for experience in cut:
            experience.action_mask = np.zeros(experience.response_length, dtype=bool)
        return experiences, {"masked_truncated_count": len(cut)}


class PassRate:
    """pass_rate_calculator: how often the policy solves a task.

    Write the mean reward of the group into `info.pass_rate` of its experiences, where operators
    after it find it. Rewards whose function failed are not in it; where all have, there is none.

    Its metrics are means over groups: `selection/valid_ratio` is the share of tasks that are solved
    sometimes and not always.
    """

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        rewards = [experience.reward for experience in experiences if has_reward(experience)]
        if not rewards:
            return experiences, {}
        rate = fmean(rewards)
        for experience in experiences:
            experience.info["pass_rate"] = rate
        return experiences, {
            "selection/pass_rate": rate,
            "selection/valid_ratio": float(0 < rate < 1),
            "selection/strict_valid_ratio": float(SIXTEENTH < rate < 1 - SIXTEENTH),
            "selection/less_than_one_ratio": float(rate < 1),
            "selection/larger_than_zero_ratio": float(rate > 0),
        }


class InvalidRewardFilter:
    """invalid_reward_filter: leave out what has no reward, because judging it failed or gave no
    number.
    """

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [experience for experience in experiences if has_reward(experience)]
        return kept, {"filtered_count": len(experiences) - len(kept)}


class LengthFilter:
    """length_filter: keep responses of a certain length.

    Keep the experiences whose response has `min_tokens` to `max_tokens` tokens.
    """

    def __init__(self, min_tokens: int = 1, max_tokens: int | None = None) -> None:
        self.least, self.most = int(min_tokens), None if max_tokens is None else int(max_tokens)
        if self.most is not None and self.most < self.least:
            raise ValueError("max_tokens is below min_tokens")

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [
            experience
            for experience in experiences
            if self.least <= experience.response_length
            and (self.most is None or experience.response_length <= self.most)
        ]
        return kept, {"filtered_count": len(experiences) - len(kept)}


class DropRepeats:
    """dedupe: of responses that are equal, token by token, keep the first.

    Within a group; with `remember=n` also what is equal, prompt and response, to one of the last n
    that were kept.
    """

    def __init__(self, remember: int = 0) -> None:
        self.remember = int(remember)
        if self.remember < 0:
            raise ValueError("remember must be 0 or more")
        self.seen: dict[bytes, None] = {}

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        found: dict[bytes, Experience] = {}
        for experience in experiences:
            tokens = experience.token_bytes
            if tokens not in self.seen:
                found.setdefault(tokens, experience)
        if self.remember:
            self.seen |= dict.fromkeys(found)
            for oldest in list(self.seen)[: max(0, len(self.seen) - self.remember)]:
                del self.seen[oldest]
        return list(found.values()), {"filtered_count": len(experiences) - len(found)}


def has_reward(experience: Experience) -> bool:
    """Whether its reward is one: not that of a reward function that failed, and no NaN."""
    return not experience.failed and isfinite(experience.reward)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
