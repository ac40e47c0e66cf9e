"""What changed between two versions of the same bytes, made small. Pure: bytes in, bytes out.

    old, new ──Encoder──► elements whose bits differ ──► gaps, steps ──planes, zstd──► delta
    delta ──read──► changes; these, old bits in place ──apply──► new bits

An element is an unsigned number of `itemsize` bytes: bits, never floats, so that NaN and -0.0 are
what they were. A step is new less old, wrapped, folded so that +1, -1, +2 are 2, 1, 4: a small
update moves a bfloat16 to a neighbour, and its upper byte is 0. Gaps and steps go byte by byte into
planes of their own, of which most are nearly constant; zstd then comes close to their entropy, in a
tenth of the time that finding the changes takes. A gap has two bytes: over a longer one lead
elements whose step is 0.

Invariants: `read` of anything raises ValueError, or has seen all of a delta to be sound: what it
gives writes within its bounds. That it was made of the bits that are there it cannot see: whoever
applies one compares the checksum of the whole.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import zstandard

Buffer = bytes | bytearray | memoryview | np.ndarray
HEAD = struct.Struct("<QQB")  # elements in all, elements told, bytes of one
SIZE = struct.Struct("<I")  # of a plane: 0: all 0; as many as elements: as it is; else zstd's
GAPS = 2  # bytes of a gap
REACH = 1 << 8 * GAPS
# parts of the full bytes: a delta that is larger saves too little for the work at both ends
WORTH = 0.5
WORD = 8  # bytes compared at a time
SCAN = 64 * 2**10  # words: what is scanned stays in the cache
LEVEL = 1  # zstd's quickest that still looks at how often a byte comes
SHRUNK = 0.75  # parts of a plane: a larger rest saves too little for the work of reading it


class Encoder:
    """Takes old and new bits part after part, `size` bytes in all. `densest`: where a larger part
    of the elements differs, it gives up at once: what is quick to send needs no long work.
    """

    def __init__(self, size: int, itemsize: int, densest: float = WORTH):
        if size % itemsize:
            raise ValueError(f"{size} bytes are no elements of {itemsize}")
        self.size = size
        self.itemsize = itemsize
        self._most = densest * size / itemsize
        self._at = 0  # elements that were taken
        self._told = 0
        self._places: list[np.ndarray] = []
        self._steps: list[np.ndarray] = []

    def add(self, old: Buffer, new: Buffer) -> None:
        """The next bytes, of whole elements."""
        before, after = (_flat(data, self.itemsize) for data in (old, new))
        if len(before) != len(after):
            raise ValueError(f"{before.nbytes} bytes became {after.nbytes}")
        if not self.is_dense:
            for places, steps in _differing(before, after):
                self._places.append(places + self._at)
                self._steps.append(_fold(steps))
                self._told += len(places)
        self._at += len(after)

    @property
    def told(self) -> int:
        """Elements that differ, of those taken so far."""
        return self._told

    @property
    def is_dense(self) -> bool:
        """So many elements differ that there will be no delta."""
        return self._told > self._most

    def finish(self) -> bytes | None:
        """The delta; None where the full bytes are the better one."""
        total = self.size // self.itemsize
        if self._at != total:
            raise ValueError(f"{self._at} of {total} elements were given")
        if self.is_dense:
            return None
        places = np.concatenate([np.empty(0, np.int64), *self._places])
        steps = np.concatenate([np.empty(0, f"<u{self.itemsize}"), *self._steps])
        gaps, steps = _within_reach(np.diff(places, prepend=-1) - 1, steps)
        planes = [_pressed(plane) for plane in (*_planes(gaps), *_planes(steps))]
        head = HEAD.pack(total, len(gaps), self.itemsize)
        sizes = b"".join(SIZE.pack(len(plane)) for plane in planes)
        delta = b"".join((head, sizes, *planes))
        return delta if len(delta) <= WORTH * self.size else None


def encode(old: Buffer, new: Buffer, itemsize: int) -> bytes | None:
    """What makes `new` of `old`; None where `new` itself is the better thing to send."""
    encoder = Encoder(memoryview(new).nbytes, itemsize)
    encoder.add(old, new)
    return encoder.finish()


class Changes(NamedTuple):
    """Elements, by their places in rising order, and what is to be added to each."""

    places: np.ndarray
    steps: np.ndarray

    def apply(self, into: Buffer, first: int) -> int:
        """To that part of all elements that begins with number `first`. Returns how many."""
        elements = _flat(into, self.steps.itemsize)
        start = self.places.searchsorted(first) if first else 0
        stop = self.places.searchsorted(first + len(elements))
        places = self.places[start:stop]
        # not `elements[places] +=`, which takes all of them out and puts them back
        np.add.at(elements, places - first if first else places, self.steps[start:stop])
        return len(places)


def read(delta: Buffer, total: int, itemsize: int) -> Changes:
    """What a delta of `total` elements says; raises ValueError where it is none."""
    data = memoryview(_flat(delta, 1))
    planes = GAPS + itemsize
    start = HEAD.size + SIZE.size * planes
    if len(data) < start:
        raise ValueError(f"a delta of {len(data)} bytes cannot be")
    elements, told, width = HEAD.unpack_from(data)
    if (elements, width) != (total, itemsize) or told > total:
        raise ValueError(
            f"a delta of {told} out of {elements} elements of {width} bytes is none of {total} of "
            f"{itemsize}"
        )
    sizes = [SIZE.unpack_from(data, HEAD.size + SIZE.size * i)[0] for i in range(planes)]
    if start + sum(sizes) != len(data):
        raise ValueError(f"a delta of {len(data)} bytes says that it has {start + sum(sizes)}")
    found = list(_opened(data[start:], sizes, told))
    places = _joined(found[:GAPS], told, GAPS).astype(np.int64)
    places += 1  # in place, here and below: there may be many
    places[:1] -= 1
    np.cumsum(places, out=places)
    if told and places[-1] >= total:
        raise ValueError(f"a delta reaches to element {places[-1]} of {total}")
    return Changes(places, _unfold(_joined(found[GAPS:], told, itemsize)))


def _flat(data: Buffer, itemsize: int) -> np.ndarray:
    if itemsize not in (1, 2, 4, 8):
        raise ValueError(f"no element has {itemsize} bytes")
    given = memoryview(data)
    if given.nbytes % itemsize:
        raise ValueError(f"{given.nbytes} bytes are no elements of {itemsize}")
    return np.frombuffer(given if given.nbytes else b"", f"<u{itemsize}")


def _differing(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places of elements that differ, in rising order, and by how much. Words are looked at first:
    most are equal.
    """
    each = WORD // old.itemsize
    whole = len(old) // each * each
    for start in range(0, whole, SCAN * each):
        before, after = (data[start : min(start + SCAN * each, whole)] for data in (old, new))
        words, moved = before.view("<u8"), after.view("<u8")
        places = np.flatnonzero(words != moved)
        if each > 1:
            inside = np.flatnonzero((words.take(places) ^ moved.take(places)).view(old.dtype) != 0)
            places = places.take(inside // each) * each + inside % each
        yield places + start, after.take(places) - before.take(places)
    places = np.flatnonzero(old[whole:] != new[whole:]) + whole
    yield places, new[places] - old[places]


def _fold(steps: np.ndarray) -> np.ndarray:
    signed = steps.view(f"<i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unfold(folded: np.ndarray) -> np.ndarray:
    """In place."""
    signs = folded & folded.dtype.type(1)
    np.negative(signs, out=signs)
    folded >>= 1
    folded ^= signs
    return folded


def _within_reach(gaps: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same with elements between, whose step is 0, where a gap is too long to be told."""
    between = gaps // REACH
    many = int(between.sum())
    if many:
        places = np.arange(len(gaps)) + np.cumsum(between)
        short, moved = np.full(len(gaps) + many, REACH - 1), np.zeros(len(gaps) + many, steps.dtype)
        short[places], moved[places] = gaps % REACH, steps
        gaps, steps = short, moved
    return gaps.astype(f"<u{GAPS}"), steps


def _planes(values: np.ndarray) -> Iterator[np.ndarray]:
    """Lowest bytes first."""
    rows = values.view(np.uint8).reshape(len(values), values.itemsize)
    return (np.ascontiguousarray(rows[:, byte]) for byte in range(values.itemsize))


def _joined(planes: Sequence[np.ndarray | None], told: int, itemsize: int) -> np.ndarray:
    """What `_planes` took apart; None: all 0."""
    values: np.ndarray | None = None
    for plane in reversed(planes):
        if values is not None:
            values <<= 8
        if plane is not None and values is not None:
            values |= plane
        elif plane is not None:
            values = plane.astype(f"<u{itemsize}")
    return np.zeros(told, f"<u{itemsize}") if values is None else values


def _pressed(plane: np.ndarray) -> bytes:
    if not plane.any():
        return b""
    small = zstandard.ZstdCompressor(level=LEVEL).compress(plane)
    return small if len(small) <= SHRUNK * len(plane) else plane.tobytes()


def _opened(data: memoryview, sizes: Sequence[int], told: int) -> Iterator[np.ndarray | None]:
    opener = zstandard.ZstdDecompressor()
    for size in sizes:
        part, data = data[:size], data[size:]
        if not size:
            yield None
        elif size == told:
            yield np.frombuffer(part, np.uint8)
        else:
            yield np.frombuffer(_unpressed(opener, part, told), np.uint8)


def _unpressed(opener: zstandard.ZstdDecompressor, part: memoryview, told: int) -> bytes:
    """What a frame says of its size is asked before any memory is taken for it."""
    try:
        if zstandard.frame_content_size(part) != told:
            raise ValueError(f"a plane of a delta has not {told} bytes")
        return opener.decompress(part, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane of a delta cannot be read: {error}") from error
