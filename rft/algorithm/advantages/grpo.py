"""Group-relative advantages: the other responses to a task are the baseline of each.

In: `Columns`. Out: `Credit`; groups without signal may be left out of the step, or give their place to groups that have one.
"""

from typing import Literal

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def grpo(
    columns: Columns, epsilon: float = 1e-6, normalize_std: bool = True, std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group", rank_penalty: float | None = None, duplicate_experiences: bool = False,
) -> Credit:  # fmt: skip
    """A_i = (R_i - mean_g) / (std + epsilon), std unbiased (Shao et al. 2024, arXiv:2402.03300, eq. 10).

    `std_cal_level`: whose deviation, the group's or that of all rewards of the step (Liu et al. 2025, arXiv:2508.08221).
    `normalize_std=False` divides by 1 (Dr. GRPO, arXiv:2503.20783). A group of one has no baseline and gets 0.
    `rank_penalty` p: rewards become R (1 - p k/n) first, k the place of the response among the n of its group, the least likely
    first (He et al. 2025, arXiv:2506.02355). `std_threshold`: groups whose deviation is not larger are left out (0: the filter of
    DAPO, arXiv:2503.14476), with `duplicate_experiences` for a copy of another group, chosen by chance.
    """
    rewards = columns.rewards if rank_penalty is None else _penalised(columns, rank_penalty)
    everything = deviation(rewards)
    advantages = np.zeros(len(rewards))
    silent = []
    for members in columns.members():
        own = deviation(rewards[members])
        if std_threshold is not None and own <= std_threshold:
            silent.append(members)
        if len(members) > 1:
            divisor = (own if std_cal_level == "group" else everything) + epsilon
            advantages[members] = (rewards[members] - rewards[members].mean()) / (divisor if normalize_std else 1.0)
    return Credit(advantages) if std_threshold is None else without(columns, advantages, silent, duplicate_experiences)


def deviation(values: np.ndarray) -> float:
    """Unbiased; that of one value is 0."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def without(columns: Columns, advantages: np.ndarray, silent: list[np.ndarray], replaces: bool = False) -> Credit:
    """The groups in `silent` are left out; `replaces`: each for a copy of a group that is not, as long as there is one."""
    times = np.ones(len(advantages), dtype=np.int64)
    for members in silent:
        times[members] = 0
    loud = [members for members in columns.members() if times[members[0]]]
    if replaces and loud:
        for chosen in np.random.default_rng(columns.seed).integers(len(loud), size=len(silent)):
            times[loud[chosen]] += 1
    return Credit(advantages, times, {"sample/groups_left_out": float(len(silent))})


def _penalised(columns: Columns, penalty: float) -> np.ndarray:
    rewards = columns.rewards.copy()
    for members in columns.members():
        place = np.argsort(np.argsort(columns.logprobs[members], kind="stable"), kind="stable")
        rewards[members] *= 1 - penalty * place / len(members)
    return rewards
