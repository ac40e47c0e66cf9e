"""Which rank stores which bytes, decided once, and the geometry by which any layout reads any
other. Numbers only; no torch.

In: what every rank holds (boxes of whole tensors, or flat ranges of boxes: `Claim`). Out: per rank
the `Region`s of its file. Invariant: the regions of all ranks cover every element of every tensor
exactly once; `check_coverage` proves it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from rft.checkpoint.records import ALIGN, Extent, Region, encode_json, sha256
from rft.ground.names import ITEM_BYTES
from rft.ground.protocols import Piece

# keys of weights proper: they come first in a file, so that they are a file of their own too
MODEL = "model/"
DIMENSIONS = 8  # of a tensor, at most


class CoverageError(ValueError):
    """Pieces that leave a part of a tensor out, or hold it twice."""


@dataclass(frozen=True)
class Claim:
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


def assign(claims: list[list[Claim]]) -> list[list[int]]:
    """Per rank the positions of the claims it stores. Copies are given to whoever has least to
    write so far.

    Deterministic: largest first, ties by key and rank. Raises CoverageError.
    """
    holders: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, listed in enumerate(claims):
        for position, claim in enumerate(listed):
            if claim.stored and claim.bytes:
                address = (
                    claim.key,
                    claim.dtype,
                    claim.global_shape,
                    claim.offset,
                    claim.shape,
                    claim.flat,
                )
                holders[address].append((rank, position))
    load = [0] * len(claims)
    chosen: list[list[int]] = [[] for _ in claims]

    def size(copies: list[tuple[int, int]]) -> int:
        rank, position = copies[0]
        return claims[rank][position].bytes

    for copies in sorted(holders.values(), key=lambda copies: (-size(copies), copies)):
        rank, position = min(copies, key=lambda place: (load[place[0]], place))
        load[rank] += size(copies)
        chosen[rank].append(position)
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


def digest(regions_of_ranks: list[list[Region]]) -> str:
    return sha256(encode_json(regions_of_ranks))


def boxes(piece: Region | Claim) -> list[Box]:
    """The piece as boxes: one, unless a flat range begins or ends inside a row."""
    if piece.flat is None:
        return [Box(piece.offset, piece.shape, 0)]
    start, stop = piece.flat
    return list(_cut(start, stop, piece.shape, piece.offset, 0))


def _cut(start: int, stop: int, shape: Extent, offset: Extent, at: int) -> Iterator[Box]:
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
    for box in _cut(start - number * row, stop - number * row, shape[1:], offset[1:], at):
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
    by_key: dict[str, list[Region | Claim]] = defaultdict(list)
    for piece in pieces:
        check_piece(piece)
        by_key[piece.key].append(piece)
    for key, held_pieces in by_key.items():
        shapes = {(piece.global_shape, piece.dtype) for piece in held_pieces}
        if len(shapes) > 1:
            raise CoverageError(
                f"{key}: pieces disagree about shape and dtype: {sorted(map(str, shapes))}"
            )
        held = [box for piece in held_pieces for box in boxes(piece)]
        shape = held_pieces[0].global_shape
        if not _fill(held, shape):
            count, whole = sum(prod(box.shape) for box in held), prod(shape)
            raise CoverageError(
                f"{key}: {count} of {whole} elements are stored"
                + (", some twice" if count >= whole else "")
            )


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
    if flat is not None and not 0 <= flat[0] <= flat[1] <= prod(shape):
        raise CoverageError(f"{piece.key}: elements {flat} are outside a box of shape {shape}")


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
    corners: dict[Extent, int] = defaultdict(int)
    whole = Box((0,) * len(shape), shape, 0)
    for count, box in [(-1, whole), *((1, box) for box in held)]:
        if 0 in box.shape:
            continue
        ends = [((low, 1), (low + n, -1)) for low, n in zip(box.offset, box.shape, strict=True)]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += count * prod(sign for _, sign in corner)
    return not any(corners.values())
