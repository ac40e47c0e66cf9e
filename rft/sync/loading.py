"""What vLLM's loaders are given at a commit: the tensors of a round in the order of the model's
layers, experts together, and of a tensor that came in part no more memory than the part.

    staged, by name ──in_layer_order──► (name, tensor), module by module ──► model.load_weights
    memory of blocks ──PartTensor────► a tensor of the whole shape, of which loaders cut their part

vLLM keeps what a module got until the module is complete. So the tensors of one vLLM module follow
each other: one is open at a time, whatever order the bytes came in. vLLM takes one tensor of all
experts where it would take that of the first, in one call instead of hundreds.

Invariants: everything that was given comes out once; what a `PartTensor` does not hold is never
read, whoever asks for it gets an error.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rft.ground.names import fused_name

# vLLM's modules that hold several of the projections
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.((?:(?:gate|up|down)_proj|w[123])\.weight)")
SLAB = 2**26  # bytes that one copy to a device may take of it beside the target, about
aten = torch.ops.aten

Key = tuple[int, int, str, str, int, str]


def layer_order(name: str) -> Key:
    """Sorts Hugging Face names as vLLM's modules lie in the model: embedding, layer by layer, final
    norm, head; within a layer those of one vLLM module together, and of experts each projection.
    """
    if found := LAYER.search(name):
        number, rest = int(found[1]), found[2]
        if expert := EXPERT.fullmatch(rest := f".{rest}"):
            return 1, number, expert[1], expert[3], int(expert[2]), ""
        module, _, last = rest.rpartition(".")
        above, _, own = module.rpartition(".")
        return 1, number, f"{above}.{FUSED.get(own, own)}", own, 0, last
    place = 0 if "embed" in name else 3 if "lm_head" in name else 2
    return place, 0, name, "", 0, ""


def in_layer_order(
    tensors: Mapping[str, torch.Tensor], together: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """`together`: experts of a layer as one tensor per projection, where their memory allows, under
    the name of the first.
    """
    names = sorted(tensors, key=layer_order)
    if not together:
        yield from ((name, tensors[name]) for name in names)
        return
    for _, group in groupby(names, key=_family):
        members = list(group)
        if len(members) > 1 and (one := stacked([tensors[name] for name in members])) is not None:
            yield members[0], one
        else:
            yield from ((name, tensors[name]) for name in members)


def expert_by_expert(
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts' tensors as fused files have them (`rft.ground.names.fused_name`), each expert under
    a name of its own; gate waits for up. The rest passes.
    """
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        if (found := fused_name(name)) is None:
            yield name, tensor
            continue
        stem, _, last = found[0].rpartition(".")
        own, part = f"{stem}.{found[1]}.{last}", found[2]
        parts = waiting.setdefault(own, {}) | {part: tensor.T if tensor.ndim > 1 else tensor}
        waiting[own] = parts
        if part == "down":
            yield own, waiting.pop(own)["down"]
        elif len(parts) == 2:
            pair = waiting.pop(own)
            yield own, torch.stack([pair["gate"], pair["up"]], dim=-1).flatten(-2)


def _family(name: str) -> str:
    """The same of all experts' tensors of one projection, and of no others."""
    found = EXPERT.fullmatch(name)
    return f"{found[1]}.*.{found[3]}" if found else name


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of them all, without a copy; None where they do not lie at equal distances."""
    first = tensors[0]
    if isinstance(first, PartTensor):
        if not all(isinstance(one, PartTensor) and one.fits(first) for one in tensors):
            return None
        pieces = [_strided([one.pieces[n] for one in tensors]) for n in range(len(first.pieces))]
        if any(piece is None for piece in pieces):
            return None
        shape = (len(tensors), *first.shape)
        return PartTensor(first.called, shape, first.cut_dim + 1, first.starts, pieces)
    return None if any(isinstance(one, PartTensor) for one in tensors) else _strided(tensors)


def _strided(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = tensors[0]
    same = {(one.untyped_storage().data_ptr(), one.shape, one.stride()) for one in tensors}
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)}
    if len(same) > 1 or len(steps) > 1 or min(steps) <= 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (steps.pop(), *first.stride()))


class PartTensor(torch.Tensor):
    """Of shape `shape`, with memory for a part of it: `pieces` lie along `dim` one after another,
    each beginning at its `starts`.

    vLLM's loaders take the whole tensor and cut out what their worker needs; the cut is again one
    of these, and copies piece by piece. What it is asked for besides is done with a copy of all of
    it, if all is here. `name` is for errors.
    """

    called: str
    cut_dim: int
    starts: tuple[int, ...]
    pieces: list[torch.Tensor]
    # operators are caught below, not these calls
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dim: int,
        starts: Sequence[int],
        pieces: Sequence[torch.Tensor],
    ) -> "PartTensor":
        made: PartTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=pieces[0].dtype, device=pieces[0].device
        )
        made.called, made.cut_dim, made.starts, made.pieces = name, dim, tuple(starts), list(pieces)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartTensor({self._what_is_here()})"

    def fits(self, other: "PartTensor") -> bool:
        """It holds the same part of the same shape."""
        return (self.shape, self.cut_dim, self.starts) == (other.shape, other.cut_dim, other.starts)

    @property
    def stop(self) -> int:
        return self.starts[-1] + self.pieces[-1].shape[self.cut_dim]

    def _what_is_here(self) -> str:
        part = f"[{self.starts[0]}, {self._stop}) of dim {self.cut_dim}"
        return f"{part} of {self.called} {list(self.shape)}"

    @property
    def _stop(self) -> int:
        return self.starts[-1] + self.pieces[-1].shape[self.cut_dim]

    def cut(self, start: int, stop: int) -> torch.Tensor:
        """[start, stop) of the dim that the pieces lie along."""
        if start >= stop:
            return self.pieces[0].narrow(self.cut_dim, 0, 0)
        if start < self.starts[0] or stop > self._stop:
            raise IndexError(
                f"a loader asks for [{start}, {stop}), and here is {self._what_is_here()}"
            )
        starts, pieces = [], []
        for first, piece in zip(self.starts, self.pieces, strict=True):
            low, high = max(start, first), min(stop, first + piece.shape[self.cut_dim])
            if low < high:
                starts.append(low - start)
                pieces.append(piece.narrow(self.cut_dim, low - first, high - low))
        shape = list(self.shape)
        shape[self.cut_dim] = stop - start
        return PartTensor(self.called, shape, self.cut_dim, starts, pieces)

    def copy_into(self, target: torch.Tensor) -> None:
        if (self.starts[0], self._stop) != (0, self.shape[self.cut_dim]):
            raise IndexError(f"a loader asks for all, and here is {self._what_is_here()}")
        if target.is_meta:
            return  # vLLM counts what would be loaded before it loads it
        if target.device == self.device and len(self.pieces) > 1:
            torch.cat(self.pieces, self.cut_dim, out=target)  # row by row: quicker than by piece
            return
        for first, piece in zip(self.starts, self.pieces, strict=True):
            into = target.narrow(self.cut_dim, first, piece.shape[self.cut_dim])
            rows = max(1, SLAB * len(piece) // piece.nbytes)
            for slab, data in zip(into.split(rows), piece.split(rows), strict=True):
                slab.copy_(data, non_blocking=piece.is_pinned())

    def assembled(self) -> torch.Tensor:
        """In memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.copy_into(made)
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in VIEWS and (found := VIEWS[func](*args, **(kwargs or {}))) is not None:
            return found
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[1].copy_into(args[0])
            return args[0]
        args, kwargs = tree_map_only(cls, cls.assembled, (args, kwargs or {}))
        return func(*args, **kwargs)


def _slice(
    part: PartTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor | None:
    dim, size = dim % part.ndim, part.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    if dim == part.cut_dim:
        return part.cut(first, last) if step == 1 else None
    pieces = [aten.slice.Tensor(piece, dim, first, last, step) for piece in part.pieces]
    shape = list(part.shape)
    shape[dim] = pieces[0].shape[dim]
    return PartTensor(part.called, shape, part.cut_dim, part.starts, pieces)


def _unsqueeze(part: PartTensor, dim: int) -> torch.Tensor:
    dim %= part.ndim + 1
    pieces = [piece.unsqueeze(dim) for piece in part.pieces]
    shape = (*part.shape[:dim], 1, *part.shape[dim:])
    return PartTensor(part.called, shape, part.cut_dim + (dim <= part.cut_dim), part.starts, pieces)


def _select(part: PartTensor, dim: int, index: int) -> torch.Tensor | None:
    if (dim := dim % part.ndim) == part.cut_dim:
        return None
    pieces = [piece.select(dim, index) for piece in part.pieces]
    shape = (*part.shape[:dim], *part.shape[dim + 1 :])
    return PartTensor(part.called, shape, part.cut_dim - (dim < part.cut_dim), part.starts, pieces)


def _unbind(part: PartTensor, dim: int = 0) -> list[torch.Tensor | None] | None:
    if dim % part.ndim == part.cut_dim:
        return None
    return [_select(part, dim, index) for index in range(part.shape[dim])]


def _detach(part: PartTensor) -> torch.Tensor:
    return PartTensor(part.called, part.shape, part.cut_dim, part.starts, part.pieces)


# what can be done without the memory of the whole; None: it cannot
VIEWS: dict[Any, Any] = {
    aten.slice.Tensor: _slice,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.detach.default: _detach,
}
