"""Checkpoints made by hand for tests of the tools: a toy model's tensors with values that name
their place.
"""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rft.checkpoint import single
from rft.checkpoint.single import TensorSource
from rft.checkpoint.storage import Disk, LocalStorage


def storage_at(root: Path) -> LocalStorage:
    return LocalStorage(root, Disk())


def sources_of(model: Path, dtype: str = "float32", add: float = 0.0) -> list[TensorSource]:
    """The weights of a model directory as `model/...` tensors, plus moments for one of them."""
    import torch

    found = []
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no iterator there
                value = (tensors.get_tensor(name) + add).to(getattr(torch, dtype)).contiguous()
                found.append(
                    source(
                        f"model/{name}", dtype, value.view(torch.uint8).numpy(), tuple(value.shape)
                    )
                )
    return found


def source(key: str, dtype: str, data: np.ndarray, shape: tuple[int, ...]) -> TensorSource:
    return TensorSource(key, dtype, shape, lambda: [data])


def commit(job: Path, step: int, sources: list[TensorSource], **more: Any) -> str:
    return single.write(storage_at(job / "checkpoints"), job / "control", step, sources, **more)
