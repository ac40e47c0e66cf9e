"""Where an engine worker takes a round's weights from, besides the trainer's streams
(`rft.sync.receiver`): buckets in a file, and committed saves.

    Round with InFile ──► map ─► every bucket: xxh3-128 of its bytes against the trainer's
                              ─► rows or columns of the tensors that they belong to
    Round with InSave ──► open ─► manifest, receipts ─► slabs of rows, every byte checked, on each
                              node by one (`rft.ground.node_file`) ─► rows or columns of the tensors

Both run in a thread beside the decoding, into memory that the next `stage` overwrites, and take of
a tensor what this worker needs (`rft.sync.plan.needed`). Invariant: tensors come out only when all
of a worker's part was read, every byte of it is what was written, and it is the round that was
announced.
"""

import logging
import mmap
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, cycle
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from rft.checkpoint import export
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.rank_files import StorageUnreachable
from rft.checkpoint.reader import Checkpoint, Mismatch
from rft.checkpoint.records import CHUNK
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import open_storage
from rft.checkpoint.targets import Array
from rft.ground import host_memory, hubs
from rft.ground.names import ITEM_BYTES, read_hf_config
from rft.ground.node_file import NodeFile
from rft.ground.protocols import Block
from rft.ground.rounds import InFile, InSave, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.buckets import Staging, host_checksum, seed_of
from rft.sync.connection import PeerLost, PeerRefused
from rft.sync.plan import (
    WHOLE,
    Share,
    Slice,
    StreamPart,
    StreamPlan,
    WeightStream,
    needed,
    part_of,
    row_bytes,
)

log = logging.getLogger(__name__)


class WeightReader(Protocol):
    """How a method's weights come to this worker; `rft.sync.receiver.Receiver` is one.

    `again`: buckets of the last round that had to come twice.
    """

    again: int

    def connect(self, info: TrainerInfo) -> None: ...
    def check(self, coming: Round) -> None:
        """Refuse a round before any byte of it is taken."""

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        """Where it raises, it has closed what it began with, and no later connection."""

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        """Bytes that came."""

    def close(self) -> None: ...


class StoredWeights:
    """What readers of stored weights share: nothing is asked for twice, nothing is held open
    between rounds, and of every tensor only what this worker's loaders use (`share`) is held.
    """

    again = 0

    def __init__(self, device: torch.device, share: Share = WHOLE):
        self.device = device
        self.share = share
        self._kept: Staging | None = None

    def staging(self, streams: list[WeightStream]) -> Staging:
        """Memory for these: that of the last round, if they are the same."""
        if self._kept is None or self._kept.streams != streams:
            self._kept = None  # given back before there is another
            self._kept = Staging(streams, self.device, kept=True, timeout=0.0)
        self._kept.begin()
        return self._kept

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        assert self._kept is not None
        return self._kept.payload

    def close(self) -> None: ...


class HandedBuckets(StoredWeights):
    """Buckets that the engine's actor hands over in a file: plan, buckets and checksums are those
    of the streams. One that is wrong is wrong for good; the actor hands all of them over anew.

    All workers of an engine read one file, and none installs a version that another has refused: so
    each bucket is verified by one of them.
    """

    def __init__(self, device: torch.device, share: Share = WHOLE):
        super().__init__(device, share)
        self.plan: StreamPlan | None = None
        self.epoch = -1
        self.verified = 0  # bytes of the last round
        self._parts: list[StreamPart] = []
        # of each stream: what is needed of a block, by the block's number
        self._cuts: list[dict[int, Block]] = []

    def connect(self, info: TrainerInfo) -> None:
        """Take over the plan; there is nobody to connect to."""
        assert info.plan is not None
        plan = plans.decode(info.plan)
        self.plan, self.epoch = plan, info.epoch
        self._parts = [part_of(plan, index, self.share) for index in range(len(plan.streams))]
        self._cuts = [
            dict(zip(part.sources, part.stream.blocks, strict=True)) for part in self._parts
        ]
        self.staging([part.stream for part in self._parts])

    def check(self, coming: Round) -> None:
        here = (self.plan.digest if self.plan else None, self.epoch)
        if (coming.digest, coming.epoch) != here:
            raise ValueError(
                f"round follows plan {coming.digest} of epoch {coming.epoch}, this engine "
                f"has {here}"
            )

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        assert self.plan is not None and isinstance(coming.location, InFile)
        staging = self.staging([part.stream for part in self._parts])
        tensors: dict[str, torch.Tensor] = {}
        turns, self.verified = cycle(range(self.share.workers)), 0
        with (
            Path(coming.location.path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
        ):
            for index, stream in enumerate(self.plan.streams):
                for number, bucket in enumerate(stream.buckets):
                    start, size, digest = coming.location.streams[index][number]
                    with memoryview(memory)[start : start + size] as data:
                        if next(turns) == self.share.worker:
                            self._verify(coming.version, index, number, data, digest)
                        for piece in bucket.pieces:
                            tensors.update(self._take(index, piece, data, staging))
        staging.check_complete()
        return tensors

    def _take(
        self, index: int, piece: Slice, data: memoryview, staging: Staging
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What this worker needs of a piece, and the tensor that it completes."""
        assert self.plan is not None
        block, cut = (
            self.plan.streams[index].blocks[piece.block],
            self._cuts[index].get(piece.block),
        )
        if cut is None:
            return
        # in rows and columns of the block
        first, count, size = cut.start - block.start, cut.stop - cut.start, row_bytes(block)
        start, stop = (first, first + count) if cut.dim == 0 else (0, block.block_shape[0])
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low >= high:
            return
        at = piece.offset + (low - piece.start) * size
        rows = np.frombuffer(data, np.uint8, (high - low) * size, at).reshape(high - low, size)
        if cut.dim == 1:
            item = size // block.block_shape[1]
            rows = rows[:, first * item : (first + count) * item]
        with staging.place(cut, low - start, high - start) as target:
            np.frombuffer(target, np.uint8).reshape(rows.shape)[:] = rows
        yield from staging.filled(cut, high - low)

    def _verify(self, version: int, index: int, number: int, data: memoryview, digest: str) -> None:
        assert self.plan is not None
        ours = host_checksum(seed_of(self.plan.digest, version, index, number))
        ours.update(data)
        self.verified += len(data)
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
    the engine keeps what it serves and waits for the next one. Chunks are taken that hold something
    of the worker's part; of a tensor that it takes in columns these are all, unless ranks have
    saved it in columns. Each is read and verified by the first reader of the node that needs it;
    the others, of this engine or another, take it from the file in memory that they have in common.
    `model`: the directory that the engine was started from, whose config.json names the tensors.
    """

    def __init__(self, model: str, device: torch.device, share: Share = WHOLE):
        super().__init__(device, share)
        self.model = model

    def connect(self, info: TrainerInfo) -> None:
        """There is nobody to connect to: every round says where it lies."""

    def check(self, coming: Round) -> None:
        """What can be wrong is known once the save is open."""

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        assert isinstance(coming.location, InSave)
        try:
            with Checkpoint(open_storage(coming.location.root), coming.location.path) as saved:
                manifest = saved.manifest
                announced = coming.digest or manifest.seal, coming.version
                if (manifest.seal, manifest.step) != announced:
                    raise Mismatch(
                        f"{saved.where} is save {manifest.id} of version {manifest.step}, "
                        f"not the one that was announced as version {coming.version}"
                    )
                for file in saved.files():
                    file.open()
                tensors = export.plan(saved, read_hf_config(self.model))
                if not _is_room(coming.location.node_file, tensors):
                    return self._read(saved, tensors)
                digests = chain.from_iterable(receipt.chunks for receipt in saved.receipts)
                with closing(NodeFile(coming.location.node_file, digests, CHUNK)) as common:
                    saved.take_from(common.take)
                    return self._read(saved, tensors)
        except (Damaged, Mismatch, StorageUnreachable) as error:
            raise PeerRefused(str(error)) from error

    def _read(self, saved: Checkpoint, tensors: list[export.Tensor]) -> dict[str, torch.Tensor]:
        needs = {
            tensor: Block(tensor.name, tensor.dtype, tensor.shape, dim, start, stop)
            for tensor in tensors
            for dim, start, stop in [needed(tensor.name, tensor.shape, self.share)]
            if start < stop
        }
        stream = WeightStream(rank=0, blocks=tuple(needs.values()), buckets=())
        staging, found = self.staging([stream]), {}
        for tensor, block in needs.items():
            for slab in export.slabs(tensor):
                if (claim := _within(slab, block)) is None:
                    continue
                first = claim.offset[0] - (block.start if block.dim == 0 else 0)
                with staging.place(block, first, first + claim.shape[0]) as target:
                    elements = np.frombuffer(target, f"<u{ITEM_BYTES[claim.dtype]}")
                    saved.fill([(claim, Array(elements))])
                found.update(staging.filled(block, claim.shape[0]))
        staging.check_complete()
        return found


def _is_room(node_file: str, tensors: list[export.Tensor]) -> bool:
    """For all weights once more, beside those that workers hold and may not have touched yet."""
    if not node_file:
        return False
    size = sum(tensor.bytes for tensor in tensors)
    free = host_memory.available() + Path(node_file).stat().st_blocks * 512
    if not (fits := 2 * size <= free):
        log.info("%d bytes of memory are free: every worker reads for itself", free)
    return fits


def _within(claim: Claim, block: Block) -> Claim | None:
    """What `block` has of a claim."""
    dim, offset, shape = block.dim, list(claim.offset), list(claim.shape)
    start = max(offset[dim], block.start)
    offset[dim], shape[dim] = start, min(offset[dim] + shape[dim], block.stop) - start
    if shape[dim] <= 0:
        return None
    return msgspec.structs.replace(claim, offset=tuple(offset), shape=tuple(shape))


def file_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face directory's safetensors files."""
    from safetensors import safe_open

    files = hubs.local_weights(Path(path))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)
