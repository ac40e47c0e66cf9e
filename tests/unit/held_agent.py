"""A checkpoint agent whose disk a test holds: python held_agent.py DIRECTORY SOCKET_FD. See
`states.Hand`.

Files in DIRECTORY: `write`, `sync` (locked: the operation waits), `full` (writes fail with ENOSPC),
`free` (bytes left), `log` (gets a + and a - around every write). Who waits writes its process
number to the pipe `arrivals`.
"""

import errno
import fcntl
import os
import struct
import sys
from pathlib import Path

from rft.checkpoint import agent
from rft.checkpoint.storage import Disk, open_storage


class HeldDisk(Disk):
    def __init__(self, directory: Path):
        self.directory = directory

    def write(self, descriptor: int, data: memoryview) -> int:
        self._note("+")
        self._wait("write")
        if (self.directory / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(descriptor, data)
        self._note("-")
        return written

    def sync(self, descriptor: int) -> None:
        self._wait("sync")
        super().sync(descriptor)

    def free_bytes(self, path: Path) -> int:
        told = self.directory / "free"
        return int(told.read_text()) if told.exists() else super().free_bytes(path)

    def _note(self, sign: str) -> None:
        if (self.directory / "log").exists():
            with open(self.directory / "log", "a") as file:
                file.write(sign)

    def _wait(self, operation: str) -> None:
        try:
            descriptor = os.open(self.directory / operation, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(self.directory / "arrivals", "wb", buffering=0) as arrivals:
            arrivals.write(struct.pack("I", os.getpid()))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.close(descriptor)


if __name__ == "__main__":
    agent.main(int(sys.argv[2]), lambda root: open_storage(root, HeldDisk(Path(sys.argv[1]))))
