"""A teacher's opinion of every token that the policy sampled, as its advantage.

In: a microbatch with the score `teacher`, log-probabilities of the frozen teacher; `old` are those of the policy that sampled, or
of the policy at the start of the step where that scores its batch. Out: advantages [T] of the trained tokens; rewards have no part.
"""

import numpy as np

from rft.packing import Packed


def on_policy_distill(packed: Packed, rewards: np.ndarray, kl_coef: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A_t = c (teacher - old): one sample of c times the reverse KL's negative, token by token (arXiv:2306.13649)."""
    teacher, old = _pair(packed)
    return _of_trained(packed, kl_coef * (teacher - old))


def jsd(
    packed: Packed, rewards: np.ndarray, lambda_coef: float = 0.5, kl_coef: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """A_t = -c JSD_b, the generalised Jensen-Shannon divergence on the sampled token (arXiv:2306.13649, eq. 1; b: lambda_coef).

    With m = (1 - b) old + b teacher, as probabilities: b (teacher - log m) + (1 - b) (old - log m). b = 0 gives old - teacher,
    b = 1 teacher - old.
    """
    teacher, old = _pair(packed)
    if lambda_coef in (0.0, 1.0):
        found = teacher - old if lambda_coef else old - teacher
    else:
        middle = np.logaddexp(old + np.log1p(-lambda_coef), teacher + np.log(lambda_coef))
        found = lambda_coef * (teacher - middle) + (1 - lambda_coef) * (old - middle)
    return _of_trained(packed, -kl_coef * found)


def _pair(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    old = packed.scores.get("proximal", packed.behaviour)
    return packed.scores["teacher"].astype(np.float64), old.astype(np.float64)


def _of_trained(packed: Packed, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(packed.weight != 0, advantages, 0.0), np.zeros(packed.length)
