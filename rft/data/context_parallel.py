"""A microbatch's tokens over the ranks of a context-parallel group. Pure numpy.

In: a `Packed`. Out: one rank's part of every sequence of it, as a `Packed` of local tokens, or the
places and positions of those. Invariant: every token is on exactly one rank of the group.
"""

import numpy as np

from rft.data.packing import PADDING, TOKEN_FIELDS, Packed, lengthened
from rft.ground.experience import NO_EXPERT


def slice_cp(packed: Packed, rank: int, size: int, multiple: int = 1, length: int = 0) -> Packed:
    """Rank's part of every sequence: cut into 2*size equal chunks (padded), take chunks `rank` and
    `2*size-1-rank`.

    Early chunks attend to little and late ones to much, so this pair costs every rank the same
    (Megatron's order). The result is padded to a multiple of `multiple` and at least `length`; its
    `cu_seqlens` are local. size=1 only pads.
    """
    assert size == 1 or not packed.shared.any(), "context-parallel ranks share no prefixes"
    if size == 1 and packed.length >= length and packed.length % multiple == 0:
        return packed
    flat = cp_index(packed, rank, size)
    starts, stops = packed.cu_seqlens[:-1], packed.cu_seqlens[1:]
    bounds = stops - starts if size == 1 else 2 * -((starts - stops) // (2 * size))
    target = max(length, multiple, -(-len(flat) // multiple) * multiple)

    def sliced(source: np.ndarray, padding: float = 0) -> np.ndarray:
        out = np.full(target, padding, dtype=source.dtype)
        out[: len(flat)] = np.where(flat >= 0, source[np.maximum(flat, 0)], padding)
        return out

    arrays = {name: sliced(getattr(packed, name), PADDING.get(name, 0)) for name in TOKEN_FIELDS}
    cu_seqlens = np.concatenate([[0], np.cumsum(bounds, dtype=np.int64)]).astype(np.int32)
    scores = {name: sliced(values) for name, values in packed.scores.items()}
    routes = packed.routes
    if routes is not None:
        own = routes[np.maximum(flat, 0)]
        own[flat < 0] = NO_EXPERT[routes.dtype.name]
        routes = lengthened(own, target)
    return Packed(
        **arrays,
        cu_seqlens=cu_seqlens,
        rows=packed.rows,
        shared=packed.shared,
        scores=scores,
        routes=routes,
    )


def cp_index(packed: Packed, rank: int, size: int) -> np.ndarray:
    """Index in `packed` of each token that `rank` holds, -1 for padding inside a sequence."""
    bounds = packed.cu_seqlens.tolist()
    if size == 1:
        return np.arange(bounds[-1])
    found = [np.zeros(0, dtype=np.int64)]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = -(-(stop - start) // (2 * size))
        index = (
            np.concatenate(
                [np.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)]
            )
            + start
        )
        found.append(np.where(index < stop, index, -1))
    return np.concatenate(found)


def cp_positions(cu_seqlens: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Position inside its (padded) sequence of every token that rank
    holds, given the *local* cu_seqlens.
    """
    parts = []
    for n in np.diff(cu_seqlens).tolist():
        if size == 1:
            parts.append(np.arange(n))
            continue
        chunk = n // 2
        parts += [np.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
