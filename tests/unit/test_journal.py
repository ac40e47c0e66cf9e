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
    (log,) = written(tmp_path, [b"a" * 40, b"b" * 40])
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
def test_a_flipped_byte_in_the_middle_is_refused_with_file_and_offset(
    tmp_path: Path, seed: int
) -> None:
    (log,) = written(tmp_path, [b"a" * 40] * 5)
    frame = 40 + HEADER.size
    # in the header or the body of any but the last record
    broken = random.Random(seed).randrange(4 * frame)
    data = bytearray(log.read_bytes())
    data[broken] ^= 0x10
    log.write_bytes(data)
    with pytest.raises(
        JournalError, match=f"{log.name} is damaged at byte {broken // frame * frame} "
    ):
        Journal(tmp_path)
    assert log.read_bytes() == bytes(data), "a refused file stays as it is"


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
