"""What Transformer Engine's kernels give for what they are given, in shapes alone: on a card they
ask the host nothing, while the stand-in that computes them in Python does.

Every result is connected with what it is made of, so that backward goes the same way.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

ROOT = "transformer_engine.pytorch"


def connected(shape: Any, *sources: Tensor | None) -> Tensor:
    first = next(source for source in sources if source is not None)
    made = first.new_empty(shape)
    for source in sources:
        if source is not None and source.is_floating_point():
            made = made + 0 * source.sum().to(made.dtype)
    return made


def attention(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return connected((*query.shape[:-2], query.shape[-2] * value.shape[-1]), query, key, value)


def apply_rotary_pos_emb(t: Tensor, *_: Any, **__: Any) -> Tensor:
    return connected(t.shape, t)


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int, *_: Any) -> Any:
    return connected((num_out_tokens, inp.shape[1]), inp), routing_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = connected((num_out_tokens, inp.shape[1]), inp)
    return rows, connected((num_out_tokens,), probs), routing_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    **_: Any,
) -> Tensor:
    return connected(restore_shape or inp.shape, inp, merging_probs)


def moe_sort_chunks_by_index(inp: Tensor, *_: Any) -> Tensor:
    return connected(inp.shape, inp)


def moe_sort_chunks_by_index_with_probs(inp: Tensor, probs: Tensor, *_: Any) -> Any:
    return connected(inp.shape, inp), connected(probs.shape, probs)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def put_in_place() -> None:
    """Before megatron takes them."""
    import_module(ROOT).DotProductAttention.forward = attention
    import_module("transformer_engine.layers").get_dummy_wgrad = get_dummy_wgrad
    places = {
        "attention.rope": (apply_rotary_pos_emb,),
        "module.base": (get_dummy_wgrad,),
        "permutation": (
            moe_permute,
            moe_permute_with_probs,
            moe_unpermute,
            moe_sort_chunks_by_index,
            moe_sort_chunks_by_index_with_probs,
        ),
    }
    for module, functions in places.items():
        for function in functions:
            assert hasattr(import_module(f"{ROOT}.{module}"), function.__name__)
            setattr(import_module(f"{ROOT}.{module}"), function.__name__, function)
