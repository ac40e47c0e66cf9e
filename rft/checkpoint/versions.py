"""Every published version, for the bytes that changed: the agent's side.

    staged bytes of version n ─► elements that differ from the version before, kept here ─► delta of
                                 each chunk ─► its file, whose receipt names that version
                              ─► all bytes, where a chain of deltas would take too long to read

In: the bytes of a rank's weights, part after part, in the order of its file; where they lie already
(a slot of shared memory), never in the training process. Out: frames, a hash of each whole chunk,
and the `Patch` of the receipt. Memory: this rank's weights once. Invariants: what is kept are the
bits of one version, whose receipt is durable, or of none; a version that was not committed is the
base of no other; whoever reads any version reads, behind its nearest full one, at most `REACH` told
elements per element.
"""

import threading
from collections.abc import Callable

import numpy as np

from rft.checkpoint.records import CHUNK, Begin, Output, Patch
from rft.checkpoint.storage import Sink
from rft.checkpoint.writer import ChunkHasher
from rft.ground.delta import Encoder
from rft.ground.names import ITEM_BYTES

# Of a chain, told elements in parts of all: to apply so many takes as long as to read all once.
REACH = 1 / 19
LINK = 1 / 180  # what another version of a chain costs beside its elements, in the same measure


class VersionKeeper:
    """What an agent holds of the version that it wrote last."""

    def __init__(self) -> None:
        self.bits = np.empty(0, np.uint8)
        self.base: tuple[int, str] | None = None  # whose bits these are
        self.layout = ""  # of that
        self.told = np.empty(0)  # elements since a chunk was stored as it is
        self.reach = 0.0  # of the chain that ends with these bits
        self.last = 0.0  # what its last link has added: as much as the next will
        self.links = 0
        self._is_lost = threading.Event()

    def lose(self) -> None:
        """By any thread: a version that was written here is not committed."""
        self._is_lost.set()

    def goes_on(self, output: Output) -> bool:
        """Whether the next version may be stored as what has changed."""
        if self._is_lost.is_set():
            self._is_lost.clear()
            self.base = None
        if self.base is None or self.layout != output.layout:
            return False
        return self.reach + self.last <= REACH

    def begin(self, output: Output) -> None:
        """Until its receipt is durable these are the bits of no version."""
        if len(self.bits) != output.bytes:
            self.bits = np.empty(output.bytes, np.uint8)
        if self.base is None or self.layout != output.layout:
            self.told = np.zeros(-(-output.bytes // CHUNK))
        self.base = None

    def stream(self, output: Output, create: Callable[[int], Sink]) -> "VersionStream":
        return VersionStream(output, self, create)

    def keep(self, begin: Begin, output: Output, is_full: bool) -> None:
        self.base, self.layout = (begin.step, begin.id), output.layout
        self.links = 0 if is_full else self.links + 1
        elements = max(1, output.bytes // width_of(output))
        reach = float(self.told.sum()) / elements + LINK * self.links
        self.last, self.reach = max(0.0, reach - self.reach), reach


class VersionStream:
    """One version on its way to its file; takes what `writer.Stream` takes."""

    def __init__(self, output: Output, keeper: VersionKeeper, create: Callable[[int], Sink]):
        """`create(size)`: the file, with so much room reserved; 0: not known."""
        self.output = output
        self.base = keeper.base if keeper.goes_on(output) else None
        self.sink: Sink = create(0 if self.base else output.bytes)
        self._keeper = keeper
        self._hasher = ChunkHasher()
        self._width = width_of(output)
        self._frames: list[int] = []
        self._at = 0
        keeper.begin(output)
        self._encoder = self._next()

    def write(self, piece: memoryview) -> None:
        self._hasher.update(piece)
        while len(piece):
            part, piece = piece[: CHUNK - self._at % CHUNK], piece[CHUNK - self._at % CHUNK :]
            here = self._keeper.bits[self._at : self._at + len(part)]
            if self.base:
                self._encoder.add(here, part)
            else:
                self.sink.write(part)
            here[:] = np.frombuffer(part, np.uint8)
            self._at += len(part)
            if self._at % CHUNK == 0 or self._at == self.output.bytes:
                self._end_chunk()

    def _end_chunk(self) -> None:
        number, told = len(self._frames), self._keeper.told
        start = number * CHUNK
        frame = self._encoder.finish() if self.base else None
        if self.base:
            data = memoryview(self._keeper.bits[start : self._at]) if frame is None else frame
            self.sink.write(memoryview(data))
        told[number] = 0 if frame is None else told[number] + self._encoder.told
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
        whole = sum(self._frames) == self.output.bytes
        if self.base is None or whole:
            return None
        return Patch(base=self.base, width=self._width, frames=self._frames)

    def done(self, begin: Begin) -> None:
        """The receipt is durable."""
        self._keeper.keep(begin, self.output, self.patch is None)


def width_of(output: Output) -> int:
    """Bytes of the elements that are compared: the smallest of those in the file."""
    return min((ITEM_BYTES[region.dtype] for region in output.regions), default=1)
