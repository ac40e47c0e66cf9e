"""Maximum likelihood of given tokens, without advantages."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor


def sft(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-log pi: negative log-likelihood of the tokens."""
    return -logprobs, {}
