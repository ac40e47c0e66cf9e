"""Group sequence policy optimisation: one ratio for a whole response."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, clipped_share, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def gspo(
    logprobs: "Tensor", fields: Fields, clip_range_low: float = 3e-4, clip_range_high: float = 4e-4
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """max(-A s, -A clip(s, 1-low, 1+high)), s = exp(mean over the response of logprobs - old) (arXiv:2507.18071, eqs. 5-7).

    Token by token (eq. 14): s_t = s held constant * pi / (pi held constant), so that the mean over a response has s's gradient.
    """
    fresh = logprobs.detach()
    ratio = (limited(fields.mean(fresh - fields.old)) + logprobs - fresh).exp()
    plain = -fields.advantage * ratio
    clipped = -fields.advantage * ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    return plain.maximum(clipped), {**clipped_share(clipped > plain, ratio.detach()), **versus_engine(logprobs, fields)}
