"""Packing loses nothing, invents nothing, crosses no sequence border, balances; context-parallel
slices partition it.
"""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import packing as packing_bench
from rft.data.context_parallel import cp_index, cp_positions, slice_cp
from rft.data.packing import (
    Cost,
    Packed,
    PackingPolicy,
    Row,
    assign,
    divide,
    multiple_of,
    pack,
    stack,
    token_weights,
)
from rft.data.wire import Microbatches, encode_part

LENGTHS = st.lists(st.integers(1, 70), max_size=30)


def make_rows(lengths: list[int]) -> list[Row]:
    """Tokens are unique over all rows, so that each can be found again; the other fields are
    functions of the token.
    """
    rows, first = [], 1
    for number, n in enumerate(lengths):
        tokens = np.arange(first, first + n)
        first += n
        trained = (tokens % 3 > 0).astype(np.float32)
        rows.append(
            Row(
                tokens,
                trained,
                -tokens.astype(np.float32),
                tokens / 7,
                tokens / 1000,
                1.0 + number / 10,
            )
        )
    return rows


def sequences(packed: Packed) -> list[tuple[int, slice]]:
    bounds = packed.cu_seqlens.tolist()
    return [(int(r), slice(a, b)) for r, a, b in zip(packed.rows, bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("lengths", [[], [33], [33, 7, 100]])
@pytest.mark.parametrize(
    ("tp", "cp", "dp", "kernels"),
    [(1, 2, 2, 1), (1, 2, 1, 1), (2, 2, 2, 1), (1, 4, 2, 1), (3, 4, 2, 32)],
)
def test_every_length_over_the_context_ranks_is_of_two_chunks_each(
    lengths: list[int], tp: int, cp: int, dp: int, kernels: int
) -> None:
    """Sequences, the padding behind them, and microbatches of padding only: Transformer Engine
    takes no others.
    """
    multiple = multiple_of(tp, cp, kernels)
    for part in pack(make_rows(lengths), dp, 64, multiple):
        for packed in part:
            for rank in range(cp):
                local = slice_cp(packed, rank, cp, multiple)
                bounds = [*local.cu_seqlens.tolist(), local.length]
                assert local.length and local.length % (tp * kernels) == 0
                assert not (np.diff(bounds) * cp % (2 * cp)).any()


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(8, 128), st.sampled_from([1, 2, 8]))
def test_every_token_is_in_exactly_one_place_with_its_own_fields(
    lengths: list[int], dp: int, limit: int, multiple: int
) -> None:
    rows = make_rows(lengths)
    parts = pack(rows, dp, limit, multiple)
    assert len(parts) == dp and len({len(part) for part in parts}) == 1 and len(parts[0]) >= 1
    seen = []
    for packed in (p for part in parts for p in part):
        used = int(packed.cu_seqlens[-1])
        assert packed.length % multiple == 0 and packed.length > 0
        assert packed.length <= max(limit, multiple) or len(packed.rows) == 1, "padding included"
        assert not packed.weight[used:].any() and (packed.temperature > 0).all()
        for number, at in sequences(packed):
            row = rows[number]
            seen.append(number)
            assert np.array_equal(packed.tokens[at], row.tokens)
            assert np.array_equal(packed.positions[at], np.arange(len(row.tokens)))
            assert (
                np.array_equal(packed.labels[at][:-1], row.tokens[1:])
                and packed.weight[at][-1] == 0
            )
            assert np.allclose(packed.weight[at][:-1], (row.weight * row.trained)[1:])
            assert np.allclose(packed.behaviour[at][:-1], row.behaviour[1:])
            assert np.allclose(packed.advantage[at][:-1], row.advantage[1:])
            assert np.allclose(packed.temperature[at], row.temperature)
    assert sorted(seen) == list(range(len(rows)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]))
def test_slices_partition_a_microbatch(lengths: list[int], size: int, multiple: int) -> None:
    packed = pack(make_rows(lengths), 1, 10**6, 1)[0][0]
    slices = [slice_cp(packed, rank, size, multiple) for rank in range(size)]
    assert len({s.length for s in slices}) == 1 and slices[0].length % multiple == 0
    assert all(np.array_equal(s.cu_seqlens, slices[0].cu_seqlens) for s in slices)
    indices = [cp_index(packed, rank, size) for rank in range(size)]
    held = np.concatenate([index[index >= 0] for index in indices])
    assert np.array_equal(np.sort(held), np.arange(packed.cu_seqlens[-1]))
    for rank, (part, index) in enumerate(zip(slices, indices, strict=True)):
        real = np.flatnonzero(index >= 0)
        for name in ("tokens", "labels", "weight", "behaviour", "advantage", "temperature"):
            assert np.array_equal(getattr(part, name)[real], getattr(packed, name)[index[real]])
        assert not np.delete(part.weight, real).any()
        assert np.array_equal(
            cp_positions(part.cu_seqlens, rank, size)[real], packed.positions[index[real]]
        )


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(8, 128))
def test_the_sum_of_all_weights_is_that_of_the_rows(
    lengths: list[int], dp: int, limit: int
) -> None:
    """The weights carry the global counts, so what they sum to
    must not depend on how the step was cut.
    """
    rows = make_rows(lengths)
    packed = [p for part in pack(rows, dp, limit, 4) for p in part]
    wanted = sum(float((row.weight[1:] * row.trained[1:]).sum()) for row in rows)
    assert sum(float(p.weight.sum(dtype=np.float64)) for p in packed) == pytest.approx(
        wanted, rel=1e-5
    )
    targets = sum(int((row.trained[1:] > 0).sum()) for row in rows)
    assert sum(int((p.weight != 0).sum()) for p in packed) == targets


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12), max_size=30), st.integers(1, 4), st.integers(8, 40), st.randoms()
)
def test_the_order_of_the_rows_does_not_matter(
    lengths: list[int], dp: int, limit: int, random: Random
) -> None:
    """Short lengths, so that many rows tie: which of them goes where may differ, the lengths in
    every place may not.
    """

    def shapes(values: list[int]) -> list[list[list[int]]]:
        return [
            [sorted(values[i] for i in bin_) for bin_ in part] for part in assign(values, dp, limit)
        ]

    shuffled = list(lengths)
    random.shuffle(shuffled)
    assert shapes(shuffled) == shapes(lengths)
    assert assign(lengths, dp, limit) == assign(lengths, dp, limit)


def costs(lengths: list[int], parts: list[list[list[int]]], cost: Cost) -> list[float]:
    """Of every rank."""
    return [
        float(cost(np.array([lengths[i] for bin_ in part for i in bin_], dtype=float)).sum())
        for part in parts
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.sampled_from([0.1, 10.0, 1000.0]))
def test_two_ranks_are_nearly_as_equal_as_they_can_be(lengths: list[int], linear: float) -> None:
    """Against every division of a few rows; 7/6 is what largest-first alone guarantees."""
    cost = Cost(linear, 1.0)
    each = cost(np.array(lengths, dtype=float))
    found = max(costs(lengths, assign(lengths, 2, 10**6, cost), cost))
    best = min(
        max(each[list(sides)].sum(), each.sum() - each[list(sides)].sum())
        for n in range(len(lengths) + 1)
        for sides in itertools.combinations(range(len(lengths)), n)
    )
    assert found <= best * 7 / 6 * (1 + 1e-9)


@pytest.mark.parametrize("linear", [600.0, 6144.0, 60000.0])
def test_long_tailed_ranks_cost_the_same_and_their_microbatches_hold_the_same(
    linear: float,
) -> None:
    """One long row costs as much as many short ones, so equal cost
    and equal tokens are different aims.
    """
    cost, rng = Cost(linear, 1.0), np.random.default_rng(1)
    lengths = [int(n) for n in np.clip(rng.lognormal(np.log(400), 1.0, 512), 1, 8192)]
    parts = assign(lengths, 4, 16384, cost)
    spread = costs(lengths, parts, cost)
    assert max(spread) < 1.005 * sum(spread) / 4
    for part in parts:
        tokens = [sum(lengths[i] for i in bin_) for bin_ in part]
        assert sum(tokens) > 0.99 * len(tokens) * max(tokens)


def test_exchanges_equalise_what_largest_first_leaves_apart() -> None:
    """Largest first ends with 8, 8 and 11."""
    lengths = [5, 5, 4, 4, 3, 3, 3]
    linear = Cost(1.0, 0.0)
    assert sorted(costs(lengths, assign(lengths, 3, 100, linear), linear)) == [9, 9, 9]


def test_no_more_microbatches_than_big_rows_need() -> None:
    """No two of these fit together: one each, and as many on every rank."""
    assert [len(part) for part in assign([60] * 12 + [5] * 12, 4, 100)] == [3, 3, 3, 3]


def test_equal_cost_does_not_cost_a_microbatch() -> None:
    """39 against 33, 20 and 13 would be the more equal ranks, and one of them too large for one
    microbatch of 60.
    """
    parts = assign([39, 20, 13, 33], 2, 60, Cost(0.1, 1.0))
    assert [len(part) for part in parts] == [1, 1]


def test_cost_counts_the_multiplications_of_a_model() -> None:
    """A forward pass spelled out matrix by matrix: 2 FLOPs per
    multiply-add, half of the query-key pairs.
    """
    hf = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 1000,
    }
    n = 10
    matrices = [(64, 128), (64, 32), (64, 32), (128, 64), (64, 96), (64, 96), (96, 64)]
    linear = 3 * sum(2 * n * rows * columns for rows, columns in matrices) + 2 * n * 64 * 1000
    attention = 3 * 8 * (2 * n * n * 16 + 2 * n * n * 16) / 2
    assert Cost.of(hf)(np.array([n]))[0] == linear + attention
    sparse = hf | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    assert Cost.of(sparse)(np.array([n]))[0] == linear + attention + 3 * 2 * n * 64 * 32


CUTS = st.builds(
    PackingPolicy, st.one_of(st.none(), st.integers(1, 5)), st.booleans(), st.booleans()
)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(8, 128), st.sampled_from([1, 2, 8]), CUTS)
def test_another_cut_keeps_every_token_and_weight(
    lengths: list[int], dp: int, limit: int, multiple: int, cut: PackingPolicy
) -> None:
    rows = make_rows(lengths)
    parts = pack(rows, dp, limit, multiple, cut=cut)
    assert len(parts) == dp and len({len(part) for part in parts}) == 1 and len(parts[0]) >= 1
    seen = []
    for packed in (p for part in parts for p in part):
        bounds = packed.cu_seqlens
        assert (
            packed.length % multiple == 0
            and packed.length > 0
            and not packed.weight[bounds[-1] :].any()
        )
        if cut.rows:
            assert len(packed.rows) <= cut.rows
        else:
            assert packed.length <= max(limit, multiple) or len(packed.rows) == 1
        if cut.pad:
            assert len(set(np.diff(bounds).tolist())) <= 1
        for number, at in sequences(packed):
            row, n = rows[number], len(rows[number].tokens)
            seen.append(number)
            assert np.array_equal(packed.tokens[at][:n], row.tokens)
            assert np.array_equal(packed.positions[at], np.arange(at.stop - at.start)), (
                "positions go on behind the row"
            )
            assert np.allclose(packed.weight[at][: n - 1], (row.weight * row.trained)[1:])
            assert not packed.weight[at][n - 1 :].any() and not packed.tokens[at][n:].any()
            assert (packed.temperature[at] > 0).all()
    assert sorted(seen) == list(range(len(rows)))
    if not cut.balance:
        in_order = [
            [number for packed in part for number in packed.rows.tolist()] for part in parts
        ]
        assert [number for part in in_order for number in part] == list(range(len(rows)))
        assert max(map(len, in_order)) - min(map(len, in_order)) <= 1


def test_microbatches_of_so_many_rows_are_balanced_over_ranks_by_cost() -> None:
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in np.clip(rng.lognormal(np.log(400), 1.0, 256), 1, 8192)]
    balanced, in_order = (
        divide(lengths, 4, 0, PackingPolicy(rows=8, balance=balance)) for balance in (True, False)
    )
    assert (
        {len(bin_) for part in balanced for bin_ in part}
        == {8}
        == {len(bin_) for part in in_order for bin_ in part}
    )
    assert max(costs(lengths, balanced, Cost())) < 1.005 * sum(costs(lengths, balanced, Cost())) / 4
    assert max(costs(lengths, in_order, Cost())) > 1.05 * sum(costs(lengths, in_order, Cost())) / 4


def test_exchanges_equalise_ranks_of_equal_row_counts_too() -> None:
    """Largest first ends with 22 and 24."""
    lengths, linear = [11, 9, 7, 7, 6, 6], Cost(1.0, 0.0)
    assert costs(lengths, divide(lengths, 2, 0, PackingPolicy(rows=3), linear), linear) == [23, 23]


def test_padded_microbatches_hold_rows_of_similar_length() -> None:
    parts = divide([10, 100, 11, 99, 12, 98], 1, 300, PackingPolicy(pad=True))
    assert parts == [[[1, 3, 5], [4, 2, 0]]]


def test_a_row_longer_than_the_limit_travels_alone() -> None:
    parts = pack(make_rows([50, 5, 5]), 1, 20, 1)
    assert [sorted(map(int, p.rows)) for p in parts[0]] in (
        [[0], [1, 2]],
        [[1, 2], [0]],
        [[0], [1], [2]],
    )


def test_without_rows_every_rank_gets_padding() -> None:
    parts = pack([], 3, 16, 4)
    assert [[(p.length, len(p.rows)) for p in part] for part in parts] == [[(4, 0)]] * 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), max_size=9), min_size=1, max_size=9))
def test_weights_make_the_aggregates(losses: list[list[float]]) -> None:
    lengths = [len(row) for row in losses]
    if not sum(lengths):
        return
    sums = np.array([sum(row) for row in losses if row])
    counts = np.array([n for n in lengths if n])
    wanted = {
        "token-mean": sums.sum() / counts.sum(),
        "seq-mean-token-mean": (sums / counts).mean(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": (sums / 7).mean(),
    }
    for mode, value in wanted.items():
        weights = token_weights(lengths, mode, longest=7)
        assert sum(w * sum(row) for w, row in zip(weights, losses, strict=True)) == pytest.approx(
            value, abs=1e-9
        )


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_agg_mode=mean"):
        token_weights([1], "mean")


def test_microbatches_survive_the_wire() -> None:
    part = stack(make_rows([5, 9, 2]), 1, 10, 2)[0]
    for stacked, told in zip(part, Microbatches(encode_part(part)), strict=True):
        sent, received = stacked.packed(), told
        for name in Packed.__dataclass_fields__.keys() - {"scores", "routes"}:
            a, b = getattr(sent, name), getattr(received, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)


def test_the_benchmark_of_packing_meets_its_bars_in_a_round() -> None:
    """Nothing of it is timed but `ms`: the same on every machine."""
    layout = packing_bench.LAYOUTS[-1]
    found = packing_bench.compare("8b", layout, 1)
    assert found["real/padded"][1] >= packing_bench.BARS["real/padded"]
    assert found["dp_cost_max/mean"][1] <= packing_bench.BARS["dp_cost_max/mean"]
