"""Nobody is left behind: adopt the orphans of this process's descendants, and end all of them.

In: nothing. Out: after `end_descendants` no process is left that this one started, directly or
through others, however they detached themselves; `end_marked` ends those of one part of a run.
Linux only; elsewhere orphans are not adopted and only the family tree as it stands is ended.
`ShortExit` ends this process itself.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import time
from collections.abc import Iterable

import psutil

log = logging.getLogger(__name__)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# a killed process is gone at once, unless the kernel still writes its memory somewhere
KILL_WAIT_S = 5.0


class ShortExit:
    """Make this first: at the end of the process, after every other `atexit` function, Python does
    not take its modules apart.

    With torch and megatron loaded that takes seconds, in which a run that is done waits for
    nothing.
    """

    def __init__(self) -> None:
        self.code = 1  # until the program says how it ended
        atexit.register(self._leave)

    def _leave(self) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self.code)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes a child
    of this process instead of init's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(grace_s: float = 0.0, spare: Iterable[int] = ()) -> None:
    """Wait up to `grace_s` for all descendants to end by themselves, kill those that did not, and
    reap them.

    `spare`: processes that, with their own children, are waited for and then left alone.
    """
    deadline = time.monotonic() + grace_s
    while family := psutil.Process().children(recursive=True):
        _, alive = psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
        alive = [process for process in alive if not _is_spared(process, set(spare))]
        if not alive:
            return
        if time.monotonic() > deadline + KILL_WAIT_S:
            log.error("these processes cannot be killed: %s", alive)
            return
        for process in alive:
            log.warning("killing %s", process)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=KILL_WAIT_S)


def end_family(pid: int) -> None:
    """Kill a process with all of its descendants, stopped ones too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        _kill([leader, *leader.children(recursive=True)])


def end_marked(variable: str, value: str) -> None:
    """Kill the descendants that were started with this in their environment, whoever their parent
    is now, and reap them.
    """
    _kill(
        [
            process
            for process in psutil.Process().children(recursive=True)
            if _is_marked(process, variable, value)
        ]
    )


def _kill(found: list[psutil.Process]) -> None:
    for process in found:
        log.warning("killing %s", process)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=KILL_WAIT_S)


def _is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or a zombie
        return process.environ().get(variable) == value
    return False


def _is_spared(process: psutil.Process, spare: set[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(spare & {process.pid, *(parent.pid for parent in process.parents())})
    return False
