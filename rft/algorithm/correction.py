"""Off-policy corrections: what to do about tokens that the trainer would have sampled with another
probability than the engine did.

In: `Fields` with the proximal log-probabilities (of the policy at the start of the step, in the
trainer's arithmetic) and the engine's own. Out: one constant weight per token, 0 where a token is
left out, that multiplies any policy loss; global counts stay. With rho = exp(proximal - engine),
per token, or its product (`sequence`) or geometric mean (`geometric`) over a response:

    rollout_is   min(rho, threshold)                    truncated importance sampling, TIS (Espeholt
                                                        et al. 2018, arXiv:1802.01561;
                                                        decoupled PPO, arXiv:2110.00641)
    rollout_rs   1 where lower <= rho <= upper, else 0  token: IcePop (arXiv:2510.18855); sequence,
                                                        geometric: masked IS, MIS
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rft.algorithm.fields import Fields, limited

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("none", "token", "sequence")
MASKS = ("none", "token", "sequence", "geometric")


@dataclass(frozen=True)
class Correction:
    """`weight` and `mask` say what rho is taken over; `veto`: a response with a token whose rho is
    smaller is left out.
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
        kept = fields.mask.new_ones(fields.mask.shape)
        if self.mask != "none":
            ratio = _over(self.mask, log_ratio, fields)
            kept = (ratio >= self.lower) & (ratio <= self.upper)
        if self.veto is not None:
            kept = kept & (fields.sums((log_ratio.exp() < self.veto).to(log_ratio.dtype))[0] == 0)
        weight = weight.where(kept, weight.new_zeros(()))
        return weight, {
            "importance/mean": weight,
            "importance/left_out_frac": 1 - kept.to(weight.dtype),
        }


def _over(unit: str, log_ratio: "Tensor", fields: Fields) -> "Tensor":
    """rho of the token, or of its response."""
    if unit == "token":
        return log_ratio.exp()
    if unit == "sequence":
        return limited(fields.sums(log_ratio)[0]).exp()
    return fields.mean(log_ratio).exp()
