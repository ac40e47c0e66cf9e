"""The clipped surrogate of proximal policy optimisation."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, clipped_share, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def ppo(
    logprobs: "Tensor", fields: Fields, clip_range: float = 0.2, clip_range_low: float | None = None,
    clip_range_high: float | None = None, clip_ratio_c: float = 3.0, enable_sequence_masking: bool = False, delta: float = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """Clipped surrogate max(-A r, -A clip(r, 1-low, 1+high)), r = exp(logprobs - old) (arXiv:1707.06347, eq. 7).

    Where A < 0 the loss is capped at -A c ("dual clip", arXiv:1912.09729, eq. 5). The log-ratio is clamped to +-20.
    `enable_sequence_masking` leaves out tokens with A < 0 of responses that have become unlikely: mean(old - logprobs) > `delta`
    (DeepSeek-V3.2, arXiv:2512.02556). `fallback_to_policy_gradient`: r = exp(logprobs - the same, held constant), which is 1.
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    advantage, fresh = fields.advantage, logprobs.detach()
    ratio = limited(logprobs - (fresh if fallback_to_policy_gradient else fields.old)).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = plain.maximum(clipped)
    loss = loss.where(advantage >= 0, loss.minimum(-advantage * clip_ratio_c))
    metrics = {**clipped_share(clipped > plain, ratio), **versus_engine(logprobs, fields)}
    if not enable_sequence_masking:
        return loss, metrics
    is_left_out = (advantage < 0) & (fields.mean(fields.old - fresh) > delta)
    return loss.where(~is_left_out, loss.new_zeros(())), metrics | {"sequence_masked_frac": is_left_out.float()}
