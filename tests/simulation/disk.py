"""A disk in memory that loses what was not synced: the system calls of a journal, and what a power
loss may leave of them.

In: `rft.ground.durable.Files`' calls. Out: after `lose_power`, any state that POSIX allows: of a
file's changes since its last fsync any pages, in any order, and a size that some of them reach; of
a directory's changes since its last fsync any first part. A killed process loses nothing, because
the kernel has it: `release` only closes what it had open.
"""

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

from rft.ground.durable import Files

PAGE = 64  # bytes that reach the medium at once: small, as the records of a simulation are


@dataclass(eq=False)
class Content:
    """A file, whatever it is called. `changes`: since the last sync, (offset, bytes) or a size."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data
        self.changes.append((offset, data))

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self.changes.append((size, None))

    def sync(self) -> None:
        self.synced, self.changes = bytes(self.data), []

    def lose(self, chance: random.Random) -> None:
        """Some pages of each change are there."""
        kept = bytearray(self.synced)
        for offset, data in self.changes:
            if data is None:
                if chance.random() < 0.5:
                    del kept[offset:]
                continue
            for at in range(0, len(data), PAGE):
                if chance.random() < 0.5:
                    page = data[at : at + PAGE]
                    kept.extend(bytes(max(0, offset + at + len(page) - len(kept))))
                    kept[offset + at : offset + at + len(page)] = page
        self.data, self.synced, self.changes = kept, bytes(kept), []


class Medium:
    """What outlives every process: names and contents."""

    def __init__(self) -> None:
        self.names: dict[Path, Content] = {}
        self.synced: dict[Path, Content] = {}
        self.changes: list[tuple[Path, Content | None]] = []  # of names since the last sync
        self.locks: dict[Path, SimulatedFiles] = {}
        self.is_full = False

    def set(self, path: Path, content: Content | None) -> None:
        self.changes.append((path, content))
        if content is None:
            del self.names[path]
        else:
            self.names[path] = content

    def sync_names(self) -> None:
        self.synced, self.changes = dict(self.names), []

    def lose_power(self, chance: random.Random) -> None:
        kept = dict(self.synced)
        for path, content in self.changes[: chance.randint(0, len(self.changes))]:
            if content is None:
                kept.pop(path, None)
            else:
                kept[path] = content
        for content in dict.fromkeys(kept.values()):
            content.lose(chance)
        self.names, self.synced, self.changes = kept, dict(kept), []
        self.locks.clear()


class Killed(BaseException):
    """A process that is dead does nothing more."""


class SimulatedFiles(Files):
    """The calls of one process."""

    def __init__(self, medium: Medium):
        self.medium = medium
        self.open: dict[int, Content] = {}
        self.last = 2
        self.dead = False

    def release(self) -> None:
        self.dead = True
        self.open.clear()
        for path in [path for path, owner in self.medium.locks.items() if owner is self]:
            del self.medium.locks[path]

    def make(self, directory: Path) -> None: ...

    def lock(self, path: Path) -> int | None:
        self.check()
        if path in self.medium.locks:
            return None
        self.medium.locks[path] = self
        return self._opened(Content())

    def names(self, directory: Path, ending: str) -> list[Path]:
        self.check()
        return sorted(path for path in self.medium.names if path.name.endswith(ending))

    def content(self, path: Path) -> bytes:
        self.check()
        return bytes(self.medium.names[path].data) if path in self.medium.names else b""

    def read_from(self, path: Path) -> int:
        self.check()
        if path not in self.medium.names:
            raise FileNotFoundError(path)
        return self._opened(self.medium.names[path])

    def write_to(self, path: Path, empty: bool = False) -> int:
        self.check()
        if path not in self.medium.names:
            self.medium.set(path, Content())
        elif empty:
            self.medium.names[path].truncate(0)
        return self._opened(self.medium.names[path])

    def change(self, path: Path) -> int:
        return self.write_to(path)

    def size(self, descriptor: int) -> int:
        return len(self.of(descriptor).data)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        return bytes(self.of(descriptor).data[offset : offset + size])

    def write(self, descriptor: int, data: bytes) -> None:
        content = self.of(descriptor)
        if self.medium.is_full:  # a part of it fits
            content.write(len(content.data), data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space is left")
        content.write(len(content.data), data)

    def put(self, descriptor: int, data: bytes) -> None:
        self.of(descriptor).write(0, data)

    def truncate(self, descriptor: int, size: int) -> None:
        self.of(descriptor).truncate(size)

    def sync(self, descriptor: int) -> None:
        self.of(descriptor).sync()

    def close(self, descriptor: int) -> None:
        self.check()
        del self.open[descriptor]

    def rename(self, source: Path, target: Path) -> None:
        self.check()
        content = self.medium.names[source]
        self.medium.set(source, None)
        self.medium.set(target, content)

    def unlink(self, path: Path) -> None:
        self.check()
        self.medium.set(path, None)

    def sync_directory(self, directory: Path) -> None:
        self.check()
        self.medium.sync_names()

    def of(self, descriptor: int) -> Content:
        self.check()
        return self.open[descriptor]

    def check(self) -> None:
        if self.dead:
            raise Killed

    def _opened(self, content: Content) -> int:
        self.last += 1
        self.open[self.last] = content
        return self.last
