"""What a layer does to every number by itself has the value and the gradient of torch's own
operations, in fp32 to rounding and in bf16 nearer to fp32 than they are.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rft.ground import device
from rft.megatron import elementwise

EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers rounds it."""
    full = x if x.dtype == torch.float64 else x.float()
    return weight * functional.rms_norm(full, (x.shape[-1],), None, EPS).to(x.dtype)


def glu(x: Tensor, _weight: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "norm": (lambda x, w: elementwise.root_mean_square(x, w, EPS), norm),
    "gated": (lambda x, w: elementwise.gated(x), glu),
}


def run(function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(x, weight)
    out.backward(torch.cos(out.detach().float()).to(out.dtype))
    return [out.detach().float(), x.grad.float()] + (
        [weight.grad.float()] if weight.grad is not None else []
    )


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_single_operations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "HOST_CACHE", 200)  # several cuts, the last one shorter
    ours, single = CASES[name]
    torch.manual_seed(0)
    x, weight = torch.randn(37, 1, 3, 16), 1 + torch.randn(16) / 10
    exact = run(single, x.double(), weight.double())
    mine, theirs = run(ours, x, weight), run(single, x, weight)
    assert len(mine) == len(exact)
    for got, other, want in zip(mine, theirs, exact, strict=True):
        assert off(got, want) <= max(2 * off(other, want), 1e-6)
    # rows that are no memory of their own, as megatron splits queries from keys
    wide = torch.cat([x, x], -1)
    part = run(lambda whole, w: ours(whole[..., :16], w), wide, weight)
    assert torch.equal(part[0], mine[0]) and torch.equal(part[1][..., :16], mine[1])


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_no_further_from_fp32_than_single_operations(name: str) -> None:
    ours, single = CASES[name]
    torch.manual_seed(0)
    x, weight = torch.randn(64, 1, 3, 16).bfloat16(), (1 + torch.randn(16) / 10).bfloat16()
    exact = run(single, x.float(), weight.float())
    mine, theirs = run(ours, x, weight), run(single, x, weight)
    for got, other, want in zip(mine, theirs, exact, strict=True):
        assert off(got, want) <= 1.1 * off(other, want)


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
