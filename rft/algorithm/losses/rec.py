"""REINFORCE with a mask, a weight and a regulariser of its own choice: the REC family."""

from typing import TYPE_CHECKING, Literal

from rft.algorithm.losses.fields import Fields, clipped_share, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


ClipMode = Literal["none", "one-side", "gspo-one-side", "two-side", "ring"]
Weight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]


def rec(
    logprobs: "Tensor", fields: Fields, epsilon_low: float = 0.2, epsilon_high: float = 0.2, epsilon_low_prime: float = 0.6,
    epsilon_high_prime: float = 2.0, clip_mode: ClipMode = "none", weight: Weight = "none",
    regularizer: Literal["none", "k2", "forward-kl"] = "none", regularizer_coef: float = 0.0, temp: float = 1.0,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """-A w logprobs where r is inside the range of `clip_mode`, else 0, plus the regulariser (Yao et al. 2025, arXiv:2509.24203).

    r is exp(logprobs - old), or in the modes named gspo its geometric mean over the response; all of it is held constant.
    Ranges: one-side, r <= 1 + high where A >= 0 and r >= 1 - low where A < 0; two-side, both; ring, two-side or
    (A >= 0 and r <= 1 - low') or (A <= 0 and r >= 1 + high'). w: 1, r, or exp(A / temp). Regularisers: k2, c (logprobs - old)^2;
    forward-kl, -c logprobs.
    """
    advantage, log_ratio = fields.advantage, limited(logprobs.detach() - fields.old)
    ratio = log_ratio.exp()
    whole = fields.mean(log_ratio).exp() if "gspo" in clip_mode + weight else ratio
    seen = whole if clip_mode == "gspo-one-side" else ratio
    is_inside = _inside(clip_mode, advantage, seen, 1 - epsilon_low, 1 + epsilon_high)
    if clip_mode == "ring":
        is_inside = is_inside | ((advantage >= 0) & (ratio <= 1 - epsilon_low_prime))
        is_inside = is_inside | ((advantage <= 0) & (ratio >= 1 + epsilon_high_prime))
    loss = -advantage * logprobs
    if weight == "advantage":
        loss = loss * (advantage / temp).exp()
    elif weight != "none":
        loss = loss * (whole if weight.startswith("gspo") else ratio)
    loss = loss.where(is_inside, loss.new_zeros(()))
    if regularizer == "k2":
        loss = loss + regularizer_coef * (logprobs - fields.old) ** 2
    elif regularizer == "forward-kl":
        loss = loss - regularizer_coef * logprobs
    return loss, {**clipped_share(~is_inside, seen), **versus_engine(logprobs, fields)}


def _inside(clip_mode: str, advantage: "Tensor", ratio: "Tensor", low: float, high: float) -> "Tensor":
    if clip_mode == "none":
        return ratio >= 0
    if clip_mode.endswith("one-side"):
        return (ratio <= high).where(advantage >= 0, ratio >= low)
    return (ratio >= low) & (ratio <= high)
