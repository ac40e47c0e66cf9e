"""One append-only, durable log of byte records in a directory: what it acknowledged survives kill
-9.

In: `append(payloads)` hands records to the kernel, `sync` / `await commit()` make them durable;
callers that commit at the same time share one fsync. Out: `records()` in the order written,
`read(position)` one of them. A position is a byte offset over all segments, so it only grows and a
checkpoint can store it as a number.

    <end>.base   records kept from before `end` by the last compaction; lies at positions [end -
                 size, end)
    <start>.log  segments, each begins where the one before ends; only the last one is written to
    lock         held by the one process that has the journal open

A frame is magic, length, xxh3-64 of the payload seeded with the length, payload. Invariant: every
file but the last log is complete and synced before the next one exists, so only the last can have a
torn tail. Opening checks every frame: a torn tail is cut off with a warning; a bad frame with good
ones behind it is damage and refuses to open.
"""

import asyncio
import bisect
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rft.ground import durable

HEADER = struct.Struct("<4sIQ")
MAGIC = b"rft\x01"
MAX_PAYLOAD = 2**32 - 1  # the length field has 32 bits

logger = logging.getLogger(__name__)


class JournalError(RuntimeError):
    """The journal cannot be opened, read or written; the message names the file and what to do."""


@dataclass
class JournalSegment:
    """An open file that holds the positions [start, end)."""

    path: Path
    start: int
    end: int
    fd: int


@dataclass(frozen=True)
class Base:
    """A compacted file, written but not yet in place: its records replace all before `end`, at
    these positions.
    """

    path: Path
    end: int
    positions: list[int]


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a journal record has at most {MAX_PAYLOAD} bytes, not {len(payload)}")
    return (
        HEADER.pack(MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload, seed=len(payload)))
        + payload
    )


def read_at(fd: int, size: int, offset: int) -> bytes:
    """These bytes of a file, or fewer where it ends:

    Linux gives at most 0x7ffff000 of them in one call.
    """
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def payload_at(fd: int, offset: int, end: int) -> bytes | None:
    """The payload of the frame that begins at `offset` and lies before `end`; None if there is no
    whole and correct one.
    """
    header = read_at(fd, HEADER.size, offset)
    if len(header) < HEADER.size:
        return None
    magic, length, checksum = HEADER.unpack(header)
    start = offset + HEADER.size
    if magic != MAGIC or start + length > end:
        return None
    payload = read_at(fd, length, start)
    return payload if xxhash.xxh3_64_intdigest(payload, seed=length) == checksum else None


def frames(fd: int, size: int) -> Iterator[tuple[int, int, bytes]]:
    """(begin, end, payload) of the correct frames that a file of `size` bytes begins with; one of
    them is in memory at a time.
    """
    offset = 0
    while offset < size and (payload := payload_at(fd, offset, size)) is not None:
        end = offset + HEADER.size + len(payload)
        yield offset, end, payload
        offset = end


def has_frame_after(fd: int, offset: int, size: int) -> bool:
    """Whether any correct frame begins behind `offset`: then the bad
    bytes there are damage, not a torn tail.
    """
    data = read_at(fd, size - offset, offset)
    at = data.find(MAGIC, 1)
    while at >= 0:
        if payload_at(fd, offset + at, size) is not None:
            return True
        at = data.find(MAGIC, at + 1)
    return False


def payloads(directory: Path) -> Iterator[bytes]:
    """Every record of a journal, in order, also of one that somebody writes to: without a lock, and
    without changing a byte.
    """
    bases = sorted(directory.glob("*.base"))
    end = int(bases[-1].stem) if bases else 0
    for path in [
        *bases[-1:],
        *(log for log in sorted(directory.glob("*.log")) if int(log.stem) >= end),
    ]:
        with open(path, "rb") as file:
            yield from (
                payload for _, _, payload in frames(file.fileno(), os.fstat(file.fileno()).st_size)
            )


def take_lock(directory: Path) -> int:
    descriptor = durable.lock(directory / "lock")
    if descriptor is None:
        owner = durable.signed_by(directory / "lock") or "unknown"
        raise JournalError(
            f"the journal {directory} is already open in process {owner}: one process may write "
            "it at a time. End that process, or give this run another name or directory."
        )
    durable.sign(descriptor, str(os.getpid()))
    return descriptor


class Journal:
    """The log in `directory`, open for one writer.

    `fsyncs` and `commits` count what their names say.
    """

    def __init__(self, directory: str | Path, segment_bytes: int = 64 * 2**20) -> None:
        self.directory = Path(directory)
        self.segment_bytes = segment_bytes
        self.fsyncs = 0
        self.commits = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = take_lock(self.directory)
        self._segments: list[JournalSegment] = []
        self._failure: BaseException | None = None
        self._durable = 0
        self._syncing = threading.Lock()
        self._round: asyncio.Task[None] | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self._durable = self.position

    # Opening

    def _open(self) -> None:
        for leftover in self.directory.glob("*.tmp"):
            leftover.unlink()
        bases = sorted(self.directory.glob("*.base"))
        logs = sorted(self.directory.glob("*.log"))
        end = int(bases[-1].stem) if bases else 0
        if bases:
            size = bases[-1].stat().st_size
            self._segments.append(self._checked(bases[-1], end - size, may_be_torn=False))
        # a crash during `install` leaves them
        replaced = [*bases[:-1], *(log for log in logs if int(log.stem) < end)]
        for path in replaced:
            path.unlink()
        logs = [log for log in logs if log not in replaced]
        for log in logs:
            if int(log.stem) != end:
                raise JournalError(
                    f"the journal {self.directory} lacks the positions {end} to {int(log.stem)}, "
                    f"which should be in {end:020d}.log: "
                    "restore that file, or move the directory away."
                )
            self._segments.append(self._checked(log, end, may_be_torn=log == logs[-1]))
            end = self._segments[-1].end
        if not logs:
            self._segments.append(self._new_segment(end))
        # bytes that a killed writer left to the kernel count as written from here on
        os.fsync(self._segments[-1].fd)
        durable.sync_directory(self.directory)

    def _checked(self, path: Path, start: int, may_be_torn: bool) -> JournalSegment:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            good = max((end for _, end, _ in frames(file.fileno(), size)), default=0)
            damaged = good < size and (
                not may_be_torn or has_frame_after(file.fileno(), good, size)
            )
        if good < size:
            if damaged:
                raise JournalError(
                    f"the journal file {path} is damaged at byte {good} of {size} (position "
                    f"{start + good}), with more data behind it. Restore the file from a copy; "
                    f"or move {self.directory} away to begin with an empty buffer, "
                    "which loses the experiences that were not trained yet."
                )
            logger.warning(
                "journal file %s: cutting off a torn record of %d bytes at byte %d (position %d), "
                "which was never acknowledged",
                path,
                size - good,
                good,
                start + good,
            )
            os.truncate(path, good)
        return JournalSegment(path, start, start + good, os.open(path, os.O_RDWR | os.O_APPEND))

    def _new_segment(self, start: int) -> JournalSegment:
        path = self.directory / f"{start:020d}.log"
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        durable.sync_directory(self.directory)
        return JournalSegment(path, start, start, fd)

    # Writing

    @property
    def position(self) -> int:
        """The end of the log: where the next record will begin."""
        return self._segments[-1].end

    @property
    def durable(self) -> int:
        """All records before this position survive a crash."""
        return self._durable

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(segment.end - segment.start for segment in self._segments)

    def append(self, payloads: Iterable[bytes]) -> int:
        """Write records in one piece, not yet durable; returns the position behind them."""
        self._check()
        data = b"".join(map(frame, payloads))
        segment = self._segments[-1]
        if (
            segment.end > segment.start
            and segment.end - segment.start + len(data) > self.segment_bytes
        ):
            self.sync()
            segment = self._new_segment(segment.end)
            self._segments.append(segment)
        try:
            durable.write_all(segment.fd, data)
        except OSError as error:
            self._failure = error
            # no half record in front of a later one
            os.ftruncate(segment.fd, segment.end - segment.start)
            raise JournalError(f"cannot write {segment.path}: {error}") from error
        segment.end += len(data)
        return segment.end

    def sync(self) -> None:
        """Make all appended records durable. Runs in any thread."""
        with self._syncing:
            self._check()
            segment = self._segments[-1]
            end = segment.end
            if end <= self._durable:
                return
            try:
                os.fsync(segment.fd)
            # the kernel may have dropped the pages: nothing later may be called durable
            except OSError as error:
                self._failure = error
                raise JournalError(f"cannot sync {segment.path}: {error}") from error
            self.fsyncs += 1
            self._durable = end

    async def commit(self) -> None:
        """Return when all that was appended before this call is
        durable; concurrent callers share one fsync.
        """
        self._check()
        self.commits += 1
        end = self.position
        while self._durable < end:
            if self._round is None or self._round.done():
                self._round = asyncio.create_task(asyncio.to_thread(self.sync))
            await asyncio.shield(self._round)

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(
                f"the journal {self.directory} failed before: {self._failure}"
            ) from self._failure
        if not self._segments:
            raise JournalError(f"the journal {self.directory} is closed")

    # Reading

    def read(self, position: int) -> bytes:
        """The record that begins at `position`.

        Runs in any thread, but not while `install` runs.
        """
        index = bisect.bisect_right(self._segments, position, key=lambda segment: segment.start) - 1
        segment = self._segments[max(index, 0)]
        offset = position - segment.start
        payload = (
            payload_at(segment.fd, offset, segment.end - segment.start) if offset >= 0 else None
        )
        if payload is None:
            raise JournalError(
                f"no correct record at position {position} (byte {offset} of {segment.path})"
            )
        return payload

    def records(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(position, record) of all records that begin in [start, stop), in order."""
        for segment in list(self._segments):
            if (start is not None and segment.end <= start) or (
                stop is not None and segment.start >= stop
            ):
                continue
            size, whole = segment.end - segment.start, 0
            for begin, end, payload in frames(segment.fd, size):
                whole, position = end, segment.start + begin
                if (start is None or position >= start) and (stop is None or position < stop):
                    yield position, payload
            if whole < size:
                raise JournalError(f"the journal file {segment.path} is damaged at byte {whole}")

    # Retention: whole segments go, and what must stay of them moves into a base file

    def cut(self, position: int) -> int | None:
        """The end of the whole log segments before `position`; None if there are none to drop."""
        logs = [segment for segment in self._segments if segment.path.suffix == ".log"]
        starts = [segment.start for segment in logs[1:] if segment.start <= position]
        return starts[-1] if starts else None

    def write_base(self, end: int, payloads: Iterable[bytes]) -> Base:
        """Write what stays of the records before `end` (from `cut`) beside the log.

        Runs in any thread.
        """
        path = self.directory / f"{end:020d}.base.tmp"
        offsets, size = [], 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for payload in payloads:
                data = frame(payload)
                durable.write_all(fd, data)
                offsets.append(size)
                size += len(data)
            os.fsync(fd)
        finally:
            os.close(fd)
        return Base(path, end, [end - size + offset for offset in offsets])

    def install(self, base: Base) -> None:
        """Put `base` in the place of all files before its end:
        one rename, then the old files go.
        """
        path = base.path.with_suffix("")
        os.rename(base.path, path)
        durable.sync_directory(self.directory)
        size = path.stat().st_size
        old = [
            segment
            for segment in self._segments
            if segment.end <= base.end and segment is not self._segments[-1]
        ]
        kept = self._segments[len(old) :]
        self._segments = [
            JournalSegment(path, base.end - size, base.end, os.open(path, os.O_RDONLY)),
            *kept,
        ]
        for segment in old:
            os.close(segment.fd)
            segment.path.unlink()

    def close(self) -> None:
        """Sync, close the files and let others open the journal. Does nothing the second time."""
        if self._lock_fd < 0:
            return
        try:
            if self._segments and self._failure is None:
                self.sync()
        finally:
            with self._syncing:
                for segment in self._segments:
                    os.close(segment.fd)
                self._segments = []
                os.close(self._lock_fd)
                self._lock_fd = -1
