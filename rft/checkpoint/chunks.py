"""Bytes of a file that is verified in whole chunks, put where they are wanted in one pass.

    ranges in any order ─► by chunk, ascending ─► fetched into their places, hashed block by block
                                             └──► or by way of a room, where not all is wanted or
                                                  what is wanted lies apart

In: who fetches bytes, the hashes of a receipt, and ranges with their places. Out: filled places.
Invariant: whoever asked does not go on before each byte was compared with its hash; each chunk is
fetched once for all that is asked of it. Raises Damaged, when places may have been filled, or what
`_fetch` raises.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import Protocol

import xxhash

from rft.checkpoint.records import CHUNK
from rft.ground.node_file import Content

AT_ONCE = 2**20  # bytes that are hashed while the processor's cache has them
MOST_PLACES = 512  # of one read: the system takes 1,024
PADDING = 8  # a chunk of which all but one part in so many is asked goes straight to its places


class Damaged(RuntimeError):
    """A checkpoint that must not be loaded: content missing, cut short, or different from what was
    written.

    `file`, `chunk`: where another reader may look for itself; no file: the manifest, the receipts,
    or what they cover.
    """

    def __init__(self, words: str, file: str = "", chunk: int = 0):
        super().__init__(words)
        self.file, self.chunk = file, chunk


class Scattered(Protocol):
    """Of bytes that do not go to one piece of memory; `it[a:b]` is a part of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, cut: slice) -> "Scattered": ...
    def put(self, data: memoryview) -> None: ...


Range = tuple[int, memoryview | Scattered]  # a byte of a file, and the place of those from it on


class ChunkFile(ABC):
    """`digests`: of all chunks of `size` bytes; `at_once`: bytes of one fetch, at most."""

    def __init__(self, size: int, digests: list[str], at_once: int = AT_ONCE):
        self.bytes, self._digests, self._at_once = size, digests, at_once
        self._room = memoryview(b"")
        self._kept = -1  # the chunk that lies there

    @abstractmethod
    def _fetch(self, at: int, places: list[memoryview]) -> object:
        """Fill these places with what lies there from byte `at` on, one behind the other."""

    @abstractmethod
    def _changed(self, number: int) -> Damaged:
        """In words of whoever it is."""

    def size(self, number: int) -> int:
        return min(CHUNK, self.bytes - number * CHUNK)

    def chunk(self, number: int) -> Content:
        """Good until something else is read."""
        size = self.size(number)
        if self._kept != number:
            self._kept = -1
            self._take(number, [self._own_room()[:size]])
            self._kept = number
        return self._room[:size]

    def fill(self, ranges: list[Range]) -> None:
        for number, inside in by_number(ranges):
            self.put(number, inside)

    def put(self, number: int, inside: list[Range]) -> None:
        """All that is asked of one chunk."""
        places = self._straight(number, inside)
        if places is not None:
            self._kept = -1
            self._take(number, places)
            return
        data, begin = memoryview(self.chunk(number)), number * CHUNK
        for start, place in inside:
            part = data[start - begin :][: len(place)]
            if isinstance(place, memoryview):
                place[:] = part
            else:
                place.put(part)

    def forget(self) -> None:
        """Give the room back."""
        self._room, self._kept = memoryview(b""), -1

    def _own_room(self) -> memoryview:
        if not self._room:
            self._room = memoryview(bytearray(min(CHUNK, self.bytes)))
        return self._room

    def _straight(self, number: int, inside: list[Range]) -> list[memoryview] | None:
        """Places of a whole chunk, in order, with room of our own for the little that nobody asks
        for; None where that is more, or something is asked for twice.
        """
        room, begin = self._own_room(), number * CHUNK
        at, stop, asked = begin, begin + self.size(number), 0
        places = list[memoryview]()
        for start, place in sorted(inside, key=itemgetter(0)):
            if start < at or not isinstance(place, memoryview):
                return None
            places += [room[at - begin : start - begin], place]
            at = start + len(place)
            asked += len(place)
        places.append(room[at - begin : stop - begin])
        return places if asked > (stop - begin) * (1 - 1 / PADDING) else None

    def _take(self, number: int, places: list[memoryview]) -> None:
        digest, at = xxhash.xxh3_128(), number * CHUNK
        for some in blocks(places, self._at_once):
            self._fetch(at, some)
            for place in some:
                digest.update(place)
                at += len(place)
        if digest.hexdigest() != self._digests[number]:
            raise self._changed(number)


def by_number(ranges: list[Range]) -> list[tuple[int, list[Range]]]:
    """What is asked of each chunk, in ascending order."""
    parts = defaultdict[int, list[Range]](list)
    for start, place in ranges:
        for at, end in by_chunk(start, start + len(place)):
            parts[at // CHUNK].append((at, place[at - start : end - start]))
    return sorted(parts.items())


def by_chunk(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The same bytes as ranges that each lie in one chunk."""
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        yield start, end
        start = end


def blocks(places: list[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The same places in order, of so many bytes together, cut where they must be."""
    found, size = list[memoryview](), 0
    for place in places:
        while len(place):
            part, place = place[: most - size], place[most - size :]
            found.append(part)
            size += len(part)
            if size == most or len(found) == MOST_PLACES:
                yield found
                found, size = [], 0
    if found:
        yield found
