"""The bytes of a bucket at both ends of a stream: read out of the trainer's weights, put into the
tensors that they belong to, and what tells that they arrived as they were sent.

    WeightSource ──Blocks──► pieces, in place ──pack──► one message, where a link wants one
            ──► bytes + checksum ──►
    Staging ◄── place, put ── pieces that came; `arrived` ──► tensors that are complete

A checksum has 128 bits per bucket, seeded with the round that the bucket belongs to (plan, version,
stream and bucket: bytes of another round are wrong bytes). Host memory: xxh3-128. Device memory: a
mixing reduction in torch's integers, so that no byte has to leave the device; two sums of the
words, each word multiplied by an odd number that depends on its place and mixed (the finaliser of
splitmix64, Steele et al. 2014). Both ends of a stream use the same one: which, follows from where
the weights lie.

Invariant: a tensor comes out of `Staging` once per round, when every bucket with a piece of it was
reported as good.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, islice

import torch
import xxhash

from rft.ground import device as devices
from rft.ground.names import ITEM_BYTES
from rft.ground.protocols import Block, WeightSource
from rft.sync.connection import CHUNK
from rft.sync.plan import ALIGNMENT, Bucket, StreamPart, WeightStream, row_bytes

CHECKSUM_BYTES = 16
ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # of two lanes
AHEAD = 4  # buckets of a stream that may wait for the consumer, where the memory is not kept

# --- checksums -----------------------------------------------------------------------------------


def seed_of(digest: str, version: int, stream: int, bucket: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{digest}/{version}/{stream}/{bucket}".encode())


def host_checksum(seed: int) -> "xxhash.xxh3_128":
    """To be fed with `update`, piece by piece; `digest()` gives the bytes."""
    return xxhash.xxh3_128(seed=seed)


def device_checksum(data: torch.Tensor, seed: int) -> bytes:
    """Of a contiguous uint8 tensor on any device, whose length 8 divides.

    Reads 16 bytes back to the host.
    """
    words = data.view(torch.int64)
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=data.device)
    lanes = [_mixed(words + places * _signed(odd) + _signed(seed ^ odd)).sum() for odd in ODD]
    return torch.stack(lanes).cpu().numpy().tobytes()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's own shift of signed numbers repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


# --- at the trainer ------------------------------------------------------------------------------


class Blocks:
    """The blocks of a part as bytes, read once and in order from those of the whole stream; going
    back starts again.
    """

    def __init__(self, stream: WeightStream, part: StreamPart, source: WeightSource):
        self.stream = stream
        self.part = part
        self.source = source
        self._start()

    def _start(self) -> None:
        self.number = -1  # of the part's block that `values` are
        self.read = -1  # of the stream's block that was read last
        self.blocks = self.source.read_blocks()
        self.values = torch.empty(0)

    def rows(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a block, as a flat uint8 tensor:
        in place where they lie together.
        """
        self._seek(number)
        return self.values[start:stop].contiguous().reshape(-1).view(torch.uint8)

    def chunks(self, number: int, start: int, stop: int) -> Iterator[memoryview]:
        """The same on the host, in lengths that stay in the cache; of columns, so many rows are
        copied together at a time.
        """
        self._seek(number)
        size = row_bytes(self.part.stream.blocks[number])
        step = stop - start if self.values.is_contiguous() else max(1, CHUNK // size)
        for first in range(start, stop, step):
            data = self.rows(number, first, min(first + step, stop)).numpy().data
            yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))

    def _seek(self, number: int) -> None:
        if number == self.number:
            return
        if number < self.number:
            self._start()
        source, cut = self.part.sources[number], self.part.stream.blocks[number]
        tensor = next(islice(self.blocks, source - self.read - 1, None))
        self.read = source
        block = self.stream.blocks[source]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (block.dtype, block.block_shape):
            raise ValueError(
                f"{block.name}: plan says {block.dtype} {block.block_shape}, got {dtype} "
                f"{tuple(tensor.shape)}"
            )
        # which is 0 where the block is whole and was cut in the other dim
        first = cut.start - block.start
        self.number, self.values = (
            number,
            tensor.detach().contiguous().narrow(cut.dim, first, cut.stop - cut.start),
        )


def pack(bucket: Bucket, blocks: Blocks, message: torch.Tensor) -> None:
    """Fill `message`; what lies between the pieces is 0, so that both ends hash the same."""
    end = 0
    for piece in bucket.pieces:
        part = blocks.rows(piece.block, piece.start, piece.stop)
        message[end : piece.offset].zero_()
        end = piece.offset + len(part)
        message[piece.offset : end].copy_(part)
    message[end:].zero_()


# --- at the engine -------------------------------------------------------------------------------


class Staging:
    """Memory that a round of weights arrives in: one Hugging Face tensor per name, filled by
    several streams at once, from any thread.

    `kept`: the memory stays for the next round, so that no page has to be cleared by the kernel
    again; otherwise every tensor has memory of its own, which its consumer frees.

    Where the streams bring a part of a tensor only, the loaders want its whole shape all the same.
    On the CPU the tensor has it, and what does not come is memory that nobody ever touches: the
    kernel gives none for it (of columns it does, where a row is shorter than a page, or than 2 MiB
    with transparent huge pages "always"). Pinned memory is given at once, so there just the part is
    kept, all tensors in one piece of it, and `whole` makes the rest, on the device, for as long as
    the loader needs it.
    """

    def __init__(
        self, streams: Sequence[WeightStream], device: torch.device, kept: bool, timeout: float
    ):
        self.streams = streams
        self.device = device
        self.kept = kept
        self.timeout = timeout
        self.dense = kept and device.type != "cpu"
        self._room = [threading.Semaphore(AHEAD) for _ in streams]
        self.bytes = 0  # of good buckets, this round
        self._spans = spans(streams)
        self._elements = elements(streams)
        self._tensors: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}  # elements, of tensors that have begun to arrive
        self._buckets: Counter[int] = Counter()  # of a stream, that are good
        self._making = threading.Lock()

    def begin(self) -> None:
        """A round begins; what an earlier one left is void."""
        self.bytes = 0
        self._missing.clear()
        self._buckets.clear()
        if not self.kept:
            self._tensors.clear()

    def reserve(self, stream: int) -> None:
        """Called before a bucket is taken: where every tensor needs
        new memory, the consumer must keep up.
        """
        if not self.kept and not self._room[stream].acquire(timeout=self.timeout):
            raise TimeoutError(f"no bucket of stream {stream} was installed for {self.timeout:g} s")

    def release(self, stream: int) -> None:
        if not self.kept:
            self._room[stream].release()

    def arrived(self, stream: int, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A bucket is good: the tensors that it completes."""
        blocks, bucket = self.streams[stream].blocks, self.streams[stream].buckets[number]
        self._buckets[stream] += 1
        self.bytes += bucket.nbytes
        for piece in bucket.pieces:
            yield from self.filled(blocks[piece.block], piece.stop - piece.start)
        self.release(stream)

    def filled(self, block: Block, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        """So many more rows of `block` are good: its tensor, if they complete it."""
        held, left = self._held(block), self._missing.get(block.name, self._elements[block.name])
        self._missing[block.name] = left - rows * math.prod(block.block_shape[1:])
        if not self._missing[block.name]:
            del self._missing[block.name]
            yield block.name, held if self.kept else self._tensors.pop(block.name)

    def late(self) -> list[int]:
        """Streams that have not delivered all of their buckets."""
        return [
            i for i, stream in enumerate(self.streams) if self._buckets[i] < len(stream.buckets)
        ]

    def check_complete(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"tensors still incomplete after the last bucket: {sorted(self._missing)}"
            )

    @contextmanager
    def place(
        self, block: Block, start: int, stop: int, amend: bool = False
    ) -> Iterator[memoryview]:
        """Host memory for rows [start, stop) of `block`: the tensor's own where they lie together,
        else copied there after. `amend`: what they are now is in it.
        """
        target = self._target(block, start, stop)
        if target.is_contiguous() and target.device.type == "cpu":
            yield _bytes(target).numpy().data
            return
        scratch = torch.empty(target.shape, dtype=target.dtype)
        if amend:
            scratch.copy_(target)
        yield _bytes(scratch).numpy().data
        target.copy_(scratch)

    def chunks(self, block: Block, start: int, stop: int) -> Iterator[memoryview]:
        """Rows [start, stop) of `block`, which are there, as bytes of host memory, in lengths that
        stay in the cache.
        """
        target = self._target(block, start, stop)
        step = len(target) if target.is_contiguous() else max(1, CHUNK // row_bytes(block))
        for rows in target.split(step):
            data = _bytes(rows.contiguous()).numpy().data
            yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))

    def put(self, block: Block, start: int, stop: int, data: torch.Tensor) -> None:
        """Rows [start, stop) of `block` from flat bytes, on any device."""
        target = self._target(block, start, stop)
        target.copy_(data.view(target.dtype).view(target.shape), non_blocking=target.is_pinned())

    def whole(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """A tensor that came out of here, in its whole shape."""
        span = self._spans[name]
        if held.shape == span.shape:
            return held
        made = torch.empty(span.shape, dtype=held.dtype, device=self.device)
        made.narrow(span.dim, span.start, span.stop - span.start).copy_(held, non_blocking=True)
        return made

    def _target(self, block: Block, start: int, stop: int) -> torch.Tensor:
        held, first = self._held(block), block.start
        if self.dense:
            first -= self._spans[block.name].start
        if block.dim == 0:
            return held[first + start : first + stop]
        return held[start:stop, first : first + block.stop - block.start]

    @property
    def payload(self) -> int:
        """Bytes that come in one round."""
        return sum(
            count * ITEM_BYTES[self._spans[name].dtype] for name, count in self._elements.items()
        )

    def _held(self, block: Block) -> torch.Tensor:
        with self._making:
            if block.name not in self._tensors:
                self._make(self._spans[block.name])
            return self._tensors[block.name]

    def _make(self, span: Block) -> None:
        """On the device if the tensors are to be used at once; a copy of this worker's part of the
        model waits in pinned host memory.
        """
        if not self.dense:
            dtype = getattr(torch, span.dtype)
            self._tensors[span.name] = torch.empty(span.shape, dtype=dtype, device=self.device)
            return
        sizes = [row_bytes(one) * one.block_shape[0] for one in self._spans.values()]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        memory = devices.staging_memory(ends[-1], self.device)
        for one, size, end in zip(self._spans.values(), sizes, ends, strict=True):
            start = end - -(-size // ALIGNMENT) * ALIGNMENT
            flat = memory[start : start + size].view(getattr(torch, one.dtype))
            self._tensors[one.name] = flat.view(one.block_shape)


def spans(streams: Sequence[WeightStream]) -> dict[str, Block]:
    """Per tensor the smallest block around all that comes of it.

    All of its blocks are cut in the same dim.
    """
    found: dict[str, Block] = {}
    for block in (block for stream in streams for block in stream.blocks):
        known = found.setdefault(block.name, block)
        found[block.name] = replace(
            known, start=min(known.start, block.start), stop=max(known.stop, block.stop)
        )
    return found


def elements(streams: Sequence[WeightStream]) -> Counter[str]:
    """Per tensor, how many come."""
    found: Counter[str] = Counter()
    for block in (block for stream in streams for block in stream.blocks):
        found[block.name] += math.prod(block.block_shape)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
