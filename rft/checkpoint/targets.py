"""Which of the stored elements go where, in any cut: bytes of files, each with the memory that they
are read into, or with what puts them into their places from a buffer.

In: regions that ranks have stored, claims, and their targets. Out: ranges of files. No torch;
elements are numpy integers of the right width. Invariant: bytes that lie one behind the other both
there and in the target's memory are read into it without a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Protocol

import numpy as np

from rft.checkpoint.records import Extent, Region
from rft.checkpoint.sharding import Box, Claim, boxes, overlap, runs


class Target(Protocol):
    """Where the elements of a claim go."""

    is_flat: bool  # they lie one behind the other
    memory: memoryview | None  # of all of them, where it can be written to

    def put(self, box: Box, place: tuple[slice, ...], values: np.ndarray) -> None:
        """`values`: unsigned integers, for this place of that box of the claim's."""


class Array:
    """Flat elements as unsigned integers."""

    is_flat = True

    def __init__(self, elements: np.ndarray):
        self._elements, self.memory = elements, memoryview(elements.view(np.uint8))

    def put(self, box: Box, place: tuple[slice, ...], values: np.ndarray) -> None:
        self._elements[box.start :][: prod(box.shape)].reshape(box.shape)[place] = values


@dataclass(frozen=True)
class Spread:
    """Bytes [start, stop) of the elements of box `source`; of them those go to the target that box
    `box` of its claim holds too.
    """

    target: Target
    box: Box
    source: Box
    width: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, cut: slice) -> "Spread":
        start, stop, _ = cut.indices(len(self))
        return replace(self, start=self.start + start, stop=self.start + stop)

    def put(self, data: memoryview) -> None:
        values, source = np.frombuffer(data, dtype=f"<u{self.width}"), self.source
        first, last = self.start // self.width, self.stop // self.width
        for run in runs(first, last, source.shape, source.offset, 0):
            if (common := overlap(run, self.box)) is not None:
                found = values[run.start :][: prod(run.shape)].reshape(run.shape)
                inside, place = _within(common, run), _within(common, self.box)
                self.target.put(self.box, place, found[inside])


def pairs(region: Region, claim: Claim, is_flat: bool) -> Iterator[tuple[Box, Box]]:
    """Boxes of what is stored and of what is wanted that may have elements in common; ranges of one
    box, as where the layout is the same, are boxes of one dimension.
    """
    if is_flat and (region.offset, region.shape) == (claim.offset, claim.shape):
        first, last = region.flat or (0, prod(region.shape))
        start, stop = claim.flat or (0, prod(claim.shape))
        yield Box((first,), (last - first,), 0), Box((start,), (stop - start,), 0)
        return
    yield from product(boxes(region), boxes(claim))


def range_of(
    source: Box, box: Box, common: tuple[Extent, Extent], width: int, target: Target
) -> tuple[int, memoryview | Spread]:
    """First of the stored elements that are read for that, in whole rows, and where they go."""
    low, shape = common
    row = prod(source.shape[1:])
    first, last = (low[0] - source.offset[0], shape[0]) if shape else (0, 1)
    first, last = first * row, (first + last) * row
    if len(shape) == 1 and target.memory is not None:
        start = (box.start + low[0] - box.offset[0]) * width
        return source.start + first, target.memory[start : start + shape[0] * width]
    return source.start + first, Spread(target, box, source, width, first * width, last * width)


def _within(common: tuple[Extent, Extent], box: Box) -> tuple[slice, ...]:
    low, shape = common
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(low, box.offset, shape, strict=True))
