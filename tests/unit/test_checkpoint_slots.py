"""A slot that was handed over comes back whatever becomes of its save, or the next saves would wait
for it in vain.
"""

import mmap
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.toy import Cut, begin, plan, settings
from rft.checkpoint import fence, sharding
from rft.checkpoint.link import Link
from rft.checkpoint.records import Begin, Freed, Report, SaveFailed, Window
from rft.checkpoint.storage import Disk, LocalStorage

PATIENCE_S = 60.0


@pytest.fixture
def slots() -> Iterator[list[int]]:
    found = [os.memfd_create("slot") for _ in range(2)]
    for descriptor in found:
        os.ftruncate(descriptor, mmap.PAGESIZE * 8)
    yield found
    for descriptor in found:
        os.close(descriptor)


def test_windows_of_a_save_that_has_failed_give_their_slots_back(
    tmp_path: Path, slots: list[int]
) -> None:
    epoch = fence.take_epoch(tmp_path / "control")
    told = settings(
        str(tmp_path / "nowhere"), str(tmp_path / "control"), 0, 1, epoch, slots, mmap.PAGESIZE * 8
    )
    heard: queue.SimpleQueue[Report] = queue.SimpleQueue()
    link = Link(told, heard.put, tmp_path / "agent.log")
    asked: Begin = begin(LocalStorage(tmp_path / "nowhere", Disk()), Cut(2), 0, 1, "e0001n0000")
    total = sharding.extent(plan(1, 1)[0])
    try:
        link.begin(asked)
        # its directory cannot be made
        link.window(Window(id=asked.id, slot=0, start=0, stop=64, last=False))
        seen = [heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)]
        assert {type(report) for report in seen} == {SaveFailed, Freed}
        # staging knew nothing of it
        link.window(Window(id=asked.id, slot=1, start=64, stop=total, last=True))
        last = heard.get(timeout=PATIENCE_S)
        assert isinstance(last, Freed) and last.slot == 1
        link.drop(asked.id, "given up for a newer one")  # nor that there is nothing left to give up
    finally:
        link.close(PATIENCE_S)
