"""What a checkpoint holds of one rank: tensors by reference as `Piece`s, and small state as msgpack
bytes.

    model/<hf name>      weights          master/<hf name>    fp32 weights, where they are memory of
                                                              their own
    exp_avg/<hf name>    Adam's moments   exp_avg_sq/<hf name>

Every piece says where it lies in a *Hugging Face* tensor, by the segments of `rft.ground.names`. So
a checkpoint knows nothing of the layout that wrote it: any sizes of tensor, pipeline, data and
context parallelism read it, padding rows are in none, and an export is a plain reading of `model/`.
Nothing is gathered: a rank's range of the distributed optimizer is `flat` within such a segment.
"""

import functools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rft.ground.names import ShardSlice
from rft.ground.protocols import Piece
from rft.megatron.mesh import Mesh
from rft.megatron.optimizer import Optimizer
from rft.megatron.weights import Shard

SAMPLED = 128  # elements of a tensor at most that a digest looks at, each in no cache
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class RankTensors:
    """What one rank has, as checkpoints and resumes look at it: `pieces`, and digests of some bits.

    Views are made once, and anew where a tensor has become other memory: a save of every step costs
    its step nothing that grows with the number of tensors but one look at where each lies.
    """

    def __init__(self, shards: list[Shard], model: Iterable[torch.nn.Module], optimizer: Optimizer):
        self._shards = shards
        self._optimizer = optimizer
        self._model = model
        self._places: list[int] = []
        self._pieces: list[Piece] = []
        self._samples: dict[str, Samples] = {}

    def pieces(self) -> list[Piece]:
        """Tensors by reference, which are as they are until the next update."""
        self._look()
        return self._pieces

    def digests(self) -> dict[str, int]:
        """`weights`: of every weight that is trained, without padding, and every buffer that its
        module would save; `moments`: of all else that the next update depends on; `frozen weights`:
        of those that are saved and that no gradient changes, if there are any. By the bits of some
        elements: equal tensors have equal ones, and a tensor that is another one, or of another
        step, has not. Training waits for it at every save: all bytes are hashed behind it, as they
        are written.
        """
        self._look()
        self._samples = self._samples or self._new_samples()
        return {name: samples.digest() for name, samples in self._samples.items()}

    @functools.cached_property
    def _buffers(self) -> list[tuple[torch.nn.Module, str]]:
        return list(_saved_buffers(self._model))

    def _saved(self) -> list[torch.Tensor]:
        return [getattr(module, name) for module, name in self._buffers]

    def _look(self) -> None:
        tensors = [shard.parameter for shard in self._shards] + self._saved()
        tensors += self._optimizer.held() + self._optimizer.mains()
        places = [tensor.data_ptr() for tensor in tensors]
        if places == self._places:
            return
        self._places = places
        self._pieces = pieces(self._shards, self._optimizer)
        self._samples = {}  # made where they are asked for: what reads a state back does not

    def _new_samples(self) -> "dict[str, Samples]":
        kept = [
            (shard.parameter.requires_grad, _cut(shard.parameter.detach(), segment))
            for shard in _kept(self._shards)
            for segment in shard.segments
        ]
        trained = [one for is_trained, one in kept if is_trained]
        found = {
            "weights": Samples(trained + self._saved()),
            "moments": Samples(self._optimizer.held()),
        }
        frozen = [one for is_trained, one in kept if not is_trained]
        return found | ({"frozen weights": Samples(frozen)} if frozen else {})


def _saved_buffers(model: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """(module, name) of those that a module would save. What counts routed tokens is no weight."""
    for part in model:
        saved = part.state_dict(keep_vars=True)
        for name, _ in part.named_buffers():
            if name in saved and not name.endswith("tokens_per_expert"):
                owner, _, last = name.rpartition(".")
                yield part.get_submodule(owner), last


class Samples:
    """The bits of some elements of each tensor, looked at in few calls: `views`, and room for what
    they show, a row of 1 KiB each on their device.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self.views = [_sampled(tensor) for tensor in tensors]
        if self.views:
            size = len(self.views), SAMPLED
            self._rows = torch.zeros(size, dtype=torch.int64, device=self.views[0].device)
            self._places = [
                row[: view.numel()].view(view.shape)
                for row, view in zip(self._rows, self.views, strict=True)
            ]

    def digest(self) -> int:
        if not self.views:
            return 0
        torch._foreach_copy_(self._places, self.views)
        found = self._rows.sum(1).tolist()  # one wait for the device
        return sum((2 * at + 1) * one for at, one in enumerate(found)) % 2**62


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of at most `SAMPLED` elements from all over it, without a copy."""
    while tensor.numel() > SAMPLED:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        tensor = tensor[(slice(None),) * longest + (slice(None, None, 2),)]
    return tensor.view(BITS[tensor.element_size()])


def pieces(shards: list[Shard], optimizer: Optimizer) -> list[Piece]:
    """Model parameters that are trained, fp32 masters where they are memory of their own, and
    Adam's moments; SGD has none.

    What is frozen under an adapter is in the files that it came from; without one, what is frozen
    (a router's correction bias) belongs to the model.
    """
    by_parameter = {id(shard.parameter): shard for shard in shards}
    listed = []
    for shard in _kept(shards):
        for segment in shard.segments:
            listed.append(
                _piece("model", shard, segment, _cut(shard.parameter.detach(), segment), None)
            )
    for parameter, (start, stop), state in optimizer.shards():
        shard = by_parameter[id(parameter)]
        for segment in shard.segments:
            first, last = _elements(shard, segment)
            low, high = max(start, first), min(stop, last)
            if low < high:
                for kind, tensor in state.items():
                    part = tensor.detach()[low - start : high - start]
                    listed.append(_piece(kind, shard, segment, part, (low - first, high - first)))
    return listed


def _kept(shards: list[Shard]) -> list[Shard]:
    has_adapter = any(shard.is_adapter for shard in shards)
    return [shard for shard in shards if shard.parameter.requires_grad or not has_adapter]


def _cut(parameter: torch.Tensor, segment: ShardSlice) -> torch.Tensor:
    return parameter.narrow(segment.dim, segment.local, segment.stop - segment.start)


def _elements(shard: Shard, segment: ShardSlice) -> tuple[int, int]:
    """Range of the flattened parameter that a segment is: rows of
    it, or, cut by columns, all of it.
    """
    if segment.dim == 1:
        return 0, shard.parameter.numel()
    row = shard.parameter[0].numel()
    return segment.local * row, (segment.local + segment.stop - segment.start) * row


def _piece(
    kind: str, shard: Shard, segment: ShardSlice, tensor: torch.Tensor, flat: tuple[int, int] | None
) -> Piece:
    name = "model.embed_tokens.weight" if shard.is_tied_copy else shard.bound.hf[segment.part]
    whole = shard.shapes[segment.part]
    offset = tuple(segment.start if d == segment.dim else 0 for d in range(len(whole)))
    shape = tuple(
        segment.stop - segment.start if d == segment.dim else n for d, n in enumerate(whole)
    )
    return Piece(
        f"{kind}/{name}", tensor, whole, offset, shape, flat, stored=not shard.is_tied_copy
    )


def random_state(mesh: Mesh) -> dict[str, Any]:
    """Every generator that training may draw from."""
    device = mesh.device.torch
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.astype("<u4").tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "megatron": {
            name: _cpu_bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()
        },
        "device": None
        if device.type == "cpu"
        else _cpu_bytes(torch.get_device_module(device).get_rng_state(device)),
    }


def set_random_state(state: dict[str, Any], mesh: Mesh) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    get_cuda_rng_tracker().set_states(
        {name: _byte_tensor(data) for name, data in state["megatron"].items()}
    )
    if state["device"] is not None:
        device = mesh.device.torch
        torch.get_device_module(device).set_rng_state(_byte_tensor(state["device"]), device)


def _cpu_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def encode(state: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(data)
