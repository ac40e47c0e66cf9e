"""Maximum likelihood of given tokens, plain and weighted by the policy's own probability of them; without advantages."""

from math import log
from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor


def sft(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-logprobs: negative log-likelihood of the tokens."""
    return -logprobs, {}


def sft_is(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-pi logprobs, pi held constant: unlikely tokens teach little (dynamic fine-tuning, arXiv:2508.05629)."""
    return -logprobs.detach().exp() * logprobs, {}


def sft_phi(logprobs: "Tensor", fields: Fields, cutoff_prob: float = 1.0) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-pi (1 - pi) min(logprobs, log cutoff), the weight held constant (CHORD-phi, arXiv:2508.11408).

    Tokens that are certain, or hopeless, teach little; those likelier than `cutoff_prob` nothing at all.
    """
    probability = logprobs.detach().exp()
    return -probability * (1 - probability) * logprobs.clamp(max=log(cutoff_prob)), {}
