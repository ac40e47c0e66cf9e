"""An agent that gives a save up early leaves to the others what they need to commit it, and one
whose disk fails does not say that a save has failed which another commits.
"""

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from bench.faults.judge import committed
from bench.faults.toy import Cut, begin, settings
from rft.checkpoint import fence
from rft.checkpoint.commit import Committer
from rft.checkpoint.records import Committed, Report, SaveFailed
from rft.checkpoint.storage import Disk, LocalStorage
from rft.checkpoint.writer import Writer


class Flaky(LocalStorage):
    """Fails the next `times` times that `operation` is done to what ends in `name`."""

    def __init__(self, root: Path, operation: str, name: str):
        super().__init__(root, Disk())
        self.operation, self.name, self.times = operation, name, 0

    def fail(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(self.name) and self.times > 0:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def list(self, path: str = "") -> list[str]:
        self.fail("list", path)
        return super().list(path)

    def get(self, path: str) -> bytes:
        self.fail("get", path)
        return super().get(path)

    def put(self, path: str, data: bytes) -> None:
        self.fail("put", path)
        super().put(path, data)


def part(
    root: Path,
    rank: int,
    epoch: int,
    heard: list[Report],
    lease_s: float = 0.0,
    storage: LocalStorage | None = None,
) -> Committer:
    """One rank's part of a save of two; without a lease, of an agent whose trainer is gone."""
    storage = storage or LocalStorage(root, Disk())
    told = settings(str(root), str(root / "control"), rank, 2, epoch, [], 0, lease_s=lease_s)
    asked = begin(storage, Cut(2), rank, 2, f"e{epoch:04d}n0000")
    writer = Writer(asked, told, storage, lambda count: None)
    writer.window(memoryview(Cut(2).file(asked.outputs[0].regions)), 0)
    writer.finish()
    committer = Committer(storage, told, heard.append, orphaned=lambda: not lease_s)
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


HOURS = 1e5
FLAKY = (("list", ".tmp-e0001n0000"), ("get", "r00001.json"), ("put", "MANIFEST.json"))


@pytest.mark.parametrize("operation, name", FLAKY)
def test_rank_0_tries_again_what_failed_once(tmp_path: Path, operation: str, name: str) -> None:
    epoch, heard = fence.take_epoch(tmp_path / "control"), list[Report]()
    storage = Flaky(tmp_path, operation, name)
    lead = part(tmp_path, 0, epoch, heard, HOURS, storage)
    part(tmp_path, 1, epoch, [], HOURS)
    storage.times = 1
    lead.look()
    assert heard == [] and storage.times == 0
    lead.look()
    assert type(heard[0]) is Committed


@pytest.mark.parametrize("operation, name", FLAKY)
def test_rank_0_that_fails_a_commit_hears_of_another_ones(
    tmp_path: Path, operation: str, name: str
) -> None:
    epoch, heard = fence.take_epoch(tmp_path / "control"), list[Report]()
    storage = Flaky(tmp_path, operation, name)
    lead = part(tmp_path, 0, epoch, heard, HOURS, storage)
    second = part(tmp_path, 1, epoch, heard, HOURS)
    storage.times = 3
    for _ in range(3):
        lead.look()
    assert heard == [] and lead.drafts
    second.settings = msgspec.structs.replace(second.settings, lease_s=0)  # its turn has come
    second.look()
    lead.look()
    assert [report.id for report in heard if isinstance(report, Committed)] == ["e0001n0000"] * 2
    assert not any(isinstance(report, SaveFailed) for report in heard)


def test_a_commit_between_the_last_receipt_and_the_sync_of_its_name(tmp_path: Path) -> None:
    """Rank 0 sees it at once: the draft has its last name before who wrote the receipt goes on."""
    epoch, heard = fence.take_epoch(tmp_path / "control"), list[Report]()
    lead = part(tmp_path, 0, epoch, heard, HOURS)

    class Quick(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "r00001.json":
                lead.look()

    part(tmp_path, 1, epoch, heard, HOURS, LocalStorage(tmp_path, Quick()))
    assert [report.id for report in heard if isinstance(report, Committed)] == ["e0001n0000"] * 2


def test_a_commit_that_fails_for_good_is_reported_with_its_cause(tmp_path: Path) -> None:
    epoch, heard = fence.take_epoch(tmp_path / "control"), list[Report]()
    storage = Flaky(tmp_path, "put", "MANIFEST.json")
    lead = part(tmp_path, 0, epoch, heard, HOURS, storage)
    part(tmp_path, 1, epoch, [], HOURS)
    storage.times = 10**9
    lead.look()
    lead.settings = msgspec.structs.replace(lead.settings, lease_s=0)  # all turns are over
    lead.look()
    assert [type(report) for report in heard] == [SaveFailed]
    assert "Input/output error" in heard[0].cause and not lead.drafts
