"""Plain importance sampling."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def importance_sampling(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-A r, r = exp(logprobs - old), the log-ratio clamped to +-20: an unbiased gradient of unbounded variance."""
    return -fields.advantage * limited(logprobs - fields.old).exp(), versus_engine(logprobs, fields)
