"""What a pair of responses is worth to each other: the margin of every pair of a step, brought to
the tokens of both; and the loss of pairs.

In: microbatches with the scores `proximal` and `reference` on the ranks that compute losses; rows
2k and 2k + 1 of the step are the chosen and the rejected response of pair k, wherever packing put
them. Out: the same with the score `margin` and with advantages 1 and -1, and the rewards of the
step. Invariant: the margin is that of the whole pair, the same on every rank, so the gradient does
not depend on which microbatch, data-parallel rank or context slice holds which response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rft.algorithm.fields import Fields
from rft.config.arguments import Positive, Smoothing
from rft.data.packing import Packed

if TYPE_CHECKING:
    from torch import Tensor

    from rft.algorithm.fields import Losses

BETA = 0.1
Summed = Callable[[list[float]], list[float]]


def credited(
    part: Sequence[Packed],
    beta: float,
    counts: bool,
    summed: Summed,
    members: Sequence[int] | None = None,
) -> tuple[Sequence[Packed], dict[str, float]]:
    """`counts`: whether this rank's rows are counted (others may hold the same); `summed` adds up
    over all ranks. `members`: ascending, the rows of the step that are here; default: all.
    """
    scored = [packed for packed in part if "reference" in packed.scores]
    own = {row: ratio for packed in scored for row, ratio in _ratios(packed)} if counts else {}
    if members is None:
        (total,) = summed([float(len(own))])
        members = range(int(total))
    place = {row: at for at, row in enumerate(members)}
    ratios = np.zeros(len(members))
    ratios[[place[row] for row in own]] = list(own.values())
    ratios = np.array(summed(ratios.tolist()))
    chosen, rejected = ratios[0::2], ratios[1::2]
    margins = dict(zip(members, np.repeat(chosen - rejected, 2).tolist(), strict=True))
    metrics = _metrics(beta * chosen, beta * rejected) if len(chosen) else {}
    return [
        _with(packed, margins) if "reference" in packed.scores else packed for packed in part
    ], metrics


def _ratios(packed: Packed) -> list[tuple[int, float]]:
    """(row, sum of log(policy / reference) over its trained tokens)."""
    gap = np.where(packed.weight != 0, packed.scores["proximal"] - packed.scores["reference"], 0.0)
    return [
        (row, float(gap[start:stop].sum(dtype=np.float64)))
        for row, start, stop in _sequences(packed)
    ]


def _sequences(packed: Packed) -> list[tuple[int, int, int]]:
    bounds = packed.cu_seqlens.tolist()
    return list(zip(packed.rows.tolist(), bounds[:-1], bounds[1:], strict=True))


def _with(packed: Packed, margins: Mapping[int, float]) -> Packed:
    sign, margin = np.zeros((2, packed.length), dtype=np.float32)
    for row, start, stop in _sequences(packed):
        sign[start:stop] = -1.0 if row % 2 else 1.0
        margin[start:stop] = margins[row]
    return replace(packed, advantage=sign, scores=packed.scores | {"margin": margin})


def _metrics(chosen: np.ndarray, rejected: np.ndarray) -> dict[str, float]:
    """Means over the pairs of the implicit rewards, beta * log(policy / reference)."""
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margin": float((chosen - rejected).mean()),
        "rewards/accuracy": float((chosen > rejected).mean()),
    }


def dpo(
    logprobs: "Tensor", fields: Fields, beta: Positive = BETA, label_smoothing: Smoothing = 0.0
) -> "Losses":
    """Direct preference optimisation: a loss of pairs of responses, as one loss per token.

    -(1 - s) log sigma(beta D) - s log sigma(-beta D), mean over pairs (arXiv:2305.18290, eq. 7; s:
    label smoothing).

    D, the field `margin`, is the sum of log(pi / reference) over the chosen response minus that
    over the rejected one, of the weights at the start of the step. It is known before the loss, so
    the two may lie in different microbatches and on different ranks. What is returned is the loss
    at those weights, spread over the tokens, plus its exact derivative times how far each
    log-probability has moved from there (by nothing but rounding: the margin is made anew before
    every update): value and gradient are the pair's. `advantage` is 1 on the chosen and -1 on the
    rejected response; weights are 1 / responses.
    """
    import torch
    from torch.nn.functional import logsigmoid

    assert fields.margin is not None and fields.proximal is not None
    scaled = beta * fields.margin
    loss = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    slope = beta * (
        label_smoothing * torch.sigmoid(scaled) - (1 - label_smoothing) * torch.sigmoid(-scaled)
    )
    (count,) = fields.sums(torch.ones_like(logprobs))
    moved = logprobs - fields.proximal
    # A pair has two responses, and the weights count responses: each brings the pair's loss once,
    # and twice its own slope.
    return loss / count.clamp(min=1) + 2 * slope * fields.advantage * moved, {}
