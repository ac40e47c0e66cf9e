"""Microbatches on their way from rank 0 to the ranks that train on them.

In: the microbatches of one data-parallel index. Out: bytes, and at the other end the same
microbatches, every bit, each laid out when it is asked for. Columns travel as they lie in memory;
of what stands for long stretches (weights, advantages), lengths of runs travel. msgpack, no pickle.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rft.data.packing import NUMBERS, Packed, Stacked
from rft.data.runs import Numbers, Runs

SEQUENCES = {
    "temperature": np.float32,
    "lengths": np.int32,
    "rows": np.int32,
    "shared": np.int64,
}  # one number each
Column = tuple[memoryview, memoryview]  # values and how often each stands; no counts: once


class EncodedMicrobatch(msgspec.Struct, array_like=True):
    length: int
    tokens: memoryview
    sequences: list[memoryview]
    numbers: list[Column]
    scores: dict[str, Column]
    routes: tuple[str, int, int, memoryview] | None = None  # dtype, layers, top_k, of all tokens


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[EncodedMicrobatch])


def encode_part(part: list[Stacked]) -> bytearray:
    """Bytes of one rank's microbatches, which may be written to."""
    made = bytearray()
    _encoder.encode_into([_told(stacked) for stacked in part], made)
    return made


class Microbatches(Sequence[Packed]):
    """A rank's microbatches, out of a buffer that they go on using. Each is laid out when it is
    asked for, and anew the next time: what stays in memory is what has travelled.
    """

    def __init__(self, data: Any):
        self.told = _decoder.decode(data)

    def __len__(self) -> int:
        return len(self.told)

    def __getitem__(self, at: Any) -> Packed:
        return _stacked(self.told[at]).packed()


def _told(stacked: Stacked) -> EncodedMicrobatch:
    return EncodedMicrobatch(
        stacked.length,
        stacked.tokens.data,
        [getattr(stacked, name).data for name in SEQUENCES],
        [_column(getattr(stacked, name)) for name in NUMBERS],
        {name: _column(values) for name, values in stacked.scores.items()},
        _told_routes(stacked.routes),
    )


def _told_routes(routes: np.ndarray | None) -> tuple[str, int, int, memoryview] | None:
    if routes is None:
        return None
    return routes.dtype.name, *routes.shape[1:], memoryview(np.ascontiguousarray(routes)).cast("B")


def _routes(told: tuple[str, int, int, memoryview] | None) -> np.ndarray | None:
    if told is None:
        return None
    dtype, layers, top_k, data = told
    return np.frombuffer(data, dtype).reshape(-1, layers, top_k)


def _stacked(told: EncodedMicrobatch) -> Stacked:
    return Stacked(
        length=told.length,
        tokens=np.frombuffer(told.tokens, dtype=np.int32),
        scores={name: _numbers(*column) for name, column in told.scores.items()},
        routes=_routes(told.routes),
        **{
            name: np.frombuffer(raw, dtype=dtype)
            for (name, dtype), raw in zip(SEQUENCES.items(), told.sequences, strict=True)
        },
        **{name: _numbers(*column) for name, column in zip(NUMBERS, told.numbers, strict=True)},
    )


def _column(numbers: Numbers) -> Column:
    """As runs, where that is shorter."""
    if isinstance(numbers, np.ndarray) and len(numbers):
        bits = numbers.view(np.int32)
        if 2 * (np.count_nonzero(bits[1:] != bits[:-1]) + 1) < len(bits):
            numbers = Runs.of(numbers)
    if isinstance(numbers, Runs):
        return numbers.values.data, numbers.counts.data
    return numbers.data, memoryview(b"")


def _numbers(values: memoryview, counts: memoryview) -> Numbers:
    found = np.frombuffer(values, dtype=np.float32)
    return Runs(found, np.frombuffer(counts, dtype=np.int32)) if len(counts) else found
