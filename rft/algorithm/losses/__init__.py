"""Policy losses: log-probabilities of the trained tokens to one loss per token. One file each, and one entry in `LOSSES`.

In: `logprobs` [T] of the current policy (with gradient) and `Fields`, aligned with it; more arguments have defaults and are the
keys of `algorithm.policy_loss_fn_args`. Out: the loss [T] before masking and weighting, and metrics [T]; names ending in ":max"
are reduced by maximum over the trained tokens, all others by their mean. In a step with expert rows, names beginning with
"expert/" are means over those, and all others over the rest. Which metrics a loss names depends on its arguments
only: ranks that see no token must name the same. Importing this loads no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rft.algorithm.kl import Coefficient, estimate
from rft.algorithm.losses.cispo import cispo
from rft.algorithm.losses.correction import Correction
from rft.algorithm.losses.dpo import dpo
from rft.algorithm.losses.fields import Fields as Fields
from rft.algorithm.losses.fields import mismatch as mismatch
from rft.algorithm.losses.gspo import gspo
from rft.algorithm.losses.importance_sampling import importance_sampling
from rft.algorithm.losses.mix import mix, mix_chord
from rft.algorithm.losses.opmd import opmd
from rft.algorithm.losses.ppo import ppo
from rft.algorithm.losses.rec import rec
from rft.algorithm.losses.sapo import sapo
from rft.algorithm.losses.sft import sft, sft_is, sft_phi
from rft.algorithm.losses.sppo import sppo
from rft.algorithm.losses.topr import topr
from rft.algorithm.losses.value import clipped_value as clipped_value

if TYPE_CHECKING:
    from torch import Tensor

    from rft.algorithm.losses.fields import TokenLoss as TokenLoss

LOSSES: dict[str, Callable[..., tuple["Tensor", dict[str, "Tensor"]]]] = {
    "ppo": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "opmd": opmd, "topr": topr, "sppo": sppo, "rec": rec,
    "importance_sampling": importance_sampling, "sft": sft, "sft_is": sft_is, "sft_phi": sft_phi,
    "dpo": dpo, "mix": mix, "mix_chord": mix_chord,
}  # fmt: skip


def token_loss(
    name: str, arguments: dict[str, Any], kl: str = "none", kl_coef: float | Coefficient = 0.0, entropy_coef: float = 0.0,
    correction: Correction | None = None, entropy_of: str = "default",
) -> "TokenLoss":  # fmt: skip
    """A loss of `LOSSES` with its arguments, weighed by `correction`, plus kl_coef * KL(policy || reference), minus
    entropy_coef * entropy. An adaptive coefficient is read anew at every call.

    The estimate of the KL is one for tokens that a policy sampled: expert rows have none. `entropy_of="mix"`: nor entropy.
    """
    function = LOSSES[name]

    def bound(logprobs: "Tensor", fields: Fields) -> tuple["Tensor", dict[str, "Tensor"]]:
        losses, metrics = function(logprobs, fields, **arguments)
        if correction is not None:
            weight, more = correction(fields)
            losses, metrics = losses * weight, metrics | more
        if kl != "none":
            assert fields.reference is not None
            term = estimate(kl, logprobs, fields.reference, fields.old)
            losses, metrics["kl/reference"] = losses + float(kl_coef) * _of_rollouts(term, fields), term
        if fields.entropy is not None:
            metrics["entropy/mean"] = fields.entropy
            if entropy_coef:
                counted = _of_rollouts(fields.entropy, fields) if entropy_of == "mix" else fields.entropy
                losses = losses - entropy_coef * counted
        return losses, metrics

    return bound


def _of_rollouts(values: "Tensor", fields: Fields) -> "Tensor":
    """0 on expert rows."""
    return values if fields.expert is None else values.where(fields.expert == 0, values.new_zeros(()))
