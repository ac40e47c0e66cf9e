"""Memory that a round of weights arrives in: one Hugging Face tensor per name, filled by several
streams at once.

In: pieces of blocks, by any thread. Out: the tensors that are complete. `kept`: the memory stays
for the next round, so that no page has to be cleared by the kernel again; otherwise every tensor
has memory of its own, which its consumer frees.

Where the streams bring a part of a tensor only, the loaders want its whole shape all the same. On
the CPU the tensor has it, and what does not come is memory that nobody ever touches: the kernel
gives none for it (of columns it does, where a row is shorter than a page, or than 2 MiB with
transparent huge pages "always"). Pinned memory is given at once, so there just the part is kept,
and `whole` makes the rest, on the device, for as long as the loader needs it.

Invariant: a tensor comes out once per round, when every bucket with a piece of it was reported as
good.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from rft.ground.protocols import Block
from rft.sync.plan import WeightStream

AHEAD = 4  # buckets of a stream that may wait for the consumer, where the memory is not kept


class Staging:
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
            block = blocks[piece.block]
            held = self._held(block)
            came = (piece.stop - piece.start) * math.prod(block.block_shape[1:])
            self._missing[block.name] = (
                self._missing.get(block.name, self._elements[block.name]) - came
            )
            if not self._missing[block.name]:
                del self._missing[block.name]
                yield block.name, held if self.kept else self._tensors.pop(block.name)
        self.release(stream)

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
        """Host memory for rows [start, stop) of `block`: the tensor's own where they lie together,
        else copied there after.
        """
        target = self._target(block, start, stop)
        if target.is_contiguous() and target.device.type == "cpu":
            yield _bytes(target).numpy().data
            return
        scratch = torch.empty(target.shape, dtype=target.dtype)
        yield _bytes(scratch).numpy().data
        target.copy_(scratch)

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

    def _held(self, block: Block) -> torch.Tensor:
        with self._making:
            if block.name not in self._tensors:
                self._tensors[block.name] = self._memory(self._spans[block.name])
            return self._tensors[block.name]

    def _memory(self, span: Block) -> torch.Tensor:
        """On the device if the tensors are to be used at once; a copy of the whole model waits in
        pinned host memory.
        """
        dtype, pinned = getattr(torch, span.dtype), self.device.type != "cpu"
        if self.dense:
            return torch.empty(span.block_shape, dtype=dtype, pin_memory=pinned)
        return torch.empty(span.shape, dtype=dtype, device=self.device)


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
