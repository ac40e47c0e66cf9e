"""Advantages: how much better than its group each response was. Pure numpy on the rewards of one step.

In: rewards and group numbers of the step's experiences, in admission order. Out: one number per experience; the trainer
spreads it over the experience's trained tokens.
"""

from collections.abc import Callable

import numpy as np


def grpo(rewards: np.ndarray, groups: np.ndarray, epsilon: float = 1e-6, normalize_std: bool = True) -> np.ndarray:
    """A_i = (R_i - mean_g) / (std_g + epsilon), std unbiased, within each group (Shao et al. 2024, arXiv:2402.03300, eq. 10).

    rewards, groups: [N]. A group of one has no baseline and gets 0. `normalize_std=False` is Dr. GRPO's numerator only.
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    for group in np.unique(groups):
        members = groups == group
        if members.sum() < 2:
            continue
        centred = rewards[members] - rewards[members].mean()
        advantages[members] = centred / (rewards[members].std(ddof=1) + epsilon) if normalize_std else centred
    return advantages


ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo}
