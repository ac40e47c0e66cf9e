"""What rows of a group begin with alike is computed once.

    rows of a group ──chains──► an order in which each shares what it can with the one before
    rows of a microbatch ──shared_lengths──► how many first tokens are those of the one before
    a microbatch ──computed_of──► the tokens that are computed, and what each of them may see

A microbatch stays a list of whole rows: labels, weights and scores are of their tokens, one after
another, whether those are shared or not. What is computed is a second, shorter array: of every row
the tokens behind those that it shares, which see the tokens of its own path only. One hidden state
may so predict a label of several rows. Pure numpy, and of lengths and tokens alone, so that every
rank and every attempt decides the same.

Invariant: a token of which the loss is trained in two rows is computed in each of them, and one
that an engine sent through other experts in two rows (`routes`) once for either way.
Prior work: Tree Training (arXiv:2511.00413).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Routes = Sequence[np.ndarray | None]  # [tokens, layers, top_k] of every row; empty: of none
FIRST_LOOK = 2048  # tokens of two rows compared at once: fewer are not quicker
# keys and values of a row's whole path are gathered for it in every layer: as many of them count
# as one token that is computed, whose activations take more room than they
KEYS = 8
WORTH = 1 / 32  # of a group's tokens: rows that share less need not be in one microbatch


@dataclass(frozen=True)
class Chain:
    """Rows of one group in an order of their tokens; `shared`: how many first tokens of each are
    those of the row before it, 0 of the first. Lists: most have few rows, or one.
    """

    rows: list[int]
    lengths: list[int]
    shared: list[int]

    def pieces(self, limit: int) -> list["Chain"]:
        """Rows that follow each other, cut where they would be larger than `limit`; a single row
        may be.
        """
        found, first, computed, keys = [], 0, 0, 0
        for at, (length, shared) in enumerate(zip(self.lengths, self.shared, strict=True)):
            computed, keys = computed + length - shared, keys + length
            if _size(computed, keys) > limit and at > first:
                found.append(self._piece(first, at))
                first, computed, keys = at, length, length
        return [*found, self._piece(first, len(self.rows))] if found else [self]

    def _piece(self, first: int, last: int) -> "Chain":
        shared = [0, *self.shared[first + 1 : last]]
        return Chain(self.rows[first:last], self.lengths[first:last], shared)

    @property
    def computed(self) -> int:
        """Tokens."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def size(self) -> int:
        """What it takes of a microbatch's tokens: those that are computed, more where their keys
        are many.
        """
        return _size(self.computed, sum(self.lengths))

    def value(self, linear: float, attention: float) -> float:
        """What it costs, by the two factors of `Cost`: queries of a row come behind what it
        shares, and see that, too.
        """
        squares = sum(n * n for n in self.lengths) - sum(n * n for n in self.shared)
        return linear * self.computed + attention * squares


def _size(computed: int, keys: int) -> int:
    return max(computed, -(-keys // KEYS))


def chains(
    tokens: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    groups: Sequence[int],
    routes: Routes = (),
) -> list[Chain]:
    """Rows of the same number >= 0 are of one chain, if they share enough; every other row is its
    own. In the order of their first rows.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group if group >= 0 else -1 - row, []).append(row)
    found = []
    for rows in members.values():
        shared = [0]  # of a row by itself
        if len(rows) > 1:
            # any order of whole tokens puts those that begin alike side by side
            rows.sort(key=lambda row: (tokens[row].tobytes(), row))
            shared = shared_lengths(
                [tokens[row] for row in rows],
                [trained[row] for row in rows],
                [0] * len(rows),
                [routes[row] for row in rows] if routes else (),
            ).tolist()
        chain = Chain(rows, [len(tokens[row]) for row in rows], shared)
        found += [chain] if sum(shared) >= WORTH * sum(chain.lengths) else chain.pieces(0)
    return found


def shared_lengths(
    tokens: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    groups: Sequence[int],
    routes: Routes = (),
) -> np.ndarray:
    """int64 [rows]: how many first tokens of each row are those of the row before it, if that is of
    the same group, up to the first one of which the loss is trained in both, or that went through
    other experts in one of them.

    The row before stands for its whole path: what it shares with others before it, those have
    computed.
    """
    found = np.zeros(len(tokens), dtype=np.int64)
    taken = np.zeros(0, dtype=bool)  # of the path so far: in which places some row's loss is
    for at in range(1, len(tokens)):
        if groups[at] != groups[at - 1]:
            continue
        if at == 1 or groups[at - 1] != groups[at - 2]:  # where a group begins
            taken = trained[at - 1] != 0
        flags = trained[at] != 0
        same = _alike(tokens[at], tokens[at - 1], flags, taken)
        same = _routed_alike(routes[at - 1], routes[at], same) if routes else same
        found[at] = same
        taken = np.concatenate([taken[:same] | flags[:same], flags[same:]])
    return found


def _alike(own: np.ndarray, before: np.ndarray, flags: np.ndarray, taken: np.ndarray) -> int:
    """Up to where two rows are the same and not both trained; longer pieces are looked at the
    further that is.
    """
    common = min(len(own), len(before))
    start, stop = 0, min(common, FIRST_LOOK)
    while start < common:
        differ = own[start:stop] != before[start:stop]
        differ |= flags[start:stop] & taken[start:stop]
        at = int(differ.argmax())
        if differ[at]:
            return start + at
        start, stop = stop, min(common, 4 * stop)
    return common


def _routed_alike(before: np.ndarray | None, own: np.ndarray | None, tokens: int) -> int:
    """How many of the first `tokens` have the same route in both; none has any in no row."""
    if before is None or own is None:
        return tokens if before is own else 0
    differ = (before[:tokens] != own[:tokens]).any((1, 2))
    return int(np.argmax(differ)) if differ.any() else tokens


@dataclass(frozen=True)
class Computed:
    """The tokens of a microbatch that go through the model, and padding behind them.

    The queries of row r are tokens [bounds[r], bounds[r + 1]), its keys are `source` at
    [key_bounds[r], key_bounds[r + 1]); query j from the end sees all keys but the last j. Without
    `source` both are the same tokens.
    """

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]: in its row
    bounds: np.ndarray  # int32 [rows + 1]
    key_bounds: np.ndarray  # int32 [rows + 1]
    source: np.ndarray | None  # int64 [labels]: which token's hidden state predicts each label
    places: np.ndarray | None = None  # int64: of the tokens among the labels; None: the same

    @property
    def length(self) -> int:
        return len(self.tokens)


def computed_of(
    tokens: np.ndarray,
    positions: np.ndarray,
    bounds: np.ndarray,
    shared: np.ndarray,
    multiple: int = 1,
    length: int = 0,
) -> Computed:
    """Of a microbatch (as the fields of `Packed`, `bounds` its `cu_seqlens`), padded to a multiple
    of `multiple` and at least `length` tokens; one that shares nothing computes what it has.
    """
    if not shared.any():
        return Computed(tokens, positions, bounds, bounds, None)
    lengths = np.diff(bounds).astype(np.int64)
    queries = np.concatenate([[0], np.cumsum(lengths - shared)]).astype(np.int32)
    source = np.zeros(len(tokens), dtype=np.int64)
    places = np.zeros(int(queries[-1]), dtype=np.int64)  # of each computed token among the labels
    before = 0
    for start, stop, common, first in zip(bounds[:-1], bounds[1:], shared, queries, strict=False):
        own = start + common
        source[start:own] = source[before : before + common]
        source[own:stop] = np.arange(first, first + stop - own)
        places[first : first + stop - own] = np.arange(own, stop)
        before = start
    target = max(length, -(-len(places) // multiple) * multiple)

    def picked(values: np.ndarray) -> np.ndarray:
        out = np.zeros(target, dtype=values.dtype)
        out[: len(places)] = values[places]
        return out

    return Computed(picked(tokens), picked(positions), queries, bounds, source, places)
