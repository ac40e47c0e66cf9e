"""Memory that a round of weights arrives in: one whole Hugging Face tensor per name, filled by several streams at once.

In: pieces of blocks, by any thread. Out: the tensors that are complete. `kept`: the memory stays for the next round, so that
no page has to be cleared by the kernel again; otherwise every tensor has memory of its own, which its consumer frees.
Invariant: a tensor comes out once per round, when every bucket with a piece of it was reported as good.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rft.protocols import Block
from rft.sync import plan as plans
from rft.sync.plan import Plan

AHEAD = 4  # buckets of a stream that may wait for the consumer, where the memory is not kept


class Staging:
    def __init__(self, plan: Plan, device: torch.device, kept: bool, timeout: float):
        self.plan = plan
        self.device = device
        self.kept = kept
        self.timeout = timeout
        self._room = [threading.Semaphore(AHEAD) for _ in plan.streams]
        self.bytes = 0  # of good buckets, this round
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
        """Called before a bucket is taken: where every tensor needs new memory, the consumer must keep up."""
        if not self.kept and not self._room[stream].acquire(timeout=self.timeout):
            raise TimeoutError(f"no bucket of stream {stream} was installed for {self.timeout:g} s")

    def release(self, stream: int) -> None:
        if not self.kept:
            self._room[stream].release()

    def arrived(self, stream: int, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A bucket is good: the tensors that it completes."""
        blocks, bucket = self.plan.streams[stream].blocks, self.plan.streams[stream].buckets[number]
        self._buckets[stream] += 1
        self.bytes += bucket.nbytes
        for piece in bucket.pieces:
            block = blocks[piece.block]
            whole = self._whole(block)
            elements = (piece.stop - piece.start) * plans.row_bytes(block) // whole.element_size()
            self._missing[block.name] = self._missing.get(block.name, whole.numel()) - elements
            if not self._missing[block.name]:
                del self._missing[block.name]
                yield block.name, whole if self.kept else self._tensors.pop(block.name)
        self.release(stream)

    def late(self) -> list[int]:
        """Streams that have not delivered all of their buckets."""
        return [i for i, stream in enumerate(self.plan.streams) if self._buckets[i] < len(stream.buckets)]

    def check_complete(self) -> None:
        if self._missing:
            raise RuntimeError(f"tensors still incomplete after the last bucket: {sorted(self._missing)}")

    @contextmanager
    def place(self, block: Block, start: int, stop: int) -> Iterator[memoryview]:
        """Host memory for rows [start, stop) of `block`: the tensor's own where they lie together, else copied there after."""
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

    def _target(self, block: Block, start: int, stop: int) -> torch.Tensor:
        whole = self._whole(block)
        if block.dim == 0:
            return whole[block.start + start : block.start + stop]
        return whole[start:stop, block.start : block.stop]

    def _whole(self, block: Block) -> torch.Tensor:
        with self._making:
            if block.name not in self._tensors:
                self._tensors[block.name] = self._memory(block)
            return self._tensors[block.name]

    def _memory(self, block: Block) -> torch.Tensor:
        """On the device if the tensors are to be used at once; a copy of the whole model waits in pinned host memory."""
        dtype = getattr(torch, block.dtype)
        if self.device.type == "cpu" or not self.kept:
            return torch.empty(block.shape, dtype=dtype, device=self.device)
        return torch.empty(block.shape, dtype=dtype, pin_memory=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
