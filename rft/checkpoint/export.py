"""A committed checkpoint as a Hugging Face directory that transformers and vLLM load, made beside
the training.

    python -m rft.checkpoint.export CHECKPOINT SOURCE TARGET
            (started by the agent after a commit)

In: a committed checkpoint (a path or a URL), and the model directory that the run began with: its
config, tokenizer and template files are copied. Out: TARGET, which gets its name when everything in
it is durable; of a run that trains an adapter (LoRA), the adapter alone, as PEFT and vLLM load it.
Layers that predict further tokens, which nothing trains, are copied from the source too. No torch;
a slab of rows in memory at a time, and for each an empty line on stdout, by which the
agent sees that it goes on. Invariant: every byte was verified against its receipt on the way; no
name `TARGET` without all of its files.
"""

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rft.checkpoint.chunks import Damaged
from rft.checkpoint.reader import Checkpoint, Mismatch
from rft.checkpoint.sharding import MODEL, Claim
from rft.checkpoint.storage import Disk, LocalSink, Storage, open_storage
from rft.config import ConfigError
from rft.ground import durable, hubs
from rft.ground.names import (
    ITEM_BYTES,
    Dims,
    architecture_of,
    file_shapes,
    fused_name,
    hf_names,
    is_ahead,
    read_hf_config,
)
from rft.ground.process import die_with_parent

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SHARD_BYTES = 5 * 10**9  # Hugging Face's own default size of one file
SLAB_BYTES = 2**25  # of a tensor in memory at a time
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
USAGE = "usage: python -m rft.checkpoint.export CHECKPOINT SOURCE TARGET"


@dataclass(frozen=True)
class Tensor:
    """One tensor of the export. `key` is its name in the checkpoint; `place`: the file of the
    source that it is copied from instead, and where its bytes begin there; `parts`: the experts'
    tensors that it is made of instead, expert by expert, gate before up.
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    place: tuple[Path, int] | None = None
    parts: tuple["Tensor", ...] = ()

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def export(
    storage: Storage,
    path: str,
    source: str | Path,
    target: Path,
    *,
    disk: Disk | None = None,
    shard_bytes: int = SHARD_BYTES,
    seen: Callable[[int, int], object] = lambda done, total: None,
) -> bool:
    """Write `target`; False if it is there already. `seen(done, total)` hears of bytes.

    Raises Damaged, Mismatch, ConfigError or OSError; then nothing is left behind.
    """
    if target.exists():
        return False
    disk = disk or Disk()
    hf = read_hf_config(source)
    with Checkpoint(storage, path) as checkpoint:
        adapter = checkpoint.manifest.about.get("adapter")
        tensors = plan(checkpoint, hf)
        if not adapter:
            tensors = in_files(tensors, Dims.of(hf)) + carried(Path(source), Dims.of(hf))
        for file in checkpoint.files():
            # open now, as many as may be: retention may take the directory away meanwhile
            file.open()
        total = sum(tensor.bytes for tensor in tensors)
        with draft_of(target, disk) as draft:
            _check_space(draft, total, disk)
            if adapter:
                _put(
                    draft / "adapter_config.json",
                    (json.dumps(adapter, indent=2) + "\n").encode(),
                    disk,
                )
                shards = [("adapter_model.safetensors", tensors)]
            else:
                _copy_files(Path(source), draft, tensors[0].dtype, disk)
                shards = list(_shards(tensors, shard_bytes))
            done = 0
            for file, part in shards:
                for count in _write(draft / file, checkpoint, part, disk):
                    done += count
                    seen(done, total)
            _write_index(draft, shards, total, disk)
            publish(draft, target, disk)
    return True


def plan(checkpoint: Checkpoint, hf: dict[str, Any]) -> list[Tensor]:
    """What the export holds, in the order of `hf_names`. Raises Mismatch if the checkpoint is not
    of this model.

    Of a run that trains an adapter: all of its weights, for those of the base model are in none of
    its checkpoints.
    """
    held = checkpoint.tensors
    if checkpoint.manifest.about.get("adapter"):
        return [
            Tensor(k.removeprefix(MODEL), k, *held[k]) for k in sorted(held) if k.startswith(MODEL)
        ]
    wanted = hf_names(Dims.of(hf), architecture_of(hf))
    missing = [name for name in wanted if MODEL + name not in held]
    wrong = [
        f"{name} is {list(held[MODEL + name][1])} there and {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name not in missing and held[MODEL + name][1] != shape
    ]
    if missing or wrong:
        first = (wrong or [f"{missing[0]} is missing there"])[0]
        raise Mismatch(
            f"{checkpoint.where} is of another model than the source's config.json: "
            f"{len(missing)} tensors missing, {len(wrong)} of another shape, like {first}"
        )
    return [
        Tensor(name, MODEL + name, held[MODEL + name][0], shape) for name, shape in wanted.items()
    ]


def in_files(tensors: list[Tensor], dims: Dims) -> list[Tensor]:
    """Under the names that the model's files have, experts together where they have them so."""
    if "fused" not in dims.features:
        return tensors
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        fused = fused_name(tensor.name)
        parts.setdefault(fused[0] if fused else tensor.name, []).append(tensor)
    shapes, found = file_shapes(dims, dims.family), []
    for name, members in parts.items():
        first = members[0]
        alone = first.name == name
        found.append(
            first if alone else Tensor(name, "", first.dtype, shapes[name], parts=tuple(members))
        )
    return found


def _together(tensor: Tensor, checkpoint: Checkpoint) -> Iterator[bytes]:
    """The bytes of a tensor of all experts, one expert after the other."""
    count = len(tensor.parts) // tensor.shape[0]
    for at in range(0, len(tensor.parts), count):
        arrays = [
            checkpoint.elements(Claim(p.key, p.dtype, p.shape, (0,) * len(p.shape), p.shape, None))
            .reshape(p.shape)
            .T
            for p in tensor.parts[at : at + count]
        ]
        yield np.stack(arrays, axis=-1).tobytes()


def carried(source: Path, dims: Dims) -> list[Tensor]:
    """Tensors of the source's files that are in no checkpoint."""
    kinds = {short: name for name, short in SAFETENSORS.items()}
    found = []
    for path in hubs.local_weights(source) if dims.ahead else ():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            fields = json.loads(file.read(size))
        for name, field in fields.items():
            if is_ahead(name, dims):
                start, shape = 8 + size + field["data_offsets"][0], tuple(field["shape"])
                found.append(Tensor(name, "", kinds[field["dtype"]], shape, (path, start)))
    return found


@contextlib.contextmanager
def draft_of(target: Path, disk: Disk) -> Iterator[Path]:
    """A new directory next to `target`, gone at the end unless it was renamed; what dead exports
    left is removed too.

    A lock on the directory itself tells a living export from a dead one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{target.name}.tmp-*"):
        with contextlib.suppress(OSError), _locked(left):
            disk.remove_tree(left)
    draft = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")
    disk.mkdir(draft)
    with _locked(draft):
        try:
            yield draft
        finally:
            if draft.exists():
                disk.remove_tree(draft)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises BlockingIOError while another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not durable.take(descriptor):
            raise BlockingIOError(f"{path} is held by another process")
        yield
    finally:
        os.close(descriptor)


def _check_space(draft: Path, total: int, disk: Disk) -> None:
    free = disk.free_bytes(draft)
    if free < total:
        raise OSError(
            f"{draft.parent}: {free / 1e9:.2f} GB are free, the export needs {total / 1e9:.2f} GB"
        )


def _copy_files(source: Path, draft: Path, dtype: str, disk: Disk) -> None:
    """Everything but weights. config.json says which dtype the
    weights have now: loaders believe it.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            data = path.read_bytes()
            _put(
                draft / path.name,
                _with_dtype(data, dtype) if path.name == "config.json" else data,
                disk,
            )


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """`dtype` is what transformers 5 writes, `torch_dtype` what version 4 did; unchanged text where
    it is right already.
    """
    fields = json.loads(config)
    stated = {key: fields[key] for key in ("dtype", "torch_dtype") if key in fields}
    if stated and all(value == dtype for value in stated.values()):
        return config
    fields |= dict.fromkeys(stated or ["dtype"], dtype)
    return (json.dumps(fields, indent=2) + "\n").encode()


def _shards(tensors: list[Tensor], limit: int) -> Iterator[tuple[str, list[Tensor]]]:
    """(file name, its tensors); a tensor above the limit has a file of its own."""
    parts: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.bytes
    for number, part in enumerate(parts, 1):
        name = (
            "model.safetensors"
            if len(parts) == 1
            else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        )
        yield name, part


def header(tensors: list[Tensor]) -> bytes:
    """The head of a safetensors file that holds these, one after another."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.bytes]
        fields[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": place,
        }
        at += tensor.bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, checkpoint: Checkpoint, tensors: list[Tensor], disk: Disk) -> Iterator[int]:
    """One file; yields the bytes of each slab written."""
    head = header(tensors)
    sink = LocalSink(disk, disk.create(path, len(head) + sum(tensor.bytes for tensor in tensors)))
    try:
        sink.write(memoryview(head))
        for tensor in tensors:
            if tensor.place or tensor.parts:
                made = (
                    _read(*tensor.place, tensor.bytes)
                    if tensor.place
                    else _together(tensor, checkpoint)
                )
                for data in made:
                    sink.write(memoryview(data))
                    yield len(data)
                continue
            for claim in slabs(tensor):
                sink.write(memoryview(checkpoint.elements(claim)).cast("B"))
                yield claim.bytes
        sink.close()
    finally:
        sink.abort()


def _read(path: Path, start: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        for at in range(0, size, SLAB_BYTES):
            yield file.read(min(SLAB_BYTES, size - at))


def slabs(tensor: Tensor, limit: int = SLAB_BYTES) -> Iterator[Claim]:
    """A tensor as claims of whole rows, each of at most `limit` bytes (but at least one row)."""
    if not tensor.shape:
        yield Claim(tensor.key, tensor.dtype, (), (), (), None)
        return
    row = prod(tensor.shape[1:]) * ITEM_BYTES[tensor.dtype]
    rows = max(1, limit // max(row, 1))
    for start in range(0, tensor.shape[0], rows):
        shape = (min(rows, tensor.shape[0] - start), *tensor.shape[1:])
        offset = (start, *(0 for _ in tensor.shape[1:]))
        yield Claim(tensor.key, tensor.dtype, tensor.shape, offset, shape, None)


def _write_index(
    draft: Path, shards: list[tuple[str, list[Tensor]]], total: int, disk: Disk
) -> None:
    if len(shards) > 1:
        where = {tensor.name: file for file, part in shards for tensor in part}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        _put(draft / "model.safetensors.index.json", index.encode(), disk)


def _put(path: Path, data: bytes, disk: Disk) -> None:
    sink = LocalSink(disk, disk.create(path))
    try:
        sink.write(memoryview(data))
        sink.close()
    finally:
        sink.abort()


def publish(draft: Path, target: Path, disk: Disk) -> None:
    disk.sync_directory(draft)
    try:
        disk.rename(draft, target)
    except OSError:
        if not target.exists():  # else another export of the same checkpoint was faster
            raise
    disk.sync_directory(target.parent)
    disk.sync_directory(target.parent.parent)  # the parent may be new


def split(checkpoint: str) -> tuple[str, str]:
    """Root and name of a checkpoint's path or URL."""
    where, _, name = checkpoint.rstrip("/").rpartition("/")
    return where or ("/" if checkpoint.startswith("/") else "."), name


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print(USAGE, file=sys.stderr)
        return 2
    checkpoint, source, target = arguments
    die_with_parent()
    os.nice(10)
    where, name = split(checkpoint)
    try:
        export(
            open_storage(where),
            name,
            source,
            Path(target),
            seen=lambda done, total: print(flush=True),
        )
    except (Damaged, Mismatch, ConfigError, OSError, ValueError) as error:
        print(f"export: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
