"""Group-relative advantages."""

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def grpo(columns: Columns, epsilon: float = 1e-6, normalize_std: bool = True) -> Credit:
    """A_i = (R_i - mean_g) / (std_g + epsilon), std unbiased, within each group (Shao et al. 2024, arXiv:2402.03300, eq. 10).

    A group of one has no baseline and gets 0. `normalize_std=False` is Dr. GRPO's numerator only.
    """
    advantages = np.zeros(len(columns.rewards))
    for members in columns.members():
        if len(members) < 2:
            continue
        rewards = columns.rewards[members]
        centred = rewards - rewards.mean()
        advantages[members] = centred / (rewards.std(ddof=1) + epsilon) if normalize_std else centred
    return Credit(advantages)
