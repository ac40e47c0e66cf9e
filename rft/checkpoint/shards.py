"""One rank's part of a checkpoint: `r<rank>.bin` with the bytes of its pieces and `r<rank>.json`, its receipt.

Out: the receipt (offset, shape, dtype, place in the whole tensor and xxh3-128 of every piece; small objects as hex). In: a
snapshot whose tensors are filled in place. Invariant: nothing is copied into a tensor whose bytes were not verified.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rft.checkpoint.store import write_json
from rft.protocols import Piece, Snapshot

if TYPE_CHECKING:
    import torch


class Damaged(RuntimeError):
    """A checkpoint that must not be loaded: missing, cut short, or different from what was written."""


class Mismatch(ValueError):
    """A good checkpoint of something else: another model, vocabulary or precision."""


def write(directory: Path, rank: int, snapshot: Snapshot) -> str:
    """Write this rank's pieces (replicas are someone else's) and receipt, fsynced; return the receipt's sha256."""
    index: list[dict[str, Any]] = []
    with open(directory / f"r{rank:05d}.bin", "xb") as file:
        for piece in snapshot.pieces:
            if piece.replica == 0:
                data = _bytes_of(piece.tensor)
                index.append(
                    {**_place(piece), "at": file.tell(), "bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
                )
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    receipt = {"pieces": index, "small": {name: data.hex() for name, data in snapshot.small.items()}}
    path = directory / f"r{rank:05d}.json"
    write_json(path, receipt)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(directory: Path, receipts: dict[str, str], snapshot: Snapshot) -> None:
    """Fill every piece of `snapshot` from whichever rank wrote it, verifying each hash. Raises `Damaged` or `Mismatch`."""
    where = {}
    for name, digest in receipts.items():
        for entry in load_receipt(directory, name, digest)["pieces"]:
            where[_address(entry)] = (directory / f"{name}.bin", entry)
    missing = [p.key for p in snapshot.pieces if _address(_place(p)) not in where]
    if missing:
        raise Mismatch(
            f"{directory} lacks {len(missing)} tensors of this rank, first {missing[0]}: it was written for another "
            "model.model_path or trainer.dtype; use those again, or another name"
        )
    for piece in snapshot.pieces:
        file, entry = where[_address(_place(piece))]
        _fill(piece, file, entry)


def load_receipt(directory: Path, name: str, digest: str) -> dict[str, Any]:
    path = directory / f"{name}.json"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise Damaged(f"{path}: receipt is missing or was changed")
    return json.loads(path.read_text(encoding="utf-8"))


def _fill(piece: Piece, file: Path, entry: dict[str, Any]) -> None:
    import torch

    with open(file, "rb") as source:
        source.seek(entry["at"])
        data = bytearray(source.read(entry["bytes"]))
    if len(data) != entry["bytes"] or xxhash.xxh3_128_hexdigest(data) != entry["xxh3"]:
        raise Damaged(f"{file}: bytes of {piece.key} differ from what was written")
    with torch.no_grad():
        loaded = (
            torch.frombuffer(data, dtype=torch.uint8).view(piece.tensor.dtype) if data else piece.tensor.new_empty(0)
        )
        piece.tensor.copy_(loaded.view(piece.tensor.shape))


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _place(piece: Piece) -> dict[str, Any]:
    return {
        "key": piece.key, "dtype": str(piece.tensor.dtype).removeprefix("torch."), "shape": list(piece.tensor.shape),
        "global_shape": list(piece.global_shape), "offset": list(piece.offset), "flat": list(piece.flat) if piece.flat else None,
    }  # fmt: skip


def _address(place: dict[str, Any]) -> str:
    return json.dumps([place[k] for k in ("key", "dtype", "shape", "offset", "flat")])
