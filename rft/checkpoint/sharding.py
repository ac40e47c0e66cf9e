"""Which rank stores which bytes, decided once, and the geometry by which any layout reads any
other. Numbers only; no torch.

In: what every rank holds (boxes of whole tensors, or flat ranges of boxes: `Claim`). Out: per rank
the `Region`s of its file. Invariant: the regions of all ranks cover every element of every tensor
exactly once; `check_coverage` proves it.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any

import msgspec

from rft.checkpoint.records import ALIGN, Extent, Region, encode_json, sha256
from rft.ground.names import ITEM_BYTES
from rft.ground.protocols import Piece

# keys of weights proper: they come first in a file, so that they are a file of their own too
MODEL = "model/"
DIMENSIONS = 8  # of a tensor, at most


class CoverageError(ValueError):
    """Pieces that leave a part of a tensor out, or hold it twice."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A rank holds this; `stored=False`: other claims cover the same elements, in another cut, and
    are the ones to store.
    """

    key: str
    dtype: str
    global_shape: Extent
    offset: Extent
    shape: Extent
    flat: tuple[int, int] | None
    stored: bool = True

    @property
    def bytes(self) -> int:
        elements = self.flat[1] - self.flat[0] if self.flat else prod(self.shape)
        return elements * ITEM_BYTES[self.dtype]


def claim_of(piece: Piece) -> Claim:
    """Everything about a piece but its bytes."""
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    shape = tuple(piece.shape if piece.shape is not None else piece.tensor.shape)
    return Claim(
        piece.key,
        dtype,
        tuple(piece.global_shape),
        tuple(piece.offset),
        shape,
        piece.flat,
        piece.stored,
    )


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor whose elements lie, row-major, from
    element `start` of some buffer on.
    """

    offset: Extent
    shape: Extent
    start: int


def encode(claims: list[Claim]) -> bytes:
    """For rank 0, which has those of all ranks at once."""
    return msgspec.msgpack.encode(claims)


def decode(everyone: Iterable[bytes]) -> list[list[Claim]]:
    """Of every rank. What claims have in common is there once: of a large model, names and shapes
    of all ranks would be ten times the rest.
    """
    once: dict[Any, Any] = {}

    def shared(claim: Claim) -> Claim:
        key, whole, offset, shape, flat = (
            once.setdefault(part, part)
            for part in (claim.key, claim.global_shape, claim.offset, claim.shape, claim.flat)
        )
        return Claim(key, claim.dtype, whole, offset, shape, flat, claim.stored)

    return [list(map(shared, msgspec.msgpack.decode(data, type=list[Claim]))) for data in everyone]


def planned(everyone: Iterable[bytes]) -> list[list[int]]:
    """`assign` of what every rank has encoded."""
    was_on = gc.isenabled()
    gc.disable()  # millions of tuples and no circle: looking for one would take half of the time
    try:
        return assign(decode(everyone))
    finally:
        if was_on:
            gc.enable()


def assign(claims: list[list[Claim]]) -> list[list[int]]:
    """Per rank the positions of the claims it stores. Copies are given to whoever has least to
    write so far.

    Deterministic: largest first, ties by rank and place. Raises CoverageError.
    """
    # by the claim itself: equal ones are copies; one place, as a number, or a list of them
    holders: dict[Claim, int | list[int]] = {}
    for rank, listed in enumerate(claims):
        for position, claim in enumerate(listed):
            if claim.stored:
                number = rank << 32 | position
                held = holders.setdefault(claim, number)
                if held is number:
                    continue
                holders[claim] = [*held, number] if isinstance(held, list) else [held, number]
    load = [0] * len(claims)
    chosen: list[list[int]] = [[] for _ in claims]
    sized = [
        (-size, copies if isinstance(copies, int) else copies[0], copies)
        for claim, copies in holders.items()
        if (size := claim.bytes)
    ]
    for size, _, copies in sorted(sized, key=itemgetter(0, 1)):
        number = (
            copies if isinstance(copies, int) else min(copies, key=lambda n: (load[n >> 32], n))
        )
        load[number >> 32] -= size
        chosen[number >> 32].append(number & 0xFFFFFFFF)
    check_coverage(
        claims[rank][position] for rank, listed in enumerate(chosen) for position in listed
    )
    return [sorted(listed) for listed in chosen]


def place(claims: Iterable[Claim]) -> list[Region]:
    """Lay claims one after another into a file, model weights first."""
    regions, at = [], 0
    for claim in sorted(claims, key=lambda claim: not claim.key.startswith(MODEL)):
        regions.append(
            Region(
                claim.key,
                claim.dtype,
                claim.global_shape,
                claim.offset,
                claim.shape,
                claim.flat,
                at,
                claim.bytes,
            )
        )
        at += -(-claim.bytes // ALIGN) * ALIGN
    return regions


def extent(regions: list[Region]) -> int:
    """Bytes of the file that holds them."""
    return max((-(-(r.at + r.bytes) // ALIGN) * ALIGN for r in regions), default=0)


def digest(regions_of_ranks: Iterable[list[Region]]) -> str:
    return digest_of(part_digest(regions) for regions in regions_of_ranks)


def part_digest(regions: list[Region]) -> str:
    """Of what one rank stores."""
    return sha256(encode_json(regions))


def digest_of(parts: Iterable[str]) -> str:
    """Of a whole layout, from those of its ranks."""
    return sha256("".join(parts).encode())


def boxes(piece: Region | Claim) -> list[Box]:
    """The piece as boxes: one, unless a flat range begins or ends inside a row."""
    if piece.flat is None:
        return [Box(piece.offset, piece.shape, 0)]
    start, stop = piece.flat
    return list(runs(start, stop, piece.shape, piece.offset, 0))


def runs(start: int, stop: int, shape: Extent, offset: Extent, at: int) -> Iterator[Box]:
    """Flat range [start, stop) of a row-major box: a part of the first row, whole rows, a part of
    the last row.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((offset[0] + start,) if shape else (), (stop - start,) if shape else (), at)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _row(last, start, stop, shape, offset, at)
        return
    yield from _row(start // row, start, first * row, shape, offset, at)
    if first < last:
        yield Box(
            (offset[0] + first, *offset[1:]), (last - first, *shape[1:]), at + first * row - start
        )
    yield from _row(last, last * row, stop, shape, offset, at + last * row - start)


def _row(
    number: int, start: int, stop: int, shape: Extent, offset: Extent, at: int
) -> Iterator[Box]:
    row = prod(shape[1:])
    for box in runs(start - number * row, stop - number * row, shape[1:], offset[1:], at):
        yield Box((offset[0] + number, *box.offset), (1, *box.shape), box.start)


def overlap(one: Box, other: Box) -> tuple[Extent, Extent] | None:
    """(offset, shape) of what both hold, or None."""
    low = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    high = tuple(
        min(a + m, b + n)
        for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def check_coverage(pieces: Iterable[Region | Claim]) -> None:
    """Raises CoverageError unless every element of every named tensor is held exactly once."""
    by_key: dict[str, dict[Any, list[tuple[int, int] | None]]] = defaultdict(dict)
    for piece in pieces:
        cut = by_key[piece.key]
        box = (piece.dtype, piece.global_shape, piece.offset, piece.shape)
        if (flats := cut.get(box)) is None:
            check_piece(piece)  # but for its own range, which is looked at below
            flats = cut[box] = []
        flats.append(piece.flat)
    for key, cut in by_key.items():
        shapes = {(shape, dtype) for dtype, shape, _, _ in cut}
        if len(shapes) > 1:
            raise CoverageError(
                f"{key}: pieces disagree about shape and dtype: {sorted(map(str, shapes))}"
            )
        held = [
            one
            for (_, _, offset, shape), flats in cut.items()
            for one in _held(key, offset, shape, flats)
        ]
        ((shape, _),) = shapes
        if not _fill(held, shape):
            count, whole = sum(prod(box.shape) for box in held), prod(shape)
            raise CoverageError(
                f"{key}: {count} of {whole} elements are stored"
                + (", some twice" if count >= whole else "")
            )


def _held(
    key: str, offset: Extent, shape: Extent, flats: list[tuple[int, int] | None]
) -> Iterator[Box]:
    """The boxes of pieces of one box: itself, where their ranges are it, one behind the other."""
    ranges = sorted(flat for flat in flats if flat is not None)
    ends = [0, *(stop for _, stop in ranges)]
    if (
        ranges
        and ends[-1] == prod(shape)
        and all(start == end <= stop for (start, stop), end in zip(ranges, ends, strict=False))
    ):
        yield Box(offset, shape, 0)
    else:
        for start, stop in ranges:
            check_range(key, shape, (start, stop))
            yield from runs(start, stop, shape, offset, 0)
    for _ in range(flats.count(None)):
        yield Box(offset, shape, 0)


def check_piece(piece: Region | Claim) -> None:
    """Raises CoverageError unless it is a part of a tensor, whoever has made it up."""
    whole, offset, shape, flat = piece.global_shape, piece.offset, piece.shape, piece.flat
    if piece.dtype not in ITEM_BYTES:
        raise CoverageError(f"{piece.key}: {piece.dtype} is no dtype of a checkpoint")
    if not len(whole) == len(offset) == len(shape) <= DIMENSIONS:
        raise CoverageError(
            f"{piece.key}: a piece at {offset} of shape {shape} is of {whole}, "
            f"of at most {DIMENSIONS} dimensions"
        )
    inside = zip(offset, shape, whole, strict=True)
    if any(low < 0 or count < 0 or low + count > size for low, count, size in inside):
        raise CoverageError(f"{piece.key}: a piece at {offset} of shape {shape} is outside {whole}")
    if flat is not None:
        check_range(piece.key, shape, flat)


def check_range(key: str, shape: Extent, flat: tuple[int, int]) -> None:
    if not 0 <= flat[0] <= flat[1] <= prod(shape):
        raise CoverageError(f"{key}: elements {flat} are outside a box of shape {shape}")


def check_place(region: Region, size: int) -> None:
    """Raises CoverageError unless its bytes are as many as it needs, inside a file of `size`."""
    check_piece(region)
    elements = region.flat[1] - region.flat[0] if region.flat else prod(region.shape)
    needed = elements * ITEM_BYTES[region.dtype]
    if region.bytes != needed or not 0 <= region.at <= size - needed:
        raise CoverageError(
            f"{region.key}: {region.bytes} bytes at {region.at} of {size} are not the "
            f"{needed} of its elements"
        )


def _fill(held: list[Box], shape: Extent) -> bool:
    """Do these boxes hold every element of the whole once, and none twice?

    Just when their corners, signed, add up to those of the whole: a sum of boxes is given by its
    mixed difference, and that of a box is its corners. So no two boxes need be compared.
    """
    whole = Box((0,) * len(shape), shape, 0)
    if held == [whole]:
        return True
    corners: dict[Extent, int] = defaultdict(int)
    for count, box in [(-1, whole), *((1, box) for box in held)]:
        if 0 in box.shape:
            continue
        ends = [((low, 1), (low + n, -1)) for low, n in zip(box.offset, box.shape, strict=True)]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += count * prod(sign for _, sign in corner)
    return not any(corners.values())
