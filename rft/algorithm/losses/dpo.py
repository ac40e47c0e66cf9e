"""Direct preference optimisation: a loss of pairs of responses, as one loss per token."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor


BETA = 0.1


def dpo(
    logprobs: "Tensor", fields: Fields, beta: float = BETA, label_smoothing: float = 0.0
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-(1 - s) log sigma(beta D) - s log sigma(-beta D), mean over pairs (arXiv:2305.18290, eq. 7; s: label smoothing).

    D, the field `margin`, is the sum of log(pi / reference) over the chosen response minus that over the rejected one, of the
    weights at the start of the step. It is known before the loss, so the two may lie in different microbatches and on different
    ranks. What is returned is the loss at those weights, spread over the tokens, plus its exact derivative times how far each
    log-probability has moved from there (by nothing but rounding, as a step is one update): value and gradient are the pair's.
    `advantage` is 1 on the chosen and -1 on the rejected response; weights are 1 / responses.
    """
    import torch
    from torch.nn.functional import logsigmoid

    assert fields.margin is not None and fields.proximal is not None
    scaled = beta * fields.margin
    loss = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    slope = beta * (label_smoothing * torch.sigmoid(scaled) - (1 - label_smoothing) * torch.sigmoid(-scaled))
    (count,) = fields.sums(torch.ones_like(logprobs))
    moved = logprobs - fields.proximal
    # A pair has two responses, and the weights count responses: each brings the pair's loss once, and twice its own slope.
    return loss / count.clamp(min=1) + 2 * slope * fields.advantage * moved, {}
