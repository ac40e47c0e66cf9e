"""Policy losses: log-probabilities of the trained tokens to one loss per token. One function each,
and one entry in `LOSSES`.

In: `logprobs` [T] of the current policy (with gradient) and `Fields`, aligned with it; more
arguments have defaults and are the keys of `algorithm.policy_loss_fn_args`. Out: the loss [T]
before masking and weighting, and metrics [T]; names ending in ":max" are reduced by maximum over
the trained tokens, all others by their mean. In a step with expert rows, names beginning with
"expert/" are means over those, and all others over the rest. Which metrics a loss names depends on
its arguments only: ranks that see no token must name the same. Importing this loads no torch.

A is the advantage, pi the policy, old the policy that its ratio r = exp(logprobs - old) is taken
against (`Fields.old`).
"""

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from rft.algorithm.fields import Fields
from rft.algorithm.pairs import dpo
from rft.algorithm.ratios import (
    Coefficient,
    Correction,
    binary_kl,
    clipped_share,
    estimate,
    limited,
    versus_engine,
)
from rft.config.arguments import AboveOne, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from rft.algorithm.fields import Losses, TokenLoss

ClipMode = Literal["none", "one-side", "gspo-one-side", "two-side", "ring"]
AggMode = Literal[
    "", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Weight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]


def ppo(
    logprobs: "Tensor",
    fields: Fields,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: AboveOne = 3.0,
    enable_sequence_masking: bool = False,
    delta: NonNegative = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> "Losses":
    """The clipped surrogate of proximal policy optimisation.

    max(-A r, -A clip(r, 1-low, 1+high)), r = exp(logprobs - old) (arXiv:1707.06347, eq. 7).

    Where A < 0 the loss is capped at -A c ("dual clip", arXiv:1912.09729, eq. 5), which
    `clip_frac_dual` counts, and `clip_frac` does not. The log-ratio is clamped to +-20.
    `enable_sequence_masking` leaves out tokens with A < 0 of responses that have become unlikely:
    mean(old - logprobs) > `delta` (DeepSeek-V3.2, arXiv:2512.02556).
    `fallback_to_policy_gradient`: r = exp(logprobs - the same, held constant), which is 1.
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    advantage, fresh = fields.advantage, logprobs.detach()
    ratio = limited(logprobs - (fresh if fallback_to_policy_gradient else fields.old)).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    bounded = plain.maximum(clipped)
    loss = bounded.where(advantage >= 0, bounded.minimum(-advantage * clip_ratio_c))
    metrics = {
        **clipped_share(clipped > plain, ratio),
        "clip_frac_dual": (loss < bounded).float(),
        **versus_engine(logprobs, fields),
    }
    if not enable_sequence_masking:
        return loss, metrics
    is_left_out = (advantage < 0) & (fields.mean(fields.old - fresh) > delta)
    return loss.where(~is_left_out, loss.new_zeros(())), metrics | {
        "sequence_masked_frac": is_left_out.float()
    }


def gspo(
    logprobs: "Tensor",
    fields: Fields,
    clip_range_low: NonNegative = 3e-4,
    clip_range_high: NonNegative = 4e-4,
) -> "Losses":
    """Group sequence policy optimisation: one ratio for a whole response.

    max(-A s, -A clip(s, 1-low, 1+high)), s = exp(mean over the response of logprobs - old)
    (arXiv:2507.18071, eqs. 5-7).

    Token by token (eq. 14): s_t = s held constant * pi / (pi held constant), so that the mean over
    a response has s's gradient.
    """
    fresh = logprobs.detach()
    ratio = (limited(fields.mean(fresh - fields.old)) + logprobs - fresh).exp()
    plain = -fields.advantage * ratio
    clipped = -fields.advantage * ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    return plain.maximum(clipped), {
        **clipped_share(clipped > plain, ratio.detach()),
        **versus_engine(logprobs, fields),
    }


def cispo(
    logprobs: "Tensor",
    fields: Fields,
    clip_range_low: NonNegative = 1.0,
    clip_range_high: NonNegative = 0.28,
    enable_mask: bool = False,
    mask_clip_range_low: NonNegative = 1.0,
    mask_clip_range_high: NonNegative = 0.28,
) -> "Losses":
    """Clipped importance sampling: the weight of a token is bounded, its gradient is never lost.

    -A clip(r, 1-low, 1+high) logprobs, the clipped ratio held constant (MiniMax-M1,
    arXiv:2506.13585, eqs. 4, 5).

    `enable_mask` leaves out what PPO would clip (eqs. 6, 7): r > 1 + high where A > 0, r < 1 - low
    where A < 0.
    """
    ratio = limited(logprobs.detach() - fields.old).exp()
    weight = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    metrics = {**clipped_share(weight != ratio, ratio), **versus_engine(logprobs, fields)}
    if enable_mask:
        is_over = (fields.advantage > 0) & (ratio > 1 + mask_clip_range_high)
        is_under = (fields.advantage < 0) & (ratio < 1 - mask_clip_range_low)
        weight = weight.where(~(is_over | is_under), weight.new_zeros(()))
    return -fields.advantage * weight * logprobs, metrics


def dppo_tv(
    logprobs: "Tensor",
    fields: Fields,
    delta_low: NonNegative = 0.2,
    delta_high: NonNegative = 0.2,
    ratio_cap: Positive = 20.0,
) -> "Losses":
    """Divergence proximal policy optimisation with total variation: a token is left out when its
    probability, not its ratio, has moved too far.

    -A min(r, cap) logprobs, the ratio held constant, and 0 where A > 0 and p - q > high, or A <= 0
    and q - p > low; p = exp(logprobs), q = exp(old) (Qi et al. 2026, arXiv:2602.04879,
    Binary-TV; the cap is its section 5.4).

    |p - q| is the total variation of two coins: this token, or any other one.
    """
    gap = (logprobs.detach().exp() - fields.old.exp()).abs()
    return _dppo(logprobs, fields, gap, delta_low, delta_high, ratio_cap)


def dppo_kl(
    logprobs: "Tensor",
    fields: Fields,
    delta_low: NonNegative = 0.05,
    delta_high: NonNegative = 0.05,
    ratio_cap: Positive = 20.0,
) -> "Losses":
    """As `dppo_tv`, with KL(q || p) of the two coins instead of |p - q| (arXiv:2602.04879,
    Binary-KL).
    """
    gap = binary_kl(fields.old, logprobs.detach())
    return _dppo(logprobs, fields, gap, delta_low, delta_high, ratio_cap)


def _dppo(
    logprobs: "Tensor", fields: Fields, gap: "Tensor", low: float, high: float, cap: float
) -> "Losses":
    """`gap`: how far the token has moved; one that comes back is never left out."""
    log_ratio = limited(logprobs.detach() - fields.old)
    is_good = fields.advantage > 0
    is_out = (is_good & (log_ratio > 0) & (gap > high)) | (~is_good & (log_ratio < 0) & (gap > low))
    weight = log_ratio.exp().clamp(max=cap)
    weight = weight.where(~is_out, weight.new_zeros(()))
    metrics = {**clipped_share(is_out, log_ratio.exp()), **versus_engine(logprobs, fields)}
    return -fields.advantage * weight * logprobs, metrics


def sapo(
    logprobs: "Tensor", fields: Fields, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> "Losses":
    """Soft adaptive policy optimisation: a smooth gate instead of a clip.

    -A f(r), f(r) = sigmoid(tau (r - 1)) 4 / tau, with tau_neg where A <= 0 (arXiv:2511.20347).

    The gradient goes through r: df/dlogprobs = 4 p (1 - p) r with p the sigmoid, which is 1 at r =
    1 and vanishes for large r.
    """
    ratio = limited(logprobs - fields.old).exp()
    tau = fields.advantage.new_full((), tau_neg).where(
        fields.advantage <= 0, fields.advantage.new_full((), tau_pos)
    )
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return -fields.advantage * gate, {"gate/mean": gate.detach(), **versus_engine(logprobs, fields)}


def sppo(logprobs: "Tensor", fields: Fields, epsilon: Positive = 0.3) -> "Losses":
    """Simple PPO: the plain gradient inside a band around the old policy, nothing outside it.

    -A (logprobs - old) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0 (`sppo` of Trinity-RFT,
    arXiv:2505.17826).
    """
    log_ratio = logprobs - fields.old
    ratio = limited(log_ratio.detach()).exp()
    is_outside = (ratio < 1 / (1 + epsilon)) | (ratio > 1 + epsilon)
    loss = (-fields.advantage * log_ratio).where(~is_outside, log_ratio.new_zeros(()))
    return loss, {**clipped_share(is_outside, ratio), **versus_engine(logprobs, fields)}


def importance_sampling(logprobs: "Tensor", fields: Fields) -> "Losses":
    """Plain importance sampling.

    -A r, r = exp(logprobs - old), the log-ratio clamped to +-20: an unbiased gradient of unbounded
    variance.
    """
    return -fields.advantage * limited(logprobs - fields.old).exp(), versus_engine(logprobs, fields)


def opmd(logprobs: "Tensor", fields: Fields, tau: NonNegative = 1.0) -> "Losses":
    """Online policy mirror descent.

    -A logprobs / (1 + tau): no ratio, so the data may be of any policy (Pan et al. 2025,
    arXiv:2505.17826).
    """
    return -fields.advantage * logprobs / (1 + tau), versus_engine(logprobs, fields)


def topr(logprobs: "Tensor", fields: Fields, advantage_threshold: float = 0.0) -> "Losses":
    """Tapered off-policy REINFORCE.

    -alpha A logprobs, alpha = clip(r, 0, 1) held constant where A <= threshold, else 1
    (arXiv:2503.14286).

    Good responses are imitated as they are; bad ones count less, the less likely they have become.
    r is that of the token, as in Trinity-RFT; the paper's is that of the whole response.
    """
    taper = limited(logprobs.detach() - fields.old).exp().clamp(max=1.0)
    alpha = taper.where(fields.advantage <= advantage_threshold, taper.new_ones(()))
    return -alpha * fields.advantage * logprobs, {
        "taper/mean": alpha,
        **versus_engine(logprobs, fields),
    }


def rec(
    logprobs: "Tensor",
    fields: Fields,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    epsilon_low_prime: NonNegative = 0.6,
    epsilon_high_prime: NonNegative = 2.0,
    clip_mode: ClipMode = "none",
    weight: Weight = "none",
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: NonNegative = 0.0,
    temp: Positive = 1.0,
) -> "Losses":
    """The REC family: REINFORCE with a mask, a weight and a regulariser of its own choice.

    -A w logprobs where r is inside the range of `clip_mode`, else 0, plus the regulariser (Yao et
    al. 2025, arXiv:2509.24203).

    r is exp(logprobs - old), or in the modes named gspo its geometric mean over the response; all
    of it is held constant. Ranges: one-side, r <= 1 + high where A >= 0 and r >= 1 - low where A <
    0; two-side, both; ring, two-side or (A >= 0 and r <= 1 - low') or (A <= 0 and r >= 1 + high').
    w: 1, r, or exp(A / temp). Regularisers: k2, c (logprobs - old)^2; forward-kl, -c logprobs.
    (Trinity-RFT takes seq-mean-token-mean with gspo-one-side; here loss_agg_mode says how, and a
    file of Trinity-RFT that leaves it out gets that.)
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


def _inside(
    clip_mode: str, advantage: "Tensor", ratio: "Tensor", low: float, high: float
) -> "Tensor":
    if clip_mode == "none":
        return ratio >= 0
    if clip_mode.endswith("one-side"):
        return (ratio <= high).where(advantage >= 0, ratio >= low)
    return (ratio >= low) & (ratio <= high)


def sft(logprobs: "Tensor", fields: Fields) -> "Losses":
    """Maximum likelihood of given tokens, without advantages.

    -logprobs: negative log-likelihood of the tokens.
    """
    return -logprobs, {}


def sft_is(logprobs: "Tensor", fields: Fields) -> "Losses":
    """-pi logprobs, pi held constant: unlikely tokens teach little (dynamic fine-tuning,
    arXiv:2508.05629).
    """
    return -logprobs.detach().exp() * logprobs, {}


def sft_phi(logprobs: "Tensor", fields: Fields, cutoff_prob: Positive = 1.0) -> "Losses":
    """-pi (1 - pi) min(logprobs, log cutoff), the weight held constant (CHORD-phi,
    arXiv:2508.11408).

    Tokens that are certain, or hopeless, teach little; those likelier than `cutoff_prob` nothing at
    all.
    """
    probability = logprobs.detach().exp()
    return -probability * (1 - probability) * logprobs.clamp(max=log(cutoff_prob)), {}


def mix(
    logprobs: "Tensor",
    fields: Fields,
    mu: Fraction = 0.1,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: AboveOne = 3.0,
    sft_loss_agg_mode: AggMode = "",
    grpo_loss_agg_mode: AggMode = "",
) -> "Losses":
    """Rollouts and expert rows in one step: the clipped surrogate on the ones, maximum likelihood
    on the others.

    (1 - mu) L_ppo(rollouts) + mu L_sft(expert rows), each divided by its own global count
    (arXiv:2508.11408, eq. 5).

    `mu` is in the advantages already (`rft.algorithm.mixing`): those of rollouts are 1 - mu times
    theirs, which the surrogate is proportional to, and those of expert rows are mu. The same holds
    of the two `*_loss_agg_mode`, which default to algorithm.loss_agg_mode: they are in the weights.
    """
    return _mixed(
        logprobs,
        fields,
        sft(logprobs, fields)[0],
        clip_range,
        clip_range_low,
        clip_range_high,
        clip_ratio_c,
    )


def mix_chord(
    logprobs: "Tensor",
    fields: Fields,
    mu_warmup_steps: NonNegative = 0,
    mu_decay_steps: NonNegative = 0,
    mu_peak: Fraction = 0.1,
    mu_valley: Fraction = 0.1,
    enable_phi_function: bool = True,
    cutoff_prob: Positive = 1.0,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: AboveOne = 3.0,
    sft_loss_agg_mode: AggMode = "",
    grpo_loss_agg_mode: AggMode = "",
) -> "Losses":
    """As `mix`, with mu of a schedule and, with `enable_phi_function`, expert tokens weighed by
    p (1 - p) (CHORD, arXiv:2508.11408, section 3).
    """
    is_weighed = enable_phi_function
    taught = sft_phi(logprobs, fields, cutoff_prob)[0] if is_weighed else sft(logprobs, fields)[0]
    return _mixed(
        logprobs, fields, taught, clip_range, clip_range_low, clip_range_high, clip_ratio_c
    )


def _mixed(
    logprobs: "Tensor",
    fields: Fields,
    taught: "Tensor",
    clip_range: float,
    low: float | None,
    high: float | None,
    cap: float,
) -> "Losses":
    assert fields.expert is not None
    losses, metrics = ppo(logprobs, fields, clip_range, low, high, cap)
    losses = losses.where(fields.expert == 0, fields.advantage * taught)
    return losses, metrics | {"expert/nll": -logprobs.detach()}


def clipped_value(values: "Tensor", fields: Fields, cliprange_value: float = 0.5) -> "Losses":
    """The critic's loss: a value moves by at most the range per step.

    max((V - R)^2, (clip(V, V_old +- range) - R)^2) / 2.
    """
    assert fields.value is not None and fields.returns is not None
    bounded = values.clamp(fields.value - cliprange_value, fields.value + cliprange_value)
    plain, clipped = (values - fields.returns) ** 2, (bounded - fields.returns) ** 2
    return plain.maximum(clipped) / 2, {"clip_frac": (clipped > plain).float()}


LOSSES: dict[str, Callable[..., "Losses"]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "opmd": opmd,
    "topr": topr,
    "sppo": sppo,
    "rec": rec,
    "importance_sampling": importance_sampling,
    "sft": sft,
    "sft_is": sft_is,
    "sft_phi": sft_phi,
    "dpo": dpo,
    "mix": mix,
    "mix_chord": mix_chord,
}


def token_loss(
    name: str,
    arguments: dict[str, Any],
    kl: str = "none",
    kl_coef: float | Coefficient = 0.0,
    entropy_coef: float = 0.0,
    correction: Correction | None = None,
    entropy_of: str = "default",
    moved: bool = False,
    kl_args: Mapping[str, Any] = MappingProxyType({}),
) -> "TokenLoss":
    """A loss of `LOSSES` with its arguments, weighed by `correction`, plus kl_coef * KL(policy ||
    reference), minus entropy_coef * entropy. An adaptive coefficient is read anew at every call.

    The estimate of the KL is one for tokens that a policy sampled: expert rows have none.
    `entropy_of="mix"`: nor entropy. `moved`: `kl/old` tells how far the policy is from the one that
    ratios are taken against, the mean of old - logprobs.
    """
    function = LOSSES[name]

    def bound(logprobs: "Tensor", fields: Fields) -> "Losses":
        losses, metrics = function(logprobs, fields, **arguments)
        if moved:
            metrics["kl/old"] = (fields.old - logprobs).detach()
        if correction is not None:
            weight, more = correction(fields)
            losses, metrics = losses * weight, metrics | more
        if kl != "none":
            assert fields.reference is not None
            term = estimate(kl, logprobs, fields.reference, fields.old, **kl_args)
            losses = losses + float(kl_coef) * _of_rollouts(term, fields)
            metrics["kl/reference"] = term
        if fields.entropy is not None:
            metrics["entropy/mean"] = fields.entropy
            if entropy_coef:
                is_mixed = entropy_of == "mix"
                counted = _of_rollouts(fields.entropy, fields) if is_mixed else fields.entropy
                losses = losses - entropy_coef * counted
        return losses, metrics

    return bound


def _of_rollouts(values: "Tensor", fields: Fields) -> "Tensor":
    """0 on expert rows."""
    if fields.expert is None:
        return values
    return values.where(fields.expert == 0, values.new_zeros(()))
