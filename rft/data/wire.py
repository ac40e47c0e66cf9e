"""Microbatches on their way from rank 0 to the ranks that train on them.

In: the microbatches of one data-parallel index. Out: bytes, and at the other end the same
microbatches, every bit. What follows from tokens and lengths (positions, labels, padding) is made
there; of what stands for long stretches (weights, advantages), lengths of runs travel. msgpack, no
pickle.
"""

from typing import Any

import msgspec
import numpy as np

from rft.data.packing import NUMBERS, PADDING, Packed


def encode_part(part: list[Packed]) -> bytes:
    """Bytes of one rank's microbatches: what a rank cannot make by itself, padding left out."""
    return msgspec.msgpack.encode([_wire(packed) for packed in part])


def decode_part(data: bytes) -> list[Packed]:
    return [_packed(told) for told in msgspec.msgpack.decode(data)]


def _wire(packed: Packed) -> dict[str, Any]:
    starts, total = packed.cu_seqlens[:-1], int(packed.cu_seqlens[-1])
    return {
        "length": packed.length,
        "tokens": packed.tokens[:total].astype(np.int32).tobytes(),
        "temperature": packed.temperature[starts].tobytes(),
        "numbers": [_runs(getattr(packed, name)[:total]) for name in NUMBERS],
        "scores": {name: _runs(values[:total]) for name, values in packed.scores.items()},
        "sequences": [array.tobytes() for array in (packed.cu_seqlens, packed.rows, packed.shared)],
    }


def _packed(told: dict[str, Any]) -> Packed:
    cu_seqlens, rows, shared = (
        np.frombuffer(raw, dtype=dtype)
        for raw, dtype in zip(told["sequences"], (np.int32, np.int32, np.int64), strict=True)
    )
    lengths, ends = np.diff(cu_seqlens), cu_seqlens[1:]
    total = int(cu_seqlens[-1])

    def whole(values: np.ndarray, dtype: Any, padding: float = 0) -> np.ndarray:
        out = np.full(told["length"], padding, dtype=dtype)
        out[: len(values)] = values
        return out

    tokens = whole(np.frombuffer(told["tokens"], dtype=np.int32), np.int64)
    labels = whole(tokens[1:total], np.int64)
    labels[ends[ends > 0] - 1] = 0  # behind a sequence comes none of its own
    temperature = np.frombuffer(told["temperature"], dtype=np.float32)
    return Packed(
        tokens=tokens,
        positions=whole(np.arange(total) - np.repeat(cu_seqlens[:-1], lengths), np.int64),
        labels=labels,
        temperature=whole(np.repeat(temperature, lengths), np.float32, PADDING["temperature"]),
        cu_seqlens=cu_seqlens,
        rows=rows,
        shared=shared,
        scores={n: whole(_of_runs(values), np.float32) for n, values in told["scores"].items()},
        **{
            name: whole(_of_runs(values), np.float32)
            for name, values in zip(NUMBERS, told["numbers"], strict=True)
        },
    )


def _runs(values: np.ndarray) -> tuple[bytes, bytes]:
    """float32 values and how often each stands; no counts: once. Equal are those of equal bits."""
    bits = values.view(np.int32)
    last = np.append(np.flatnonzero(bits[1:] != bits[:-1]), len(bits) - 1)
    if 2 * len(last) >= len(bits):
        return values.tobytes(), b""
    return values[last].tobytes(), np.diff(last, prepend=-1).astype(np.int32).tobytes()


def _of_runs(told: tuple[bytes, bytes]) -> np.ndarray:
    values = np.frombuffer(told[0], dtype=np.float32)
    return np.repeat(values, np.frombuffer(told[1], dtype=np.int32)) if told[1] else values
