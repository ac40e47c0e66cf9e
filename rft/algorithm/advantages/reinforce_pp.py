"""REINFORCE++: the return from each token on, whitened over the whole step instead of over a group."""

import numpy as np

from rft.algorithm.advantages.gae import gae
from rft.packing import Packed


def reinforceplusplus(packed: Packed, rewards: np.ndarray, gamma: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A_t = r_t + gamma A_t+1 (Hu et al. 2025, arXiv:2501.03262), then whitened over all trained tokens of the step.

    This is `gae` where every value is 0 and lambda is 1.
    """
    return gae(rewards, np.zeros(packed.length), packed.weight != 0, packed.cu_seqlens, gamma, 1.0)
