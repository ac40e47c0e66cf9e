"""Packing loses nothing, invents nothing, crosses no sequence border, and context-parallel slices partition it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.packing import (
    Packed,
    Row,
    cp_index,
    cp_positions,
    decode_part,
    encode_part,
    pack,
    slice_cp,
    token_weights,
)  # fmt: skip

LENGTHS = st.lists(st.integers(1, 70), max_size=30)


def make_rows(lengths: list[int]) -> list[Row]:
    """Tokens are unique over all rows, so that each can be found again; the other fields are functions of the token."""
    rows, first = [], 1
    for number, n in enumerate(lengths):
        tokens = np.arange(first, first + n)
        first += n
        trained = (tokens % 3 > 0).astype(np.float32)
        rows.append(
            Row(tokens, trained, -tokens.astype(np.float32), tokens / 7, trained * tokens / 1000, 1.0 + number / 10)
        )
    return rows


def sequences(packed: Packed) -> list[tuple[int, slice]]:
    bounds = packed.cu_seqlens.tolist()
    return [(int(r), slice(a, b)) for r, a, b in zip(packed.rows, bounds, bounds[1:], strict=False)]


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
        assert used <= limit or len(packed.rows) == 1
        assert not packed.weight[used:].any() and (packed.temperature > 0).all()
        for number, at in sequences(packed):
            row = rows[number]
            seen.append(number)
            assert np.array_equal(packed.tokens[at], row.tokens)
            assert np.array_equal(packed.positions[at], np.arange(len(row.tokens)))
            assert np.array_equal(packed.labels[at][:-1], row.tokens[1:]) and packed.weight[at][-1] == 0
            assert np.allclose(packed.weight[at][:-1], row.weight[1:])
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
        assert np.array_equal(cp_positions(part.cu_seqlens, rank, size)[real], packed.positions[index[real]])


def test_ranks_are_balanced() -> None:
    rng = np.random.default_rng(0)
    parts = pack(make_rows(rng.integers(10, 400, 200).tolist()), 4, 4096, 1)
    cost = [sum((len(rows) * (len(rows) + 6144)) for p in part for rows in [p.tokens]) for part in parts]
    assert max(cost) < 1.05 * min(cost)
    microbatches = [int(p.cu_seqlens[-1]) for part in parts for p in part]
    assert max(microbatches) < 1.2 * min(microbatches)


def test_a_row_longer_than_the_limit_travels_alone() -> None:
    parts = pack(make_rows([50, 5, 5]), 1, 20, 1)
    assert [sorted(map(int, p.rows)) for p in parts[0]] in ([[0], [1, 2]], [[1, 2], [0]], [[0], [1], [2]])


def test_without_rows_every_rank_gets_padding() -> None:
    parts = pack([], 3, 16, 4)
    assert [[(p.length, len(p.rows)) for p in part] for part in parts] == [[(4, 0)]] * 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), max_size=9), min_size=1, max_size=9))
def test_weights_make_the_three_aggregates(losses: list[list[float]]) -> None:
    lengths = [len(row) for row in losses]
    if not sum(lengths):
        return
    sums = np.array([sum(row) for row in losses if row])
    counts = np.array([n for n in lengths if n])
    wanted = {
        "token-mean": sums.sum() / counts.sum(),
        "seq-mean-token-mean": (sums / counts).mean(),
        "seq-mean-token-sum": sums.mean(),
    }
    for mode, value in wanted.items():
        weights = token_weights(lengths, mode)
        assert sum(w * sum(row) for w, row in zip(weights, losses, strict=True)) == pytest.approx(value, abs=1e-9)


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_agg_mode=mean"):
        token_weights([1], "mean")


def test_microbatches_survive_the_wire() -> None:
    part = pack(make_rows([5, 9, 2]), 1, 10, 2)[0]
    for sent, received in zip(part, decode_part(encode_part(part)), strict=True):
        for name in Packed.__dataclass_fields__:
            a, b = getattr(sent, name), getattr(received, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)
