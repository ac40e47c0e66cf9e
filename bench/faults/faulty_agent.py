"""The real agent on a disk that kills it once: `python -m bench.faults.faulty_agent MARKER NUMBER
WHEN SOCKET_FD`.

The one that creates MARKER is the one that dies; those started after it have a sound disk.
"""

import os
import sys
from pathlib import Path

from bench.faults.disks import Board, Killing
from rft.checkpoint.agent import main
from rft.checkpoint.storage import Disk, LocalStorage


def run(marker: str, number: str, when: str, descriptor: str) -> None:
    disk = Disk()
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        disk = Killing(int(number), when, "agent", Board())
    except FileExistsError:
        pass
    main(int(descriptor), lambda root: LocalStorage(Path(root), disk))


if __name__ == "__main__":
    run(*sys.argv[1:])
