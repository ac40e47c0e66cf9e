"""What a checkpoint holds of one rank: tensors by reference as `Piece`s, and small state as msgpack bytes.

Keys count layers over the whole model. A tensor-parallel shard has its place (`offset`) in the concatenation of all
shards, which is megatron's own order (gated MLP: gate and up of shard 0, then of shard 1). A range of the distributed
optimizer is `flat` within the shard at that offset. Invariant: whoever has `replica` > 0 holds the same bytes as 0.
"""

import random
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rft.megatron.mesh import Mesh
from rft.megatron.optimizer import Optimizer
from rft.megatron.weights import Shard
from rft.protocols import Piece


def pieces(shards: list[Shard], optimizer: Optimizer, mesh: Mesh) -> list[Piece]:
    """Model parameters, fp32 masters where they are memory of their own, and Adam's moments."""
    by_parameter = {id(shard.parameter): shard for shard in shards}
    found = []
    for shard in shards:
        shape, offset, tp_replica = _place(shard, mesh)
        replica = tp_replica + mesh.tp * (mesh.dp_rank * mesh.cp + mesh.cp_rank)
        found.append(Piece(f"model.{shard.name}", shard.parameter.detach(), shape, offset, replica))
    for parameter, flat, state in optimizer.shards():
        shard = by_parameter[id(parameter)]
        shape, offset, tp_replica = _place(shard, mesh)
        for kind, tensor in state.items():
            found.append(Piece(f"{kind}.{shard.name}", tensor.detach(), shape, offset, tp_replica, flat))
    return found


def _place(shard: Shard, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Whole shape, this shard's offset, and its replica number among tensor-parallel ranks."""
    local = tuple(shard.parameter.shape)
    if shard.bound.kind == "replicated":
        return local, (0,) * len(local), mesh.tp_rank
    dim = 1 if shard.bound.kind == "row" else 0
    shape = tuple(n * mesh.tp if i == dim else n for i, n in enumerate(local))
    return shape, tuple(n * mesh.tp_rank if i == dim else 0 for i, n in enumerate(local)), 0


def random_state(mesh: Mesh) -> dict[str, Any]:
    """Every generator that training may draw from."""
    device = mesh.device.torch
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.astype("<u4").tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "megatron": {name: _cpu_bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()},
        "device": None if device.type == "cpu" else _cpu_bytes(torch.get_device_module(device).get_rng_state(device)),
    }


def set_random_state(state: dict[str, Any], mesh: Mesh) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    get_cuda_rng_tracker().set_states({name: _byte_tensor(data) for name, data in state["megatron"].items()})
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
