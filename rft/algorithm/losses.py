"""Policy and value losses: scores of the trained tokens to one loss per token. Pure functions on tensors.

In: `logprobs` [T] of the current policy, or `values` [T] of the critic (with gradient), and `Fields`, aligned with it. Out:
the loss [T] before masking and weighting, and metrics [T]; names ending in ":max" are reduced by maximum over the trained
tokens, all others by their mean. Masks, weights and global counts belong to the caller, so a loss cannot depend on how a
batch was cut. Which metrics a loss names depends on its arguments only: ranks that see no token must name the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft.algorithm.kl import LOG_RATIO_LIMIT, estimate

if TYPE_CHECKING:
    from torch import Tensor

    TokenLoss = Callable[[Tensor, "Fields"], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Fields:
    """What a token loss may look at, each [T]; `mask` is True where a token is trained. None: this run has no such thing."""

    behaviour: "Tensor"  # log-probabilities that the engine recorded
    advantage: "Tensor"
    weight: "Tensor"
    mask: "Tensor"
    proximal: "Tensor | None" = None  # log-probabilities of the policy at the start of the step
    reference: "Tensor | None" = None  # those of the frozen model
    value: "Tensor | None" = None  # what the critic said before the step
    returns: "Tensor | None" = None
    entropy: "Tensor | None" = None  # of the current policy, with gradient

    @property
    def old(self) -> "Tensor":
        """Log-probabilities that the policy's ratio is taken against."""
        return self.behaviour if self.proximal is None else self.proximal


def sft(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Negative log-likelihood of the reference tokens."""
    return -logprobs, {}


def ppo(
    logprobs: "Tensor", fields: Fields, clip_range: float = 0.2, clip_range_low: float | None = None,
    clip_range_high: float | None = None, clip_ratio_c: float = 3.0, importance_cap: float | None = None,
) -> tuple["Tensor", dict[str, "Tensor"]]:  # fmt: skip
    """Clipped surrogate max(-A r, -A clip(r, 1-low, 1+high)), r = exp(logprobs - old) (arXiv:1707.06347, eq. 7).

    Where A < 0 the loss is capped at -A c ("dual clip", arXiv:1912.09729, eq. 5). The log-ratio is clamped to +-20.
    Where `old` is the proximal policy, `importance_cap` weighs a token by min(exp(old - behaviour), cap): how much likelier
    that policy was to choose it than the engine which did ("decoupled", arXiv:2110.00641, eq. 3).
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    advantage = fields.advantage
    ratio = _limited(logprobs - fields.old).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = plain.maximum(clipped)
    loss = loss.where(advantage >= 0, loss.minimum(-advantage * clip_ratio_c))
    metrics = {"clip_frac": (clipped > plain).float(), **mismatch(_limited(logprobs - fields.behaviour).detach())}
    if importance_cap is None:
        return loss, metrics
    weight = _limited(fields.old - fields.behaviour).exp().clamp(max=importance_cap)
    return loss * weight, metrics | {"importance/mean": weight}


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


def clipped_value(
    values: "Tensor", fields: Fields, cliprange_value: float = 0.5
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """max((V - R)^2, (clip(V, V_old +- range) - R)^2) / 2: a value moves by at most the range per step."""
    assert fields.value is not None and fields.returns is not None
    bounded = values.clamp(fields.value - cliprange_value, fields.value + cliprange_value)
    plain, clipped = (values - fields.returns) ** 2, (bounded - fields.returns) ** 2
    return plain.maximum(clipped) / 2, {"clip_frac": (clipped > plain).float()}


def _limited(log_ratio: "Tensor") -> "Tensor":
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


LOSSES: dict[str, Callable[..., tuple["Tensor", dict[str, "Tensor"]]]] = {"ppo": ppo, "sft": sft}


def token_loss(
    name: str, arguments: dict[str, Any], kl: str = "none", kl_coef: float = 0.0, entropy_coef: float = 0.0
) -> "TokenLoss":
    """A loss of `LOSSES` with its arguments, plus kl_coef * KL(policy || reference), minus entropy_coef * entropy."""
    function = LOSSES[name]

    def bound(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
        losses, metrics = function(logprobs, fields, **arguments)
        if kl != "none":
            assert fields.reference is not None
            term = estimate(kl, logprobs, fields.reference, fields.old)
            losses, metrics["kl/reference"] = losses + kl_coef * term, term
        if fields.entropy is not None:
            metrics["entropy/mean"] = fields.entropy
            if entropy_coef:
                losses = losses - entropy_coef * fields.entropy
        return losses, metrics

    return bound
