"""Hugging Face export: a stream of full tensors to a directory that transformers and vLLM load.

In: `(name, tensor)` pairs and the directory the model came from (its config, tokenizer and template files are copied). Out: a
directory that gets its name when everything in it is on disk.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rft.checkpoint.store import sync_directory

if TYPE_CHECKING:
    import torch

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SHARD_BYTES = 5 * 10**9  # Hugging Face's own default size of one file


def write_hf(tensors: Iterable[tuple[str, "torch.Tensor"]], source: str | Path, target: Path) -> Path:
    """Write `tensors`, sharded by size, next to copies of `source`'s other files; rename into place at the end."""
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")
    temporary.mkdir(parents=True)
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copy2(path, temporary / path.name)
    _write_shards(tensors, temporary)
    sync_directory(temporary)
    temporary.rename(target)
    sync_directory(target.parent)
    return target


def _write_shards(tensors: Iterable[tuple[str, "torch.Tensor"]], directory: Path) -> None:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        _write_shard(pending, directory / f"part-{len(shards)}.safetensors")
        shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.detach().to("cpu").contiguous().clone()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    where = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / file)
        where |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _write_shard(tensors: dict[str, "torch.Tensor"], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    with open(path, "rb") as file:
        os.fsync(file.fileno())
