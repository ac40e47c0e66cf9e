"""Advantages of online policy mirror descent."""

from typing import Literal

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def opmd(columns: Columns, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: float = 1.0) -> Credit:
    """A_i = R_i - b, b = mean_g, or tau log mean exp(R / tau) over the group (Pan et al. 2025, arXiv:2505.17826;
    Kimi k1.5, arXiv:2501.12599, section 2.3.2). A response alone has b = 0.
    """
    advantages = columns.rewards.copy()
    for members in columns.members():
        if len(members) > 1:
            rewards = columns.rewards[members]
            advantages[members] -= rewards.mean() if opmd_baseline == "mean" else _soft_maximum(rewards, tau)
    return Credit(advantages)


def _soft_maximum(rewards: np.ndarray, tau: float) -> float:
    top = rewards.max()
    return float(top + tau * np.log(np.exp((rewards - top) / tau).mean()))
