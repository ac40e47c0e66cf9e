"""Advantages of the REC family (REINFORCE made safe for data of another policy)."""

from typing import Literal

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def rec(
    columns: Columns, epsilon: float = 1e-6, std_normalize: bool = False, drop: Literal["none", "balance"] = "none"
) -> Credit:
    """A_i = R_i - mean over the kept of its group [/ (their population std + epsilon)] (Yao et al. 2025, arXiv:2509.24203).

    `drop=balance` keeps as many bad responses (R < mean_g) as there are good ones, by chance ("RED-Drop"); the others get 0.
    """
    chance = np.random.default_rng(columns.seed)
    advantages = np.zeros(len(columns.rewards))
    for members in columns.members():
        is_good = columns.rewards[members] >= columns.rewards[members].mean()
        good, bad = members[is_good], members[~is_good]
        if drop == "balance" and len(bad) > len(good):
            bad = chance.choice(bad, len(good), replace=False)
        kept = np.concatenate([good, bad])
        rewards = columns.rewards[kept]
        divisor = rewards.std() + epsilon if std_normalize else 1.0
        advantages[kept] = (rewards - rewards.mean()) / divisor
    return Credit(advantages)
