"""The plan of a weight stream, by value: what it accepts, how it cuts, and what its digest sees."""

import dataclasses

import pytest

from rft.ground.protocols import Block
from rft.sync import plan as plans


def rows(name: str, start: int, stop: int, total: int = 8, width: int = 4) -> Block:
    return Block(name, "float32", (total, width), 0, start, stop)


def columns(name: str, start: int, stop: int, total: int = 8, height: int = 4) -> Block:
    return Block(name, "float32", (height, total), 1, start, stop)


def test_ranks_without_blocks_have_no_stream_and_order_is_rank_order() -> None:
    plan = plans.build([[rows("a", 0, 4)], [], [rows("a", 4, 8)]], 1024)
    assert [stream.rank for stream in plan.streams] == [0, 2]


def test_columns_and_rows_cover_their_tensors() -> None:
    assert plans.coverage_errors([rows("a", 0, 8), columns("b", 0, 3), columns("b", 3, 8)]) == []


@pytest.mark.parametrize(
    ("blocks", "part"),
    [
        ([rows("a", 0, 4)], "a: dim 0 ends at 4, the tensor at 8"),
        ([rows("a", 4, 8)], "a: dim 0 [0, 4) is missing"),
        ([rows("a", 0, 3), rows("a", 5, 8)], "a: dim 0 [3, 5) is missing"),
        ([rows("a", 0, 5), rows("a", 4, 8)], "a: dim 0 [4, 5) comes more than once"),
        ([rows("a", 0, 8), rows("a", 0, 8)], "a: dim 0 [0, 8) comes more than once"),
        ([rows("a", 0, 12)], "a: dim 0 ends at 12, the tensor at 8"),
        ([rows("a", 0, 4), columns("a", 4, 8)], "a: blocks disagree"),
        ([rows("a", 0, 0), rows("a", 0, 8)], "a: block [0, 0) is empty"),
        ([Block("a", "float3", (8, 4), 0, 0, 8)], "a: dtype float3 is unknown"),
        ([Block("a", "float32", (8,), 1, 0, 8)], "a: dim 1 of shape (8,) cannot be cut"),
        ([], "no rank owns any block"),
    ],
)
def test_bad_coverage_is_named(blocks: list[Block], part: str) -> None:
    with pytest.raises(ValueError) as raised:
        plans.build([blocks], 1024)
    assert part in str(raised.value)


def test_all_coverage_errors_are_listed_at_once() -> None:
    errors = plans.coverage_errors([rows("a", 0, 4), rows("b", 4, 8), rows("c", 0, 8)])
    assert [error[0] for error in errors] == ["a", "b"]


@pytest.mark.parametrize("limit", [1, 16, 64, 100, 128, 1000, 4096])
def test_buckets_keep_their_limit_and_hold_every_row_once_in_order(limit: int) -> None:
    blocks = [
        rows("a", 0, 100, 100),
        columns("b", 2, 5),
        columns("b", 0, 2),
        columns("b", 5, 8),
        rows("c", 0, 1, 1),
    ]
    stream = plans.build([blocks], limit).streams[0]
    seen = [
        (piece.block, row)
        for b in stream.buckets
        for piece in b.pieces
        for row in range(piece.start, piece.stop)
    ]
    assert seen == [
        (number, row) for number, block in enumerate(blocks) for row in range(block.block_shape[0])
    ]
    for bucket in stream.buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == end and piece.offset % plans.ALIGNMENT == 0
            size = (piece.stop - piece.start) * plans.row_bytes(blocks[piece.block])
            assert piece.offset + size <= bucket.nbytes
            assert piece.offset + size <= max(limit, plans.row_bytes(blocks[piece.block]))
            end = -(-(piece.offset + size) // plans.ALIGNMENT) * plans.ALIGNMENT
        assert bucket.nbytes == end


def test_a_block_that_fits_a_bucket_is_never_cut() -> None:
    blocks = [rows(name, 0, 8) for name in "abcdef"]  # 128 bytes each
    buckets = plans.build([blocks], 300).streams[0].buckets
    assert [[piece.block for piece in bucket.pieces] for bucket in buckets] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_digest_changes_with_everything() -> None:
    base = [[rows("a", 0, 4)], [rows("a", 4, 8), rows("b", 0, 8)]]
    other_dtype = [[dataclasses.replace(b, dtype="int32") for b in rank] for rank in base]
    variants = [
        plans.build(base, 1024),
        plans.build(base, 64),
        plans.build([base[0] + base[1]], 1024),
        plans.build([base[0], base[1][::-1]], 1024),
        plans.build([base[1], base[0]], 1024),
        plans.build(other_dtype, 1024),
        plans.build([base[0], [], base[1]], 1024),
    ]
    assert len({plan.digest for plan in variants}) == len(variants)
    assert plans.build(base, 1024).digest == variants[0].digest


def test_plan_survives_encoding_and_a_changed_one_is_refused() -> None:
    plan = plans.build([[rows("a", 0, 4)], [rows("a", 4, 8)]], 1024)
    data = plans.encode(plan)
    assert plans.decode(data) == plan
    data["streams"][0]["blocks"][0]["stop"] = 5  # type: ignore[index]
    with pytest.raises(ValueError, match="its content has"):
        plans.decode(data)
