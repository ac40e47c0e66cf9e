"""How a step's rows are cut into several optimizer updates: epochs over the batch, each in
mini-batches.

    rows ──planned──► part of every rank, which is scored once
                  └─► [update] whose rows, in which microbatches, with which weights
                        ──regrouped, on every rank──► the microbatches of one update

In: the rows of a step, at rank 0. Out: `Update`s that every rank hears. Invariants: which rows are
in an update, and in which order updates come, depends on the rule, the step and the number of rows
alone, and on no generator and no layout, so that a resume and another mesh make the same ones; a
row stays on the data-parallel rank that scored it; weights are divided by the counts of the update,
whoever holds its rows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rft.data.packing import (
    BY_TOKENS,
    PADDING,
    TOKEN_FIELDS,
    Cost,
    Cut,
    Packed,
    PackingPolicy,
    Row,
    bins_of,
    chunks,
    joined_routes,
    lengthened,
    pack,
    token_weights,
)
from rft.data.prefixes import shared_lengths


@dataclass(frozen=True)
class UpdateRule:
    """`size`: rows of an update at most; None: the whole batch. `together`: so many rows that
    follow each other are never parted. `shuffle`: rows are dealt anew in every epoch, by `seed`.
    """

    epochs: int = 1
    size: int | None = None
    shuffle: bool = False
    seed: int = 0
    together: int = 1

    def updates_of(self, kinds: Sequence[bool], step: int, epoch: int) -> list[list[int]]:
        """Row numbers of every update of one epoch, whose sizes differ by one unit at most.

        `kinds`: of every row. Rows of both kinds are spread over the updates as evenly as they go.
        """
        units = range(0, len(kinds), self.together)
        places: dict[int, float] = {}
        for kind in (False, True):
            alike = [unit for unit in units if bool(kinds[unit]) is kind]
            if self.shuffle:
                random.Random(f"{self.seed}/{step}/{epoch}").shuffle(alike)
            places |= {unit: (at + 0.5) / len(alike) for at, unit in enumerate(alike)}
        order = sorted(units, key=places.__getitem__)
        each = max(1, (self.size or len(kinds)) // self.together)
        count = max(1, -(-len(order) // each))
        bounds = [len(order) * number // count for number in range(count + 1)]
        return [
            [row for unit in order[low:high] for row in range(unit, unit + self.together)]
            for low, high in zip(bounds[:-1], bounds[1:], strict=True)
        ]


ONE_UPDATE = UpdateRule()


@dataclass(frozen=True)
class Update:
    """`bins`: [data-parallel rank][microbatch] row numbers, as many microbatches on every rank.
    `weights`: of a trained token of every row of the step; 0: the row is not in this update.
    """

    bins: list[list[list[int]]]
    weights: list[float]

    @property
    def rows(self) -> list[int]:
        return sorted(row for rank in self.bins for bin_ in rank for row in bin_)


@dataclass(frozen=True)
class RowPacking:
    """How rows become microbatches here; as the arguments of `pack`."""

    dp: int
    max_tokens: int
    multiple: int
    cost: Cost = Cost()
    cut: PackingPolicy = BY_TOKENS

    def bins(self, rows: list[Row]) -> list[list[list[int]]]:
        return bins_of(rows, self.dp, self.max_tokens, self.multiple, self.cost, self.cut)

    def made_up(self, rows: int, longest: int, vocab: int) -> list[Packed]:
        """A microbatch of rows that mean nothing, `longest` tokens each, for whoever computes when
        there are no others yet: at most `rows`, and half of what fits, for so much has even the
        emptiest of several; where microbatches are of so many rows, these, as far as they fit.
        """
        fits = self.max_tokens // (2 * longest)
        if self.cut.rows:
            fits = min(self.cut.rows, (self.max_tokens - self.multiple + 1) // longest)
        one = np.ones(longest, dtype=np.float32)
        made = [
            Row(np.arange(at, at + longest, dtype=np.int32) % vocab, one, -one, one, one / longest)
            for at in range(max(1, min(rows, fits)))
        ]
        cut = replace(self.cut, share=False)
        return pack(made, 1, self.max_tokens, self.multiple, self.cost, cut)[0]

    def bins_at(
        self, rows: list[int], homes: list[int], lengths: list[int]
    ) -> list[list[list[int]]]:
        """Of rows whose ranks are decided: `homes` of every row of the step."""
        limit = max(1, self.max_tokens - self.max_tokens % self.multiple)
        ordered = sorted(rows, key=lambda row: (-lengths[row], row))
        parts = [
            chunks([row for row in ordered if homes[row] == rank], lengths, limit, self.cut)
            for rank in range(self.dp)
        ]
        most = max(map(len, parts))
        return [part + [[] for _ in range(most - len(part))] for part in parts]


def planned(
    rows: list[Row],
    rule: UpdateRule,
    step: int,
    packing: RowPacking,
    modes: tuple[str, str],
    longest: int = 1,
) -> tuple[Cut, list[Update]]:
    """Microbatches of every data-parallel rank, each row in one of them, and the updates; none:
    the whole part is one. `modes` (of rollouts, and of expert rows) and `longest` as in
    `token_weights`.
    """
    lengths = [len(row.tokens) for row in rows]
    kinds = [bool(row.scores["expert"].any()) if "expert" in row.scores else False for row in rows]
    first = rule.updates_of(kinds, step, 0)
    if rule.epochs * len(first) == 1:
        bins = packing.bins(rows)
        return Cut(rows, bins, packing.multiple, packing.cut), []
    found = [
        [
            [[members[at] for at in bin_] for bin_ in rank]
            for rank in packing.bins([rows[row] for row in members])
        ]
        for members in first
    ]
    ranks = [[bin_ for bins in found for bin_ in bins[rank]] for rank in range(packing.dp)]
    homes = [0] * len(rows)
    for rank, bins in enumerate(ranks):
        for row in (row for bin_ in bins for row in bin_):
            homes[row] = rank
    for epoch in range(1, rule.epochs):
        found += (
            [
                packing.bins_at(members, homes, lengths)
                for members in rule.updates_of(kinds, step, epoch)
            ]
            if rule.shuffle
            else found[: len(first)]
        )
    trained = [int((row.trained > 0).sum()) for row in rows]
    updates = [Update(bins, _weights(bins, trained, kinds, modes, longest)) for bins in found]
    return Cut(rows, ranks, packing.multiple, packing.cut), updates


def _weights(
    bins: list[list[list[int]]],
    trained: list[int],
    kinds: list[bool],
    modes: tuple[str, str],
    longest: int,
) -> list[float]:
    """Rows of each kind are divided by the counts of their own."""
    weights = [0.0] * len(trained)
    members = sorted(row for rank in bins for bin_ in rank for row in bin_)
    for kind, mode in zip((False, True), modes, strict=True):
        alike = [row for row in members if kinds[row] is kind]
        given = token_weights([trained[row] for row in alike], mode, longest)
        for row, weight in zip(alike, given, strict=True):
            weights[row] = weight
    return weights


def regrouped(
    part: Sequence[Packed], bins: list[list[int]], weights: list[float], multiple: int
) -> list[Packed]:
    """Rows of `part` with all that is known of them, in the microbatches `bins`, each trained token
    with its row's weight.
    """
    where: dict[int, PlacedRow] = {}
    for packed in part:
        bounds, shared = packed.cu_seqlens.tolist(), packed.shared.tolist()
        for row, start, stop, with_last in zip(
            packed.rows.tolist(), bounds[:-1], bounds[1:], shared, strict=True
        ):
            last = next(reversed(where.values()), None)
            chain = last.chain if last and with_last else len(where)
            where[row] = PlacedRow(packed, slice(start, stop), chain, len(where))
    if any(packed.shared.any() for packed in part):
        bins = [sorted(bin_, key=lambda row: where[row].number) for bin_ in bins]
    return [_microbatch(part[0], where, bin_, weights, multiple) for bin_ in bins]


@dataclass(frozen=True)
class PlacedRow:
    """Where a row is: rows of one `chain` share prefixes, `number` is their order."""

    packed: Packed
    at: slice
    chain: int
    number: int

    def field(self, name: str) -> np.ndarray:
        found: np.ndarray = getattr(self.packed, name)[self.at]
        return found

    @property
    def routes(self) -> np.ndarray | None:
        return None if self.packed.routes is None else self.packed.routes[self.at]

    @property
    def trained(self) -> np.ndarray:
        """Of its tokens; weights stand before them."""
        return np.append(False, self.field("weight")[:-1] != 0)


def _microbatch(
    like: Packed, where: dict[int, PlacedRow], rows: list[int], weights: list[float], multiple: int
) -> Packed:
    """`like`: which has the same scores."""
    places = [where[row] for row in rows]
    lengths = [place.at.stop - place.at.start for place in places]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu_seqlens[-1])
    padded = max(multiple, -(-total // multiple) * multiple)

    def joined(arrays: list[np.ndarray], dtype: np.dtype, padding: float = 0) -> np.ndarray:
        out = np.full(padded, padding, dtype=dtype)
        if arrays:
            out[:total] = np.concatenate(arrays)
        return out

    def picked(name: str) -> np.ndarray:
        given = [place.field(name) for place in places]
        if name == "weight":
            given = [
                np.where(old != 0, np.float32(weights[row]), np.float32(0))
                for row, old in zip(rows, given, strict=True)
            ]
        return joined(given, getattr(like, name).dtype, PADDING.get(name, 0))

    shared = shared_lengths(
        [place.field("tokens") for place in places],
        [place.trained for place in places],
        [place.chain for place in places],
        [place.routes for place in places],
    )
    return Packed(
        **{name: picked(name) for name in TOKEN_FIELDS},
        cu_seqlens=cu_seqlens,
        rows=np.array(rows, dtype=np.int32),
        shared=shared,
        scores={
            name: joined([place.packed.scores[name][place.at] for place in places], values.dtype)
            for name, values in like.scores.items()
        },
        routes=_padded(joined_routes([p.routes for p in places], np.array(lengths)), padded),
    )


def _padded(routes: np.ndarray | None, length: int) -> np.ndarray | None:
    return None if routes is None else lengthened(routes, length)
