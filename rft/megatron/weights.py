"""Two readings of `rft.ground.names`: Hugging Face files -> shards, shards -> blocks.

In: the GPTModels whose parameters this rank holds. Out: filled parameters, or HF blocks of their
current values. Invariants: the vocabulary's padding rows are 0 and never leave; a tied
embedding leaves once, from the first stage; loading reads only the rows and columns that this rank
keeps.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rft.config import ConfigError
from rft.ground import hubs
from rft.ground.adapters import PREFIX, Lora, adapter, adapter_names, beside
from rft.ground.names import (
    VALUE_HEAD,
    BoundRule,
    Dims,
    Place,
    ShardSlice,
    architecture_of,
    bind,
    file_shapes,
    fused_name,
    hf_names,
    hf_shape,
    is_ahead,
)
from rft.ground.protocols import Block
from rft.megatron.lora_layers import deltas, initial_A

# a buffer that old checkpoints store; it follows from the config
IGNORED_SUFFIX = "rotary_emb.inv_freq"
SHOWN = 12  # tensors named in one error message


@dataclass(frozen=True)
class Shard:
    """One parameter of this rank and where it lies in the HF tensors, which have these `shapes`."""

    parameter: nn.Parameter
    bound: BoundRule
    shapes: tuple[tuple[int, ...], ...]
    segments: list[ShardSlice]
    is_tied_copy: bool

    @property
    def is_adapter(self) -> bool:
        return self.bound.hf[0].startswith(PREFIX)


@dataclass(frozen=True)
class Slab:
    """A block and the runs of the shard that it consists of.

    `delta`: what an adapter adds to a run.
    """

    block: Block
    shard: Shard
    runs: list[ShardSlice]
    delta: Callable[[ShardSlice], Tensor] | None

    @torch.no_grad()
    def read(self) -> Tensor:
        """The block's current bytes, contiguous, adapter merged; a view of the live weights where
        that is possible.
        """
        value = self.shard.parameter.detach()
        parts = [value.narrow(run.dim, run.local, run.stop - run.start) for run in self.runs]
        if self.delta is not None:
            parts = [part + self.delta(run) for part, run in zip(parts, self.runs, strict=True)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=self.runs[0].dim)


def shards(model: Sequence[nn.Module], dims: Dims, place: Place) -> list[Shard]:
    """Every parameter of the rank at `place`, in the model's order."""
    found = []
    for part in model:
        first_layer = part.decoder.layers[0].layer_number - 1
        for name, parameter in part.named_parameters():
            found.append(_shard(name, parameter, first_layer, dims, place))
    return found


def _shard(name: str, parameter: nn.Parameter, first_layer: int, dims: Dims, place: Place) -> Shard:
    if found := beside(name):
        which, weight = found
        base = bind(weight, first_layer, place.first_expert(dims), dims.features)
        rank = (
            parameter.shape[1]
            if which == "lora_B"
            else parameter.shape[0] // (1 if base.kind == "row" else len(base.hf))
        )
        held = adapter(which, base, dims, place, rank)
        return Shard(parameter, held.bound, held.shapes, held.segments, False)
    bound = bind(name, first_layer, place.first_expert(dims), dims.features)
    shapes = tuple(
        hf_shape(bound.kind, part, hf_name, dims) for part, hf_name in enumerate(bound.hf)
    )
    tied_copy = dims.tied and name == "output_layer.weight"
    return Shard(parameter, bound, shapes, place.segments(bound, dims), tied_copy)


class HFReader:
    """Tensors of a checkpoint directory by name, single file or sharded, checked against the config
    when opened.
    """

    def __init__(self, path: str | Path, hf: dict[str, Any]):
        if absent := hubs.absent_weights(Path(path)):
            raise ConfigError(f"model.model_path={path} has no {absent}")
        files = hubs.local_weights(Path(path))
        self._files = [safe_open(str(file), framework="pt") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no iterator there
        self._check(path, hf)

    def _check(self, path: str | Path, hf: dict[str, Any]) -> None:
        dims = Dims.of(hf)
        wanted = file_shapes(dims, architecture_of(hf))
        missing = [name for name in wanted if name not in self._where]
        extra = [
            name
            for name in self._where
            if name not in wanted and not name.endswith(IGNORED_SUFFIX) and not is_ahead(name, dims)
        ]
        if dims.tied:
            extra = [name for name in extra if name != "lm_head.weight"]
        shapes = {
            name: tuple(self._where[name].get_slice(name).get_shape())
            for name in wanted
            if name in self._where
        }
        wrong = [
            f"{n} is {list(s)}, config.json says {list(wanted[n])}"
            for n, s in shapes.items()
            if s != wanted[n]
        ]
        problems = [("missing", missing), ("not of this model", extra), ("misshaped", wrong)]
        text = "; ".join(
            f"{len(found)} {what}: {_listed(found)}" for what, found in problems if found
        )
        if text:
            raise ConfigError(
                f"model.model_path={path}: the weights do not fit config.json: {text}"
            )

    def read(self, name: str, segment: ShardSlice) -> Tensor:
        fused = None if name in self._where else fused_name(name)
        view = self._expert(*fused) if fused else self._where[name].get_slice(name)
        return (
            view[segment.start : segment.stop]
            if segment.dim == 0
            else view[:, segment.start : segment.stop]
        )

    def _expert(self, name: str, expert: int, part: str) -> Tensor:
        """Out of the tensor of all experts."""
        one = self._where[name].get_slice(name)[expert]
        own = one if part == "down" else one[..., part == "up" :: 2]
        return own.mT if own.ndim > 1 else own


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@torch.no_grad()
def load_hf(model: Sequence[nn.Module], path: str | Path, hf: dict[str, Any], place: Place) -> None:
    """Fill every parameter of this rank from the checkpoint at `path`. Raises one ConfigError with
    all that does not fit.

    The checkpoint is that of a language model: a critic's value head begins at 0.
    """
    reader = HFReader(path, hf)
    for shard in shards(model, Dims.of(hf), place):
        target = shard.parameter
        if shard.is_adapter:
            continue
        if shard.bound.hf[0] == VALUE_HEAD:
            target.zero_()
            continue
        if shard.bound.kind == "vocab":
            target.zero_()  # the padding rows
        for segment in shard.segments:
            name = (
                "model.embed_tokens.weight" if shard.is_tied_copy else shard.bound.hf[segment.part]
            )
            rows = segment.stop - segment.start
            target.narrow(segment.dim, segment.local, rows).copy_(reader.read(name, segment))


@torch.no_grad()
def clear_padding(model: Sequence[nn.Module], dims: Dims, place: Place) -> None:
    """Of parameters that a saved state will fill."""
    for shard in shards(model, dims, place):
        if shard.bound.kind == "vocab":
            shard.parameter.zero_()


@torch.no_grad()
def initialise_adapters(model: Sequence[nn.Module], dims: Dims, place: Place, seed: int) -> None:
    """A as PEFT has it, B = 0: the same adapter in every layout."""
    for shard in shards(model, dims, place):
        if shard.is_adapter and shard.bound.hf[0].endswith("lora_A.weight"):
            for segment in shard.segments:
                whole = initial_A(shard.bound.hf[segment.part], shard.shapes[segment.part], seed)
                rows = segment.stop - segment.start
                part = whole.narrow(segment.dim, segment.start, rows)
                shard.parameter.narrow(segment.dim, segment.local, rows).copy_(part)


def slabs(model: Sequence[nn.Module], hf: dict[str, Any], place: Place) -> list[Slab]:
    """Every shard of this rank as it looks from outside, adapters merged. No collective.

    All ranks list tensors in the order of `hf_names`: a rank may lack some (with more shards than
    key/value heads a shard can be queries only), and whoever receives from several ranks needs one
    order for all.
    """
    dims = Dims.of(hf)
    own = [
        shard
        for shard in shards(model, dims, place)
        if not shard.is_adapter and not shard.is_tied_copy
    ]
    return in_order(own, list(hf_names(dims, architecture_of(hf))), deltas(model))


def adapter_slabs(
    model: Sequence[nn.Module], hf: dict[str, Any], place: Place, lora: Lora
) -> list[Slab]:
    """The same of the adapter alone, in PEFT's names: what an
    engine that holds the base model lacks.
    """
    dims = Dims.of(hf)
    own = [shard for shard in shards(model, dims, place) if shard.is_adapter]
    return in_order(own, list(adapter_names(dims, architecture_of(hf), lora)), {})


def in_order(
    own: list[Shard], names: list[str], merged: dict[int, Callable[[ShardSlice], Tensor]]
) -> list[Slab]:
    """Of these shards, tensors in the order of `names`. `merged`: what is added to which
    parameter.
    """
    order = {name: i for i, name in enumerate(names)}
    found = [
        Slab(_block(shard, runs), shard, runs, merged.get(id(shard.parameter)))
        for shard in own
        for runs in _joined(shard.segments)
    ]
    return sorted(found, key=lambda slab: (order[slab.block.name], slab.block.start))


def shared(held: list[Slab], place: Place) -> list[Slab]:
    """Of all ranks together every element once, each copy of a shard giving as much as the others:
    what is streamed.
    """
    copies = [place.copy_of(slab.shard.bound) for slab in held]
    return [
        slab
        for slab, copy, sender in zip(held, copies, senders(held, place), strict=True)
        if copy is not None and copy[0] == sender
    ]


def senders(held: list[Slab], place: Place) -> list[int | None]:
    """Of each slab, which copy of it is sent; None: that of another shard.

    Ranks that hold the same shards deal them out alike without asking each other: the largest
    first, each to the copy that has the fewest bytes by then. Experts have copies of their own. Two
    copies differ by one block at most.
    """
    dealt: list[int | None] = [None] * len(held)
    for expert in (False, True):
        kind = [(n, slab) for n, slab in enumerate(held) if slab.shard.bound.is_expert == expert]
        given: list[tuple[int, int]] = []  # bytes and copy, a heap: the fewest bytes first
        for number, slab in sorted(kind, key=lambda item: -_size(item[1].block)):
            copy = place.copy_of(slab.shard.bound)
            if copy is None:
                continue
            given = given or [(0, index) for index in range(copy[1])]
            size, least = given[0]
            heapq.heapreplace(given, (size + _size(slab.block), least))
            dealt[number] = least
    return dealt


def _size(block: Block) -> int:
    return math.prod(block.block_shape)


class AdapterSource:
    """A `WeightSource` of the adapter: few bytes, for engines that
    add them to the base model by themselves.
    """

    def __init__(self, own: list[Slab]):
        self._slabs = own

    def blocks(self) -> list[Block]:
        return [slab.block for slab in self._slabs]

    def read_blocks(self) -> Iterator[Tensor]:
        return (slab.read() for slab in self._slabs)


def _joined(places: list[ShardSlice]) -> list[list[ShardSlice]]:
    """Runs that continue each other in the same HF tensor, together."""
    groups: list[list[ShardSlice]] = []
    for place in places:
        if groups and groups[-1][-1].part == place.part and groups[-1][-1].stop == place.start:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _block(shard: Shard, runs: list[ShardSlice]) -> Block:
    part = runs[0].part
    name, shape = shard.bound.hf[part], shard.shapes[part]
    dim, start, stop = runs[0].dim, runs[0].start, runs[-1].stop
    if (start, stop) == (0, shape[dim]):
        dim, stop = 0, shape[0]
    dtype = str(shard.parameter.dtype).removeprefix("torch.")
    return Block(name=name, dtype=dtype, shape=shape, dim=dim, start=start, stop=stop)
