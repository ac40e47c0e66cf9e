"""REINFORCE with the other responses as baseline."""

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def rloo(columns: Columns) -> Credit:
    """A_i = R_i - mean of the other rewards of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    That is n / (n - 1) (R_i - mean_g). A response without others keeps its reward.
    """
    advantages = columns.rewards.copy()
    for members in columns.members():
        if (n := len(members)) > 1:
            rewards = columns.rewards[members]
            advantages[members] = (rewards - rewards.mean()) * (n / (n - 1))
    return Credit(np.asarray(advantages))
