"""Online policy mirror descent."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def opmd(logprobs: "Tensor", fields: Fields, tau: float = 1.0) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-A logprobs / (1 + tau): no ratio, so the data may be of any policy (Pan et al. 2025, arXiv:2505.17826)."""
    return -fields.advantage * logprobs / (1 + tau), versus_engine(logprobs, fields)
