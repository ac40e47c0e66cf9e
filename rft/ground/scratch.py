"""Temporary files of a process and its children, in a directory of its own that a later start can
tell from others: what it leaves behind is found and removed when it is dead. Standard library only.

    <temporary directory>/rft-<uid>/<name>/      TMPDIR of the process that has it, and its children
    <temporary directory>/rft-<uid>/<name>.lock  locked for as long as that process lives

In: nothing. Out: `take`, a directory; `enter`, one for this process; `sweep`, which removes those
of dead owners, with the shared memory that vLLM's workers named in them. Invariants: only what is
this user's and what nobody holds is removed; where there is no such place (no locks, no room, a
temporary directory with a long name) everything works as without it. Caches of compilers stay where
they were: they are not of one run.
"""

import contextlib
import getpass
import logging
import os
import shutil
import stat
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from rft.ground import durable

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "vllm_dist_"  # a file that vLLM's workers meet at; their segments have its name in front
# of a socket's address there are 107; vLLM's have 36, ours and those of Python's libraries fewer
LONGEST = 64


@dataclass
class Scratch:
    """A directory that is its owner's until it is removed, or the owner dies."""

    directory: Path
    descriptor: int

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
                    _remove(directory)
                    os.close(descriptor)
                    swept.append(directory)
            except OSError as error:
                log.warning("%s could not be swept: %s", directory, error)
    return swept


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
    if directory.exists():
        shutil.rmtree(directory)
    _lock_of(directory).unlink(missing_ok=True)
