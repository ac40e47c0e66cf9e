"""The system calls that make files durable, one method each. Everything that rft's checkpoints do
to a disk goes through here.

Tests put another object in its place: one that dies, fails, or remembers, call by call.
"""

import fcntl
import os
import shutil
from pathlib import Path


class Disk:
    """The local file system. Every method raises OSError as the system does."""

    def mkdir(self, path: Path) -> None:
        """A directory in an existing one: a root that vanished is an
        error, not something to be made again.
        """
        path.mkdir(exist_ok=True)

    def create(self, path: Path, size: int = 0) -> int:
        """A new file, never an existing one; with `size` its space is reserved, so that a full disk
        is met here.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if size:
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError:
                os.close(descriptor)
                raise
        return descriptor

    def bypass_cache(self, descriptor: int, on: bool) -> bool:
        """Let writes go to the device straight from the slot (O_DIRECT).

        Copying into the page cache and flushing it would take five times as much processor time
        from the training beside. False where the file system has no such thing.
        """
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(
                descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
            )
        except (OSError, AttributeError):  # tmpfs of older kernels; systems without the flag
            return False
        return True

    def write(self, descriptor: int, data: memoryview) -> int:
        """Bytes written, possibly fewer than given."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free
