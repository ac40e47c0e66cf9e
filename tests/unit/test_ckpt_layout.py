"""Geometry of checkpoints: any cut reads any other bit by bit; holes and overlaps are found; work
is shared out evenly.
"""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import held, write_cut

from rft.checkpoint import sharding
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.rank_files import OpenFiles
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.records import CHUNK
from rft.checkpoint.restore import Elements
from rft.checkpoint.sharding import Claim, CoverageError, boxes, check_coverage
from rft.checkpoint.storage import open_storage

Box = tuple[tuple[int, ...], tuple[int, ...]]
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def box_cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """`shape` cut by planes, again and again, each part on its own: what TP, PP and CP leave."""
    parts: list[Box] = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offset, extent = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[axis]))
        low = tuple(at if a == axis else n for a, n in enumerate(extent))
        high = tuple(n - at if a == axis else n for a, n in enumerate(extent))
        parts += [
            (o, e)
            for o, e in (
                (offset, low),
                (tuple(o + at if a == axis else o for a, o in enumerate(offset)), high),
            )
            if prod(e)
        ]
    return parts


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], dtype: str = "int32") -> list[Claim]:
    """Boxes, some of them as flat ranges: what a distributed optimizer holds."""
    found = []
    for offset, extent in draw(box_cuts(shape)):
        count = prod(extent)
        if draw(st.booleans()):
            inner = draw(st.lists(st.integers(0, count), max_size=3))
            edges = sorted({0, count, *inner})
            found += [
                Claim("t", dtype, shape, offset, extent, (a, b))
                for a, b in zip(edges, edges[1:], strict=False)
            ]
        else:
            found.append(Claim("t", dtype, shape, offset, extent, None))
    return found


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[np.ndarray, list[Claim], list[Claim], list[int]]:
    shape = draw(SHAPES)
    one, other = draw(cuts(shape)), draw(cuts(shape))
    owners = draw(st.lists(st.integers(0, 2), min_size=len(one), max_size=len(one)))
    return np.arange(1, prod(shape) + 1, dtype=np.uint32).reshape(shape), one, other, owners


@settings(max_examples=30, deadline=None)
@given(two_cuts())
def test_any_cut_reads_any_other(tmp_path_factory: pytest.TempPathFactory, case: tuple) -> None:
    whole, one, other, owners = case
    ranks = [
        [c for c, owner in zip(one, owners, strict=True) if owner == rank] for rank in range(3)
    ]
    with write_cut(tmp_path_factory.mktemp("cut"), whole, ranks) as checkpoint:
        checkpoint.verify()
        checkpoint.check(other)
        for claim in other:
            assert np.array_equal(checkpoint.elements(claim), held(whole, claim)), claim
        assert np.array_equal(checkpoint.whole("t"), whole)


LARGE = 3001, 2503  # four chunks


@pytest.mark.parametrize("readers", [1, 3])
def test_another_cut_reads_each_chunk_once(
    tmp_path: Path, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that had columns are read by one that has rows, in several tensors of which two are no
    memory that can be read into.
    """
    rows, columns = LARGE
    whole = np.arange(rows * columns, dtype=np.uint32).reshape(LARGE)
    cut = [
        [Claim("t", "int32", LARGE, (0, start), (rows, stop - start), None)]
        for start, stop in ((0, 1001), (1001, columns))
    ]
    write_cut(tmp_path, whole, cut).close()
    fetched: list[int] = []
    read = OpenFiles.read_into

    def counted(files: OpenFiles, name: str, start: int, places: list[memoryview]) -> int:
        fetched.append(sum(map(len, places)))
        return read(files, name, start, places)

    monkeypatch.setattr(OpenFiles, "read_into", counted)
    claims = [
        Claim("t", "int32", LARGE, (1500, 0), (rows - 1500, columns), None),
        Claim("t", "int32", LARGE, (0, 0), (1500, columns), (7, 2_000_011)),
        Claim("t", "int32", LARGE, (0, 0), (1500, columns), (2_000_011, 1500 * columns)),
        Claim("t", "int32", LARGE, (0, 1000), (rows, 2), None),
    ]
    to = [torch.zeros(prod(c.shape) if c.flat is None else c.flat[1] - c.flat[0]) for c in claims]
    to[0] = torch.zeros(columns, rows - 1500).T
    to[3] = torch.zeros(rows, 2)
    with Checkpoint(open_storage(tmp_path), "step_00000001", readers=readers) as checkpoint:
        targets = [Elements(tensor) for tensor in to]
        assert [target.memory is None for target in targets] == [True, False, False, False]
        checkpoint.fill(list(zip(claims, targets, strict=True)))
        assert sum(fetched) == checkpoint.manifest.bytes
    for claim, tensor in zip(claims, to, strict=True):
        found = tensor.contiguous().view(-1).view(torch.int32).numpy()
        assert np.array_equal(found.view(np.uint32), held(whole, claim)), claim
    file = tmp_path / "step_00000001" / "r00001.bin"
    data = bytearray(file.read_bytes())
    data[CHUNK + 5] ^= 1
    file.write_bytes(data)
    with (
        Checkpoint(open_storage(tmp_path), "step_00000001", readers=readers) as checkpoint,
        pytest.raises(Damaged, match="r00001.bin was changed: chunk 1 differs"),
    ):
        checkpoint.fill(list(zip(claims, targets, strict=True)))
    file.write_bytes(data[: CHUNK + 5])
    with (
        Checkpoint(open_storage(tmp_path), "step_00000001", readers=readers) as checkpoint,
        pytest.raises(Damaged, match="r00001.bin ends early: [05] of .* bytes of chunk"),
    ):
        checkpoint.fill(list(zip(claims, targets, strict=True)))


@settings(max_examples=60, deadline=None)
@given(SHAPES.flatmap(cuts))
def test_boxes_of_a_piece_are_its_elements_in_order(claims: list[Claim]) -> None:
    whole = np.arange(prod(claims[0].global_shape)).reshape(claims[0].global_shape)
    for claim in claims:
        flat = held(whole, claim)
        found = np.full(len(flat), -1)
        for box in boxes(claim):
            inside = whole[
                tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            ].reshape(-1)
            found[box.start : box.start + len(inside)] = inside
        assert np.array_equal(found, flat)


@settings(max_examples=60, deadline=None)
@given(SHAPES.flatmap(cuts), st.data())
def test_coverage_finds_every_hole_and_every_overlap(
    claims: list[Claim], data: st.DataObject
) -> None:
    check_coverage(claims)
    one = data.draw(st.sampled_from(claims))
    if len(claims) > 1:
        with pytest.raises(CoverageError):
            check_coverage([c for c in claims if c is not one])
    with pytest.raises(CoverageError):
        check_coverage([*claims, one])
    other = data.draw(st.sampled_from(claims))
    if other.bytes == one.bytes and other is not one:  # the count is right, the place is not
        with pytest.raises(CoverageError):
            check_coverage([c for c in claims if c is not other] + [one])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_coverage_is_what_counting_every_element_says(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    found, count = [], np.zeros(shape, dtype=int)
    for _ in range(data.draw(st.integers(1, 5))):
        low = tuple(data.draw(st.integers(0, n)) for n in shape)
        size = tuple(data.draw(st.integers(0, n - a)) for a, n in zip(low, shape, strict=True))
        found.append(Claim("t", "int32", shape, low, size, None))
        count[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] += 1
    if (count == 1).all():
        check_coverage(found)
        return
    with pytest.raises(CoverageError):
        check_coverage(found)


def test_coverage_names_what_is_wrong() -> None:
    def claim(offset: int, count: int, whole: int = 8, dtype: str = "float32") -> Claim:
        return Claim("model/w", dtype, (whole,), (offset,), (count,), None)

    with pytest.raises(CoverageError, match="model/w: 6 of 8 elements are stored$"):
        check_coverage([claim(0, 4), claim(6, 2)])
    with pytest.raises(CoverageError, match="model/w: 8 of 8 elements are stored, some twice"):
        check_coverage([claim(0, 4), claim(2, 4)])
    with pytest.raises(CoverageError, match="outside"):
        check_coverage([claim(0, 4), claim(6, 4)])
    with pytest.raises(CoverageError, match="disagree about shape and dtype"):
        check_coverage([claim(0, 4), claim(4, 4, dtype="bfloat16")])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=24), st.integers(1, 6))
def test_copies_are_stored_once_by_whoever_has_least(sizes: list[int], ranks: int) -> None:
    claims = [Claim(f"model/{i}", "float32", (n,), (0,), (n,), None) for i, n in enumerate(sizes)]
    chosen = sharding.assign([list(claims) for _ in range(ranks)])
    assert sorted(position for listed in chosen for position in listed) == list(range(len(sizes)))
    loads = [sum(sizes[position] for position in listed) for listed in chosen]
    assert max(loads) - min(loads) <= max(sizes)
    assert sharding.assign([list(claims) for _ in range(ranks)]) == chosen


def test_pieces_of_others_and_empty_ones_are_not_stored() -> None:
    mine = Claim("model/a", "float32", (4,), (0,), (4,), None)
    view = Claim("model/a", "float32", (4,), (0,), (2,), None, stored=False)
    empty = Claim("model/b", "float32", (0,), (0,), (0,), None)
    assert sharding.assign([[view, mine, empty], [view]]) == [[1], []]


def test_a_file_has_aligned_regions_and_the_model_first() -> None:
    claims = [
        Claim(key, "bool", (n,), (0,), (n,), None)
        for key, n in (("o/x", 3), ("model/a", 65), ("model/b", 1))
    ]
    regions = sharding.place(claims)
    assert [(r.key, r.at) for r in regions] == [("model/a", 0), ("model/b", 128), ("o/x", 192)]
    assert (
        sharding.extent(regions) == 256
        and sharding.extent(regions[:2]) == 192
        and sharding.extent([]) == 0
    )
