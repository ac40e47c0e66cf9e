"""How much memory the processes of this machine may take: what the machine has, or less, where this
is a container or a batch job.

In: /proc/meminfo, and the control groups of this process (version 1 or 2) with all those around
them. Out: bytes. Files that were read and wait in the page cache count as free, for the kernel
gives that back; files in memory (memfd, /dev/shm) count as used, in the group of the process that
touched them first. `root`: of the file system.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# by the version of control groups: files of the limit and of what is used, and what names of the
# latter's parts begin with, where groups inside are to be counted
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
CACHED = ("active_file", "inactive_file")
WORTH_GIVING = 16 * 2**20  # bytes; below, looking for free pages costs more than they are worth
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
LIBC = ctypes.CDLL(None)


def give_back(freed: int) -> None:
    """To the system, what the C library keeps of `freed` bytes in small pieces (GNU's: man 3
    malloc_trim). Others keep it for the next step.
    """
    if freed >= WORTH_GIVING and hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def keep_no_blocks() -> None:
    """From now on a block of 128 KiB or more goes back to the system when it is freed, in whichever
    thread; GNU's library raises that limit otherwise (man 3 mallopt).
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def keep_blocks() -> None:
    """From now on what is freed stays with this process, for what it allocates next, until
    `give_back` (GNU's library: man 3 mallopt). A step allocates what the one before has freed, and
    every page that went back to the system in between is made, and filled with zeros, anew.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_MMAP_MAX, 0)
        LIBC.mallopt(M_TRIM_THRESHOLD, -1)


def available(root: Path = ROOT) -> int:
    """What can be taken now; whoever takes more may be killed."""
    free = [_machine(root)["MemAvailable"], *(limit - used for limit, used in _groups(root))]
    return max(0, min(free))


def limit(root: Path = ROOT) -> int:
    """What there is for all processes here together."""
    return min([_machine(root)["MemTotal"], *(limit for limit, _ in _groups(root))])


def _machine(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = (line.replace(":", " ").split() for line in lines)
    return {name: int(size) * 1024 for name, size, *_ in fields}


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every group around this process that has a limit. A container may not see
    the groups that it is in by their names: then its own is at the top.
    """
    own = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in own):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = [part for part in path.split("/") if part]
        inner = [] if ".." in parts else parts
        for depth in range(len(inner), -1, -1):
            yield from _group(top.joinpath(*inner[:depth]), 1 if controllers else 2)


def _group(directory: Path, version: int) -> Iterator[tuple[int, int]]:
    most, current, prefix = FILES[version]
    if not (directory / most).is_file():
        return
    most = (directory / most).read_text(encoding="ascii").strip()
    if most == "max":
        return
    stat = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
    parts = {name: int(size) for name, size in stat}
    cached = sum(parts.get(prefix + name, 0) for name in CACHED)
    yield int(most), int((directory / current).read_text(encoding="ascii")) - cached
