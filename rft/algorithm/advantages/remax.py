"""ReMax: the reward of the greedy response is the baseline of the sampled ones."""

import numpy as np

from rft.algorithm.advantages.gae import gae
from rft.packing import Packed


def remax(packed: Packed, rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A_t = sum of the rewards from t on - R(greedy response) (Li et al. 2023, arXiv:2310.10505).

    The explorer makes one greedy response per task, which is not trained on; its reward is the score `baseline` of every token.
    """
    trained = packed.weight != 0
    returns, _ = gae(rewards, np.zeros(packed.length), trained, packed.cu_seqlens)
    baseline = packed.scores.get("baseline", np.zeros(packed.length))  # a step in which nothing is trained has none
    return np.where(trained, returns - baseline, 0.0), returns
