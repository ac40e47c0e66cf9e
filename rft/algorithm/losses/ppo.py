"""The clipped surrogate of proximal policy optimisation."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, limited, mismatch

if TYPE_CHECKING:
    from torch import Tensor


def ppo(
    logprobs: "Tensor", fields: Fields, clip_range: float = 0.2, clip_range_low: float | None = None,
    clip_range_high: float | None = None, clip_ratio_c: float = 3.0, importance_cap: float | None = None,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """Clipped surrogate max(-A r, -A clip(r, 1-low, 1+high)), r = exp(logprobs - old) (arXiv:1707.06347, eq. 7).

    Where A < 0 the loss is capped at -A c ("dual clip", arXiv:1912.09729, eq. 5). The log-ratio is clamped to +-20.
    Where `old` is the proximal policy, `importance_cap` weighs a token by min(exp(old - behaviour), cap): how much likelier
    that policy was to choose it than the engine which did ("decoupled", arXiv:2110.00641, eq. 3).
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    advantage = fields.advantage
    ratio = limited(logprobs - fields.old).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = plain.maximum(clipped)
    loss = loss.where(advantage >= 0, loss.minimum(-advantage * clip_ratio_c))
    metrics = {"clip_frac": (clipped > plain).float(), **mismatch(limited(logprobs - fields.behaviour).detach())}
    if importance_cap is None:
        return loss, metrics
    weight = limited(fields.old - fields.behaviour).exp().clamp(max=importance_cap)
    return loss * weight, metrics | {"importance/mean": weight}
