"""An engine that computes as the trainer does, to the bit: vLLM's layers for a CPU, with the
trainer's own functions in them.

In: nothing, in a process of vLLM's, before it loads a model. Out: vLLM's registries name these
classes in place of its own: for attention (`register_backend`), norms and activations
(`CustomOp.register_oot`), linear layers and the output layer (`PluggableLayer.register_oot`).
Invariant: what a token's row becomes depends on the tokens before it alone, not on who else is in
the batch, how its prompt was cut, or what of it was cached (`rft.megatron.bitwise`). The sampler is
vLLM's own: its log-softmax is of one row.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rft.megatron.bitwise import attend, product
from rft.megatron.elementwise import gated, root_mean_square


class ExactNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return root_mean_square(x, self.weight, self.variance_epsilon)
        both = x + residual
        return root_mean_square(both, self.weight, self.variance_epsilon), both


class ExactGate(SiluAndMul):
    def forward(self, x: Tensor) -> Tensor:
        return gated(x)


class _Linear(UnquantizedLinearMethod):
    """The weight stays as it was loaded: nothing is packed for another kernel."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, layer.weight, bias)


class _Embedding(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of the words that there are, without vLLM's padding."""
        return product(x, layer.weight[: layer.org_vocab_size], bias)


def _exact(layer: type[Any], method: type[Any]) -> type[Any]:
    """The class of vLLM's, with another method of multiplying."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, *args, **kwargs)
        self.quant_method = method()

    return type(f"Exact{layer.__name__}", (layer,), {"__init__": __init__})


class ExactBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type["ExactAttention"]:
        return ExactAttention


class ExactAttention(CPUAttentionBackendImpl):
    """Pages hold keys and values side by side, [block, groups, slot, key | value]."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size, slots = kv_cache.shape[2], slot_mapping.long()
        both = torch.cat([key, value], -1)[: len(slots)]
        kv_cache[slots // size, :, slots % size] = both

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM warms up
            return output
        size = kv_cache.shape[2]
        starts = attn_metadata.query_start_loc.tolist()
        lengths = attn_metadata.seq_lens.tolist()
        alike: dict[int, list[int]] = {}
        for number, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            alike.setdefault(stop - start, []).append(number)
        for n, requests in alike.items():
            ends = torch.tensor([lengths[one] for one in requests])
            first = torch.tensor([starts[one] for one in requests])
            held = attn_metadata.block_table[requests, : -(-int(ends.max()) // size)].long()
            # what stands in a table behind a request's pages is of others, or of nobody
            held = held.where(torch.arange(held.shape[1]) * size < ends[:, None], held[:, :1])
            pages = kv_cache[held].transpose(1, 2).flatten(2, 3)[:, :, : int(ends.max())]
            keys, values = pages.split(pages.shape[-1] // 2, -1)
            rows = first[:, None] + torch.arange(n)
            last = ends[:, None] - n + torch.arange(n)
            hidden = torch.arange(pages.shape[2]) > last[..., None]
            out = attend(query[rows].transpose(1, 2), keys, values, hidden, self.scale)
            output[rows] = out.transpose(1, 2)
        return output


def register() -> None:
    """Once per process; again does nothing."""
    if RMSNorm.__name__ in op_registry_oot:
        return
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ExactBackend.__name__}")
    for op, exact in ((RMSNorm, ExactNorm), (SiluAndMul, ExactGate)):
        CustomOp.register_oot(exact, name=op.__name__)
    for layer in (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear):
        PluggableLayer.register_oot(_exact(layer, _Linear), name=layer.__name__)
    for layer in (VocabParallelEmbedding, ParallelLMHead):
        PluggableLayer.register_oot(_exact(layer, _Embedding), name=layer.__name__)
