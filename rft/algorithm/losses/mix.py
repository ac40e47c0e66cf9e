"""Rollouts and expert rows in one step: the clipped surrogate on the ones, maximum likelihood on the others."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields
from rft.algorithm.losses.ppo import ppo
from rft.algorithm.losses.sft import sft, sft_phi

if TYPE_CHECKING:
    from torch import Tensor


def mix(
    logprobs: "Tensor", fields: Fields, mu: float = 0.1, clip_range: float = 0.2, clip_range_low: float | None = None,
    clip_range_high: float | None = None, clip_ratio_c: float = 3.0,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """(1 - mu) L_ppo(rollouts) + mu L_sft(expert rows), each divided by its own global count (arXiv:2508.11408, eq. 5).

    `mu` is in the advantages already (`rft.algorithm.mixing`): those of rollouts are 1 - mu times theirs, which the surrogate is
    proportional to, and those of expert rows are mu.
    """
    return _mixed(logprobs, fields, sft(logprobs, fields)[0], clip_range, clip_range_low, clip_range_high, clip_ratio_c)


def mix_chord(
    logprobs: "Tensor", fields: Fields, mu_warmup_steps: int = 0, mu_decay_steps: int = 0, mu_peak: float = 0.1,
    mu_valley: float = 0.1, phi: bool = True, cutoff_prob: float = 1.0, clip_range: float = 0.2,
    clip_range_low: float | None = None, clip_range_high: float | None = None, clip_ratio_c: float = 3.0,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """As `mix`, with mu of a schedule and, with `phi`, expert tokens weighed by p (1 - p) (CHORD, arXiv:2508.11408, section 3)."""
    taught = sft_phi(logprobs, fields, cutoff_prob)[0] if phi else sft(logprobs, fields)[0]
    return _mixed(logprobs, fields, taught, clip_range, clip_range_low, clip_range_high, clip_ratio_c)


def _mixed(
    logprobs: "Tensor", fields: Fields, taught: "Tensor", clip_range: float, low: float | None, high: float | None, cap: float
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    assert fields.expert is not None
    losses, metrics = ppo(logprobs, fields, clip_range, low, high, cap)
    losses = losses.where(fields.expert == 0, fields.advantage * taught)
    return losses, metrics | {"expert/nll": -logprobs.detach()}
