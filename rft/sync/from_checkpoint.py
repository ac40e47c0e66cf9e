"""Weights that the trainer has saved, as an engine worker takes them: a committed save in, whole Hugging Face tensors out.

    update: digest (the seal of the save's manifest), origin {root: a path or URL, path: below it}
    open ─► manifest, receipts ─► slabs of rows, every byte checked against its receipt ─► memory that the next stage overwrites

Runs in a thread beside the decoding, like `rft.sync.receiver`, which it stands in for where there is no stream to join: the
trainer may be on another cluster, or gone. Invariant: tensors come out only when the whole save was read, every byte of it is
what was written, and it is the save that was announced. A save that is damaged, of another model or gone is nobody's fault here:
it is `Refused`, the engine keeps what it serves and waits for the next one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rft.checkpoint import export
from rft.checkpoint.reader import Checkpoint, Damaged, Mismatch
from rft.checkpoint.storage import open_storage
from rft.names import read_hf_config
from rft.sync.wire import Refused


class SavedWeights:
    """One per engine worker. `model`: the directory that the engine was started from, whose config.json names the tensors."""

    again = 0  # nothing is asked for twice: what is read wrong was written wrong

    def __init__(self, model: str, device: torch.device):
        self.model = model
        self.device = device
        self._kept: dict[str, torch.Tensor] = {}

    def connect(self, info: dict[str, Any]) -> None:
        """There is nobody to connect to: every round says where it lies."""

    def check(self, update: dict[str, Any]) -> None:
        """What can be wrong is known once the save is open."""

    def stage(self, update: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All tensors of the save. They lie in memory that the next `stage` overwrites."""
        origin = update["origin"]
        try:
            with Checkpoint(open_storage(origin["root"]), origin["path"]) as saved:
                if (saved.manifest.seal, saved.manifest.step) != (update["digest"], update["version"]):
                    raise Mismatch(
                        f"{saved.where} is save {saved.manifest.id} of version {saved.manifest.step}, "
                        f"not the one that was announced as version {update['version']}"
                    )
                for file in saved.files():
                    file.chunk(0)  # open now: retention may take the directory away meanwhile, open files stay readable
                tensors = export.plan(saved, read_hf_config(self.model))
                return {tensor.name: self._read(saved, tensor) for tensor in tensors}
        except (Damaged, Mismatch) as error:
            raise Refused(str(error)) from error

    def _read(self, saved: Checkpoint, tensor: export.Tensor) -> torch.Tensor:
        memory = self._memory(tensor)
        flat, at = memory.view(-1).view(torch.uint8).numpy(), 0
        for claim in export.slabs(tensor):
            flat[at : at + claim.bytes] = saved.elements(claim).view(np.uint8)
            at += claim.bytes
        return memory

    def _memory(self, tensor: export.Tensor) -> torch.Tensor:
        kept, dtype = self._kept.get(tensor.name), getattr(torch, tensor.dtype)
        if kept is None or (kept.dtype, tuple(kept.shape)) != (dtype, tensor.shape):
            kept = torch.empty(tensor.shape, dtype=dtype, pin_memory=self.device.type != "cpu")
            self._kept[tensor.name] = kept
        return kept

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        """Bytes that came."""
        return sum(tensor.nbytes for tensor in staged.values())

    def whole(self, staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What was staged has its whole shape."""
        return iter(staged.items())

    def close(self) -> None:
        """Nothing is held open between rounds."""
