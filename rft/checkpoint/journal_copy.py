"""The buffer's journal on another node's disk, as far as the states that are in its memory need it.

    agent of rank 0 ── names and sizes of the journal's files ──► agent on the next node
                    ◄── how much of each is there; a hash of it, the first time ──
                    ── what is missing, each piece with its hash ──►  written, synced; then files
                                                                      that the journal has dropped
                                                                      go
    a start on that node: no journal is there, or an older one ─► the copy takes its place

In: a journal's directory, which its buffer goes on writing (`rft.buffer.journal`); never locked,
never changed. Out: a directory that a journal opens, up to a position that was durable. Invariants:
bytes before that position never change, so that what is there is never sent again; what is there is
a part of this journal by its bytes, not by its name, for another one may have had the directory
before; a copy is told of only when it is on the disk; where one is, it opens as a journal while the
next one comes. No torch.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec
import xxhash

from rft.buffer.journal import mark_in, marked
from rft.checkpoint.peers import AgentRefused, PeerLine
from rft.ground import durable

log = logging.getLogger(__name__)
PIECE = 4 * 2**20
MARK = "durable"
SYNC_S = 60.0  # for the peer's disk
OLD = ".old"  # behind the name of a journal that a copy has taken the place of


class JournalFiles(msgspec.Struct, frozen=True, tag=True):
    """What a copy is to consist of: names and bytes, up to this position."""

    files: list[tuple[str, int]]
    position: int
    known: list[bool]  # of each: what the other end has of it came from here, or was compared


class JournalHeld(msgspec.Struct, frozen=True):
    """Bytes of each file that are there already."""

    held: list[int]


class JournalPrefix(msgspec.Struct, frozen=True):
    """What is there of a file that is not known."""

    digest: str


class JournalCompared(msgspec.Struct, frozen=True):
    is_same: bool


class JournalPiece(msgspec.Struct, frozen=True):
    """`count` bytes follow."""

    count: int
    digest: str


class JournalStored(msgspec.Struct, frozen=True):
    refused: str = ""


class JournalMissing(OSError):
    """There is no journal here that goes so far."""


def directory(control: Path) -> Path:
    """Of the copy that this node has."""
    return control / "replicas" / "journal"


def files_of(journal: Path, position: int) -> tuple[list[tuple[Path, int]], int]:
    """The files of a copy, with the bytes of each that will not change any more, and the position
    up to which they go. Raises JournalMissing.
    """
    mark = journal / MARK
    sound = mark_in(mark.read_bytes()) if mark.exists() else None
    if sound is None or sound < position:
        raise JournalMissing(
            f"{journal} is durable up to {sound or 0}, and the state needs {position}: is the "
            "buffer on another node?"
        )
    bases = sorted(journal.glob("*.base"))
    begin = int(bases[-1].stem) if bases else 0
    found = [(path, path.stat().st_size) for path in bases[-1:]]
    for path in sorted(journal.glob("*.log")):
        start = int(path.stem)
        if begin <= start < sound:
            found.append((path, min(path.stat().st_size, sound - start)))
    return found, sound


def send(
    line: PeerLine, journal: Path, position: int, known: dict[str, tuple[int, int]] | None = None
) -> None:
    """Bring the peer's copy up to `position` at least. Raises OSError.

    `known`: device and inode of each file that this connection has compared or sent, by name; kept
    by the caller from one call to the next.
    """
    known = {} if known is None else known
    found, sound = files_of(journal, position)
    opened = []
    try:
        # a compaction may drop a file by its name now, and not what is open
        opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path, _ in found]
        which = {path.name: _identity(one) for (path, _), one in zip(found, opened, strict=True)}
        is_known = [known.get(name) == one for name, one in which.items()]
        line.send(JournalFiles([(path.name, size) for path, size in found], sound, is_known))
        held = line.receive(JournalHeld).held
        begins = [
            count if not count or sure or _is_theirs(line, one, count) else 0
            for one, count, sure in zip(opened, held, is_known, strict=True)
        ]
        for descriptor, (_, size), begin in zip(opened, found, begins, strict=True):
            for start in range(begin, size, PIECE):
                data = os.pread(descriptor, min(PIECE, size - start), start)
                line.send(JournalPiece(len(data), xxhash.xxh3_128_hexdigest(data)))
                line.send_bytes(data)
        if refused := line.receive(JournalStored, SYNC_S).refused:
            raise AgentRefused(refused)
        known.clear()
        known.update(which)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    """Of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_theirs(line: PeerLine, descriptor: int, count: int) -> bool:
    """Whether the peer has the same `count` bytes; both read them at once."""
    ours = _digest(descriptor, count)
    is_same = line.receive(JournalPrefix, SYNC_S).digest == ours
    line.send(JournalCompared(is_same))
    return is_same


def _digest(descriptor: int, count: int) -> str:
    """Of the first `count` bytes."""
    found = xxhash.xxh3_128()
    for start in range(0, count, PIECE):
        found.update(os.pread(descriptor, min(PIECE, count - start), start))
    return found.hexdigest()


def take(line: PeerLine, told: JournalFiles, place: Path) -> None:
    """The other end of `send`. Raises OSError."""
    for name, _ in told.files:
        if not Path(name).stem.isdecimal() or Path(name).suffix not in (".log", ".base"):
            raise AgentRefused(f"{name} is no file of a journal")
    place.mkdir(parents=True, exist_ok=True)
    growing = [_growing(place / name, size) for name, size in told.files]
    held = [_size(path, size) for path, (_, size) in zip(growing, told.files, strict=True)]
    line.send(JournalHeld(held))
    for at, (count, sure) in enumerate(zip(held, told.known, strict=True)):
        if count and not sure and not _is_ours(line, growing[at], count):
            growing[at], held[at] = _beside(place / told.files[at][0]), 0
    for path, (_, size), begin in zip(growing, told.files, held, strict=True):
        with path.open("ab") as file:
            file.truncate(begin)
            while begin < size:
                begin += _piece(line, file.fileno(), size - begin)
            file.flush()
            os.fsync(file.fileno())
    _put_in_place(told, growing, place)
    line.send(JournalStored())


def _is_ours(line: PeerLine, path: Path, count: int) -> bool:
    """Whether the sender's file begins with what is there."""
    with path.open("rb") as file:
        line.send(JournalPrefix(_digest(file.fileno(), count)))
    return line.receive(JournalCompared, SYNC_S).is_same


def _put_in_place(told: JournalFiles, whole: list[Path], place: Path) -> None:
    finals = [place / name for name, _ in told.files]
    if any(path != final and final.exists() for path, final in zip(whole, finals, strict=True)):
        # another journal's: a part of each is no copy, if this breaks off
        (place / MARK).unlink(missing_ok=True)
        durable.sync_directory(place)
    # the base first: of logs without it there would be a gap before those behind it
    for path, final in zip(whole, finals, strict=True):
        path.replace(final)
    durable.sync_directory(place)
    durable.put(place / MARK, marked(told.position))
    kept = {name for name, _ in told.files} | {MARK}
    for path in place.iterdir():
        if path.name not in kept:
            path.unlink()


def _growing(final: Path, wanted: int) -> Path:
    """Where the bytes of a file go: behind those of a log that is there; of a new one beside its
    place, under a name that a journal passes over, until all files are whole.
    """
    there = final.stat().st_size if final.exists() else -1
    is_begun = there == wanted or (final.suffix == ".log" and 0 <= there < wanted)
    return final if is_begun else _beside(final)


def _beside(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp")


def _size(path: Path, wanted: int) -> int:
    """Bytes that are there; more than there should be is of another journal."""
    size = path.stat().st_size if path.exists() else 0
    return size if size <= wanted else 0


def _piece(line: PeerLine, descriptor: int, left: int) -> int:
    piece = line.receive(JournalPiece)
    if not 0 < piece.count <= min(PIECE, left):
        raise AgentRefused(f"a piece of {piece.count} bytes")
    data = bytearray(piece.count)
    line.receive_into(memoryview(data))
    if xxhash.xxh3_128_hexdigest(data) != piece.digest:
        raise AgentRefused("a piece of the journal is not what its hash says")
    durable.write_all(descriptor, bytes(data))
    return piece.count


def bring_back(control: Path, journal: Path) -> int | None:
    """Where this node has a copy, and no journal or one that was last written before that, the copy
    takes its place; the position up to which it goes. An older journal is moved aside (`OLD`).
    """
    copy = directory(control)
    position = mark_in((copy / MARK).read_bytes()) if (copy / MARK).exists() else None
    if position is None or _written(journal) >= _written(copy):
        return None
    draft = journal.with_name(f".{journal.name}.copy")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(copy, draft)  # with the times of its files
    for path in draft.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    durable.sync_directory(draft)
    if journal.exists():
        aside = journal.with_name(f"{journal.name}{OLD}")
        shutil.rmtree(aside, ignore_errors=True)
        journal.replace(aside)
    draft.replace(journal)
    durable.sync_directory(journal.parent)
    return position


def _written(journal: Path) -> int:
    """When it was last, in ns of this node's clock; of a copy: when it was told of. 0: never."""
    files = [path for kind in ("*.log", "*.base") for path in journal.glob(kind)]
    mark = journal / MARK
    times = [path.stat().st_mtime_ns for path in ([mark] if mark.exists() else files)]
    return max(times) if files else 0
