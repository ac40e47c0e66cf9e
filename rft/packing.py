"""Rows of one step -> balanced, packed microbatches, and their context-parallel slices. Pure numpy.

    rows ──pack──► [dp rank][microbatch] Packed ──slice_cp──► this context-parallel rank's tokens

Every array of a `Packed` is aligned to the *predicting* position t: `labels[t]`, `weight[t]`, `behaviour[t]` and
`advantage[t]` belong to the next token of the same sequence. Invariant: every token of every row is in exactly one
microbatch of one rank, and a weight that is not 0 stands only before a trained token; so the sum of weight * loss over
everything is the step's loss, however the rows were cut.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

LINEAR_COST = 6144  # a token costs this much more than one query-key pair: 6 x hidden for a 1024-wide model


@dataclass(frozen=True)
class Row:
    """One sequence [L] with what is known about each of its tokens (0 where nothing is)."""

    tokens: np.ndarray  # int64
    trained: np.ndarray  # 1 where the token is a training target
    behaviour: np.ndarray  # the engine's log-probability of the token
    advantage: np.ndarray
    weight: np.ndarray  # global loss weight of the token, already divided by the global counts
    temperature: float = 1.0


@dataclass(frozen=True)
class Packed:
    """One microbatch of T tokens: sequences one after another, then padding that belongs to none."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], from 0 in every sequence
    labels: np.ndarray  # int64 [T]
    weight: np.ndarray  # float32 [T], as are the three below
    behaviour: np.ndarray
    advantage: np.ndarray
    temperature: np.ndarray
    cu_seqlens: np.ndarray  # int32 [sequences + 1]
    rows: np.ndarray  # int32 [sequences]: index of each sequence in the list given to `pack`

    @property
    def length(self) -> int:
        return len(self.tokens)


TOKEN_FIELDS = ("tokens", "positions", "labels", "weight", "behaviour", "advantage", "temperature")
PADDING = {"temperature": 1.0}  # every other field is padded with 0


def token_weights(lengths: list[int], mode: str) -> list[float]:
    """Weight of every trained token of each row, so that the sum of weight * loss is the aggregate `mode` over the batch.

    `lengths` counts the trained tokens of every row of the step; rows without any do not count as sequences.
    """
    sequences, tokens = sum(n > 0 for n in lengths), sum(lengths)
    if mode == "token-mean":
        return [1.0 / tokens if n else 0.0 for n in lengths]
    if mode == "seq-mean-token-mean":
        return [1.0 / (sequences * n) if n else 0.0 for n in lengths]
    if mode == "seq-mean-token-sum":
        return [1.0 / sequences if n else 0.0 for n in lengths]
    raise ValueError(f"algorithm.loss_agg_mode={mode}: use token-mean, seq-mean-token-mean or seq-mean-token-sum")


def pack(rows: list[Row], dp: int, max_tokens: int, multiple: int) -> list[list[Packed]]:
    """Microbatches of at most `max_tokens` for each of `dp` ranks, the same number everywhere, balanced by cost.

    Lengths are padded to a multiple of `multiple`. A row longer than `max_tokens` gets a microbatch of its own; a rank
    without rows gets microbatches of padding only, which compute nothing and keep the collectives aligned.
    """
    lengths = [len(row.tokens) for row in rows]
    bins = _bins(lengths, dp, max_tokens)
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    load = [0] * dp
    per_rank = len(bins) // dp
    for rows_of_bin in sorted(bins, key=lambda b: -sum(map(_cost, (lengths[i] for i in b)))):
        rank = min((r for r in range(dp) if len(ranks[r]) < per_rank), key=lambda r: load[r])
        ranks[rank].append(rows_of_bin)
        load[rank] += sum(_cost(lengths[i]) for i in rows_of_bin)
    return [[_join(rows, sorted(bin_), multiple) for bin_ in part] for part in ranks]


def _cost(length: int) -> int:
    return length * (length + LINEAR_COST)


def _bins(lengths: list[int], dp: int, max_tokens: int) -> list[list[int]]:
    """Largest row first, each into the cheapest bin that has room; one more bin per rank until everything fits."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = dp * max(1, -(-sum(lengths) // (max_tokens * dp)))
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        cost, size = np.zeros(count), np.zeros(count, dtype=np.int64)
        for i in order:
            room = (size + lengths[i] <= max_tokens) | (size == 0)
            if not room.any():
                break
            best = int(np.argmin(np.where(room, cost, np.inf)))
            bins[best].append(i)
            cost[best] += _cost(lengths[i])
            size[best] += lengths[i]
        else:
            return bins
        count += dp


def _join(rows: list[Row], chosen: list[int], multiple: int) -> Packed:
    """Concatenate rows, shift their targets to the predicting position, pad the end."""
    picked = [rows[i] for i in chosen]
    lengths = np.array([len(row.tokens) for row in picked], dtype=np.int32)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu_seqlens[-1])
    padded = max(multiple, -(-total // multiple) * multiple)

    def joined(parts: list[np.ndarray], dtype: Any, padding: float = 0) -> np.ndarray:
        out = np.full(padded, padding, dtype=dtype)
        if parts:
            out[:total] = np.concatenate(parts)
        return out

    def shifted(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
        return joined([np.append(part[1:], part.dtype.type(0)) for part in parts], dtype)

    return Packed(
        tokens=joined([row.tokens for row in picked], np.int64),
        positions=joined([np.arange(n) for n in lengths], np.int64),
        labels=shifted([row.tokens for row in picked], np.int64),
        weight=shifted([row.weight * (row.trained > 0) for row in picked], np.float32),
        behaviour=shifted([row.behaviour for row in picked], np.float32),
        advantage=shifted([row.advantage for row in picked], np.float32),
        temperature=joined([np.full(len(row.tokens), row.temperature) for row in picked], np.float32, 1.0),
        cu_seqlens=cu_seqlens,
        rows=np.array(chosen, dtype=np.int32),
    )


def slice_cp(packed: Packed, rank: int, size: int, multiple: int = 1, length: int = 0) -> Packed:
    """Rank's part of every sequence: cut into 2*size equal chunks (padded), take chunks `rank` and `2*size-1-rank`.

    Early chunks attend to little and late ones to much, so this pair costs every rank the same (Megatron's order). The
    result is padded to a multiple of `multiple` and at least `length`; its `cu_seqlens` are local. size=1 only pads.
    """
    flat = cp_index(packed, rank, size)
    starts, stops = packed.cu_seqlens[:-1], packed.cu_seqlens[1:]
    bounds = stops - starts if size == 1 else 2 * -((starts - stops) // (2 * size))
    target = max(length, multiple, -(-len(flat) // multiple) * multiple)
    arrays = {}
    for name in TOKEN_FIELDS:
        source = getattr(packed, name)
        out = np.full(target, PADDING.get(name, 0), dtype=source.dtype)
        out[: len(flat)] = np.where(flat >= 0, source[np.maximum(flat, 0)], PADDING.get(name, 0))
        arrays[name] = out
    cu_seqlens = np.concatenate([[0], np.cumsum(bounds, dtype=np.int64)]).astype(np.int32)
    return Packed(**arrays, cu_seqlens=cu_seqlens, rows=packed.rows)


def cp_index(packed: Packed, rank: int, size: int) -> np.ndarray:
    """Index in `packed` of each token that `rank` holds, -1 for padding inside a sequence."""
    bounds = packed.cu_seqlens.tolist()
    if size == 1:
        return np.arange(bounds[-1])
    found = [np.zeros(0, dtype=np.int64)]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = -(-(stop - start) // (2 * size))
        index = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)]) + start
        found.append(np.where(index < stop, index, -1))
    return np.concatenate(found)


def cp_positions(cu_seqlens: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Position inside its (padded) sequence of every token that rank holds, given the *local* cu_seqlens."""
    parts = []
    for n in np.diff(cu_seqlens).tolist():
        if size == 1:
            parts.append(np.arange(n))
            continue
        chunk = n // 2
        parts += [np.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def encode_part(part: list[Packed]) -> bytes:
    """Bytes of one rank's microbatches: msgpack of dtype and raw data, no pickle."""
    return msgspec.msgpack.encode(
        [[(f.name, a.dtype.str, a.tobytes()) for f in fields(p) for a in [getattr(p, f.name)]] for p in part]
    )


def decode_part(data: bytes) -> list[Packed]:
    return [
        Packed(**{name: np.frombuffer(raw, dtype=dtype) for name, dtype, raw in arrays})
        for arrays in msgspec.msgpack.decode(data)
    ]
