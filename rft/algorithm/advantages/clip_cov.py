"""Clip-B and Clip-V: GRPO without the tokens that would change the entropy most.

With p the probability of the sampled token, l its logarithm and H the entropy there, S = p (H + l) says how a step on this token
changes the entropy ("On the Entropy Dynamics in Reinforcement Fine-Tuning of Large Language Models", arXiv:2602.03392). In: a
microbatch with GRPO's advantages and the trainer's own `proximal` and `entropy`, and the moments of what is measured over all
trained tokens of the step. Out: the same advantages, 0 at the tokens that are clipped: they have no gradient, and still count.
"""

import numpy as np

from rft.packing import Packed


def entropy_change(packed: Packed) -> np.ndarray:
    """S of every token: it raises the entropy less, the more likely the token is."""
    logprobs = packed.scores["proximal"].astype(np.float64)
    found: np.ndarray = np.exp(logprobs) * (packed.scores["entropy"] + logprobs)
    return found


def clipb(
    packed: Packed, rewards: np.ndarray, mean: float, std: float, mu: float = 2.5
) -> tuple[np.ndarray, np.ndarray]:
    """A, but 0 where A < 0 and S - mean < -mu std: bad tokens whose punishment would lower the entropy most."""
    is_clipped = (packed.advantage < 0) & (entropy_change(packed) - mean < -mu * std)
    return np.where(is_clipped, 0.0, packed.advantage), packed.advantage
