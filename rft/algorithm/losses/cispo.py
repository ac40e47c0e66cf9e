"""Clipped importance sampling: the weight of a token is bounded, its gradient is never lost."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, clipped_share, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def cispo(
    logprobs: "Tensor", fields: Fields, clip_range_low: float = 1.0, clip_range_high: float = 0.28, enable_mask: bool = False,
    mask_clip_range_low: float = 1.0, mask_clip_range_high: float = 0.28,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """-A clip(r, 1-low, 1+high) logprobs, the clipped ratio held constant (MiniMax-M1, arXiv:2506.13585, eqs. 4, 5).

    `enable_mask` leaves out what PPO would clip (eqs. 6, 7): r > 1 + high where A > 0, r < 1 - low where A < 0.
    """
    ratio = limited(logprobs.detach() - fields.old).exp()
    weight = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    metrics = {**clipped_share(weight != ratio, ratio), **versus_engine(logprobs, fields)}
    if enable_mask:
        is_over = (fields.advantage > 0) & (ratio > 1 + mask_clip_range_high)
        is_under = (fields.advantage < 0) & (ratio < 1 - mask_clip_range_low)
        weight = weight.where(~(is_over | is_under), weight.new_zeros(()))
    return -fields.advantage * weight * logprobs, metrics
