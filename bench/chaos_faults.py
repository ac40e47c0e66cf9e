"""The faults of `bench.chaos`, on processes and on the disk of a run that a user started.

In: the process ids of a run, and the directory that a small file system of its own is mounted at
(root and a loop device; without them the two faults of a disk are left out, and that is said). Out:
what was done to whom, with when it began, ended and was noticed. Invariant: whatever ends the
bench, no file system stays frozen, filled or mounted, and no process stopped.

    kill            SIGKILL
    stop 10 s       SIGSTOP, then SIGCONT: nothing may come of it
    stop 45 s       the same for longer: somebody must notice and end the part
    reset           one of the part's TCP connections gets a reset at both ends (`ss -K`)
    full disk       all that is free on the run's file system is taken for 5 s
    slow disk       for 10 s every write waits for most of half a second (the file system is frozen
                    and thawed in turn)
"""

import contextlib
import ctypes
import fcntl
import itertools
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PARTS = {  # what a process's command line tells of who it is
    "rank": "-m rft.run.rank",
    "engine": "VLLM::EngineCore",
    "explorer": "ray::Explorer",
    "buffer": "ray::ExperienceBuffer",
    "synchronizer": "ray::Synchronizer",
    "reward worker": "rft.rollout.reward_worker",
    "checkpoint agent": "rft.checkpoint.agent",
    "launcher": "rft.run.elastic",
}
UNCONNECTED = ("reward worker", "checkpoint agent")  # by sockets that have no name
CUT = "port"  # in the words of a reset that was one
DISK = "disk"  # the part that faults of a disk hit: all that write
KILL, SHORT, LONG, RESET = "kill", "stop 10 s", "stop 45 s", "reset"
FULL, SLOW = "full disk", "slow disk"
OF_PARTS, OF_DISK = (KILL, SHORT, LONG, RESET), (FULL, SLOW)
LASTS = {KILL: 0.0, SHORT: 10.0, LONG: 45.0, RESET: 0.0, FULL: 5.0, SLOW: 10.0}
FROZEN_S, THAWED_S = 0.4, 0.1
DISK_MB = 1024
FREEZE, THAW = 0xC0045877, 0xC0045878  # of ioctl(2)
LAZILY = 2  # of umount2(2): what still has a file open there keeps it until it ends


@dataclass
class Fault:
    """`began`, `noticed`: of the monotonic clock. `words`: what came of it, for the table."""

    kind: str
    part: str
    began: float = 0.0
    noticed: float | None = None
    pid: int = 0
    words: str = ""


Card = tuple[str, str]  # kind, part


def deck(seed: int, disk: bool, number: int, parts: Sequence[str] = tuple(PARTS)) -> Iterator[Card]:
    """For run `number`: hands, of an order drawn from `seed`, each with every part and every kind
    in it, as far as `parts` go; four in turn have every kind on every part.
    """
    dice = random.Random(seed)
    order = dice.sample(list(PARTS), len(PARTS))
    while len({order.index(part) % len(OF_PARTS) for part in UNCONNECTED}) < len(UNCONNECTED):
        dice.shuffle(order)  # a reset of a hand is of somebody else
    for hand in itertools.count():
        turn = hand + number
        cards = [
            (OF_PARTS[(place + turn) % len(OF_PARTS)], part)
            for place, part in enumerate(order)
            if part in parts
        ]
        cards += [(kind, DISK) for kind in OF_DISK] if disk else []
        yield from random.Random(f"{seed} {turn}").sample(cards, len(cards))


def found(family: list[psutil.Process], part: str) -> psutil.Process | None:
    """The youngest process of a part that lives."""
    mine = [one for one in family if PARTS[part] in title(one)]
    return max(mine, key=psutil.Process.create_time, default=None)


def title(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline())
    return ""


def lives(process: psutil.Process) -> bool:
    return bool(title(process))


def reset(process: psutil.Process, dice: random.Random) -> str:
    """Cut one connection; returns which, or why none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        open_ = [c for c in process.net_connections("tcp") if c.status == "ESTABLISHED"]
        if not open_:
            return "it has no connection"
        one = dice.choice(open_)
        near, far = one.laddr, one.raddr
        ask = ["ss", "-K", "-H", "-t", "state", "established"]
        where = f"src = {_end(near)} and dst = {_end(far)}"
        done = subprocess.run([*ask, where], capture_output=True, text=True)
        cut = done.returncode == 0 and done.stdout.strip()
        return f"{CUT} {near.port} to {far.port}" if cut else "the kernel refused"
    return "it had ended"


def _end(address: "psutil._ntuples.addr") -> str:
    host = f"[{address.ip}]" if ":" in address.ip else address.ip
    return f"{host}:{address.port}"


class RunDisk:
    """An ext4 of its own under the run, in a file; `real` is False where none can be mounted."""

    def __init__(self, at: Path, image: Path):
        self.at = at
        self.image = image
        self.filler = at / "filler"
        self.real = False

    def __enter__(self) -> "RunDisk":
        self.at.mkdir()
        with self.image.open("wb") as file:
            file.truncate(DISK_MB * 2**20)
        commands = (
            ["mkfs.ext4", "-q", str(self.image)],
            ["mount", "-o", "loop", str(self.image), str(self.at)],
        )
        with contextlib.suppress(FileNotFoundError):
            self.real = all(
                subprocess.run(words, capture_output=True).returncode == 0 for words in commands
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.real:
            self.thaw()
            libc = ctypes.CDLL(None, use_errno=True)
            libc.umount2(str(self.at).encode(), LAZILY)
        self.image.unlink()

    def fill(self) -> str:
        """All that is free; what others free meanwhile is theirs again."""
        free = os.statvfs(self.at)
        with self.filler.open("wb") as file:
            for size in (free.f_bavail * free.f_frsize, 2**24, 2**20, 2**16, 2**12):
                with contextlib.suppress(OSError):
                    while True:
                        at = os.fstat(file.fileno()).st_size
                        os.posix_fallocate(file.fileno(), at, size)
        return f"{self.filler.stat().st_size / 2**20:.0f} MB taken"

    def empty(self) -> None:
        self.filler.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._ask(FREEZE)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # it was not frozen
            self._ask(THAW)

    def _ask(self, what: int) -> None:
        directory = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, what, 0)
        finally:
            os.close(directory)

    def be_slow(self, over: Callable[[], bool]) -> None:
        """For as long as this fault lasts."""
        end = time.monotonic() + LASTS[SLOW]
        try:
            while time.monotonic() < end and not over():
                self.freeze()
                time.sleep(FROZEN_S)
                self.thaw()
                time.sleep(THAWED_S)
        finally:
            self.thaw()
