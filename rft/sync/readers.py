"""Where an engine worker takes a round's weights from, besides the trainer's streams
(`rft.sync.receiver`): buckets in a file, and committed saves.

    Round with InFile ──► map ─► every bucket: xxh3-128 of its bytes against the trainer's
                              ─► rows or columns of the tensors that they belong to
    Round with InSave ──► open ─► manifest, receipts ─► slabs of rows, every byte checked
                              ─► whole tensors

Both run in a thread beside the decoding, into memory that the next `stage` overwrites. Invariant:
tensors come out only when all of a round was read, every byte of it is what was written, and it is
the round that was announced.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rft.checkpoint import export
from rft.checkpoint.reader import Checkpoint, Damaged, Mismatch, StorageUnreachable
from rft.checkpoint.storage import open_storage
from rft.ground.names import read_hf_config
from rft.ground.rounds import InFile, InSave, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.buckets import Staging, host_checksum, seed_of
from rft.sync.connection import PeerLost, PeerRefused
from rft.sync.plan import StreamPlan, row_bytes


class WeightReader(Protocol):
    """How a method's weights come to this worker; `rft.sync.receiver.Receiver` is one.

    `again`: buckets of the last round that had to come twice.
    """

    again: int

    def connect(self, info: TrainerInfo) -> None: ...
    def check(self, coming: Round) -> None:
        """Refuse a round before any byte of it is taken."""

    def stage(self, coming: Round) -> dict[str, torch.Tensor]: ...
    def size(self, staged: dict[str, torch.Tensor]) -> int:
        """Bytes that came."""

    def whole(self, staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as vLLM's loaders want them: in their whole shape."""

    def close(self) -> None: ...


class StoredWeights:
    """What readers of stored weights share: they come whole, nothing is asked for twice, and
    nothing is held open between rounds.
    """

    again = 0

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in staged.values())

    def whole(self, staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(staged.items())

    def close(self) -> None: ...


class HandedBuckets(StoredWeights):
    """Buckets that the engine's actor hands over in a file: plan, buckets and checksums are those
    of the streams. One that is wrong is wrong for good; the actor hands all of them over anew.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.plan: StreamPlan | None = None
        self.epoch = -1
        self._kept: Staging | None = None

    def connect(self, info: TrainerInfo) -> None:
        """Take over the plan; there is nobody to connect to."""
        assert info.plan is not None
        plan = plans.decode(info.plan)
        if self.plan is None or self.plan.digest != plan.digest:
            self._kept = None
        self.plan, self.epoch = plan, info.epoch

    def check(self, coming: Round) -> None:
        here = (self.plan.digest if self.plan else None, self.epoch)
        if (coming.digest, coming.epoch) != here:
            raise ValueError(
                f"round follows plan {coming.digest} of epoch {coming.epoch}, this engine "
                f"has {here}"
            )

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        assert self.plan is not None and isinstance(coming.location, InFile)
        staging = self._kept = self._kept or Staging(
            self.plan.streams, self.device, kept=True, timeout=0.0
        )
        staging.begin()
        tensors: dict[str, torch.Tensor] = {}
        with (
            Path(coming.location.path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
        ):
            for index, stream in enumerate(self.plan.streams):
                for number, bucket in enumerate(stream.buckets):
                    start, size, digest = coming.location.streams[index][number]
                    with memoryview(memory)[start : start + size] as data:
                        self._verify(coming.version, index, number, data, digest)
                        for piece in bucket.pieces:
                            block = stream.blocks[piece.block]
                            end = piece.offset + (piece.stop - piece.start) * row_bytes(block)
                            flat = torch.frombuffer(
                                bytearray(data[piece.offset : end]), dtype=torch.uint8
                            )
                            staging.put(block, piece.start, piece.stop, flat)
                    tensors.update(staging.arrived(index, number))
        staging.check_complete()
        return tensors

    def _verify(self, version: int, index: int, number: int, data: memoryview, digest: str) -> None:
        assert self.plan is not None
        ours = host_checksum(seed_of(self.plan.digest, version, index, number))
        ours.update(data)
        if ours.hexdigest() != digest:
            stream = self.plan.streams[index]
            name = stream.blocks[stream.buckets[number].pieces[0].block].name
            raise PeerLost(
                f"checksum of bucket {number} of stream {index} ({name} ..) is wrong: its bytes "
                f"are not those of version {version}"
            )


class SavedWeights(StoredWeights):
    """Saves of a trainer that may be on another cluster, or gone.

    A save that is damaged, of another model or gone is nobody's fault here: it is `PeerRefused`,
    the engine keeps what it serves and waits for the next one. `model`: the directory that the
    engine was started from, whose config.json names the tensors.
    """

    def __init__(self, model: str, device: torch.device):
        self.model = model
        self.device = device
        self._kept: dict[str, torch.Tensor] = {}

    def connect(self, info: TrainerInfo) -> None:
        """There is nobody to connect to: every round says where it lies."""

    def check(self, coming: Round) -> None:
        """What can be wrong is known once the save is open."""

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        assert isinstance(coming.location, InSave)
        try:
            with Checkpoint(open_storage(coming.location.root), coming.location.path) as saved:
                manifest = saved.manifest
                if (manifest.seal, manifest.step) != (coming.digest, coming.version):
                    raise Mismatch(
                        f"{saved.where} is save {manifest.id} of version {manifest.step}, "
                        f"not the one that was announced as version {coming.version}"
                    )
                for file in saved.files():
                    # open now: retention may take the directory away meanwhile, open files stay
                    # readable
                    file.chunk(0)
                tensors = export.plan(saved, read_hf_config(self.model))
                return {tensor.name: self._read(saved, tensor) for tensor in tensors}
        except (Damaged, Mismatch, StorageUnreachable) as error:
            raise PeerRefused(str(error)) from error

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


def file_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face directory's safetensors files."""
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)
