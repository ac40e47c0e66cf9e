"""Products, attention and log-probabilities whose bits are those of one row alone: the same however
many rows are computed together, in whichever pages, chunks or paddings they stand.

In: fp32 tensors on a CPU. Out: what the trainer (`attention`, `logprobs`) and, in vLLM's process,
the engine (`rft.sync.bitwise`) both compute with. Nothing of megatron or vLLM is imported here.
Invariant: a sum is added up in an order that follows from its own terms alone. torch's product of
two matrices keeps it for ROWS rows and more (of fewer it takes other kernels), so there are never
fewer; a query meets its keys in blocks of KEYS from the first on, where a key that it does not see
adds 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
KEYS = 64
LOGITS = 2**24  # that exist at a time


def filled(rows: Tensor) -> Tensor:
    """[..., n, k] -> the same with rows of 0 behind them, where there are fewer than ROWS."""
    missing = ROWS - rows.shape[-2]
    return F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., k] times weight [m, k], transposed, plus bias [m]."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = F.linear(filled(flat), weight)[: len(flat)].view(*rows.shape[:-1], len(weight))
    return out if bias is None else out + bias


def label_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    """[T] of hidden [T, H], labels [T]: as vLLM's sampler has them, from whole rows of logits."""
    step = max(ROWS, LOGITS // len(weight))
    found = [torch.zeros_like(temperature[:0])]
    for at in range(0, len(hidden), step):
        some = slice(at, at + step)
        logits = product(hidden[some], weight).div_(temperature[some, None])
        found.append(logits.log_softmax(1).gather(1, labels[some, None]).squeeze(1))
    return torch.cat(found)


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """query [b, heads, n, d], key [b, groups, L, d], value [b, groups, L, e] -> [b, heads, n, e];
    `hidden` [b or 1, n, L]: which keys a query does not see.
    """
    b, heads, n, _ = query.shape
    groups, spare = key.shape[1], -key.shape[2] % KEYS
    times = heads // groups
    rows = filled(query.reshape(b * groups, times * n, -1))
    keys = _blocks(key, spare)
    # one more number of each value, 1, adds up the weights
    values = _blocks(F.pad(value, (0, 1), value=1.0), spare)
    unseen = F.pad(hidden, (0, spare), value=True).expand(b, n, -1)[:, None, None]
    unseen = unseen.expand(b, groups, times, n, -1).reshape(b * groups, times * n, -1)
    unseen = F.pad(unseen, (0, 0, 0, rows.shape[1] - times * n))
    scores = torch.stack([torch.bmm(rows, block.transpose(1, 2)) for block in keys])
    scores.mul_(scale)
    for block, out in zip(unseen.split(KEYS, 2), scores, strict=True):
        out.masked_fill_(block, -torch.inf)
    weights = scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    total = torch.bmm(weights[0], values[0])
    for weight, block in zip(weights[1:], values[1:], strict=True):
        total = total + torch.bmm(weight, block)
    out = total[:, : times * n, :-1] / total[:, : times * n, -1:]
    return out.view(b, heads, n, -1)


def _blocks(columns: Tensor, spare: int) -> list[Tensor]:
    """[b, groups, L, d] -> KEYS of them after KEYS, each [b * groups, KEYS, d]."""
    whole = F.pad(columns, (0, 0, 0, spare)).flatten(0, 1)
    return [block.contiguous() for block in whole.split(KEYS, 1)]


class Attended(torch.autograd.Function):
    """`attend`, with the gradient of torch's own attention over the same."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, hidden)
        ctx.scale = scale
        return attend(query, key, value, hidden, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *given, hidden = ctx.saved_tensors
        inputs = [one.detach().requires_grad_() for one in given]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(
                *inputs,
                attn_mask=~hidden[:, None],
                scale=ctx.scale,
                enable_gqa=inputs[0].shape[1] != inputs[1].shape[1],
            )
        return *torch.autograd.grad(out, inputs, gradient), None, None
