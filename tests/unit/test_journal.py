"""The journal keeps what it acknowledged: through kill -9, torn
tails and compaction; damage is refused.
"""

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rft.buffer import journal as journal_module
from rft.buffer.journal import HEADER, Journal, JournalError
from rft.ground import durable

WRITER = """
import asyncio, os, sys
from rft.buffer.journal import Journal

async def main() -> None:
    journal = Journal(sys.argv[1], segment_bytes=20_000)
    number = sum(1 for _ in journal.records())

    async def write() -> None:
        nonlocal number
        while True:
            mine, number = number, number + 1
            journal.append([f"{mine}:".encode() + os.urandom(mine % 700)])
            await journal.commit()
            os.write(1, f"{mine}\\n".encode())

    await asyncio.gather(*(write() for _ in range(4)))

asyncio.run(main())
"""


def payloads(journal: Journal) -> list[bytes]:
    return [payload for _, payload in journal.records()]


def written(directory: Path, records: list[bytes], segment_bytes: int = 2**20) -> list[Path]:
    journal = Journal(directory, segment_bytes)
    for record in records:
        journal.append([record])
    journal.close()
    return sorted(directory.glob("*.log"))


def crashed(directory: Path, acknowledged: list[bytes], others: list[bytes]) -> tuple[Path, int]:
    """As a power loss finds it before the pages of the `others` are on the disk; the log, and how
    much of it was synced.
    """
    journal = Journal(directory)
    journal.append(acknowledged)
    journal.sync()
    for record in others:
        journal.append([record])
    synced = journal.durable
    os.close(journal._lock_fd)
    (log,) = directory.glob("*.log")
    return log, synced


def test_records_come_back_in_order_at_their_positions(tmp_path: Path) -> None:
    records = [os.urandom(n) for n in (0, 1, 100, 5000, 3, 70_000)]
    written(tmp_path, records, segment_bytes=4096)
    journal = Journal(tmp_path, segment_bytes=4096)
    assert payloads(journal) == records
    assert len(list(tmp_path.glob("*.log"))) > 2
    positions = [position for position, _ in journal.records()]
    assert [journal.read(position) for position in positions] == records
    assert [payload for _, payload in journal.records(positions[2], positions[4])] == records[2:4]
    assert journal.position == journal.durable == sum(len(r) + HEADER.size for r in records)
    journal.close()


def test_a_position_inside_a_record_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([b"x" * 50])
    for position in (1, journal.position, journal.position + 7):
        with pytest.raises(JournalError, match="no correct record"):
            journal.read(position)
    journal.close()


def test_a_second_writer_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(JournalError, match=f"already open in process {os.getpid()}"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize("lost", [1, 7, 40, 55])
def test_a_torn_tail_is_cut_off_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: int
) -> None:
    log, _ = crashed(tmp_path, [b"a" * 40], [b"b" * 40])
    os.truncate(log, log.stat().st_size - lost)
    with caplog.at_level(logging.WARNING):
        journal = Journal(tmp_path)
    assert "torn record" in caplog.text
    journal.append([b"c"])
    assert payloads(journal) == [b"a" * 40, b"c"]
    journal.close()


def test_zeros_behind_the_last_record_are_a_torn_tail(tmp_path: Path) -> None:
    (log,) = written(tmp_path, [b"a" * 40])
    os.truncate(log, 4096)
    journal = Journal(tmp_path)
    assert payloads(journal) == [b"a" * 40]
    journal.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_byte_is_refused_with_file_and_offset(tmp_path: Path, seed: int) -> None:
    """Also in the last record, which was acknowledged; an older rft did not say so."""
    (log,) = written(tmp_path, [b"a" * 40] * 5)
    frame, is_old = 40 + HEADER.size, seed % 2
    if is_old:
        (tmp_path / "durable").unlink()
    broken = random.Random(seed).randrange((5 - is_old) * frame)
    data = bytearray(log.read_bytes())
    data[broken] ^= 0x10
    log.write_bytes(data)
    with pytest.raises(
        JournalError, match=f"{log.name} is damaged at byte {broken // frame * frame} "
    ):
        Journal(tmp_path)
    assert log.read_bytes() == bytes(data), "a refused file stays as it is"


@pytest.mark.parametrize("seed", range(12))
def test_it_opens_after_any_power_loss_that_left_what_was_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    """Pages behind the last fsync are on the disk or read as zeros, in any order."""
    chance = random.Random(seed)
    size = chance.choice([100, 900, 3000, 9000])
    acknowledged, others = (
        [os.urandom(size) for _ in range(n)] for n in (3, chance.randrange(2, 7))
    )
    log, synced = crashed(tmp_path, acknowledged, others)
    page, share = chance.choice([512, 4096]), chance.choice([0.1, 0.5])
    with open(log, "r+b") as file:
        for at in range(-(-synced // page) * page, log.stat().st_size, page):
            if chance.random() < share:
                file.seek(at)
                file.write(bytes(min(page, log.stat().st_size - at)))
    journal = Journal(tmp_path)
    there = payloads(journal)
    assert there == [*acknowledged, *others][: len(there)] and len(there) >= 3
    journal.append([b"more"])
    journal.close()
    assert payloads(Journal(tmp_path)) == [*there, b"more"]


@pytest.mark.parametrize("left", [0, 57, 111])
def test_a_log_without_its_acknowledged_end_is_refused(tmp_path: Path, left: int) -> None:
    (log,) = written(tmp_path, [b"a" * 40, b"b" * 40])
    os.truncate(log, left)
    why = f"lacks the positions .* to 112, which should be in {log.name}"
    with pytest.raises(JournalError, match="is damaged at byte" if left % 56 else why):
        Journal(tmp_path)
    log.unlink()
    with pytest.raises(JournalError, match=why):
        Journal(tmp_path)


def test_a_frame_behind_a_bad_one_is_found_wherever_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is looked through piece by piece, and a frame may begin at the end of one."""
    monkeypatch.setattr(journal_module, "LOOK_BYTES", 16)
    for gap in range(1, 40):
        path = tmp_path / str(gap)
        path.write_bytes(b"?" * gap + journal_module.frame(b"good"))
        with open(path, "rb") as file:
            assert journal_module.has_frame_after(file.fileno(), 0, path.stat().st_size)
            assert not journal_module.has_frame_after(file.fileno(), gap, path.stat().st_size)


def test_a_file_that_cannot_be_begun_is_told_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path, segment_bytes=150)
    journal.append([b"a" * 100])
    with monkeypatch.context() as patched:
        patched.setattr(durable, "sync_directory", failing)
        with pytest.raises(JournalError, match="cannot begin a file behind .*Input/output error"):
            journal.append([b"b" * 100])
    with pytest.raises(JournalError, match="failed before"):
        journal.append([b"c"])
    journal.close()
    journal = Journal(tmp_path, segment_bytes=150)
    assert payloads(journal) == [b"a" * 100], "what was acknowledged, and no more"
    for letter in (b"b", b"c"):
        journal.append([letter * 100])
    assert payloads(journal) == [b"a" * 100, b"b" * 100, b"c" * 100]
    journal.close()


def test_a_journal_of_many_files_keeps_few_of_them_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journal = Journal(tmp_path, segment_bytes=50)
    for _ in range(20):
        journal.append([b"x" * 50])
    journal.install(journal.write_base(int(journal.cut(500) or 0), [b"kept"]))
    there = len(os.listdir("/proc/self/fd")) - before
    assert len(list(tmp_path.glob("*.log"))) > 10 and there <= 3
    assert len([journal.read(position) for position, _ in journal.records()]) > 10
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_torn_segment_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    logs = written(tmp_path, [b"a" * 100] * 4, segment_bytes=150)
    os.truncate(logs[1], logs[1].stat().st_size - 1)
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    logs = written(tmp_path, [b"a" * 100] * 4, segment_bytes=150)
    logs[1].unlink()
    with pytest.raises(JournalError, match=f"lacks the positions .* {logs[1].name}"):
        Journal(tmp_path)


def test_concurrent_commits_share_fsyncs(tmp_path: Path) -> None:
    async def main() -> tuple[int, int, int]:
        journal = Journal(tmp_path)

        async def write(number: int) -> None:
            journal.append([str(number).encode()])
            mine = journal.position
            await journal.commit()
            assert journal.durable >= mine

        await asyncio.gather(*(write(n) for n in range(300)))
        counts = journal.fsyncs, journal.commits, len(payloads(journal))
        journal.close()
        return counts

    fsyncs, commits, records = asyncio.run(main())
    assert (commits, records) == (300, 300)
    assert fsyncs <= 3


def test_a_commit_waits_for_an_fsync_that_began_after_its_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = Journal(tmp_path)
        loop = asyncio.get_running_loop()
        begun, release = asyncio.Event(), threading.Event()
        real = os.fsync

        def slow(fd: int) -> None:
            loop.call_soon_threadsafe(begun.set)
            assert release.wait(10)
            real(fd)

        monkeypatch.setattr(journal_module.os, "fsync", slow)
        journal.append([b"first"])
        first = asyncio.create_task(journal.commit())
        await begun.wait()
        journal.append([b"second"])
        second = asyncio.create_task(journal.commit())
        release.set()
        await first
        assert journal.durable < journal.position or second.done()
        await second
        assert journal.durable == journal.position
        assert journal.fsyncs == 2
        journal.close()

    asyncio.run(main())


def test_after_a_failed_fsync_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = Journal(tmp_path)
        real = os.fsync

        def failing(fd: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(journal_module.os, "fsync", failing)
        journal.append([b"x"])
        results = await asyncio.gather(journal.commit(), journal.commit(), return_exceptions=True)
        assert all(isinstance(result, JournalError) for result in results)
        monkeypatch.setattr(journal_module.os, "fsync", real)
        with pytest.raises(JournalError, match="failed before"):
            await journal.commit()
        with pytest.raises(JournalError, match="failed before"):
            journal.append([b"y"])
        journal.close()

    asyncio.run(main())


def test_a_failed_write_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append([b"whole"])
    real = os.write

    def half(fd: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) - 5])

    monkeypatch.setattr(journal_module.os, "write", half)
    with pytest.raises(JournalError, match="No space left"):
        journal.append([b"z" * 100])
    monkeypatch.setattr(journal_module.os, "write", real)
    journal.close()
    (log,) = tmp_path.glob("*.log")
    assert log.stat().st_size == len(b"whole") + HEADER.size


def test_compaction_keeps_the_given_records_and_all_later_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=250)
    records = [bytes([n]) * 90 for n in range(8)]
    for record in records:
        journal.append([record])
    assert journal.cut(150) is None
    end = journal.cut(journal.position)
    assert end is not None
    later = [payload for _, payload in journal.records(start=end)]
    base = journal.write_base(end, [b"kept", b"also"])
    assert payloads(journal) == records, "nothing changes before `install`"
    before = journal.position
    journal.install(base)
    assert payloads(journal) == [b"kept", b"also", *later]
    assert [journal.read(position) for position in base.positions] == [b"kept", b"also"]
    assert journal.position == before
    journal.append([b"new"])
    journal.close()
    again = Journal(tmp_path, segment_bytes=250)
    assert payloads(again) == [b"kept", b"also", *later, b"new"]
    assert again.position == before + HEADER.size + 3
    again.close()


def test_a_crash_within_compaction_loses_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=200)
    for number in range(8):
        journal.append([bytes([number]) * 90])
    journal.close()
    old = {log.name: log.read_bytes() for log in tmp_path.glob("*.log")}
    journal = Journal(tmp_path, segment_bytes=200)
    end = journal.cut(journal.position)
    assert end is not None
    journal.write_base(end, [b"kept"])  # crash before the rename
    journal.close()
    journal = Journal(tmp_path, segment_bytes=200)
    assert len(payloads(journal)) == 8
    assert not list(tmp_path.glob("*.tmp"))
    journal.install(journal.write_base(end, [b"kept"]))
    expected = payloads(journal)
    journal.close()
    for name, data in old.items():  # crash after the rename, before the old files were gone
        (tmp_path / name).write_bytes(data)
    journal = Journal(tmp_path, segment_bytes=200)
    assert payloads(journal) == expected
    assert all(int(log.stem) >= end for log in tmp_path.glob("*.log"))
    journal.close()


def test_a_segment_is_synced_before_the_next_one_begins(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=150)
    journal.append([b"a" * 100])
    assert journal.durable == 0
    journal.append([b"b" * 100])
    assert journal.durable == 100 + HEADER.size
    journal.close()


def test_all_acknowledged_records_survive_kill_9(tmp_path: Path) -> None:
    acknowledged: set[int] = set()
    for kill in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(40 + 37 * kill):
            acknowledged.add(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        acknowledged.update(int(line) for line in process.stdout.read().split(b"\n")[:-1])
        process.wait()
        journal = Journal(tmp_path, segment_bytes=20_000)
        there = [int(payload.split(b":")[0]) for payload in payloads(journal)]
        journal.close()
        assert there == list(range(len(there))), "no gaps and no repeats"
        assert acknowledged <= set(there)
    assert len(acknowledged) > 400


def test_a_kernel_that_gives_less_than_asked_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [os.urandom(n) for n in (0, 5000, 1, 300)]
    written(tmp_path, records)
    real = os.pread
    monkeypatch.setattr(
        journal_module.os, "pread", lambda fd, size, offset: real(fd, min(size, 7), offset)
    )
    journal = Journal(tmp_path)
    assert payloads(journal) == records == list(journal_module.payloads(tmp_path))
    assert [journal.read(position) for position, _ in journal.records()] == records
    journal.close()


@pytest.mark.verify
def test_a_base_of_more_than_two_gibibytes_opens(tmp_path: Path) -> None:
    """Linux gives at most 0x7ffff000 bytes in one call.

    Nine records of zeros, which lie in holes of the file.
    """
    length, count = 2**28, 9
    zeros = bytes(length)
    header = journal_module.frame(zeros)[: HEADER.size]
    size = count * (HEADER.size + length)
    with open(tmp_path / f"{size:020d}.base", "wb") as file:
        for number in range(count):
            file.seek(number * (HEADER.size + length))
            file.write(header)
        file.truncate(size)
    journal = Journal(tmp_path)
    assert journal.position == size
    assert [payload == zeros for _, payload in journal.records()] == [True] * count
    assert journal.read(size - length - HEADER.size) == zeros
    journal.close()
