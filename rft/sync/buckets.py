"""The bytes of a bucket at both ends of a stream: read out of the trainer's weights, put into the
tensors that they belong to, and what tells that they arrived as they were sent.

    WeightSource ──Blocks──► pieces, in place ──pack──► one message, where a link wants one
            ──► bytes + checksum ──►
    Staging ◄── place, put ── pieces that came; `arrived` ──► tensors that are complete

A checksum has 128 bits per bucket, seeded with the round that the bucket belongs to (plan, version,
stream and bucket: bytes of another round are wrong bytes). Host memory: xxh3-128. Device memory: a
mixing reduction in integers, so that no byte has to leave the device; two sums of the words, to
each word an odd number times its place added, and mixed (the finaliser of splitmix64, Steele et al.
2014): on a card one kernel (`rft.sync.mixing`), else torch's operations. Both ends of a stream use
the same one: which, follows from where the weights lie.

Invariant: a tensor comes out of `Staging` once per round, when every bucket with a piece of it was
reported as good.
"""

import importlib.util
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice

import torch
import xxhash

from rft.ground import device as devices
from rft.ground import host_memory
from rft.ground.names import ITEM_BYTES
from rft.ground.protocols import Block, WeightSource
from rft.ground.streams import hand_over, settle
from rft.sync.connection import CHUNK
from rft.sync.loading import PartTensor, layer_order
from rft.sync.plan import ALIGNMENT, Bucket, StreamPart, WeightStream, row_bytes

CHECKSUM_BYTES = 16
WORD = 8  # bytes
SLICE = 4 * 2**20  # bytes that torch's operations sum at a time
ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # of two lanes
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0))  # shifts and factors
AHEAD = 4  # buckets of a stream that may wait for the consumer, where the memory is not kept

# --- checksums -----------------------------------------------------------------------------------


def seed_of(digest: str, version: int, stream: int, bucket: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{digest}/{version}/{stream}/{bucket}".encode())


def host_checksum(seed: int) -> "xxhash.xxh3_128":
    """To be fed with `update`, piece by piece; `digest()` gives the bytes."""
    return xxhash.xxh3_128(seed=seed)


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class Checksum:
    """Of contiguous uint8 tensors on one device, whose lengths 8 divides: in memory that is made
    once, for all links of a process. One sum at a time: with what it reads back, 16 bytes, the
    device is done with that memory, and another stream may use it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._free = threading.Lock()
        self._add: Callable[[torch.Tensor, int], None] | None = None

    def make(self) -> None:
        """Its memory, the first time. Whoever connects the first link calls this."""
        with self._free:
            if self._add is not None:
                return
            self._total, self._sum = torch.empty((2, 2), dtype=torch.int64, device=self.device)
            if has_kernel(self.device):
                self._add = self._by_kernel
                self._by_kernel(self._sum, 0)  # compiled now: a second that no round waits for
            else:
                self._make_slices()
                self._add = self._by_slices
            settle(self.device)  # another thread, with another stream, uses it

    def of(self, data: torch.Tensor, seed: int) -> bytes:
        with self._free:
            assert self._add is not None
            self._total.zero_()
            self._add(data.view(torch.int64), seed)
            return self._total.cpu().numpy().tobytes()

    def _by_kernel(self, words: torch.Tensor, seed: int) -> None:
        from rft.sync import mixing

        seeds = _signed(seed ^ ODD[0]), _signed(seed ^ ODD[1])
        mixing.add(words, self._total, seeds, ODD, MIXING)

    def _make_slices(self) -> None:
        words = SLICE // WORD
        kept = torch.empty((3, len(ODD), words), dtype=torch.int64, device=self.device)
        for lane, odd in zip(kept[0], ODD, strict=True):
            torch.arange(1, words + 1, out=lane).mul_(_signed(odd))
        self._places, self._mixed, self._shifted = kept

    def _by_slices(self, words: torch.Tensor, seed: int) -> None:
        at = 0
        for part in words.split(self._places.shape[1]):
            mixed = self._mixed[:, : len(part)]
            torch.add(part, self._places[:, : len(part)], out=mixed)
            for lane, odd in zip(mixed, ODD, strict=True):
                lane.add_(_signed(at * odd + (seed ^ odd)))
            self._mix(mixed, self._shifted[:, : len(part)])
            self._total.add_(torch.sum(mixed, dim=1, out=self._sum))
            at += len(part)

    @staticmethod
    def _mix(words: torch.Tensor, shifted: torch.Tensor) -> None:
        """Torch's own shift of signed numbers repeats the sign: zeros come in by a mask."""
        for shift, factor in MIXING:
            torch.bitwise_right_shift(words, shift, out=shifted)
            words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
            if factor:
                words.mul_(_signed(factor))


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


# --- at the trainer ------------------------------------------------------------------------------


class Blocks:
    """The blocks of a part as bytes, read once and in order from those of the whole stream; going
    back starts again. On a GPU made and used inside `Beside`: a block that had to be put together
    is memory of the stream that it was read on.
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

    def copy(self, number: int, start: int, stop: int, message: torch.Tensor, at: int) -> int:
        """The same into a message, without memory of its own; returns its length."""
        self._seek(number)
        rows = self.values[start:stop]
        message[at : at + rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)
        return rows.nbytes

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
        self.values = torch.empty(0)  # two blocks that had to be put together are never there
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
    """Fill `message`; what lies between the pieces is 0, so that both ends hash the same. Needs no
    memory beside it.
    """
    end = 0
    for piece in bucket.pieces:
        message[end : piece.offset].zero_()
        end = piece.offset + blocks.copy(
            piece.block, piece.start, piece.stop, message, piece.offset
        )
    message[end:].zero_()


def largest(part: StreamPart) -> int:
    """Bytes of one message, at most."""
    return max((bucket.nbytes for bucket in part.stream.buckets), default=0)


# --- at the engine -------------------------------------------------------------------------------


class Staging:
    """Memory that a round of weights arrives in: of every Hugging Face tensor the part that comes,
    filled by several streams at once, from any thread.

    `kept`: one piece of memory, there from the start and for every round; otherwise every tensor
    has memory of its own, on the device, which its consumer frees.

    Every block lies in one piece, rows together, also where it is columns of its tensor: bytes come
    and go by plain copies, and are put beside each other when vLLM's loaders copy them out of the
    `PartTensor` that has the tensor's whole shape. Tensors lie in the order of the model's layers,
    experts of a layer together.
    """

    def __init__(
        self, streams: Sequence[WeightStream], device: torch.device, kept: bool, timeout: float
    ):
        self.streams = streams
        self.device = device
        self.kept = kept
        self.timeout = timeout
        self._room = [threading.Semaphore(AHEAD) for _ in streams]
        self.bytes = 0  # of good buckets, this round
        self._blocks = blocks_by_tensor(streams)
        self._elements = {
            name: sum(math.prod(block.block_shape) for block in blocks)
            for name, blocks in self._blocks.items()
        }
        self._tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[tuple[str, int], torch.Tensor] = {}  # by name and start of a block
        self._missing: dict[str, int] = {}  # elements, of tensors that have begun to arrive
        self._buckets: Counter[int] = Counter()  # of a stream, that are good
        self._making = threading.Lock()
        self._is_over = False
        if kept:
            self._make_all()

    def begin(self) -> None:
        """A round begins; what an earlier one left is void."""
        self.bytes = 0
        self._missing.clear()
        self._buckets.clear()
        if not self.kept:
            self._tensors.clear()
            self._memory.clear()

    def reserve(self, stream: int) -> None:
        """Called before a bucket is taken: where every tensor needs
        new memory, the consumer must keep up.
        """
        if not self.kept and not self._room[stream].acquire(timeout=self.timeout):
            raise TimeoutError(f"no bucket of stream {stream} was installed for {self.timeout:g} s")
        if not self.kept and self._is_over:
            raise RuntimeError("nobody takes what comes in this round any more")

    def release(self, stream: int) -> None:
        if not self.kept:
            self._room[stream].release()

    def give_up(self) -> None:
        """Nobody takes what comes any more: who waits for that hears of it."""
        self._is_over = True
        for stream in range(len(self.streams)):
            self.release(stream)

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
        left = self._missing.get(block.name, self._elements[block.name])
        self._missing[block.name] = left - rows * math.prod(block.block_shape[1:])
        if not self._missing[block.name]:
            del self._missing[block.name]
            if self.kept:
                yield block.name, self._tensors[block.name]
            else:
                for one in self._blocks[block.name]:
                    hand_over(self._memory.pop((one.name, one.start)))
                yield block.name, self._tensors.pop(block.name)

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
    def place(self, block: Block, start: int, stop: int) -> Iterator[memoryview]:
        """Host memory for rows [start, stop) of `block`: its own, or copied to the device after."""
        target = self._target(block, start, stop)
        if target.device.type == "cpu":
            yield _bytes(target).numpy().data
            return
        scratch = torch.empty(target.shape, dtype=target.dtype)
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

    def _target(self, block: Block, start: int, stop: int) -> torch.Tensor:
        if not self.kept:
            with self._making:
                if block.name not in self._tensors:
                    size = self._size(block.name)
                    memory = torch.empty(size, dtype=torch.uint8, device=self.device)
                    self._make(block.name, memory)
        return self._memory[block.name, block.start][start:stop]

    @property
    def payload(self) -> int:
        """Bytes that come in one round."""
        return sum(map(self._size, self._blocks))

    def _size(self, name: str) -> int:
        return self._elements[name] * ITEM_BYTES[self._blocks[name][0].dtype]

    def _make_all(self) -> None:
        """Raises RuntimeError where there is no room."""
        names = sorted(self._blocks, key=layer_order)
        sizes = [-(-self._size(name) // ALIGNMENT) * ALIGNMENT for name in names]
        ends = list(accumulate(sizes, initial=0))
        check_room(ends[-1])
        memory = devices.staging_memory(ends[-1], self.device)
        for name, start in zip(names, ends, strict=False):
            self._make(name, memory[start : start + self._size(name)])

    def _make(self, name: str, memory: torch.Tensor) -> None:
        """A tensor whose blocks lie in `memory`, one after another."""
        blocks = self._blocks[name]
        first, values = blocks[0], memory.view(getattr(torch, blocks[0].dtype))
        at, pieces = 0, []
        for block in blocks:
            end = at + math.prod(block.block_shape)
            pieces.append(values[at:end].view(block.block_shape))
            self._memory[name, block.start] = pieces[-1]
            at = end
        starts = [block.start for block in blocks]
        if first.dim == 0:  # they lie as they do in the tensor
            starts, pieces = starts[:1], [values.view(-1, *first.shape[1:])]
        whole = len(pieces) == 1 and pieces[0].shape == first.shape
        self._tensors[name] = (
            pieces[0] if whole else PartTensor(name, first.shape, first.dim, starts, pieces)
        )


def check_room(size: int) -> None:
    """For so many bytes of staging memory."""
    if size > (free := host_memory.available()):
        raise RuntimeError(
            f"the next version of the weights takes {size} bytes of host memory in this worker, "
            f"and {free} are free: give the machine or the container more, run fewer engines on "
            "it, or set synchronizer.receive=direct"
        )


def blocks_by_tensor(streams: Sequence[WeightStream]) -> dict[str, list[Block]]:
    """Of each tensor the blocks that come, side by side: all are cut in the same dim."""
    found: dict[str, list[Block]] = {}
    for block in (block for stream in streams for block in stream.blocks):
        found.setdefault(block.name, []).append(block)
    for blocks in found.values():
        blocks.sort(key=lambda block: block.start)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
