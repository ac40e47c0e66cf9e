"""Disks that misbehave at their n-th call. Each is a `rft.checkpoint.storage.Disk`: all file
operations pass here.

`Counting` names the calls; the others act on one of them: kill processes, raise, write short, stop.
"""

import errno
import mmap
import os
import re
import shutil
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.checkpoint.storage import Disk

WHEN = ("before", "middle", "after")


class Board:
    """A few integers shared by the processes of one case."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def set(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    def get(self, place: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * place)[0]

    def close(self) -> None:
        self._memory.close()


TRAINER, FIRED = 0, 1  # places on the board


class Counting(Disk):
    """Counts calls from 1 on and hands each to `at(n, kind, path)`; subclasses act in `call`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}

    def call(
        self, kind: str, path: str, action: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        self.calls.append((kind, path))
        return action()

    def mkdir(self, path: Path) -> None:
        self.call("mkdir", str(path), lambda: super(Counting, self).mkdir(path))

    def create(self, path: Path, size: int = 0) -> int:
        descriptor = self.call(
            "create", str(path), lambda: super(Counting, self).create(path, size)
        )
        self._paths[descriptor] = str(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        def some(count: int) -> int:
            return super(Counting, self).write(descriptor, data[:count])

        return self.call(
            "write",
            self._paths[descriptor],
            lambda: some(len(data)),
            lambda: some(max(1, len(data) // 2)),
        )

    def sync(self, descriptor: int) -> None:
        self.call("sync", self._paths[descriptor], lambda: super(Counting, self).sync(descriptor))

    def close(self, descriptor: int) -> None:
        self.call("close", self._paths[descriptor], lambda: super(Counting, self).close(descriptor))

    def sync_directory(self, path: Path) -> None:
        self.call("sync_directory", str(path), lambda: super(Counting, self).sync_directory(path))

    def rename(self, source: Path, target: Path) -> None:
        self.call("rename", str(target), lambda: super(Counting, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self.call("unlink", str(path), lambda: super(Counting, self).unlink(path))

    def remove_tree(self, path: Path) -> None:
        def half() -> None:
            for name in sorted(os.listdir(path))[::2]:
                os.unlink(path / name)

        self.call("remove_tree", str(path), lambda: shutil.rmtree(path), half)


class Killing(Counting):
    """Kills with -9 around call `number`: the agent itself, the trainer whose number is on the
    board, or both.
    """

    def __init__(self, number: int, when: str, victim: str, board: Board):
        super().__init__()
        self.number, self.when, self.victim, self.board = number, when, victim, board

    def call(
        self, kind: str, path: str, action: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        self.calls.append((kind, path))
        if len(self.calls) != self.number:
            return action()
        if self.when == "middle" and half is not None:
            done = half()
            self._kill()
            # of a write whose process lives on: a short one
            return action() if done is None else done
        if self.when == "before":
            self._kill()
        result = action()
        if self.when == "after":
            self._kill()
        return result

    def _kill(self) -> None:
        self.board.set(FIRED, 1)
        if self.victim in ("trainer", "both"):
            os.kill(self.board.get(TRAINER), signal.SIGKILL)
        if self.victim in ("agent", "both"):
            os.kill(os.getpid(), signal.SIGKILL)


class Failing(Counting):
    """Raises `code` at call `number`, or with `for_ever` from then on until a call names `heals`;
    code 0: a short write.
    """

    def __init__(
        self, number: int, code: int, board: Board, for_ever: bool = False, heals: str = "\0"
    ):
        super().__init__()
        self.number, self.code, self.board, self.for_ever, self.heals = (
            number,
            code,
            board,
            for_ever,
            heals,
        )
        self._healed = False

    def call(
        self, kind: str, path: str, action: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        self.calls.append((kind, path))
        self._healed = self._healed or self.heals in path
        due = len(self.calls) == self.number or (self.for_ever and len(self.calls) > self.number)
        if not due or self._healed:
            return action()
        if self.code == 0:
            if half is None or kind != "write":
                return action()
            self.board.set(FIRED, 1)
            return half()
        self.board.set(FIRED, 1)
        if kind == "close":
            action()  # as Linux does: the descriptor is gone whatever close says
        raise OSError(self.code, os.strerror(self.code), path)


class Signalling(Counting):
    """Sends its own process `number` before the first call of
    `kind` whose path matches `inside`.
    """

    def __init__(self, kind: str, inside: str, number: signal.Signals):
        super().__init__()
        self.kind, self.inside, self.number = kind, inside, number

    def call(
        self, kind: str, path: str, action: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        self.calls.append((kind, path))
        if kind == self.kind and re.search(self.inside, path):
            self.kind = ""
            signal.pthread_kill(
                threading.get_ident(), self.number
            )  # sent to all, SIGSTOP may let this thread go on a little
        return action()


ERRORS = {
    name: getattr(errno, name)
    for name in ("ENOSPC", "EIO", "EROFS", "EDQUOT", "EINTR", "ENOENT", "EACCES", "ESTALE")
}
