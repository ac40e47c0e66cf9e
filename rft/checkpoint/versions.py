"""Every published version, for the bytes that changed: the agent's side.

    staged bytes of version n ─► elements that differ from the version before, kept here ─► delta of
                                 each chunk ─► its file, whose receipt names that version
                              ─► from the last full one, kept here too, where a chain of deltas
                                 would take too long to read
                              ─► all bytes, where that delta would too

In: the bytes of a rank's weights, part after part, in the order of its file; where they lie already
(a slot of shared memory), never in the training process. Out: frames, a hash of each whole chunk,
and the `Patch` of the receipt. Memory: this rank's weights twice. Invariants: what is kept are the
bits of two versions, whose receipts are durable, or of none; a version that was not committed is
the base of no other; whoever reads any version reads, behind its nearest full one, at most `REACH`
told elements per element.

Why from the last full one: in k steps fewer elements differ than k times those of a step (half as
many at 15 steps of lr 1e-6 in bf16), for an element that has moved often moves again.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rft.checkpoint.records import CHUNK, Begin, Output, Patch
from rft.checkpoint.storage import Sink
from rft.checkpoint.writer import ChunkHasher
from rft.ground.delta import Encoder
from rft.ground.names import ITEM_BYTES

# Of a chain, told elements in parts of all: to apply so many takes as long as to read all once.
REACH = 1 / 21
LINK = 1 / 180  # what another version of a chain costs beside its elements, in the same measure


class HeldVersion(NamedTuple):
    """A version that another may be made from."""

    name: tuple[int, str]
    bits: np.ndarray


class VersionKeeper:
    """What an agent holds of the version that it wrote last, and of the last full one."""

    def __init__(self) -> None:
        # where bits of the next version go, and what the full one has or nobody needs
        self.bits = self._other = np.empty(0, np.uint8)
        self.newest: HeldVersion | None = None
        self.full: HeldVersion | None = None
        self.layout = ""  # of both
        # of the chain that ends with the newest: elements told since a chunk was stored as it is
        self.told, self.links = np.empty(0), 0
        # in parts of all elements: what the last step has changed, as much as the next will, and
        # how many differ at most between the two
        self.last = self.apart = 0.0
        self._is_lost = threading.Event()

    def lose(self) -> None:
        """By any thread: a version that was written here is not committed."""
        self._is_lost.set()

    def base_of(self, output: Output) -> HeldVersion | None:
        """What the next version is stored as changes of; None: it is stored in full."""
        if self._is_lost.is_set():
            self._is_lost.clear()
            self.newest = None
        if self.newest is None or self.layout != output.layout:
            return None
        more = self.last + LINK
        if float(self.told.sum()) / elements_of(output) + LINK * self.links + more <= REACH:
            return self.newest
        return self.full if self.apart + more <= REACH else None

    def begin(self, output: Output) -> None:
        """Until its receipt is durable these are the bits of no version."""
        if self.full is not None and self.full.bits is self.bits:  # and stays what it is
            self.bits, self._other = self._other, self.bits
        if len(self.bits) != output.bytes:
            self.bits = np.empty(output.bytes, np.uint8)
        self.newest = None

    def stream(self, output: Output, create: Callable[[int], Sink]) -> "VersionStream":
        return VersionStream(output, self, create)

    def keep(
        self,
        name: tuple[int, str],
        output: Output,
        base: HeldVersion | None,
        told: np.ndarray,
        is_whole: np.ndarray,
    ) -> None:
        """These are the bits of version `name` now, stored as changes of `base`. Of each chunk:
        `told`: the elements that differ from the base's, as far as they were counted; `is_whole`:
        it is stored as it is.
        """
        self.newest, self.layout = HeldVersion(name, self.bits), output.layout
        told = np.where(is_whole, 0, told)  # for those whoever reads needs no base
        changed = float(told.sum()) / elements_of(output)
        if base is None:
            self.full = self.newest
            before, self.links, self.last, self.apart = 0, 0, 0.0, 0.0
        elif base is self.full and self.links:
            before, self.links, self.apart = 0, 1, changed
        else:
            before, self.links = self.told, self.links + 1
            self.last, self.apart = changed, self.apart + changed
        self.told = np.where(is_whole, 0, before + told)


class VersionStream:
    """One version on its way to its file; takes what `writer.Stream` takes."""

    def __init__(self, output: Output, keeper: VersionKeeper, create: Callable[[int], Sink]):
        """`create(size)`: the file, with so much room reserved; 0: not known."""
        self.output = output
        self.base = keeper.base_of(output)
        self.sink: Sink = create(0 if self.base else output.bytes)
        self._keeper = keeper
        self._hasher = ChunkHasher()
        self._width = width_of(output)
        self._frames: list[int] = []
        self._told: list[int] = []
        self._is_whole: list[bool] = []
        self._at = 0
        keeper.begin(output)
        self._encoder = self._next()

    def write(self, piece: memoryview) -> None:
        self._hasher.update(piece)
        while len(piece):
            part, piece = piece[: CHUNK - self._at % CHUNK], piece[CHUNK - self._at % CHUNK :]
            here = slice(self._at, self._at + len(part))
            if self.base:
                self._encoder.add(self.base.bits[here], part)
            else:
                self.sink.write(part)
            self._keeper.bits[here] = np.frombuffer(part, np.uint8)
            self._at += len(part)
            if self._at % CHUNK == 0 or self._at == self.output.bytes:
                self._end_chunk()

    def _end_chunk(self) -> None:
        start = len(self._frames) * CHUNK
        frame = self._encoder.finish() if self.base else None
        if self.base:
            data = memoryview(self._keeper.bits[start : self._at]) if frame is None else frame
            self.sink.write(memoryview(data))
        self._told.append(self._encoder.told)
        self._is_whole.append(frame is None)
        self._frames.append(self._at - start if frame is None else len(frame))
        self._encoder = self._next()

    def _next(self) -> Encoder:
        size = min(CHUNK, self.output.bytes - len(self._frames) * CHUNK)
        return Encoder(max(size, 0), self._width, densest=REACH)

    def close(self) -> None:
        self.sink.close()

    def abort(self) -> None:
        self.sink.abort()

    @property
    def chunks(self) -> list[str]:
        return self._hasher.finish()

    @property
    def patch(self) -> Patch | None:
        """None where every chunk is its own."""
        if self.base is None or all(self._is_whole):
            return None
        return Patch(base=self.base.name, width=self._width, frames=self._frames)

    def done(self, begin: Begin) -> None:
        """The receipt is durable."""
        base, name = None if self.patch is None else self.base, (begin.step, begin.id)
        told, is_whole = np.array(self._told), np.array(self._is_whole)
        self._keeper.keep(name, self.output, base, told, is_whole)


def elements_of(output: Output) -> int:
    return max(1, output.bytes // width_of(output))


def width_of(output: Output) -> int:
    """Bytes of the elements that are compared: the smallest of those in the file."""
    return min((ITEM_BYTES[region.dtype] for region in output.regions), default=1)
