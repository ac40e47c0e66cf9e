"""Weights that the engine's actor hands over in a file, as an engine worker takes them: mapped buckets in, whole tensors out.

    update: digest (of the plan), origin {path, streams: per bucket its place, length and checksum}
    map ─► every bucket: xxh3-128 of its bytes against the trainer's ─► rows or columns of the tensors that they belong to

Stands in for `rft.sync.receiver` where there is no stream to join; plan, buckets and checksums are the same. Invariant: tensors
come out only when every bucket of every stream is what the trainer packed for this version.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rft.sync import checksum
from rft.sync import plan as plans
from rft.sync.plan import Plan, row_bytes
from rft.sync.staging import Staging
from rft.sync.wire import Lost


class HandedBuckets:
    """One per engine worker."""

    again = 0  # a bucket that is wrong is wrong for good; the actor hands all of them over anew

    def __init__(self, device: torch.device):
        self.device = device
        self.plan: Plan | None = None
        self.epoch = -1
        self._kept: Staging | None = None

    def connect(self, info: dict[str, Any]) -> None:
        """Take over the plan; there is nobody to connect to."""
        plan = plans.decode(info["plan"])
        if self.plan is None or self.plan.digest != plan.digest:
            self._kept = None
        self.plan, self.epoch = plan, int(info["epoch"])

    def check(self, update: dict[str, Any]) -> None:
        """Refuse a round of another plan or epoch."""
        here = (self.plan.digest if self.plan else None, self.epoch)
        if (update["digest"], update["epoch"]) != here:
            raise ValueError(
                f"round follows plan {update['digest']} of epoch {update['epoch']}, this engine has {here}"
            )

    def stage(self, update: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All tensors of one round. They lie in memory that the next `stage` overwrites."""
        assert self.plan is not None
        staging = self._kept = self._kept or Staging(self.plan.streams, self.device, kept=True, timeout=0.0)
        staging.begin()
        found: dict[str, torch.Tensor] = {}
        origin = update["origin"]
        with Path(origin["path"]).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            for index, stream in enumerate(self.plan.streams):
                for number, bucket in enumerate(stream.buckets):
                    start, size, digest = origin["streams"][index][number]
                    with memoryview(memory)[start : start + size] as data:
                        self._verify(update["version"], index, number, data, digest)
                        for piece in bucket.pieces:
                            block = stream.blocks[piece.block]
                            end = piece.offset + (piece.stop - piece.start) * row_bytes(block)
                            flat = torch.frombuffer(bytearray(data[piece.offset : end]), dtype=torch.uint8)
                            staging.put(block, piece.start, piece.stop, flat)
                    found.update(staging.arrived(index, number))
        staging.check_complete()
        return found

    def _verify(self, version: int, index: int, number: int, data: memoryview, digest: str) -> None:
        assert self.plan is not None
        found = checksum.host(checksum.seed_of(self.plan.digest, version, index, number))
        found.update(data)
        if found.hexdigest() != digest:
            stream = self.plan.streams[index]
            name = stream.blocks[stream.buckets[number].pieces[0].block].name
            raise Lost(
                f"checksum of bucket {number} of stream {index} ({name} ..) is wrong: its bytes are not those of version {version}"
            )

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        """Bytes that came."""
        return sum(tensor.nbytes for tensor in staged.values())

    def whole(self, staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What was staged has its whole shape."""
        return iter(staged.items())

    def close(self) -> None:
        """Nothing is held open between rounds."""
