"""Log-probabilities of labels over a vocabulary that is cut across tensor-parallel ranks, with its gradient.

In: this rank's logits [T, V'/tp] and, per token, the label and the temperature. Out: log softmax(logits / temperature)
at the label, fp32 [T], the same on every rank of the group. Columns of the padding beyond the true vocabulary take no
part. Tokens are worked off in chunks, so besides the logits only one more buffer of their size exists, in backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2048  # tokens; fp32 copies of a chunk of a 150k vocabulary take 1.2 GB


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: Tensor, first: int, width: int, group: dist.ProcessGroup
    ) -> Tensor:
        """`first`: vocabulary index of column 0; `width`: columns that are not padding."""
        local = labels - first
        mine = (local >= 0) & (local < width)
        local = local.where(mine, torch.zeros_like(local))
        normaliser = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
        chosen = torch.empty_like(normaliser)
        for part in torch.arange(len(labels)).split(CHUNK):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            scaled = logits[rows, :width].float() / temperature[rows, None]
            normaliser[rows] = _log_sum_exp(scaled, group)
            chosen[rows] = scaled.gather(1, local[rows, None]).squeeze(1) if width else 0.0
        chosen = chosen.where(mine, torch.zeros_like(chosen))
        if group.size() > 1:
            dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(logits, local, mine, temperature, normaliser)
        ctx.width = width
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, local, mine, temperature, normaliser = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        scale = upstream / temperature
        for part in torch.arange(len(local)).split(CHUNK):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            scaled = logits[rows, : ctx.width].float() / temperature[rows, None]
            softmax = (scaled - normaliser[rows, None]).exp_()
            piece = softmax.mul_(-scale[rows, None])
            if ctx.width:
                piece.scatter_add_(1, local[rows, None], (scale[rows] * mine[rows])[:, None])
            grad[rows, : ctx.width] = piece.to(grad.dtype)
        return grad, None, None, None, None, None


def _log_sum_exp(scaled: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Over all ranks' columns; an all-padding shard (no columns) contributes nothing."""
    top = scaled.max(1).values if scaled.shape[1] else scaled.new_full((len(scaled),), -torch.inf)
    if group.size() > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total = (scaled - top[:, None]).exp_().sum(1)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.log_() + top


def label_logprobs(logits: Tensor, labels: Tensor, temperature: Tensor, vocab: int, group: dist.ProcessGroup) -> Tensor:
    """Log-probabilities [T] of `labels` [T]; `vocab` is the true vocabulary size, without padding."""
    columns = logits.shape[1]
    first = group.rank() * columns
    width = max(0, min(columns, vocab - first))
    return _LabelLogprobs.apply(logits, labels, temperature, first, width, group)
