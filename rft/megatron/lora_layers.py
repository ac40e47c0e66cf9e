"""Parallel linear layers with a LoRA adapter beside the frozen weight: megatron's own, or those of
Transformer Engine, whichever the layer spec has. Formula and layouts: `rft.ground.adapters`.

    column:  x ─► A ─► gather tokens ─► B of this rank's rows        row:  x of this rank's columns
            ─► A ─► reduce ─► B
    expert:  x ─► A ─► B, one of them this rank's part

In: the submodules of a layer spec and the `Lora`. Out: the same with classes that give what the
layer gives, with the adapter's part; where a layer norms its input first, so it does the adapter's.
Only the narrow [T, r] between A and B is ever exchanged, and of an expert the gradient of the
matrix that is not cut. Invariant: B begins at 0, so the first policy is the base model, in every
layout.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from rft.ground.adapters import ATTENTION, MLP, Lora, beside
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
        self.lora_A = _parameter(self.weight, self.parts * self.lora.rank, columns)
        self.lora_B = _parameter(self.weight, rows, self.lora.rank)
        set_tensor_model_parallel_attributes(self.lora_B, True, 0, 1)
        self.lora_A.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        mask = _row_of_part(self.weight, self.parts, self.segments)
        self.register_buffer("row_of_part", mask, persistent=False)
        # Transformer Engine's layer norms its input, and then gives that too: (output, normed)
        self.return_layernorm_output = hasattr(self, "layer_norm_weight")

    def spread(self) -> Tensor:
        """B [rows, P*r]: every row meets the A of its own projection and no other."""
        return _spread(self.lora_B, self.row_of_part)

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
        self.lora_A = _parameter(self.weight, self.lora.rank, columns)
        self.lora_B = _parameter(self.weight, rows, self.lora.rank)
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


class LoraExperts(nn.Module):
    """In front of a layer of one expert, or of all experts of this rank in one module (`weight0`,
    `weight1`, ...), which is told how many rows each has.

    Tokens are gathered before an expert and summed after it, over the ranks that have its parts. So
    its input is whole, its output a part of a sum, and only the matrix that all of them have gets
    parts of its gradient: A of a column layer, B of a row layer. `counts`: whether the norm of the
    gradient has that matrix from this rank.
    """

    lora: Lora
    parts: int
    segments: list[ShardSlice]
    is_row: bool
    counts: bool

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        grouped = hasattr(self, "num_gemms")
        self.numbers = [str(n) for n in range(self.num_gemms)] if grouped else [""]
        # Transformer Engine's is told of no group where megatron does all between the ranks
        self.shards = self._tp_group if grouped else self.tp_group
        for number in self.numbers:
            weight = self.get_parameter(f"weight{number}")
            rows, columns = weight.shape
            A = _parameter(weight, self.parts * self.lora.rank, columns)
            B = _parameter(weight, rows, self.lora.rank)
            set_tensor_model_parallel_attributes(A, True, 1 if self.is_row else 0, 1)
            set_tensor_model_parallel_attributes(B, True, 0, 1)
            for matrix in (A, B):
                matrix.allreduce = weight.allreduce  # type: ignore[attr-defined]
            (B if self.is_row else A).shared = not self.counts  # type: ignore[attr-defined]
            self.register_parameter(f"lora_A{number}", A)
            self.register_parameter(f"lora_B{number}", B)
        first = self.get_parameter(f"weight{self.numbers[0]}")
        mask = None if self.is_row else _row_of_part(first, self.parts, self.segments)
        self.register_buffer("row_of_part", mask, persistent=False)

    def matrices(self, number: str) -> tuple[Tensor, Tensor]:
        """A, and B of which every row meets the A of its own projection and no other."""
        A, B = self.get_parameter(f"lora_A{number}"), self.get_parameter(f"lora_B{number}")
        if self.is_row:
            return A, SummedGradient.apply(B, self.shards)
        return SummedGradient.apply(A, self.shards), _spread(B, self.row_of_part)

    def delta(self, number: str, run: ShardSlice) -> Tensor:
        """What the adapter adds to these of this rank's rows, or columns, of an expert's weight."""
        A, B = self.matrices(number)
        length = run.stop - run.start
        if self.is_row:
            return self.lora.scale * (B @ A.narrow(1, run.local, length))
        return self.lora.scale * (B.narrow(0, run.local, length) @ A)

    def forward(self, input_: Tensor, *splits: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *splits)
        sizes = splits[0] if splits else [input_.shape[0]]
        rows = input_.split(sizes.tolist() if isinstance(sizes, Tensor) else sizes)
        added = []
        for number, own in zip(self.numbers, rows, strict=True):
            A, B = self.matrices(number)
            added.append(nn.functional.linear(nn.functional.linear(own, A), B))
        return output + self.lora.scale * torch.cat(added), bias


class SummedGradient(torch.autograd.Function):
    """What it is given; the gradient is the sum of those of a group."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.group.size() > 1:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _parameter(weight: Tensor, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns, dtype=weight.dtype, device=weight.device))


def _row_of_part(weight: Tensor, parts: int, segments: list[ShardSlice]) -> Tensor:
    """1 where a row of the weight is of that part [rows, parts, 1]."""
    mask = weight.new_zeros(weight.shape[0], parts, 1)
    for segment in segments:
        mask[segment.local : segment.local + segment.stop - segment.start, segment.part] = 1
    return mask


def _spread(B: Tensor, row_of_part: Tensor) -> Tensor:
    return (B[:, None] * row_of_part).flatten(1)


def add_adapters(layer: Any, has_experts: bool, lora: Lora, dims: Dims, place: Place) -> None:
    """Put adapters in front of the layers of `lora` in the submodules of one transformer layer."""
    for at, inner, names in _linear(layer, has_experts, dims):
        for name in lora.layers & names:
            bound = bind(f"decoder.layers.0.{at}.{name}.weight", 0, features=dims.features)
            is_row, base = bound.kind == "row", getattr(inner, name)
            own: dict[str, Any] = {"lora": lora}
            if bound.is_expert:
                own |= {"is_row": is_row, "counts": place.etp_rank == 0}
            if bound.is_expert or not is_row:
                own |= {"parts": len(bound.hf), "segments": place.segments(bound, dims)}
            front = LoraExperts if bound.is_expert else LoraRow if is_row else LoraColumn
            setattr(inner, name, type(f"Lora{base.__name__}", (front, base), own))


def _linear(layer: Any, has_experts: bool, dims: Dims) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Where a transformer layer has linear ones: what megatron calls the place, its submodules and
    which they are.
    """
    yield "self_attention", submodules(layer.self_attention), frozenset(ATTENTION)
    inner, names = submodules(layer.mlp), frozenset(MLP)
    if not has_experts:
        yield "mlp", inner, names
        return
    yield "mlp.experts.local_experts.0", submodules(inner.experts), names
    if dims.shared_ffn:
        yield "mlp.shared_experts", submodules(inner.shared_experts), names


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
            parameter.requires_grad_(beside(name) is not None)


def deltas(model: Sequence[nn.Module]) -> dict[int, Callable[[ShardSlice], Tensor]]:
    """Per weight, by identity, the function that gives what its adapter adds to a part of it."""
    found: dict[int, Callable[[ShardSlice], Tensor]] = {}
    for layer in (layer for part in model for layer in part.modules()):
        if isinstance(layer, LoraColumn | LoraRow):
            found[id(layer.weight)] = layer.delta
        elif isinstance(layer, LoraExperts):
            for number in layer.numbers:
                weight = layer.get_parameter(f"weight{number}")
                found[id(weight)] = functools.partial(layer.delta, number)
    return found


def initial_A(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """PEFT's initialisation, U(-1/sqrt(i), 1/sqrt(i)), of a whole HF tensor [r, i]: the same
    whatever the layout.
    """
    generator = torch.Generator().manual_seed(
        xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1
    )
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
