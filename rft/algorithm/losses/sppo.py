"""Simple PPO: the plain gradient inside a band around the old policy, nothing outside it."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, clipped_share, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def sppo(logprobs: "Tensor", fields: Fields, epsilon: float = 0.3) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-A (logprobs - old) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0 (`sppo` of Trinity-RFT, arXiv:2505.17826)."""
    log_ratio = logprobs - fields.old
    ratio = limited(log_ratio.detach()).exp()
    is_outside = (ratio < 1 / (1 + epsilon)) | (ratio > 1 + epsilon)
    loss = (-fields.advantage * log_ratio).where(~is_outside, log_ratio.new_zeros(()))
    return loss, {**clipped_share(is_outside, ratio), **versus_engine(logprobs, fields)}
