"""An agent that gives a save up early leaves to the others what they need to commit it."""

import time
from pathlib import Path

from bench.faults.judge import committed
from bench.faults.toy import Cut, begin, settings
from rft.checkpoint import fence
from rft.checkpoint.commit import Committer
from rft.checkpoint.records import Committed, Report, SaveFailed
from rft.checkpoint.storage import Disk, LocalStorage
from rft.checkpoint.writer import Writer


def part(root: Path, rank: int, epoch: int, heard: list[Report]) -> Committer:
    """One rank's part of a save of two, written by an agent whose trainer is gone."""
    storage, told = (
        LocalStorage(root, Disk()),
        settings(str(root), str(root / "control"), rank, 2, epoch, [], 0, lease_s=0),
    )
    asked = begin(storage, Cut(2), rank, 2, f"e{epoch:04d}n0000")
    writer = Writer(asked, told, storage, lambda count: None)
    writer.window(memoryview(Cut(2).file(asked.outputs[0].regions)), 0)
    writer.finish()
    committer = Committer(storage, told, heard.append, orphaned=lambda: True)
    committer.watch(asked, asked.outputs[0], time.monotonic())
    committer.look()
    return committer


def test_a_rank_whose_agent_comes_late_still_commits(tmp_path: Path) -> None:
    epoch = fence.take_epoch(tmp_path / "control")
    heard: list[Report] = []
    part(tmp_path, 1, epoch, heard)  # rank 0's agent has not yet locked anything: it looks dead
    assert [type(report) for report in heard] == [SaveFailed]
    part(tmp_path, 0, epoch, heard)
    assert isinstance(heard[1], Committed)
    assert [(held.cut, held.why) for held in committed(tmp_path)] == [(Cut(2), "")]
