"""Temporary files of a process and its children, in a directory of its own that a later start can
tell from others: what it leaves behind is found and removed when it is dead. Standard library only.

    <temporary directory>/rft-<uid>/<name>/      TMPDIR of the process that has it, and its children
    <temporary directory>/rft-<uid>/<name>.lock  locked for as long as that process lives

In: nothing. Out: `take`, a directory; `enter`, one for this process; `sweep`, which removes those
of dead owners, with the shared memory that vLLM's workers named in them, that which `note` has seen
an owner's processes map or that was made as the owner died, and what a Ray of the owner has left.
Invariants: only what is this user's and what nobody holds is removed (nobody whose process can be
seen: containers that share /dev/shm share process numbers too); where there is no such place (no
locks, no room, a temporary directory with a long name) everything works as without it. Caches of
compilers stay where they were: they are not of one run.
"""

import contextlib
import getpass
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rft.ground import durable

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "vllm_dist_"  # a file that vLLM's workers meet at; their segments have its name in front
# Python's, with names that say nothing of an owner: who has mapped them has
NAMELESS = re.compile(r"psm_|sem\.mp-")
# By device and inode: whoever made a semaphore has it under a name that is gone (`sem_open` makes
# one, and links it).
MAPPED = re.compile(r"(\S+) (\d+) +/dev/shm/")
SEEN = "shared_memory"  # in a directory: names and inodes
UNSEEN_S = 5.0  # between two looks of an owner, and some more
LINKS = "node-file-"  # of `rft.ground.node_file`
RAY = (
    "ray_sessions"  # in a directory: the process that started a Ray, and where that keeps its files
)
# of a socket's address there are 107; vLLM's have 36, ours and those of Python's libraries fewer
LONGEST = 64


@dataclass
class Scratch:
    """A directory that is its owner's until it is removed, or the owner dies."""

    directory: Path
    descriptor: int
    seen: dict[str, int] = field(default_factory=dict)
    _there: set[str] = field(default_factory=set)
    _was_new: bool = False

    def note(self, processes: Callable[[], Iterable[int]]) -> None:
        """Write down which shared memory these processes have, so that it is found when all of them
        were killed. Memory maps are read only where a name is new, and once more: one that was just
        made is mapped a moment later.
        """
        with contextlib.suppress(FileNotFoundError):  # no such memory here
            there = set(os.listdir(SHARED_MEMORY))
            is_new = bool(there - self._there)
            if is_new or self._was_new:
                self._add(there, _mapped(processes()))
            self._there, self._was_new = there, is_new
            (self.directory / SEEN).touch()  # when this one looked last

    def _add(self, names: set[str], mapped: set[tuple[str, int]]) -> None:
        for name in names - set(self.seen):
            with contextlib.suppress(FileNotFoundError):
                found = (SHARED_MEMORY / name).lstat()
                if NAMELESS.match(name) and _place_of(found) in mapped:
                    self.seen[name] = found.st_ino
        text = "".join(f"{name} {inode}\n" for name, inode in self.seen.items())
        (self.directory / SEEN).write_text(text, encoding="utf-8")

    def starts_ray(self) -> None:
        """What a Ray of this process will leave goes with what this one leaves."""
        base = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
        (self.directory / RAY).write_text(f"{os.getpid()} {base}/ray", encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """For whoever is to leave its temporary files there."""
        try:
            name = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            name = f"uid_{os.getuid()}"
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{name}"
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))
        return {"TMPDIR": str(self.directory), "TORCHINDUCTOR_CACHE_DIR": kept}

    def remove(self) -> None:
        _remove(self.directory)
        os.close(self.descriptor)


def take() -> Scratch | None:
    """A new one; None, and a line in the log, where there can be none."""
    directory = _place() / uuid.uuid4().hex[:8]
    try:
        if len(os.fsencode(directory)) > LONGEST:
            raise OSError(f"{directory} is too long for addresses of sockets")
        _own(directory.parent)
        descriptor = durable.lock(_lock_of(directory))
        if descriptor is None:
            raise OSError(f"{directory} is taken")
        directory.mkdir(mode=0o700)
    except OSError as error:
        log.warning("temporary files stay where they are: %s", error)
        return None
    return Scratch(directory, descriptor)


def enter() -> None:
    """From now on this process and what it starts leave their temporary files in one of its own."""
    found = take()
    if found is not None:
        os.environ.update(found.environment())
        tempfile.tempdir = None  # asked for anew


def sweep() -> list[Path]:
    """Remove what dead owners have left in this user's directory; returns what that was."""
    swept = []
    with contextlib.suppress(FileNotFoundError):  # nobody has had one here
        for lock in sorted(_place().glob("*.lock")):
            directory = lock.with_suffix("")
            try:
                if (descriptor := durable.lock(lock)) is not None:
                    _free_unseen(directory)
                    _remove(directory)
                    os.close(descriptor)
                    swept.append(directory)
            except OSError as error:
                log.warning("%s could not be swept: %s", directory, error)
        for link in _place().glob(f"{LINKS}*"):
            if not os.path.exists(link):
                link.unlink(missing_ok=True)
    return swept


def shared_place() -> Path:
    """A directory that all processes of this user find on this node. Raises OSError."""
    _own(_place())
    return _place()


def _place() -> Path:
    """This user's, in the temporary directory, also for whoever has entered one of these."""
    temporary = Path(tempfile.gettempdir())
    name = f"rft-{os.getuid()}"
    return temporary.parent if temporary.parent.name == name else temporary / name


def _own(place: Path) -> None:
    """Everybody may write to a temporary directory: what is there already must be ours."""
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise OSError(f"{place} is somebody else's")


def _lock_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _remove(directory: Path) -> None:
    """The directory, the segments that are named in it, then its lock: the other way round nobody
    would find what is left after a death in between.
    """
    for met in directory.rglob(f"{SEGMENTS}*"):
        for segment in SHARED_MEMORY.glob(f"{met.name}-*"):
            with contextlib.suppress(FileNotFoundError):  # its owner was quicker
                segment.unlink()
    free_segments(directory)
    if (told := directory / RAY).exists():
        pid, base = told.read_text(encoding="utf-8").split(" ", 1)
        if not Path(f"/proc/{pid}").exists():  # else that number came again: at a later start
            for session in Path(base).glob(f"session_*_{pid}"):
                if not session.is_symlink() and session.stat().st_uid == os.getuid():
                    shutil.rmtree(session)
            latest = Path(base) / "session_latest"
            if latest.is_symlink() and not latest.exists():
                latest.unlink()
    if directory.exists():
        shutil.rmtree(directory)
    _lock_of(directory).unlink(missing_ok=True)


def free_segments(directory: Path) -> None:
    """Remove the shared memory that was noted here and that nobody has any more."""
    if not (told := directory / SEEN).exists():
        return
    lines = [line.split() for line in told.read_text(encoding="utf-8").splitlines()]
    used = _mapped(_everybody())
    for name, inode in lines:
        segment = SHARED_MEMORY / name
        with contextlib.suppress(FileNotFoundError):  # given back
            found = segment.lstat()
            if _place_of(found) not in used and found.st_ino == int(inode):
                segment.unlink()


def _free_unseen(directory: Path) -> None:
    """Remove what nobody has and what was made when its dead owner looked last, or soon after: the
    owner's death came before its next look.
    """
    if not (told := directory / SEEN).exists():
        return
    looked, used = told.stat().st_mtime, _mapped(_everybody())
    for segment in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = segment.lstat()
            if (
                NAMELESS.match(segment.name)
                and _place_of(found) not in used
                and found.st_uid == os.getuid()
                and abs(found.st_ctime - looked) <= UNSEEN_S
            ):
                segment.unlink()


def _everybody() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _mapped(processes: Iterable[int]) -> set[tuple[str, int]]:
    """Device and inode of the shared memory that these have. Those of other users are not looked
    at, and have none of this user's.
    """
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):  # gone
            text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= {(device, int(inode)) for device, inode in MAPPED.findall(text)}
    return found


def _place_of(found: os.stat_result) -> tuple[str, int]:
    """As the kernel writes it among a process's maps."""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino
