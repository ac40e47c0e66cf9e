"""One append-only, durable log of byte records in a directory: what it acknowledged survives kill
-9.

In: `append(payloads)` hands records to the kernel, `sync` / `await commit()` make them durable;
callers that commit at the same time share one fsync. Out: `records()` in the order written,
`read(position)` one of them. A position is a byte offset over all segments, so it only grows and a
checkpoint can store it as a number.

    <end>.base   records kept from before `end` by the last compaction; lies at positions [end -
                 size, end)
    <start>.log  segments, each begins where the one before ends; only the last one is written to
    durable      how far an fsync has come: written behind it, so it never says too much
    lock         held by the one process that has the journal open

A frame is magic, length, xxh3-64 of the payload seeded with the length, payload. Invariant: every
file but the last log is complete and synced before the next one exists, so only the last can have a
torn tail. Opening checks every frame. A bad one behind the position in `durable` was never
acknowledged, whatever lies behind it (pages go to the disk in any order): the log is cut off there,
with a warning. One before it is damage, and refuses to open. A power loss may leave an older
position in `durable`, which is as good: it tells less damage, and refuses no more. In a journal of
an older rft, without that file, a bad frame with good ones behind it is damage.
Only the log that is written to is kept open; no file is ever in memory as a whole.
"""

import asyncio
import bisect
import contextlib
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rft.ground.durable import FILES, Files

HEADER = struct.Struct("<4sIQ")
MAGIC = b"rft\x01"
MAX_PAYLOAD = 2**32 - 1  # the length field has 32 bits
MARK = struct.Struct("<4sQQ")  # of the file `durable`: magic, position, checksum of the position
LOOK_BYTES = 2**20  # read at once to find a frame behind a bad one

logger = logging.getLogger(__name__)


class JournalError(RuntimeError):
    """The journal cannot be opened, read or written; the message names the file and what to do."""


@dataclass
class JournalSegment:
    """A file that holds the positions [start, end)."""

    path: Path
    start: int
    end: int


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


def payload_at(fd: int, offset: int, end: int, files: Files = FILES) -> bytes | None:
    """The payload of the frame that begins at `offset` and lies before `end`; None if there is no
    whole and correct one.
    """
    header = files.read(fd, HEADER.size, offset)
    if len(header) < HEADER.size:
        return None
    magic, length, checksum = HEADER.unpack(header)
    start = offset + HEADER.size
    if magic != MAGIC or start + length > end:
        return None
    payload = files.read(fd, length, start)
    return payload if xxhash.xxh3_64_intdigest(payload, seed=length) == checksum else None


def frames(fd: int, size: int, files: Files = FILES) -> Iterator[tuple[int, int, bytes]]:
    """(begin, end, payload) of the correct frames that a file of `size` bytes begins with; one of
    them is in memory at a time.
    """
    offset = 0
    while offset < size and (payload := payload_at(fd, offset, size, files)) is not None:
        end = offset + HEADER.size + len(payload)
        yield offset, end, payload
        offset = end


def has_frame_after(fd: int, offset: int, size: int, files: Files = FILES) -> bool:
    """Whether any correct frame begins behind `offset`: then the bad
    bytes there are damage, not a torn tail.
    """
    at = offset + 1
    while at < size:
        data = files.read(fd, min(LOOK_BYTES, size - at), at)
        found = data.find(MAGIC)
        while found >= 0:
            if payload_at(fd, at + found, size, files) is not None:
                return True
            found = data.find(MAGIC, found + 1)
        at += max(len(data) - len(MAGIC) + 1, 1)  # it may lie across two looks
    return False


def marked(position: int) -> bytes:
    packed = position.to_bytes(8, "little")
    return MARK.pack(MAGIC, position, xxhash.xxh3_64_intdigest(packed))


def mark_in(data: bytes) -> int | None:
    """The position that the file tells; None where there is none, or no whole one."""
    if len(data) != MARK.size:
        return None
    position = int(MARK.unpack(data)[1])
    return position if marked(position) == data else None


def payloads(directory: Path) -> Iterator[bytes]:
    """Every record of a journal, in order, also of one that somebody writes to: without a lock, and
    without changing a byte.

    Where a compaction takes the files away meanwhile it goes on with what has taken their place:
    records that came before, and still count, come again; of the others those that had not come are
    gone.
    """
    files, before = files_in(directory), list[Path]()
    while files:
        try:
            with open(files[0], "rb") as file:
                begun = frames(file.fileno(), os.fstat(file.fileno()).st_size)
                yield from (payload for _, _, payload in begun)
            files = files[1:]
        except FileNotFoundError:
            gone, files = files, files_in(directory)
            if files == before:  # no compaction: it is listed, and not there
                raise
            before = files
            logger.warning(
                "%s was cut while it was read, and is read on without what nobody needs any more",
                gone[0].parent,
            )


def files_in(directory: Path) -> list[Path]:
    """The files that hold the records of a journal, in their order."""
    # the logs first: a compaction between the two looks has put its base there before they go
    logs, bases = sorted(directory.glob("*.log")), sorted(directory.glob("*.base"))
    end = int(bases[-1].stem) if bases else 0
    return [*bases[-1:], *(log for log in logs if int(log.stem) >= end)]


class Journal:
    """The log in `directory`, open for one writer.

    `fsyncs` and `commits` count what their names say.
    """

    def __init__(
        self,
        directory: str | Path,
        segment_bytes: int = 64 * 2**20,
        files: Files = FILES,
    ) -> None:
        self.files = files
        self.directory = Path(directory)
        self.segment_bytes = segment_bytes
        self.fsyncs = 0
        self.commits = 0
        self.files.make(self.directory)
        self._lock_fd = self._take_lock()
        self._segments: list[JournalSegment] = []
        self._fd = self._mark_fd = -1  # of the last log, and of `durable`
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

    def _take_lock(self) -> int:
        lock = self.directory / "lock"
        descriptor = self.files.lock(lock)
        if descriptor is None:
            owner = self.files.content(lock).decode(errors="replace").strip() or "unknown"
            raise JournalError(
                f"the journal {self.directory} is already open in process {owner}: one process "
                "may write it at a time. End that process, or give this run another name or "
                "directory."
            )
        return descriptor

    def _open(self) -> None:
        for leftover in self.files.names(self.directory, ".tmp"):
            self.files.unlink(leftover)
        bases = self.files.names(self.directory, ".base")
        logs = self.files.names(self.directory, ".log")
        mark = mark_in(self.files.content(self.directory / "durable"))
        end = int(bases[-1].stem) if bases else 0
        if bases:
            self._segments.append(self._checked(bases[-1], None, end))
        # a crash during `install` leaves them
        replaced = [*bases[:-1], *(log for log in logs if int(log.stem) < end)]
        for path in replaced:
            self.files.unlink(path)
        logs = [log for log in logs if log not in replaced]
        for log in logs:
            if int(log.stem) != end:
                raise self._lacking(end, int(log.stem), f"{end:020d}.log")
            following = logs[logs.index(log) + 1 :]
            self._segments.append(
                self._checked(log, end, int(following[0].stem) if following else mark)
            )
            end = self._segments[-1].end
        if mark is not None and end < mark:
            raise self._lacking(end, mark, logs[-1].name if logs else f"{end:020d}.log")
        if logs:
            self._fd = self.files.write_to(logs[-1])
        else:
            self._begin_segment(end)
        # bytes that a killed writer left to the kernel count as written from here on
        self.files.sync(self._fd)
        self._mark_fd = self.files.change(self.directory / "durable")
        self._mark(end)
        self.files.sync(self._mark_fd)
        self.files.sync_directory(self.directory)

    def _lacking(self, start: int, end: int, name: str) -> JournalError:
        return JournalError(
            f"the journal {self.directory} lacks the positions {start} to {end}, "
            f"which should be in {name}: "
            "restore that file, or move the directory away."
        )

    def _checked(self, path: Path, begin: int | None, sound: int | None) -> JournalSegment:
        """`begin`: its first position; None: of a base, which ends at `sound`.

        `sound`: the position up to which it was synced; None: nobody knows.
        """
        with self._reading(path) as fd:
            size = self.files.size(fd)
            start = int(sound or 0) - size if begin is None else begin
            good = max((end for _, end, _ in frames(fd, size, self.files)), default=0)
            damaged = good < size and (
                start + good < sound
                if sound is not None
                else has_frame_after(fd, good, size, self.files)
            )
        if damaged:
            there = "with acknowledged data behind it" if sound else "with more data behind it"
            raise JournalError(
                f"the journal file {path} is damaged at byte {good} of {size} (position "
                f"{start + good}), {there}. Restore the file from a copy; "
                f"or move {self.directory} away to begin with an empty buffer, "
                "which loses the experiences that were not trained yet."
            )
        if good < size:
            logger.warning(
                "journal file %s: cutting off a torn record of %d bytes at byte %d (position %d), "
                "which was never acknowledged",
                path,
                size - good,
                good,
                start + good,
            )
            fd = self.files.write_to(path)
            try:
                self.files.truncate(fd, good)
            finally:
                self.files.close(fd)
        return JournalSegment(path, start, start + good)

    def _begin_segment(self, start: int) -> None:
        """Write on in a new file. Raises OSError, and leaves none that a later try would meet."""
        path = self.directory / f"{start:020d}.log"
        # the lock says that nobody else writes it: what is there is an empty one, of an earlier try
        fd = self.files.write_to(path)
        try:
            self.files.sync_directory(self.directory)
        except OSError:
            self.files.close(fd)
            raise
        with self._syncing:
            old, self._fd = self._fd, fd
            self._segments.append(JournalSegment(path, start, start))
        if old >= 0:
            self.files.close(old)

    def _mark(self, position: int) -> None:
        """Say how far the journal is durable, for whoever opens it after a crash; not synced: what
        a power loss takes of it is told by the frames.
        """
        self.files.put(self._mark_fd, marked(position))

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[int]:
        fd = self.files.read_from(path)
        try:
            yield fd
        finally:
            self.files.close(fd)

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
            try:
                self._begin_segment(segment.end)
            except OSError as error:
                self._failure = error
                raise JournalError(f"cannot begin a file behind {segment.path}: {error}") from error
            segment = self._segments[-1]
        try:
            self.files.write(self._fd, data)
        except OSError as error:
            self._failure = error
            self._cut_back(segment)
            raise JournalError(f"cannot write {segment.path}: {error}") from error
        segment.end += len(data)
        return segment.end

    def _cut_back(self, segment: JournalSegment) -> None:
        """No half record stays behind the last one."""
        try:
            self.files.truncate(self._fd, segment.end - segment.start)
        except OSError as error:
            logger.error(
                "%s: a half record stays until it is opened again: %s", segment.path, error
            )

    def sync(self) -> None:
        """Make all appended records durable. Runs in any thread."""
        with self._syncing:
            self._check()
            segment = self._segments[-1]
            end = segment.end
            if end <= self._durable:
                return
            try:
                self.files.sync(self._fd)
                self._mark(end)
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
        payload = None
        if offset >= 0:
            with self._reading(segment.path) as fd:
                payload = payload_at(fd, offset, segment.end - segment.start, self.files)
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
            with self._reading(segment.path) as fd:
                for begin, end, payload in frames(fd, size, self.files):
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
        fd = self.files.write_to(path, empty=True)
        try:
            for payload in payloads:
                data = frame(payload)
                self.files.write(fd, data)
                offsets.append(size)
                size += len(data)
            self.files.sync(fd)
        except BaseException:
            self.files.unlink(path)  # a full disk gets its space back
            raise
        finally:
            self.files.close(fd)
        return Base(path, end, [end - size + offset for offset in offsets])

    def install(self, base: Base) -> None:
        """Put `base` in the place of all files before its end:
        one rename, then the old files go. Runs in any thread, also while others append.
        """
        path = base.path.with_suffix("")
        try:
            self.files.rename(base.path, path)
        except OSError:
            self.files.unlink(base.path)
            raise
        self.files.sync_directory(self.directory)
        with self._reading(path) as fd:
            size = self.files.size(fd)
        old = [
            segment
            for segment in self._segments
            if segment.end <= base.end and segment is not self._segments[-1]
        ]
        # in one step of the interpreter: `append` adds to the end of the same list
        self._segments[: len(old)] = [JournalSegment(path, base.end - size, base.end)]
        for segment in old:
            self.files.unlink(segment.path)

    def close(self) -> None:
        """Sync, close the files and let others open the journal. Does nothing the second time."""
        if self._lock_fd < 0:
            return
        try:
            if self._mark_fd >= 0 and self._failure is None:
                self.sync()
        finally:
            with self._syncing:
                self._segments = []
                for fd in (self._fd, self._mark_fd, self._lock_fd):
                    if fd >= 0:
                        self.files.close(fd)
                self._fd = self._mark_fd = self._lock_fd = -1
