"""Generalised advantage estimation (arXiv:1506.02438) over the trained tokens of packed sequences. Pure numpy.

In: rewards and the critic's values of one microbatch [T], aligned with the predicting position. Out: advantages and returns
[T]. Invariant: only trained tokens exist here. Prompts, tokens of an environment and padding carry no reward, no value and
no decay: the token that follows a trained one is the next *trained* one of the same sequence.
"""

import numpy as np

from rft.packing import Packed

EPSILON = 1e-8


def gae(
    rewards: np.ndarray, values: np.ndarray, trained: np.ndarray, cu_seqlens: np.ndarray, gamma: float = 1.0, lam: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lam A_t+1, both 0 behind the last; returns = A + V. fp64."""
    index = np.flatnonzero(trained)
    sequence = np.searchsorted(cu_seqlens, index, side="right") - 1
    counts = np.bincount(sequence, minlength=len(cu_seqlens) - 1)
    last = np.cumsum(counts)[sequence] - 1
    column = counts.max(initial=0) - 1 - (last - np.arange(len(index)))  # last tokens stand below each other
    r, v, a = np.zeros((3, len(counts), counts.max(initial=0) + 1))
    r[sequence, column], v[sequence, column] = rewards[index], values[index]
    for t in reversed(range(v.shape[1] - 1)):
        a[:, t] = r[:, t] + gamma * v[:, t + 1] - v[:, t] + gamma * lam * a[:, t + 1]
    advantages, returns = np.zeros((2, len(trained)))
    advantages[index] = a[sequence, column]
    returns[index] = advantages[index] + v[sequence, column]
    return advantages, returns


def whitened(advantages: np.ndarray, trained: np.ndarray, mean: float, variance: float) -> np.ndarray:
    """Mean 0 and variance 1 over the trained tokens of the whole step, whose `mean` and unbiased `variance` are given."""
    found: np.ndarray = np.where(trained, (advantages - mean) / np.sqrt(variance + EPSILON), 0.0)
    return found


def ppo(packed: Packed, rewards: np.ndarray, gamma: float = 1.0, lam: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """`gae` over the critic's values."""
    return gae(rewards, packed.scores["value"], packed.weight != 0, packed.cu_seqlens, gamma, lam)
