"""Parallel linear layers with a LoRA adapter beside the frozen weight: megatron's own, or those of
Transformer Engine, whichever the layer spec has. Formula and layouts: `rft.ground.adapters`.

    column:  x ─► A ─► gather tokens ─► B of this rank's rows        row:  x of this rank's columns
            ─► A ─► reduce ─► B

In: the submodules of a layer spec and the `Lora`. Out: the same with classes that give what the
layer gives, with the adapter's part; where a layer norms its input first, so it does the adapter's.
Only the narrow [T, r] between A and B is ever exchanged. Invariant: B begins at 0, so the first
policy is the base model, in every layout.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from rft.ground.adapters import Lora
from rft.ground.names import Dims, Place, ShardSlice, bind


class LoraColumn(nn.Module):
    """In front of a column-parallel layer. `segments`: which of this rank's rows belong to which of
    the `parts` projections that the layer fuses.
    """

    lora: Lora
    parts: int
    segments: list[ShardSlice]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        rows, columns = self.weight.shape
        self.lora_A = _parameter(self, self.parts * self.lora.rank, columns)
        self.lora_B = _parameter(self, rows, self.lora.rank)
        set_tensor_model_parallel_attributes(self.lora_B, True, 0, 1)
        self.lora_A.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        mask = self.weight.new_zeros(rows, self.parts, 1)
        for segment in self.segments:
            mask[segment.local : segment.local + segment.stop - segment.start, segment.part] = 1
        self.register_buffer("row_of_part", mask, persistent=False)
        # Transformer Engine's layer norms its input, and then gives that too: (output, normed)
        self.return_layernorm_output = hasattr(self, "layer_norm_weight")

    def spread(self) -> Tensor:
        """B [rows, P*r]: every row meets the A of its own projection and no other."""
        return (self.lora_B[:, None] * self.row_of_part).flatten(1)

    def delta(self, run: ShardSlice) -> Tensor:
        """What the adapter adds to these of this rank's rows of the weight."""
        rows = self.spread().narrow(0, run.local, run.stop - run.start)
        return self.lora.scale * (rows @ self.lora_A)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        if self.return_layernorm_output:
            output, input_ = output
        low = nn.functional.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return output + self.lora.scale * nn.functional.linear(low, self.spread()), bias


class LoraRow(nn.Module):
    """In front of a row-parallel layer."""

    lora: Lora

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        rows, columns = self.weight.shape
        self.lora_A = _parameter(self, self.lora.rank, columns)
        self.lora_B = _parameter(self, rows, self.lora.rank)
        set_tensor_model_parallel_attributes(self.lora_A, True, 1, 1)
        self.lora_B.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def delta(self, run: ShardSlice) -> Tensor:
        """What the adapter adds to these of this rank's columns of the weight."""
        columns = self.lora_A.narrow(1, run.local, run.stop - run.start)
        return self.lora.scale * (self.lora_B @ columns)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        low = nn.functional.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + self.lora.scale * nn.functional.linear(low, self.lora_B), bias


def _parameter(layer: Any, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(
        torch.zeros(rows, columns, dtype=layer.weight.dtype, device=layer.weight.device)
    )


def add_adapters(layer: Any, lora: Lora, dims: Dims, place: Place) -> None:
    """Put adapters in front of the layers of `lora` in the submodules of one transformer layer."""
    parents = dict.fromkeys(("linear_qkv", "linear_proj"), "self_attention")
    parents |= dict.fromkeys(("linear_fc1", "linear_fc2"), "mlp")
    for name in lora.layers:
        inner = submodules(getattr(layer, parents[name]))
        full = f"decoder.layers.0.{parents[name]}.{name}.weight"
        bound = bind(full, 0, features=dims.features)
        own: dict[str, Any] = {"lora": lora}
        if bound.kind != "row":
            own |= {"parts": len(bound.hf), "segments": place.segments(bound, dims)}
        front, base = LoraRow if bound.kind == "row" else LoraColumn, getattr(inner, name)
        setattr(inner, name, type(f"Lora{base.__name__}", (front, base), own))


def submodules(spec: Any) -> Any:
    """Of a ModuleSpec; newer versions of megatron have a partial call in place of some."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def freeze_all_but_adapters(model: Sequence[nn.Module]) -> None:
    """Recomputed layers get a gradient only if what goes into them asks for one, and a frozen
    embedding does not: its output is made to ask.
    """
    for part in model:
        if part.pre_process:
            part.embedding.register_forward_hook(
                lambda _module, _inputs, output: output.requires_grad_()
            )
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name.endswith((".lora_A", ".lora_B")))


def deltas(model: Sequence[nn.Module]) -> dict[int, Callable[[ShardSlice], Tensor]]:
    """Per weight, by identity, the function that gives what its adapter adds to a part of it."""
    layers = [
        layer
        for part in model
        for layer in part.modules()
        if isinstance(layer, LoraColumn | LoraRow)
    ]
    return {id(layer.weight): layer.delta for layer in layers}


def initial_A(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """PEFT's initialisation, U(-1/sqrt(i), 1/sqrt(i)), of a whole HF tensor [r, i]: the same
    whatever the layout.
    """
    generator = torch.Generator().manual_seed(
        xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1
    )
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
