"""What a layer does to every number by itself, between its products: norm and gated activation.
Each as one function with a gradient of its own.

In and out: tensors of any type on any device; the type of what comes in is that of what goes out.
In fp32 torch's own do it. Of other types they and megatron's are made of single operations (a card
with Transformer Engine has kernels): every one reads and writes all of memory again, and their
gradients are twice as many. On a CPU, where the products are quick (AMX), these took about a third
of a step. Here a few rows are worked on at a time, so that what one operation leaves is in the
cache for the next, and only what the gradient needs is kept. Invariant: sums are fp32, and results
are rounded where transformers rounds them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rft.ground.device import cached_slices


def root_mean_square(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last axis."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    result: Tensor = _RootMeanSquare.apply(x, weight, eps)
    return result


def gated(both: Tensor) -> Tensor:
    """silu(gate) * up, of [..., gate and up behind it]."""
    if both.dtype == torch.float32:
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up
    result: Tensor = _Gated.apply(both)
    return result


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        scale = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        for some in cached_slices(rows):
            full = rows[some].to(torch.float32, copy=True)
            norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
            scale[some] = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            torch.mul(full.mul_(scale[some]).to(x.dtype), weight, out=out[some])
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        given = gradient.reshape(rows.shape)
        of_x, full = torch.empty_like(rows), weight.float()
        of_weight = torch.zeros_like(full)
        for some in cached_slices(rows):
            normed = rows[some].to(torch.float32, copy=True).mul_(scale[some])
            passed = given[some].to(torch.float32, copy=True)
            products = passed * normed
            of_weight += products.sum(0)
            common = torch.mv(products, full).div_(-rows.shape[1]).unsqueeze(1)
            of_x[some] = passed.mul_(full).addcmul_(normed, common).mul_(scale[some])
        return of_x.view(gradient.shape), of_weight.to(weight.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        rows = both.reshape(-1, both.shape[-1])
        width = rows.shape[1] // 2
        out = rows.new_empty(len(rows), width)
        for some in cached_slices(rows):
            opened = functional.silu(rows[some, :width])
            torch.mul(opened, rows[some, width:], out=out[some])
        ctx.save_for_backward(rows)
        return out.view(*both.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        width = rows.shape[1] // 2
        given, of_both = gradient.reshape(-1, width), torch.empty_like(rows)
        for some in cached_slices(rows):
            gate, passed = rows[some, :width], given[some]
            torch.mul(passed, functional.silu(gate), out=of_both[some, width:])
            product = passed * rows[some, width:]
            of_both[some, :width] = torch.ops.aten.silu_backward(product, gate)
        return of_both.view(*gradient.shape[:-1], 2 * width)
