"""Asymmetric REINFORCE: a baseline below the mean, so that good responses teach more than bad ones."""

from rft.algorithm.advantages.columns import Columns, Credit


def asymre(columns: Columns, baseline_shift: float = -0.1) -> Credit:
    """A_i = R_i - (mean_g + shift) (Arnal et al. 2025, arXiv:2506.20520). A response alone has the baseline 0."""
    advantages = columns.rewards.copy()
    for members in columns.members():
        if len(members) > 1:
            advantages[members] -= columns.rewards[members].mean() + baseline_shift
    return Credit(advantages)
