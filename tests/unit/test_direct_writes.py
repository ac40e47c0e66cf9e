"""Writes past the page cache: any sizes and places give the same bytes as plain ones."""

import mmap
import random
from pathlib import Path

import pytest

from rft.checkpoint.storage import BLOCK, DIRECT_BYTES, Disk, LocalSink, LocalStorage


class Watched(Disk):
    def __init__(self) -> None:
        self.switched: list[bool] = []

    def bypass_cache(self, descriptor: int, on: bool) -> bool:
        self.switched.append(on)
        return super().bypass_cache(descriptor, on)


@pytest.mark.parametrize(
    "pieces",
    [
        [DIRECT_BYTES, BLOCK],
        [DIRECT_BYTES, 64],
        [3 * BLOCK + 64, DIRECT_BYTES],
        [1, 2, 3, DIRECT_BYTES],
        [DIRECT_BYTES + 1] * 2,
    ],
)
def test_any_pieces_arrive_whole(tmp_path: Path, pieces: list[int]) -> None:
    memory = mmap.mmap(-1, sum(pieces))
    memory[:] = random.Random(1).randbytes(len(memory))
    disk = Watched()
    sink = LocalStorage(tmp_path, disk).create("file", len(memory))
    at = 0
    for size in pieces:
        sink.write(memoryview(memory)[at : at + size])
        at += size
    sink.close()
    assert (tmp_path / "file").read_bytes() == memory[:]
    assert disk.switched[0] is True and len(disk.switched) <= 2


def test_small_files_are_left_to_the_cache(tmp_path: Path) -> None:
    disk = Watched()
    sink = LocalSink(disk, disk.create(tmp_path / "file", 100), 100)
    sink.write(memoryview(bytes(100)))
    sink.close()
    assert disk.switched == []
