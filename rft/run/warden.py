"""What outlives a supervisor that was killed: a small process that then ends everything that the
supervisor had started.

    Supervisor ──Warden──► python -m rft.run.warden MARK LOG_DIR CONTROL_DIR
               ──LOOK; one process number a line; then EOF──►

Most parts are killed by the kernel with their parent; Ray's agents would try to reach their head
for half a minute, and what foreign code left behind would stay for ever. In: the mark that all
processes of the supervisor have in their environment, and the numbers of those that write their
title over it (Ray's), which it finds itself while Ray starts. Out: within ENDS_S + KILL_WAIT_S of
the supervisor's death none of them is left, but checkpoint agents that still write what was staged,
with their children. Invariants: it never ends a process that is neither marked nor told nor found;
a supervisor that ends well kills it first.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil

from rft.checkpoint import fence
from rft.ground.process import KILL_WAIT_S, is_marked, is_spared, kill_these

MARK = "RFT_SUPERVISOR"
ENDS_S = 2.0  # for those that end by themselves, and give back what a killed one held
LOOK = "look"
LOOK_S = 0.2  # those that have begun since then are marked still

log = logging.getLogger(__name__)


class Warden:
    """The supervisor's hold on it."""

    def __init__(self, log_dir: Path, control: Path):
        """Whatever this process starts from now on is marked, and ends with it."""
        mark = f"{os.getpid()} {log_dir}"
        os.environ[MARK] = mark
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, mark, str(log_dir), str(control)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the supervisor's business
        )

    def look(self) -> None:
        """Until something is told: this process cannot, because Ray starts."""
        self._say(LOOK)

    def tell(self) -> None:
        """All descendants of this process, as they are now."""
        self._say(*(str(one.pid) for one in psutil.Process().children(recursive=True)))

    def _say(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(f"{line}\n".encode() for line in lines)
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def main(mark: str, log_dir: Path, control: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and Kubernetes tell every process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    told: set[psutil.Process] = set()
    for line in iter(sys.stdin.readline, ""):
        if line.strip() == LOOK:
            look(int(mark.split()[0]), told, sys.stdin)
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            told.add(psutil.Process(int(line)))  # with the time of its start: numbers come again
    logging.basicConfig(filename=log_dir / "warden.log", format="%(asctime)s %(message)s")
    gone = time.monotonic()
    while (found := left(mark, told, control)) and time.monotonic() < gone + ENDS_S + KILL_WAIT_S:
        if time.monotonic() > gone + ENDS_S:
            log.warning("the supervisor is gone: killing %s", found)
            kill_these(found)
        psutil.wait_procs(found, timeout=LOOK_S)


def look(supervisor: int, found: set[psutil.Process], until: TextIO) -> None:
    """Find its descendants, until it says more or is gone."""
    while not select.select([until], [], [], LOOK_S)[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(supervisor).children(recursive=True))


def left(mark: str, told: set[psutil.Process], control: Path) -> list[psutil.Process]:
    """All that are ours but this process, and the agents that hold their locks."""
    agents = {fence.holder(path) for path in fence.living_agents(control)}
    marked = {one for one in psutil.process_iter() if is_marked(one, MARK, mark)}
    return [
        process
        for process in marked | set(filter(lives, told))
        if process.pid != os.getpid() and not is_spared(process, agents)
    ]


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
