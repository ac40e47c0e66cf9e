"""How far two policies are apart on sampled tokens: ratios, KL(policy || reference) estimated from
the sampled tokens alone (Schulman 2020), and off-policy corrections. Pure functions on tensors;
importing this loads no torch.

In: log-probabilities [T] of two policies. Out: numbers [T]. With d = policy - reference:

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

`Correction` is for tokens that the trainer would have sampled with another probability than the
engine did: from the proximal log-probabilities (of the policy at the start of the step, in the
trainer's arithmetic) and the engine's own, one constant weight per token, 0 where a token is left
out, that multiplies any policy loss; global counts stay. With rho = exp(proximal - engine), per
token, or its product (`sequence`) or geometric mean (`geometric`) over a response:

    rollout_is   min(rho, threshold)                    truncated importance sampling, TIS (Espeholt
                                                        et al. 2018, arXiv:1802.01561;
                                                        decoupled PPO, arXiv:2110.00641)
    rollout_rs   1 where lower <= rho <= upper, else 0  token: IcePop (arXiv:2510.18855); sequence,
                                                        geometric: masked IS, MIS
                 1 where KL(p, q) <= upper and          binary_kl: KPop (Guo et al. 2026,
                 KL(q, p) <= upper, else 0              ringtech.notion.site/kpop); p, q the two
                                                        probabilities of the token against all
                                                        others
                 what `outliers` has kept of the step   second_moment: M2PO (arXiv:2510.01161)
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from rft.algorithm.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) still has a finite square in fp32
KL_LIMIT, RATIO_LIMIT = 10.0, 2.0
KL_COEF = 0.001  # where `kl_coef` is not given
STRIDE = 0.2  # of an adaptive coefficient
WEIGHTS = ("none", "token", "sequence")
MASKS = ("none", "token", "sequence", "geometric", "binary_kl", "second_moment")
# masks whose threshold is no range around 1 but a budget, and the published one: phi of KPop as
# prime-rl and its authors have it (AReaL's example has 2), tau of M2PO (section 5)
BUDGETS = {"binary_kl": 0.1, "second_moment": 0.04}
SURE, HOPELESS = -1e-6, -80.0  # log-probabilities; between them 1 - p and p are no zeros in fp32


def limited(log_ratio: "Tensor") -> "Tensor":
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_share(is_clipped: "Tensor", ratio: "Tensor") -> dict[str, "Tensor"]:
    """How many tokens the loss clips because the policy has moved too far, in all, down (`low`) and
    up (`high`): they have no gradient, or, in `cispo`, a bounded weight.
    """
    below, above = is_clipped & (ratio < 1), is_clipped & (ratio > 1)
    return {
        "clip_frac": is_clipped.float(),
        "clip_frac_low": below.float(),
        "clip_frac_high": above.float(),
    }


def versus_engine(logprobs: "Tensor", fields: Fields) -> dict[str, "Tensor"]:
    """`mismatch` of the trainer as it is now: part of what every loss on rollouts tells."""
    return mismatch(limited(logprobs - fields.behaviour).detach())


def mismatch(log_ratio: "Tensor") -> dict[str, "Tensor"]:
    """How far trainer and engine disagree on the sampled tokens; log_ratio [T] = trainer - engine.

    `kl/mismatch` is the k3 estimate of KL(engine || trainer), r - 1 - log r (Schulman 2020). At
    max_staleness=0 in fp32 all of this is arithmetic noise (below 1e-4); with staleness it includes
    the policy's own movement. `drift/token_mult_prob_error` is NeMo-RL's: the mean of exp |log r|
    (docs/guides/grpo.md there), 1 where both agree.
    """
    ratio = log_ratio.exp()
    gap = log_ratio.abs()
    return {
        "drift/token_mult_prob_error": gap.exp(),
        "kl/mismatch": ratio - 1 - log_ratio,
        "logprob_diff/mean": gap,
        "logprob_diff/max:max": gap,
        "ratio/mean": ratio,
        "ratio/max:max": ratio,
    }


def binary_kl(first: "Tensor", second: "Tensor") -> "Tensor":
    """KL(first || second) of two coins [T]: this token, or any other one.

    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), p = exp(first), q = exp(second), both held off 0
    and 1. log(1 - p) is taken without the difference, which is 0 in fp32 from p = 1 - 6e-8 on.
    """
    log_p, log_q = first.clamp(HOPELESS, SURE), second.clamp(HOPELESS, SURE)
    rest_p, rest_q = -log_p.expm1(), -log_q.expm1()
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())


@dataclass
class Coefficient:
    value: float = KL_COEF
    target: float | None = None  # of the KL per token; None: the value is fixed
    horizon: float = 1.0

    def __float__(self) -> float:
        return self.value

    def after(self, kl: float, responses: int) -> None:
        """A step with so many responses had this KL on average: one that is no number, of a step
        that is skipped, says nothing.
        """
        if self.target is not None and isfinite(kl):
            error = min(max(kl / self.target - 1, -STRIDE), STRIDE)
            self.value *= 1 + error * min(1.0, responses / self.horizon)


def none(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    """No such term; nothing asks for its values."""
    return logprobs.new_zeros(logprobs.shape)


def k1(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    return logprobs - reference


def k2(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    d = limited(logprobs - reference)
    return (-d).exp() + d - 1


def low_var_kl(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    return k3(logprobs, reference, old).clamp(-KL_LIMIT, KL_LIMIT)


def absolute(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    return (logprobs - reference).abs()


def corrected_k3(logprobs: "Tensor", reference: "Tensor", old: "Tensor") -> "Tensor":
    ratio = (logprobs - old).clamp(max=LOG_RATIO_LIMIT).exp().clamp(0, RATIO_LIMIT)
    return ratio * k3(logprobs, reference, old)


ESTIMATORS: dict[str, "Callable[..., Tensor]"] = {
    "none": none,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
    "corrected_k3": corrected_k3,
}


def estimate(
    name: str, logprobs: "Tensor", reference: "Tensor", old: "Tensor", **arguments: Any
) -> "Tensor":
    """KL per token [T] by the estimator `name`; `old` is the
    policy that the ratio is taken against.
    """
    return ESTIMATORS[name](logprobs, reference, old, **arguments)


@dataclass(frozen=True)
class Correction:
    """`weight` and `mask` say what rho is taken over; `upper` is the budget of a mask that has one;
    `veto`: a response with a token whose rho is smaller is left out.
    """

    weight: str = "none"
    cap: float = 2.0
    mask: str = "none"
    lower: float = 0.5
    upper: float = 2.0
    veto: float | None = None

    def __call__(self, fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
        log_ratio = limited(fields.old - fields.behaviour)
        weight = log_ratio.new_ones(log_ratio.shape)
        if self.weight != "none":
            weight = _over(self.weight, log_ratio, fields).clamp(max=self.cap)
        kept = self._kept(log_ratio, fields)
        if self.veto is not None:
            kept = kept & (fields.sums((log_ratio.exp() < self.veto).to(log_ratio.dtype))[0] == 0)
        weight = weight.where(kept, weight.new_zeros(()))
        if fields.expert is not None:  # which no engine has sampled: there is no rho
            weight = weight.where(fields.expert == 0, weight.new_ones(()))
        return weight, {
            "importance/mean": weight,
            "importance/left_out_frac": 1 - kept.to(weight.dtype),
        }

    def _kept(self, log_ratio: "Tensor", fields: Fields) -> "Tensor":
        if self.mask == "none":
            return fields.mask.new_ones(fields.mask.shape)
        if self.mask == "second_moment":
            assert fields.kept is not None
            return fields.kept != 0
        if self.mask == "binary_kl":
            there, back = (fields.old, fields.behaviour), (fields.behaviour, fields.old)
            return binary_kl(*there).maximum(binary_kl(*back)) <= self.upper
        ratio = _over(self.mask, log_ratio, fields)
        return (ratio >= self.lower) & (ratio <= self.upper)


def _over(unit: str, log_ratio: "Tensor", fields: Fields) -> "Tensor":
    """rho of the token, or of its response."""
    if unit == "token":
        return log_ratio.exp()
    if unit == "sequence":
        return limited(fields.sums(log_ratio)[0]).exp()
    return fields.mean(log_ratio).exp()
