"""Where checkpoints lie: names below one root, on a local or shared file system, or in an object
store (fsspec).

    draft(step, id) ──► create + put files ──► publish(draft, final) ──► listed as committed

Every system call that makes a file durable is a method of `Disk`: tests put another one in its
place, which dies, fails, or remembers, call by call.

Invariant: a committed name stands for a directory whose every byte was durable before the name
could be seen. On a file system that is fsync, then rename; an object store has no rename, so there
the manifest, put last, is the mark.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rft.checkpoint.chunks import AT_ONCE
from rft.checkpoint.records import COLLECTIONS as COLLECTIONS
from rft.checkpoint.records import VERSIONS as VERSIONS
from rft.checkpoint.records import WEIGHTS as WEIGHTS
from rft.checkpoint.records import final_name

BLOCK = 4096  # bytes that every device takes as a unit
RECORD_BYTES = 2**31  # of a manifest or a receipt, at most
DIRECT_BYTES = 2**23  # below this the page cache is quicker
SCRATCH = ".trash-"  # prefix of directories that are being deleted


class NotAFile(OSError):
    """A directory, a pipe, a device, or far too much, where a file should be: it is what lies there
    that is wrong, not the medium.
    """


class Sink(Protocol):
    """A file being written. `close` returns when its bytes are durable."""

    def write(self, data: memoryview) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class ReadFile(Protocol):
    """Bytes from `start` on, fewer where the file ends. OSError where the medium fails."""

    def read(self, start: int, length: int) -> bytes: ...
    def read_into(self, start: int, places: list[memoryview]) -> int: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """Paths are relative to the root, with '/'.

    OSError where the medium fails, FileNotFoundError where nothing is.
    """

    look_s: float  # between two looks at a draft that others are at work on
    read_bytes: int  # of one request
    readers: int  # at the same time, that gain although each waits more than it works

    @property
    def where(self) -> str: ...
    def draft(self, prefix: str, step: int, identity: str) -> str: ...
    def prepare(self) -> None: ...
    def begin(self, draft: str) -> None: ...
    def create(self, path: str, size: int) -> Sink: ...
    def put(self, path: str, data: bytes) -> None: ...
    def discard(self, path: str) -> None: ...
    def get(self, path: str) -> bytes: ...
    def open(self, path: str) -> "ReadFile": ...
    def size(self, path: str) -> int: ...
    def list(self, path: str = "") -> list[str]: ...
    def publish(self, draft: str, final: str) -> str: ...
    def settle(self, path: str) -> None: ...
    def leftovers(self, collection: str) -> Sequence[str]: ...
    def set_aside(self, path: str, prefix: str) -> str: ...
    def remove(self, path: str) -> None: ...
    def remove_draft(self, path: str) -> None: ...
    def end_uploads(self) -> None: ...
    def free_bytes(self) -> int | None: ...


class Disk:
    """The system calls that make files durable, one method each. All raise OSError as the system
    does.
    """

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


class LocalStorage:
    """A directory. Drafts are `step_N.tmp-<id>`; publishing renames them."""

    look_s = 0.02
    read_bytes = AT_ONCE
    readers = 1

    def __init__(self, root: Path, disk: Disk):
        self.root = root
        self.disk = disk

    @property
    def where(self) -> str:
        return str(self.root)

    def draft(self, prefix: str, step: int, identity: str) -> str:
        return f"{final_name(prefix, step)}.tmp-{identity}"

    def prepare(self) -> None:
        """Make the root. OSError when it cannot be written to."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for collection in COLLECTIONS[1:]:
            self.begin(collection)
        for path in (self.root, *(path.parent for path in missing)):
            self.disk.sync_directory(path)

    def begin(self, draft: str) -> None:
        self.disk.mkdir(self.root / draft)

    def create(self, path: str, size: int) -> "LocalSink":
        return LocalSink(self.disk, self.disk.create(self.root / path, size), size)

    def put(self, path: str, data: bytes) -> None:
        """Replace `path` as a whole: it holds the old bytes or the new ones, never a part."""
        target = self.root / path
        temporary = target.with_name(f".{target.name}.new-{uuid.uuid4().hex[:12]}")
        sink = LocalSink(self.disk, self.disk.create(temporary))
        try:
            sink.write(memoryview(data))
            sink.close()
        except OSError:
            sink.abort()
            self.disk.unlink(temporary)
            raise
        self.disk.rename(temporary, target)
        # a draft's last receipt: whoever has seen it syncs the names and publishes them (`publish`)
        with contextlib.suppress(FileNotFoundError):
            self.disk.sync_directory(target.parent)

    def discard(self, path: str) -> None:
        """Delete one file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(self.root / path)

    def get(self, path: str) -> bytes:
        with self._regular(path) as file:
            if os.fstat(file.fileno()).st_size > RECORD_BYTES:
                raise NotAFile(errno.EFBIG, "is larger than any record", str(self.root / path))
            return file.read()

    def open(self, path: str) -> "LocalFile":
        return LocalFile(self._regular(path))

    def _regular(self, path: str) -> io.FileIO:
        """Never waits: a pipe to which nobody writes is no file."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(self.root / path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotAFile(errno.EINVAL, "is no regular file", str(self.root / path))
        return io.FileIO(descriptor, "rb")

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def list(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def publish(self, draft: str, final: str) -> str:
        """Give the draft its name; a name that is taken gets a suffix, for nothing is ever written
        into a published directory.
        """
        self.disk.sync_directory(self.root / draft)
        target = self.root / final
        another = target.with_name(f"{target.name}.{draft.rpartition('-')[2]}")
        target = another if target.exists() else target
        try:
            self.disk.rename(self.root / draft, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            target = another  # the name was taken between the look and the rename
            self.disk.rename(self.root / draft, target)
        self.disk.sync_directory(target.parent)
        return str(target.relative_to(self.root))

    def settle(self, path: str) -> None:
        """Make sure of a name that another process gave, and may
        have died before it was durable.
        """
        self.disk.sync_directory((self.root / path).parent)

    def leftovers(self, collection: str) -> Sequence[str]:
        """Drafts and half-deleted directories; may go when nobody writes.

        What was set aside for being bad stays.
        """
        names = [
            name for name in self.list(collection) if ".tmp-" in name or name.startswith(SCRATCH)
        ]
        return [f"{collection}/{name}" if collection else name for name in names]

    def set_aside(self, path: str, prefix: str) -> str:
        """Take `path` out of every list without deleting it."""
        source = self.root / path
        target = source.with_name(f".{prefix}-{source.name}-{uuid.uuid4().hex[:8]}")
        self.disk.rename(source, target)
        self.disk.sync_directory(target.parent)
        return str(target.relative_to(self.root))

    def remove(self, path: str) -> None:
        """Delete a directory: first its name, so that no reader meets half of it."""
        if not path.rpartition("/")[2].startswith("."):
            path = self.set_aside(path, "trash")
        self.disk.remove_tree(self.root / path)

    def remove_draft(self, path: str) -> None:
        """By a rename first, as a commit: of the two, one finds the draft gone."""
        self.remove(path)

    def end_uploads(self) -> None:
        """What is not complete is a draft here, like everything else."""

    def free_bytes(self) -> int | None:
        return self.disk.free_bytes(self.root)


class LocalSink:
    """Appends to one descriptor, past the page cache as long as blocks are whole.

    After `abort` or `close` it is gone.
    """

    def __init__(self, disk: Disk, descriptor: int, size: int = 0):
        self.disk = disk
        self.descriptor: int | None = descriptor
        self._direct = size >= DIRECT_BYTES and disk.bypass_cache(descriptor, True)

    def write(self, data: memoryview) -> None:
        while len(data) and self.descriptor is not None:
            whole = len(data) - len(data) % BLOCK
            if self._direct and not whole:
                self._through_the_cache()
            try:
                written = self.disk.write(self.descriptor, data[:whole] if self._direct else data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_the_cache()  # memory or place that this device cannot take
                continue
            data = data[written:]

    def _through_the_cache(self) -> None:
        assert self.descriptor is not None
        self.disk.bypass_cache(self.descriptor, False)
        self._direct = False

    def close(self) -> None:
        if self.descriptor is not None:
            self.disk.sync(self.descriptor)
            descriptor, self.descriptor = self.descriptor, None
            self.disk.close(descriptor)

    def abort(self) -> None:
        """Give the descriptor back; what was written proves nothing."""
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


class LocalFile:
    """One that is read in parts, by several threads."""

    def __init__(self, file: io.FileIO):
        self._file = file

    def read(self, start: int, length: int) -> bytes:
        parts = []
        while length and (part := os.pread(self._file.fileno(), length, start)):
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def read_into(self, start: int, places: list[memoryview]) -> int:
        left, at = list(places), start
        while left and (count := os.preadv(self._file.fileno(), left, at)):
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return at - start

    def close(self) -> None:
        self._file.close()


def open_storage(where: str | Path, disk: Disk | None = None) -> Storage:
    """A path, or a URL that fsspec knows (s3://bucket/prefix)."""
    if "://" in str(where):
        from rft.checkpoint.objects import ObjectStorage

        return ObjectStorage(str(where))
    return LocalStorage(Path(where), disk or Disk())
