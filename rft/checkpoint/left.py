"""What was written to disk and still lies in the slots that it was staged in, by its hashes.

    agent   Lying.of: window, hashes of the file ──► answer of an agent that rests
    rank    LeftChunks.take(digest) ──► the chunk, or what is read from disk

In: slots and what they held when they were written. Out: chunks. Invariant: nobody keeps them, and
what has been staged since may lie over them, so each is compared before it is handed out.
"""

import mmap
import os
from collections.abc import Callable, Iterable

import msgspec
import xxhash

from rft.checkpoint.records import CHUNK, Window
from rft.ground.node_file import Content


class Lying(msgspec.Struct, frozen=True):
    """Hashes of the chunks that lie whole in a slot; the first begins `at` there."""

    slot: int
    at: int
    chunks: list[str]

    @classmethod
    def of(cls, window: Window, chunks: list[str]) -> "Lying":
        """`chunks`: of the whole file."""
        first = -(-window.start // CHUNK)
        behind = len(chunks) if window.last else window.stop // CHUNK
        return cls(window.slot, first * CHUNK - window.start, chunks[first:behind])


class LeftChunks:
    """`slots`: descriptors, and what lies there; they stay open as long as this is used."""

    def __init__(self, slots: Iterable[tuple[int, Lying]] = ()):
        self.taken = 0  # bytes that were sound
        self._places = {
            digest: (descriptor, lying.at + number * CHUNK)
            for descriptor, lying in slots
            for number, digest in enumerate(lying.chunks)
        }
        self._views: dict[int, memoryview] = {}  # by descriptor

    def take(self, digest: str, count: int, read: Callable[[], Content]) -> Content:
        """That chunk, of `count` bytes."""
        if digest not in self._places:
            return read()
        descriptor, at = self._places[digest]
        found = self._view(descriptor)[at : at + count]
        if xxhash.xxh3_128_hexdigest(found) != digest:
            del self._places[digest]
            return read()
        self.taken += count
        return found

    def _view(self, descriptor: int) -> memoryview:
        if descriptor not in self._views:
            size = os.fstat(descriptor).st_size
            self._views[descriptor] = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        return self._views[descriptor]
