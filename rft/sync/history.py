"""The version before, at the trainer: what makes a bucket of changes possible.

    weights in host memory ──told──► the same bits, kept ──► checksum of the whole bucket
    kept bits of the version before ──► delta from it, made once for all who take this bucket

In: a part of this rank's stream, read in place while a version is open. Out: of each bucket all its
bytes, or the delta from the version that this rank told before, if that is worth it. Memory: the
part once. Invariants: what is kept of a bucket are the bits of one version, or nobody gets them; a
delta names the version that it begins from, and only who holds exactly that gets it.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rft.ground.delta import Encoder
from rft.ground.experience import Record
from rft.ground.names import ITEM_BYTES
from rft.sync.buckets import Blocks, host_checksum, seed_of
from rft.sync.connection import PeerConnection, PeerLost
from rft.sync.plan import Bucket, WeightStream, row_bytes

# of the elements of a bucket: where more have changed, finding them takes longer than sending all
DENSEST = 1 / 16


class WeightRequest(Record):
    """What a worker asks for: a version; of its buckets these, None: all; and what it has all of
    already.
    """

    version: int
    buckets: list[int] | None = None
    base: int | None = None


class WrongBuckets(Record):
    """What it says behind them; empty: it has everything."""

    again: list[int]

    def check(self, count: int, wire: PeerConnection) -> list[int]:
        """They, if they are buckets of so many. Raises PeerLost."""
        if len(self.again) > count or not set(self.again) <= set(range(count)):
            raise wire.said_wrong(f"buckets {self.again[:8]} of {count}")
        return self.again


class BucketHead(Record, frozen=True):
    """What stands before a bucket of host memory: so many bytes, all of its own; or, with `base`, a
    delta from that version.
    """

    bucket: int
    size: int
    base: int | None = None

    @property
    def delta(self) -> bool:
        return self.base is not None

    def check(self, payload: int, wire: PeerConnection) -> None:
        """Raises PeerLost where that is none of a bucket of so many bytes."""
        if not 0 < self.size <= payload or (self.size < payload and not self.delta):
            raise PeerLost(
                f"{wire.name}: {self.size} bytes of a bucket of {payload} cannot be", wire.engine
            )


class Told(NamedTuple):
    """What is said of one bucket of a version: its checksum; and, from the version `base`, a delta.

    None: there is none.
    """

    digest: bytes
    base: int | None = None
    delta: bytes = b""

    def is_from(self, base: int | None) -> bool:
        return self.base is not None and self.base == base

    def send(
        self,
        wire: PeerConnection,
        number: int,
        base: int | None,
        size: int,
        chunks: Iterable[memoryview],
    ) -> int:
        """To who has `base`: the delta, if it is from there, else the `size` bytes of `chunks`.
        Returns how many went.
        """
        if not self.is_from(base):
            wire.send_record(BucketHead(bucket=number, size=size))
            for data in chunks:
                wire.send(data)
        else:
            size = len(self.delta)
            wire.send_record(BucketHead(bucket=number, size=size, base=base))
            wire.send(memoryview(self.delta))
        wire.send(memoryview(self.digest))
        return size


class History:
    """Of one part of a stream; asked from the threads of all workers that take it."""

    def __init__(self, stream: WeightStream, digest: str):
        self.stream = stream
        self.digest = digest
        count = len(stream.buckets)
        self._locks = [threading.Lock() for _ in range(count)]
        self._kept: list[np.ndarray | None] = [None] * count
        self._versions: list[int | None] = [None] * count
        self._told = [Told(b"")] * count

    def told(self, number: int, version: int, blocks: Blocks, is_full: bool) -> Told:
        """Of bucket `number` of the weights that `blocks` are now.

        `is_full`: changes are not looked for.
        """
        with self._locks[number]:
            if self._versions[number] != version:
                self._told[number] = self._read(number, version, blocks, is_full)
            return self._told[number]

    def all_of(self, number: int) -> memoryview:
        """The bytes of a bucket that was told; they stay until a later version is."""
        kept = self._kept[number]
        assert kept is not None
        return kept.data

    def _read(self, number: int, version: int, blocks: Blocks, is_full: bool) -> Told:
        bucket, base = self.stream.buckets[number], self._versions[number]
        self._versions[number] = None  # until all of it is of the new one
        kept = self._kept[number]
        if kept is None:
            kept = self._kept[number] = np.empty(payload(self.stream, bucket), np.uint8)
        encoder = Encoder(len(kept), itemsize(self.stream, bucket), DENSEST)
        digest = host_checksum(seed_of(self.digest, version, self.stream.rank, number))
        at = 0
        for piece in bucket.pieces:
            for data in blocks.chunks(piece.block, piece.start, piece.stop):
                here = kept[at : at + len(data)]
                if base is not None and not is_full:
                    encoder.add(here, data)
                here[:] = np.frombuffer(data, np.uint8)
                digest.update(here)
                at += len(data)
        delta = None if base is None or is_full else encoder.finish()
        self._versions[number] = version
        if delta is None:
            return Told(digest.digest())
        return Told(digest.digest(), base, delta)


def payload(stream: WeightStream, bucket: Bucket) -> int:
    """Bytes of a bucket, without what pads it."""
    return sum(
        (piece.stop - piece.start) * row_bytes(stream.blocks[piece.block])
        for piece in bucket.pieces
    )


def itemsize(stream: WeightStream, bucket: Bucket) -> int:
    """Bytes of the elements that are compared: the smallest of those in the bucket."""
    return min(ITEM_BYTES[stream.blocks[piece.block].dtype] for piece in bucket.pieces)
