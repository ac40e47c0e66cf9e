"""What ranks read of a part in an agent's memory: the same bytes, whichever ranges they ask for, or
`Damaged`.
"""

import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rft.checkpoint.chunks import AT_ONCE, MOST_PLACES, Damaged
from rft.checkpoint.memory import _read_slot
from rft.checkpoint.records import CHUNK, FORMAT, Receipt
from rft.checkpoint.remote import HeldFile
from rft.checkpoint.writer import ChunkHasher

CONTENT = random.Random(5).randbytes(2 * CHUNK + 12345)


@pytest.fixture
def slot() -> Iterator[int]:
    """Of a part that ends before it."""
    descriptor = os.memfd_create("slot")
    os.write(descriptor, CONTENT)
    os.ftruncate(descriptor, 3 * CHUNK)
    yield descriptor
    os.close(descriptor)


def held(fetch: Any) -> HeldFile:
    receipt = Receipt(
        format=FORMAT,
        id="x",
        step=7,
        epoch=1,
        rank=3,
        world=4,
        layout="",
        file="",
        bytes=len(CONTENT),
        chunks=ChunkHasher.of(memoryview(CONTENT)),
        regions=[],
        small={},
        local={},
    )
    return HeldFile(receipt, "there", fetch)


def filled(file: HeldFile, ranges: list[tuple[int, int]]) -> list[bool]:
    """Of each range, whether it is as it should be."""
    places = [bytearray(stop - start) for start, stop in ranges]
    file.fill([(start, memoryview(to)) for (start, _), to in zip(ranges, places, strict=True)])
    return [to == CONTENT[a:b] for (a, b), to in zip(ranges, places, strict=True)]


def drawn(seed: int, most: int) -> list[tuple[int, int]]:
    """Ranges with gaps between them, in some order."""
    chance = random.Random(seed)
    ends = sorted(chance.sample(range(len(CONTENT) + 1), 2 * chance.randrange(1, most)))
    ranges = list(zip(ends[::2], ends[1::2], strict=True))
    chance.shuffle(ranges)
    return ranges


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, len(CONTENT))],
        [(CHUNK, 2 * CHUNK)],
        [(5, 9), (CHUNK - 1, CHUNK + 1)],
        [(0, CHUNK), (0, CHUNK), (7, 100)],
        [(at, at + 4096) for at in range(0, 2 * CHUNK, 4096)],
        *(drawn(seed, 40) for seed in range(8)),
        drawn(8, 3 * MOST_PLACES),
    ],
)
def test_every_range_is_filled(slot: int, ranges: list[tuple[int, int]]) -> None:
    file = held(partial(_read_slot, slot))
    assert all(filled(file, ranges)) and all(filled(file, ranges[::-1]))


def test_a_changed_byte_is_found_also_where_nobody_asks_for_it(slot: int) -> None:
    os.pwrite(slot, bytes([CONTENT[CHUNK + 9] ^ 1]), CHUNK + 9)
    file = held(partial(_read_slot, slot))
    assert all(filled(file, [(0, CHUNK), (2 * CHUNK, len(CONTENT))]))
    for ranges in ([(CHUNK, 2 * CHUNK)], [(CHUNK + 10, 2 * CHUNK)], [(CHUNK + 10, CHUNK + 11)]):
        with pytest.raises(Damaged, match="there: chunk 1 was changed .of rank 3's part of step 7"):
            filled(file, ranges)


def test_each_chunk_is_fetched_once_and_no_more_of_it_at_a_time_than_is_said(slot: int) -> None:
    fetched: list[int] = []

    def fetch(start: int, places: list[memoryview]) -> None:
        fetched.append(sum(map(len, places)))
        _read_slot(slot, start, places)

    file = held(fetch)
    assert all(filled(file, [(CHUNK // 2 + 64, CHUNK + 10), (0, CHUNK // 2)]))
    assert sum(fetched) == 2 * CHUNK and max(fetched) <= AT_ONCE
    assert all(filled(file, [(CHUNK + 20, CHUNK + 50)]))  # it has that one still
    assert sum(fetched) == 2 * CHUNK


def test_what_a_slot_does_not_have_is_no_chunk(slot: int) -> None:
    os.ftruncate(slot, 2 * CHUNK)
    with pytest.raises(Damaged, match="chunk 2"):
        filled(held(partial(_read_slot, slot)), [(2 * CHUNK, len(CONTENT))])
