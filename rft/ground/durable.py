"""Files that survive a crash, and locks that end with their holder. Standard library only.

In: bytes for a path; a path to lock. Out: the old content or the new one, never half of either, and
durable when the call returns; a descriptor that is the lock for as long as it is open. Invariant: a
draft has its final name only after its bytes are on the medium (write, fsync, rename, fsync of the
directory: LWN, "Ensuring data reaches disk", 2011).

Locks are `flock`: the kernel gives them back when a holder dies, however it dies. `Files` are the
system calls of what keeps files open for long; simulations have others. Checkpoints have their own
seam (`rft.checkpoint.storage`), which fault tests replace.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOOK_S = 0.05  # whether a lock is free: nothing tells, and a blocking flock has no deadline


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte: one `os.write` takes at most 2 GiB, and a full disk takes fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well; nothing is left otherwise."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_directory(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def put(path: Path, data: bytes | str) -> None:
    """Give `path` this content at once. Raises OSError, and the old content stays."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def lock(path: Path, shared: bool = False, wait_s: float = 0.0) -> int | None:
    """Lock `path`, made where it is missing; the descriptor that holds the lock, None if another
    process has it for longer than `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    while not take(descriptor, shared):
        if time.monotonic() >= deadline:
            os.close(descriptor)
            return None
        time.sleep(LOOK_S)
    return descriptor


def take(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file, or a directory; False if another process has it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path, by_anybody: bool = False) -> bool:
    """Whether a process holds `path` alone, or, `by_anybody`, shares it with others. A file that is
    not there is held by nobody.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not take(descriptor, shared=not by_anybody)
    finally:
        os.close(descriptor)


def locker(path: Path, table: Path = Path("/proc/locks")) -> int:
    """Process number of whoever holds `path` alone, as the kernel's table has it; 0: it does not.

    1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
    """
    node = str(path.stat().st_ino)
    if not table.exists():
        return 0
    for line in table.read_text(encoding="ascii").splitlines():
        fields = line.split()
        is_whole = fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"]
        if is_whole and fields[5].rpartition(":")[2] == node:
            return max(0, int(fields[4]))
    return 0


def sign(descriptor: int, text: str) -> None:
    """Say in a lock's file who holds it. Raises OSError."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def signed_by(path: Path) -> str:
    """What the last holder of a lock has said of itself, empty where nothing was."""
    return path.read_text(encoding="utf-8", errors="replace").strip()


class Files:
    """The system calls of a journal, by descriptor. All raise OSError."""

    def make(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def lock(self, path: Path) -> int | None:
        """Signed with the number of this process; None if another one has it."""
        descriptor = lock(path)
        if descriptor is not None:
            sign(descriptor, str(os.getpid()))
        return descriptor

    def names(self, directory: Path, ending: str) -> list[Path]:
        """Those that end so, sorted."""
        return sorted(directory.glob(f"*{ending}"))

    def content(self, path: Path) -> bytes:
        """Empty where there is no file."""
        return path.read_bytes() if path.exists() else b""

    def read_from(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write_to(self, path: Path, empty: bool = False) -> int:
        """Made where it is missing; what is written goes behind its end."""
        how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        return os.open(path, how, 0o644)

    def change(self, path: Path) -> int:
        """Made where it is missing; written in place by `put`."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """These bytes of a file, or fewer where it ends:

        Linux gives at most 0x7ffff000 of them in one call.
        """
        data = os.pread(descriptor, size, offset)
        while len(data) < size and (
            more := os.pread(descriptor, size - len(data), offset + len(data))
        ):
            data += more
        return data

    def write(self, descriptor: int, data: bytes) -> None:
        write_all(descriptor, data)

    def put(self, descriptor: int, data: bytes) -> None:
        """At the beginning."""
        os.pwrite(descriptor, data, 0)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, directory: Path) -> None:
        sync_directory(directory)


FILES = Files()
