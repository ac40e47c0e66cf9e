"""Rows that begin alike: what is computed once, what each token sees, and how groups are cut."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.data.packing import (
    BY_TOKENS,
    Cost,
    Packed,
    PackingPolicy,
    Row,
    pack,
    stack,
    work_of,
)
from rft.data.prefixes import KEYS, Chain, chains, computed_of, shared_lengths
from rft.data.updates import regrouped

SHARE = PackingPolicy(share=True)
# few tokens, so that rows often begin alike
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=12)
ROWS = st.lists(st.tuples(TOKENS, st.integers(-1, 2), st.integers(0, 2**12 - 1)), max_size=12)


def rows_of(drawn: list[tuple[list[int], int, int]]) -> list[Row]:
    """Of (tokens, group, bits: which tokens are trained)."""
    found = []
    for number, (tokens, group, bits) in enumerate(drawn):
        flags = np.array([bits >> at & 1 for at in range(len(tokens))], dtype=np.float32)
        value = np.arange(len(tokens), dtype=np.float32) + 100 * number
        given = np.array(tokens, dtype=np.int64)
        found.append(Row(given, flags, -value, value, flags * (1 + value), 1.0, {}, group))
    return found


def computed(packed: Packed, multiple: int = 1) -> Any:
    arrays = packed.tokens, packed.positions, packed.cu_seqlens, packed.shared
    return computed_of(*arrays, multiple)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 3), st.integers(4, 40), st.sampled_from([1, 4]))
def test_every_label_is_predicted_behind_the_tokens_of_its_own_row(
    drawn: list[tuple[list[int], int, int]], dp: int, limit: int, multiple: int
) -> None:
    rows = rows_of(drawn)
    parts = pack(rows, dp, limit, multiple, cut=SHARE)
    assert sorted(int(r) for part in parts for p in part for r in p.rows) == list(range(len(rows)))
    for packed in (p for part in parts for p in part):
        found = computed(packed, multiple)
        assert found.length % multiple == 0
        bounds = packed.cu_seqlens.tolist()
        for at, (start, stop) in enumerate(pairwise(bounds)):
            row = rows[int(packed.rows[at])]
            path = np.arange(start, stop) if found.source is None else found.source[start:stop]
            # what queries of this row see: `key_bounds` of `source`, the last of them being its own
            first, last = found.bounds[at], found.bounds[at + 1]
            assert np.array_equal(path[len(path) - (last - first) :], np.arange(first, last))
            assert np.array_equal(found.tokens[path], row.tokens)
            assert np.array_equal(found.positions[path], np.arange(len(row.tokens)))
            assert np.array_equal(packed.labels[start : stop - 1], row.tokens[1:])
            assert np.array_equal(packed.weight[start : stop - 1], row.weight[1:])


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_no_token_is_computed_once_that_carries_a_loss_in_two_rows(
    drawn: list[tuple[list[int], int, int]],
) -> None:
    for packed in pack(rows_of(drawn), 1, 10**6, 1, cut=SHARE)[0]:
        found = computed(packed)
        if found.source is None:
            continue
        # a trained token is the one behind a label of weight
        own = np.append(False, packed.weight[:-1] != 0)
        own[packed.cu_seqlens[:-1]] = [
            row.trained[0] for row in map(rows_of(drawn).__getitem__, packed.rows)
        ]
        carried = found.source[np.flatnonzero(own)]
        assert len(carried) == len(set(carried.tolist()))


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 2**12 - 1), st.integers(0, 12))
def test_a_token_is_computed_once_for_every_route(
    drawn: list[tuple[list[int], int, int]], bits: int, where: int
) -> None:
    """Rows of which some were sent through other experts from some token on, and one through none:
    whatever is shared, every label is predicted behind tokens of its own row's routes.
    """
    rows = []
    for at, row in enumerate(rows_of(drawn)):
        routes = np.repeat(row.tokens.astype(np.uint8), 4).reshape(-1, 2, 2)
        routes[where:] += 10 * (bits >> at & 1)
        rows.append(replace(row, routes=None if at == 3 else routes))
    part = stack(rows, 1, 10**6, 1, cut=SHARE)[0]
    whole = [stacked.packed() for stacked in part]
    bins = [packed.rows.tolist() for packed in whole]
    for packed in (*whole, *regrouped(whole, bins, [1.0] * len(rows), 1)):
        found = computed(packed)
        if packed.routes is None or found.source is None:
            continue
        own = packed.routes[found.places]
        total = int(packed.cu_seqlens[-1])
        assert np.array_equal(own[found.source[:total]], packed.routes[:total])


def test_a_prompt_is_computed_once_and_identical_responses_are_not() -> None:
    prompt = [7] * 10
    drawn = [
        (prompt + [1, 2], 0, 3 << 10),
        (prompt + [1, 2], 0, 3 << 10),
        (prompt + [3], 0, 1 << 10),
    ]
    (packed,) = pack(rows_of(drawn), 1, 100, 1, cut=SHARE)[0]
    assert packed.shared.tolist() == [0, 10, 10] and packed.computed == 10 + 2 + 2 + 1
    assert pack(rows_of(drawn), 1, 100, 1)[0][0].computed == 35


def test_turns_of_an_agent_are_behind_one_another() -> None:
    """Each turn is a sample; what it answered is context of the next, and carries no loss there."""
    first = [1, 2, 3, 4]
    second = first + [5, 6, 7]
    drawn = [(second, 0, 0b1100000), (first, 0, 0b1100)]
    (packed,) = pack(rows_of(drawn), 1, 100, 1, cut=SHARE)[0]
    assert packed.rows.tolist() == [1, 0] and packed.shared.tolist() == [0, 4]


def test_a_group_that_shares_next_to_nothing_is_not_kept_together() -> None:
    rows = [np.array([7] + [10 + at] * 99) for at in range(4)]
    flags = [np.zeros(100)] * 4
    assert [chain.rows for chain in chains(rows, flags, [0] * 4)] == [[0], [1], [2], [3]]
    rows = [np.array([7] * 20 + [10 + at] * 80) for at in range(4)]
    assert [chain.rows for chain in chains(rows, flags, [0] * 4)] == [[0, 1, 2, 3]]


def test_rows_of_two_groups_or_of_none_share_nothing() -> None:
    alike = [1, 2, 3, 4, 5]
    for groups in ((0, 1), (-1, -1)):
        drawn = [(alike, group, 0) for group in groups]
        (packed,) = pack(rows_of(drawn), 1, 100, 1, cut=SHARE)[0]
        assert not packed.shared.any()


def test_a_group_that_no_microbatch_holds_is_cut_and_a_row_alone_may_be_longer() -> None:
    rows = [([1] * 20 + [2 + at] * 4, 0, 0b1111 << 20) for at in range(6)] + [([9] * 50, 1, 0)]
    (part,) = pack(rows_of(rows), 1, 30, 1, cut=SHARE)
    sizes = [(packed.computed, len(packed.rows)) for packed in part]
    assert sorted(sizes) == [(28, 2), (28, 2), (28, 2), (50, 1)]


def test_ranks_share_the_work_of_one_group() -> None:
    """One group on four ranks: each computes the prompt, and a quarter of the rest."""
    rows = rows_of([([1] * 8 + [2 + at] * 16, 0, (2**16 - 1) << 8) for at in range(8)])
    parts = pack(rows, 4, 10**4, 1, cut=SHARE)
    assert [[(p.computed, len(p.rows)) for p in part] for part in parts] == [[(40, 2)]] * 4


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(1, 4), st.integers(4, 60))
def test_sharing_never_costs_the_dearest_rank_more(
    drawn: list[tuple[list[int], int, int]], dp: int, limit: int
) -> None:
    """Up to what the balance leaves: chains end as single rows where those balance better."""
    rows, cost = rows_of(drawn), Cost(10.0, 1.0)

    def dearest(cut: PackingPolicy) -> float:
        return max(
            sum(spent(packed, cost) for packed in part)
            for part in pack(rows, dp, limit, 1, cost, cut)
        )

    assert dearest(SHARE) <= 1.5 * dearest(BY_TOKENS)


def spent(packed: Packed, cost: Cost) -> float:
    lengths = np.diff(packed.cu_seqlens).astype(np.float64)
    return float(cost(lengths).sum() - cost(packed.shared.astype(np.float64)).sum())


def test_pieces_count_what_they_compute() -> None:
    (chain,) = chains(
        [np.array([1, 1, 2]), np.array([1, 1, 3, 4])], [np.zeros(3), np.zeros(4)], [0, 0]
    )
    assert (chain.size, chain.value(1.0, 1.0)) == (5, 5 + 9 + 16 - 4)
    assert [piece.rows for piece in chain.pieces(4)] == [[0], [1]]
    assert [piece.size for piece in chain.pieces(4)] == [3, 4]
    assert isinstance(chain.pieces(9)[0], Chain) and chain.pieces(9)[0].size == 5


def test_keys_of_many_short_answers_to_a_long_prompt_fit_a_microbatch_too() -> None:
    """Without a bound 64 answers behind one prompt would gather 64 prompts in every layer."""
    rows = rows_of([([1] * 1000 + [2 + at] * 4, 0, 0b1111 << 1000) for at in range(64)])
    (part,) = pack(rows, 1, 2000, 1, cut=SHARE)
    keys = [int(packed.cu_seqlens[-1]) for packed in part]
    assert sum(len(packed.rows) for packed in part) == 64 and max(keys) <= KEYS * 2000
    assert [packed.computed for packed in part] == [1000 + 4 * len(p.rows) for p in part]
    assert len(part) == 5


def test_metrics_say_what_is_computed_and_what_was_shared() -> None:
    drawn = [([1] * 9 + [2 + at], 0, 1 << 9) for at in range(10)]
    parts = stack(rows_of(drawn), 1, 100, 1, cut=SHARE)
    told = work_of(parts, Cost(2.0, 0.0))
    assert told == {
        "packing/tokens": 100.0,
        "packing/forward_flops": pytest.approx(2 * 19.0),
        "packing/shared_frac": pytest.approx(0.81),
        "packing/shared_flops_frac": pytest.approx(0.81),
    }
    whole, cut = work_of(stack(rows_of(drawn), 1, 100, 1), Cost(0.0, 1.0)), PackingPolicy(pad=True)
    assert whole == {
        "packing/tokens": 100.0,
        "packing/forward_flops": 1000.0,
        "packing/shared_frac": 0.0,
        "packing/shared_flops_frac": 0.0,
    }
    drawn[0] = ([1, 2], 0, 2)  # its padding is no work of the model
    padded = work_of(stack(rows_of(drawn), 1, 100, 1, cut=cut), Cost(0.0, 1.0))
    assert (padded["packing/tokens"], padded["packing/forward_flops"]) == (92.0, 904.0)


@settings(max_examples=100, deadline=None)
@given(ROWS.filter(bool), st.integers(4, 40), st.randoms(use_true_random=False))
def test_updates_share_what_their_rows_begin_with(
    drawn: list[tuple[list[int], int, int]], limit: int, random: Any
) -> None:
    rows = rows_of(drawn)
    (part,) = pack(rows, 1, limit, 1, cut=SHARE)
    chosen = random.sample(range(len(rows)), max(1, len(rows) // 2))
    (again,) = regrouped(part, [chosen], [1.0] * len(rows), 1)
    assert sorted(again.rows.tolist()) == sorted(chosen)
    found = computed(again)
    for at, (start, stop) in enumerate(pairwise(again.cu_seqlens.tolist())):
        path = np.arange(start, stop) if found.source is None else found.source[start:stop]
        assert np.array_equal(found.tokens[path], rows[int(again.rows[at])].tokens)


def test_a_shared_token_stays_marked_for_all_that_come_behind() -> None:
    """The third row may not share the token that the first one trains, although the second, which
    lies between them, does not train it.
    """
    tokens = [np.array([1, 2, 3])] * 3
    trained = [np.array([0, 0, 1]), np.array([0, 0, 0]), np.array([0, 0, 1])]
    assert shared_lengths(tokens, trained, [0, 0, 0]).tolist() == [0, 3, 2]
