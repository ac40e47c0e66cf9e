"""Numbers of tokens that stand for long stretches (weights, advantages), each with how often it
stands: what they are as an array is made where it is computed with.

In: an array, or numbers and counts. Out: either as the other. Invariant: what comes back is the
same, every bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    values: np.ndarray  # float32
    counts: np.ndarray  # int32: of the tokens that each stands for

    @classmethod
    def of(cls, values: np.ndarray) -> "Runs":
        """Of an array of at least one number, 4 bytes each or flags; equal are those of equal
        bits.
        """
        bits = values if values.dtype == bool else values.view(np.int32)
        ends = (bits[1:] != bits[:-1]).nonzero()[0]
        bounds = np.empty(len(ends) + 2, dtype=np.int32)
        bounds[0], bounds[1:-1], bounds[-1] = -1, ends, len(bits) - 1
        return cls(values[bounds[1:]].astype(np.float32), bounds[1:] - bounds[:-1])

    @classmethod
    def joined(cls, parts: Sequence["Runs"]) -> "Runs":
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def times(self, number: float) -> "Runs":
        return Runs(self.values * np.float32(number), self.counts)


Numbers = np.ndarray | Runs  # float32 of every token


def expanded(numbers: Numbers) -> np.ndarray:
    """The array."""
    return np.repeat(numbers.values, numbers.counts) if isinstance(numbers, Runs) else numbers


def nonzero(numbers: Numbers) -> int:
    """How many of them are not 0."""
    if isinstance(numbers, Runs):
        return int(numbers.counts[numbers.values != 0].sum())
    return int(np.count_nonzero(numbers))
