"""Columns: what is known of every token of a sequence, one array each, from the engine's answer to
the device.

    in memory     numpy: int32 ids, float32 log-probabilities, float64 rewards, bool flags
    msgpack       the array's own bytes, little-endian; of flags the int32 lengths of their runs,
                  the first one of zeros
    JSON          lists, for people and for other programs

In: arrays, or lists: those of a user's own code, and of records that an older rft wrote. Out:
arrays of a kind's own dtype that may be written to. Invariant: what is not a column of this kind,
whole and in one dimension, raises ValueError; nothing is rounded to an integer.
"""

from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int32]]
LogProbs = np.ndarray[Any, np.dtype[np.float32]]
TokenRewards = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
DTYPES: dict[Any, np.dtype] = {
    Ids: np.dtype("<i4"),
    LogProbs: np.dtype("<f4"),
    TokenRewards: np.dtype("<f8"),
    Flags: np.dtype("?"),
}
LIMITS = {Ids: (-(2**31), 2**31 - 1), Flags: (0, 1)}
RUNS = DTYPES[Ids]
LONGEST = 2**27  # flags that runs may become: what a few forged bytes can ask for is bounded


def column(kind: Any, values: Any) -> np.ndarray:
    """`values` as a column of `kind`: itself, where it is one. Raises ValueError."""
    dtype = DTYPES[kind]
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.ndim == 1:
        return values
    found = np.asarray(values)
    if found.ndim != 1:
        raise ValueError(f"{found.ndim} dimensions, where one number per token is wanted")
    if not len(found):
        return np.zeros(0, dtype)
    if found.dtype.kind not in {"f": "iuf", "i": "iu", "b": "iub"}[dtype.kind]:
        raise ValueError(f"{found.dtype} instead of numbers that {dtype} holds")
    least, most = LIMITS.get(kind, (-np.inf, np.inf))
    if found.min() < least or found.max() > most:
        raise ValueError(f"numbers that are not from {least} to {most}")
    return found.astype(dtype)


def behind(prompt: Any, tokens: Any) -> Ids:
    """The ids of a prompt and of its continuation."""
    return np.concatenate([column(Ids, prompt), column(Ids, tokens)])


def packed(values: Any) -> memoryview | bytes:
    """msgspec's `enc_hook` for msgpack."""
    _check(values)
    if values.dtype == DTYPES[Flags]:
        return _runs(values).tobytes()
    return np.ascontiguousarray(values).data


def listed(values: Any) -> list[Any]:
    """msgspec's `enc_hook` for JSON."""
    _check(values)
    found: list[Any] = (values.astype(int) if values.dtype == DTYPES[Flags] else values).tolist()
    return found


def unpacked(kind: Any, data: Any) -> np.ndarray:
    """msgspec's `dec_hook`: of bytes, or of the list that they were once."""
    if kind not in DTYPES:
        raise NotImplementedError(f"no column is of {kind}")
    if not isinstance(data, bytes):
        return column(kind, data)
    if kind == Flags:
        return _flags(np.frombuffer(data, RUNS))
    return np.frombuffer(data, DTYPES[kind]).copy()


def is_same(one: Any, other: Any) -> bool:
    """Of two fields, either of which may be a column."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _check(values: Any) -> None:
    if not isinstance(values, np.ndarray):
        raise NotImplementedError(f"a record holds no {type(values).__name__}")
    if values.dtype not in DTYPES.values():
        raise TypeError(f"a record holds no column of {values.dtype}")


def _runs(flags: np.ndarray) -> np.ndarray:
    """0 0 1 1 1 -> 2 3; 1 0 -> 0 1 1."""
    if not len(flags):
        return np.zeros(0, RUNS)
    turns = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    edges = np.concatenate([[0, 0] if flags[0] else [0], turns, [len(flags)]])
    return (edges[1:] - edges[:-1]).astype(RUNS)


def _flags(runs: np.ndarray) -> np.ndarray:
    if len(runs) and (runs.min() < 0 or int(runs.sum(dtype=np.int64)) > LONGEST):
        raise ValueError("lengths of runs that no flags have")
    return np.repeat((np.arange(len(runs)) & 1).astype(bool), runs)
