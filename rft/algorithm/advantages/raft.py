"""RAFT: imitate the best responses, forget the others."""

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit


def raft(columns: Columns, reward_threshold: float | None = None) -> Credit:
    """Trained on are the responses with the highest reward of their group (Dong et al. 2023, arXiv:2304.06767), each with A = 1.

    `reward_threshold`: those instead whose reward is larger than this. A group in which all are equal has no best one.
    """
    rewards = columns.rewards
    chosen = np.zeros(len(rewards), dtype=bool)
    for members in columns.members():
        own = rewards[members]
        chosen[members] = (
            own > reward_threshold if reward_threshold is not None else (own == own.max()) & (own > own.min())
        )
    return Credit(np.ones(len(rewards)), chosen.astype(np.int64), {"sample/chosen_frac": float(chosen.mean())})
