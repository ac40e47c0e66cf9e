"""KL(policy || reference), estimated token by token from the sampled tokens alone (Schulman 2020).
Pure functions on tensors.

In: log-probabilities [T] of the policy and of the reference. With d = policy - reference:

    k1  d                  unbiased, of both signs. As a loss its gradient is 0 on average: meant
                           for rewards.
    k2  d^2 / 2            as a loss it has the gradient of the KL on average, for tokens that the
                           policy itself sampled
    k3  e^-d + d - 1       unbiased and never negative; its gradient is that of the KL the other way
                           round
    low_var_kl             k3 with d clamped to +-20 and the result to +-10
    corrected_k3           k3 times the ratio policy / old, clamped to [0, 2]: for tokens that the
                           old policy sampled
    abs                    |d|

`Coefficient` is what the estimate is multiplied by. An adaptive one is moved after every step so
that the KL comes near to a target, by at most a fifth for `horizon` responses (Ziegler et al. 2019,
arXiv:1909.08593, section 2.2). Every rank moves its own, by numbers that are the same on all;
checkpoints hold it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) still has a finite square in fp32
KL_LIMIT, RATIO_LIMIT = 10.0, 2.0
ESTIMATORS = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
KL_COEF = 0.001  # where `kl_coef` is not given
STRIDE = 0.2  # of an adaptive coefficient


@dataclass
class Coefficient:
    value: float = KL_COEF
    target: float | None = None  # of the KL per token; None: the value is fixed
    horizon: float = 1.0

    def __float__(self) -> float:
        return self.value

    def after(self, kl: float, responses: int) -> None:
        """A step with so many responses had this KL on average."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -STRIDE), STRIDE)
            self.value *= 1 + error * min(1.0, responses / self.horizon)


def estimate(name: str, logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    """KL per token [T] by the estimator `name`; `old` is the
    policy that the ratio is taken against.
    """
    d = logprobs - reference
    if name == "k1":
        return d
    if name == "k2":
        return d**2 / 2
    if name == "abs":
        return d.abs()
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (-d).exp() + d - 1
    if name == "k3":
        return k3
    if name == "low_var_kl":
        return k3.clamp(-KL_LIMIT, KL_LIMIT)
    if name == "corrected_k3":
        return (logprobs - old).clamp(max=LOG_RATIO_LIMIT).exp().clamp(0, RATIO_LIMIT) * k3
    raise ValueError(f"{name}: no estimator of the KL; known: {', '.join(ESTIMATORS)}")
