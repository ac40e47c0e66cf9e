"""A teacher's opinion of every token that the policy sampled, as its advantage.

In: a microbatch with the score `teacher`, log-probabilities of the frozen teacher; `old` are those of the policy that sampled, or
of the policy at the start of the step where that scores its batch. Out: advantages [T] of the trained tokens; rewards have no part.
"""

import numpy as np

from rft.algorithm.kl import LOG_RATIO_LIMIT
from rft.packing import Packed


def on_policy_distill(packed: Packed, rewards: np.ndarray, kl_coef: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A_t = c (teacher - old): one sample of c times the reverse KL's negative, token by token (arXiv:2306.13649)."""
    teacher, old = _pair(packed)
    return _of_trained(packed, kl_coef * (teacher - old))


def jsd(
    packed: Packed, rewards: np.ndarray, lambda_coef: float = 0.5, kl_coef: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Down the generalised Jensen-Shannon divergence b KL(teacher | m) + (1 - b) KL(old | m), m = (1 - b) old + b teacher, as
    probabilities (arXiv:2306.13649, eq. 1; b: lambda_coef): A_t = -c (1 - b) (old - log m).

    That is its exact gradient, in expectation over what the policy samples: the teacher's term moves with m alone, and what m adds
    to both sums up to 0. (Trinity-RFT takes -c (b (teacher - log m) + (1 - b) (old - log m)), which for b = 1/2 cannot tell a
    token that the teacher likes from one that it does not, and for b = 1 leads away from it.) At the ends, where the divergence
    vanishes, b = 0 is KL(old | teacher), A_t = c (teacher - old), and b = 1 is KL(teacher | old), A_t = c (teacher / old - 1).
    """
    teacher, old = _pair(packed)
    if lambda_coef == 0.0:
        found = teacher - old
    elif lambda_coef == 1.0:
        found = np.expm1(np.minimum(teacher - old, LOG_RATIO_LIMIT))
    else:
        middle = np.logaddexp(old + np.log1p(-lambda_coef), teacher + np.log(lambda_coef))
        found = (1 - lambda_coef) * (middle - old)
    return _of_trained(packed, kl_coef * found)


def _pair(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    old = packed.scores.get("proximal", packed.behaviour)
    return packed.scores["teacher"].astype(np.float64), old.astype(np.float64)


def _of_trained(packed: Packed, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(packed.weight != 0, advantages, 0.0), np.zeros(packed.length)
