"""Policy losses: log-probabilities of the trained tokens to one loss per token. Pure functions on tensors.

In: `logprobs` [T] of the current policy (with gradient) and `fields`, whose tensors are [T] and aligned with it:
`behaviour` (log-probabilities recorded by the engine) and `advantage`. Out: the loss [T] before masking and weighting,
and metrics [T]; names ending in ":max" are reduced by maximum over the trained tokens, all others by their mean.
Masks, weights and global counts belong to the caller, so a loss cannot depend on how a batch was cut.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) still has a finite square in fp32


class LossFields(Protocol):
    behaviour: "Tensor"
    advantage: "Tensor"


LossFn = Callable[..., tuple["Tensor", dict[str, "Tensor"]]]


def sft(logprobs: "Tensor", fields: LossFields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Negative log-likelihood of the reference tokens."""
    return -logprobs, {}


def ppo(
    logprobs: "Tensor", fields: LossFields, clip_range: float = 0.2, clip_range_low: float | None = None,
    clip_range_high: float | None = None, clip_ratio_c: float = 3.0,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """Clipped surrogate max(-A r, -A clip(r, 1-low, 1+high)), r = exp(logprobs - behaviour) (arXiv:1707.06347, eq. 7).

    Where A < 0 the loss is capped at -A c ("dual clip", arXiv:1912.09729, eq. 5). The log-ratio is clamped to +-20.
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    advantage = fields.advantage
    log_ratio = (logprobs - fields.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = plain.maximum(clipped)
    loss = loss.where(advantage >= 0, loss.minimum(-advantage * clip_ratio_c))
    return loss, {"clip_frac": (clipped > plain).float(), **mismatch(log_ratio.detach())}


def mismatch(log_ratio: "Tensor") -> dict[str, "Tensor"]:
    """How far trainer and engine disagree on the sampled tokens; log_ratio [T] = trainer - engine.

    `kl/mismatch` is the k3 estimate of KL(engine || trainer), r - 1 - log r (Schulman 2020). At max_staleness=0 in fp32 all
    of this is arithmetic noise (below 1e-4); with staleness it includes the policy's own movement.
    """
    ratio = log_ratio.exp()
    gap = log_ratio.abs()
    return {
        "kl/mismatch": ratio - 1 - log_ratio,
        "logprob_diff/mean": gap,
        "logprob_diff/max:max": gap,
        "ratio/mean": ratio,
        "ratio/max:max": ratio,
    }


LOSSES: dict[str, LossFn] = {"ppo": ppo, "sft": sft}


def token_loss(
    name: str, arguments: dict[str, Any]
) -> Callable[["Tensor", LossFields], tuple["Tensor", dict[str, "Tensor"]]]:
    """Bind a loss of `LOSSES` to its arguments from the config."""
    function = LOSSES[name]

    def bound(logprobs: "Tensor", fields: LossFields) -> tuple["Tensor", dict[str, "Tensor"]]:
        return function(logprobs, fields, **arguments)

    return bound
