"""REINFORCE without a baseline."""

from rft.algorithm.advantages.columns import Columns, Credit


def reinforce(columns: Columns) -> Credit:
    """A_i = R_i (Williams 1992, https://doi.org/10.1007/BF00992696)."""
    return Credit(columns.rewards.copy())
