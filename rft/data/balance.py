"""Which rows a rank gets, and in which of its microbatches: by tokens and by cost, as evenly as
exchanges make it. Pure numpy.

In: lengths, or chains of rows that share beginnings, and what a sequence costs. Out: [rank]
[microbatch] -> row numbers. Invariant: every row is in exactly one microbatch, and the order in
which rows come decides nothing.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.data.prefixes import Chain
from rft.ground.names import Dims

ROUNDS_PER_GROUP = 8  # exchanges of one refinement at most
LIGHT_GROUPS = 4  # how many are tried as partner of the heaviest
CLOSE_ENOUGH = 1e-3  # of the mean: groups that differ by less are not refined further
EVEN = 1.02  # dearest rank / mean: shared rows are parted only where it is more


def projected(dims: Dims) -> int:
    """Multiply-adds of a token in the projections of one layer's attention."""
    if "mla" not in dims.features:
        return 2 * dims.hidden * dims.head_size * (dims.heads + dims.groups)
    names = ("q_a_proj", "q_b_proj") if dims.latent.query else ("q_proj",)
    names += ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    shapes = [dims.latent.shape(f"{name}.weight", dims) for name in names]
    return sum(rows * columns for rows, columns in shapes)


@dataclass(frozen=True)
class Cost:
    """What a sequence of n tokens costs: linear * n + attention * n^2, in FLOPs of one forward
    pass.

    Counted as in Narayanan et al. 2021 (arXiv:2104.04473, appendix), 2 FLOPs per multiply-add, for
    grouped queries, gated MLPs and a causal mask, under which half of the query-key pairs exist.
    With L layers, h hidden, H heads and G key/value heads of size d, I the MLP width that a token
    passes through, V vocabulary:

        linear    = L * (2hd(2H + 2G) + 6hI) + 2hV        projections q, o, k, v; gate, up, down;
                                                          the head
        attention = L * 2Hd                               QK^T and PV: 2 * 2Hd * n^2, halved

    The backward pass doubles both, so only the ratio matters. The default is that of a model 1,024
    wide.
    """

    linear: float = 6144.0
    attention: float = 1.0

    @classmethod
    def of(cls, hf: dict[str, Any]) -> "Cost":
        """From a Hugging Face config; of a mixture count the router, the experts of one token, and
        the one that all share.
        """
        dims = Dims.of(hf)
        hidden, layers, heads, size = dims.hidden, dims.layers, dims.heads, dims.head_size
        mixed = sum(dims.has_experts(layer) for layer in range(layers))
        chosen = int(hf["num_experts_per_tok"]) if mixed else 0
        attention = 2 * projected(dims)
        gate = 2 * hidden * ("gated_shared" in dims.features)
        experts = 6 * hidden * (dims.expert_ffn * chosen + dims.shared_ffn) + gate
        linear = layers * attention + (layers - mixed) * 6 * hidden * dims.ffn
        linear += mixed * (experts + 2 * hidden * dims.experts) + 2 * hidden * dims.vocab
        return cls(float(linear), float(layers * heads * (size + dims.value_size)))

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        found: np.ndarray = lengths * (self.linear + self.attention * lengths)
        return found


def assign(
    lengths: list[int], dp: int, max_tokens: int, cost: Cost = Cost()
) -> list[list[list[int]]]:
    """[rank][microbatch] -> ascending row numbers: as few microbatches as were found, ranks of
    equal cost, bins of equal size.

    Ranks wait for each other once a step, so what they must share equally is the cost of all their
    rows. The microbatches of one rank share its tokens equally instead: pipeline stages pad them to
    the longest, and memory is that of the longest. They are ordered by cost, so that ranks which
    meet in every microbatch (experts) meet at equal ones. Everything is decided on the sorted
    lengths: another order of the rows renames rows of one length and changes nothing.
    """
    real = np.array(lengths, dtype=np.int64)
    return _assigned(real, cost(real.astype(np.float64)), dp, max_tokens)


def assign_chains(
    given: list[Chain], dp: int, max_tokens: int, cost: Cost = Cost()
) -> list[list[list[int]]]:
    """As `assign`, for rows that share: a chain stays together as far as a microbatch holds it, and
    as ranks are of equal cost; it is parted where the dearest rank becomes cheaper by that,
    although what both parts share is then computed in each.
    """
    limit, least, best = max_tokens, np.inf, None
    while True:
        units = [piece for chain in given for piece in chain.pieces(limit)]
        value = np.array([unit.value(cost.linear, cost.attention) for unit in units])
        size = np.array([unit.size for unit in units], dtype=np.int64)
        bins = _assigned(size, value, dp, max_tokens)
        loads = [sum(value[unit] for bin_ in rank for unit in bin_) for rank in bins]
        if max(loads) < least or best is None:
            least, best = max(loads), (units, bins)
        even = max(loads) <= EVEN * value.sum() / dp
        if even or limit == 1 or all(len(unit.rows) == 1 for unit in units):
            units, bins = best
            return [
                [[row for unit in bin_ for row in units[unit].rows] for bin_ in rank]
                for rank in bins
            ]
        limit //= 2


def _assigned(
    real: np.ndarray, value: np.ndarray, dp: int, max_tokens: int
) -> list[list[list[int]]]:
    """[rank][microbatch] -> ascending numbers of units of so many tokens and of such cost."""
    order = sorted(range(len(real)), key=lambda i: (-real[i], -value[i], i))
    real, value = real[order], value[order]
    size = np.minimum(real, max_tokens)  # a row that is too long fills its microbatch
    count = _fewest(size, dp, max_tokens)
    while True:
        parts = _attempt(size, value, dp, count, max_tokens)
        if parts is not None:
            return [
                [
                    sorted(order[i] for i in bin_)
                    for bin_ in sorted(part, key=lambda b: (-value[b].sum(), b))
                ]
                for part in parts
            ]
        count += 1 + count // 64  # one by one until attempts become dear


def _fewest(size: np.ndarray, dp: int, max_tokens: int) -> int:
    """Microbatches per rank that are needed at least: for all tokens, and for rows of which no two
    fit together.
    """
    bins = max(-(-int(size.sum()) // max_tokens), int((2 * size > max_tokens).sum()))
    return max(1, -(-bins // dp))


def _attempt(
    size: np.ndarray, value: np.ndarray, dp: int, count: int, max_tokens: int
) -> list[list[list[int]]] | None:
    """Rows over ranks by cost, then each rank's rows over its microbatches by tokens; None where
    some row finds no room.
    """
    ranks = fill(range(len(size)), dp, value, size, count * max_tokens)
    if ranks is None:
        return None
    refine(ranks, value, size, count * max_tokens)
    parts = []
    for rank in ranks:
        part = fill(sorted(rank), count, size, size, max_tokens)
        if part is None:
            return None
        parts.append(part)
    for part in parts:
        refine(part, size, size, max_tokens)
    return parts


def fill(
    rows: Sequence[int], groups: int, value: np.ndarray, size: np.ndarray, limit: int
) -> list[list[int]] | None:
    """`rows`, largest first, each into the group of least value that has room, or else each into
    the fullest that has.
    """
    values, sizes = value.tolist(), size.tolist()
    for fullest in (False, True):
        found: list[list[int]] = [[] for _ in range(groups)]
        used = [0] * groups
        order = [(0.0, group) for group in range(groups)]  # by what they are chosen by, best first
        for row in rows:
            fits = limit - sizes[row]
            first = bisect_left(order, (-fits, -1)) if fullest else 0
            at = next((at for at in range(first, groups) if used[order[at][1]] <= fits), None)
            if at is None:
                break
            before, best = order.pop(at)
            found[best].append(row)
            used[best] += sizes[row]
            insort(order, (-used[best] if fullest else before + values[row], best))
        else:
            return found
    return None


def refine(groups: list[list[int]], value: np.ndarray, size: np.ndarray, limit: int) -> None:
    """Move one row, or exchange two, between the heaviest group and a light one, until nothing
    helps; in place.
    """
    load = np.array([value[group].sum() for group in groups], dtype=np.float64)
    for _ in range(ROUNDS_PER_GROUP * len(groups)):
        high = int(np.argmax(load))
        for low in np.argsort(load, kind="stable")[:LIGHT_GROUPS].tolist():
            gap = load[high] - load[low]
            if gap <= CLOSE_ENOUGH * load.mean():
                return
            if _exchange(groups[high], groups[low], gap, value, size, limit):
                load[[high, low]] = value[groups[high]].sum(), value[groups[low]].sum()
                break
        else:
            return


def _exchange(
    high: list[int], low: list[int], gap: float, value: np.ndarray, size: np.ndarray, limit: int
) -> bool:
    """Give `low` what halves the gap best: a row of `high`, or one against a row of its own.

    False: nothing helps.
    """
    given = np.append(value[low], 0.0)  # the last column: nothing in return
    room = limit - int(size[low].sum()), limit - int(size[high].sum())
    more = size[high][:, None] - np.append(size[low], 0)[None]
    moved = value[high][:, None] - given[None]
    fits = (
        (more <= room[0])
        & (-more <= room[1])
        & (moved > CLOSE_ENOUGH * gap)
        & (moved < (1 - CLOSE_ENOUGH) * gap)
    )
    if not fits.any():
        return False
    at = np.where(fits, np.abs(moved - gap / 2), np.inf).argmin()
    i, j = divmod(int(at), len(given))
    row = high.pop(i)
    if j < len(low):
        high.append(low.pop(j))
    low.append(row)
    return True
