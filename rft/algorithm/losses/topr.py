"""Tapered off-policy REINFORCE."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def topr(logprobs: "Tensor", fields: Fields, advantage_threshold: float = 0.0) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-alpha A logprobs, alpha = clip(r, 0, 1) held constant where A <= threshold, else 1 (arXiv:2503.14286).

    Good responses are imitated as they are; bad ones count less, the less likely they have become.
    """
    taper = limited(logprobs.detach() - fields.old).exp().clamp(max=1.0)
    alpha = taper.where(fields.advantage <= advantage_threshold, taper.new_ones(()))
    return -alpha * fields.advantage * logprobs, {"taper/mean": alpha, **versus_engine(logprobs, fields)}
