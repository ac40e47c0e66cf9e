"""What rft knows about processes: how two talk, how one ends with its parent, how it ended, and how
nobody is left behind.

One framing rule for every stream between two processes: the length of the body, 4 bytes, little
endian, and the body, msgpack mostly. A message is received whole or not at all.

In: process numbers, or what `subprocess` gave. Out: after `end_family` a process, its group and its
descendants are gone, after `end_descendants` all that this process started, directly or through
others, however they detached themselves; `end_marked` ends those of one part of a run. Linux only;
elsewhere orphans are not adopted and only the family tree as it stands is ended. `ShortExit` ends
this process itself.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# a killed process is gone at once, unless the kernel still writes its memory somewhere
KILL_WAIT_S = 5.0
HEADER = struct.Struct("<I")  # of a frame: the length of the body behind it
LONGEST = 2**32 - 1
AT_ONCE = 2**16  # bytes: small frames are read several at a time


class BrokenFrame(ConnectionError):
    """A stream that ended inside a frame, or one of something else."""


def frame(body: bytes) -> bytes:
    """What goes over a stream for one message of fewer than 4 GiB."""
    return HEADER.pack(len(body)) + body


class Frames:
    """Finds the messages in what comes over a stream, in whatever parts it comes."""

    def __init__(self, limit: int = LONGEST) -> None:
        """`limit`: bytes of one body; more is none of ours."""
        self.limit = limit
        self.rest = bytearray()  # of a frame that is not here as a whole yet

    def split(self, part: bytes) -> list[bytes]:
        """The bodies that this part completes. Raises BrokenFrame for one beyond the limit."""
        self.rest += part
        whole, start = [], 0
        with memoryview(self.rest) as view:
            while len(view) >= start + HEADER.size:
                length = HEADER.unpack_from(view, start)[0]
                if length > self.limit:
                    raise BrokenFrame(f"a message of {length} bytes is too long")
                end = start + HEADER.size + length
                if len(view) < end:
                    break
                whole.append(bytes(view[start + HEADER.size : end]))
                start = end
        del self.rest[:start]
        return whole


def messages(stream: socket.socket, limit: int = LONGEST) -> Iterator[bytes]:
    """The bodies of all frames up to the end of a stream, each as soon as it is there.

    Raises BrokenFrame when it ends inside one, and what `recv` raises: TimeoutError where the
    socket has a timeout.
    """
    frames = Frames(limit)
    while part := stream.recv(AT_ONCE):
        yield from frames.split(part)
    if frames.rest:
        raise BrokenFrame("the stream ended inside a message")


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
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it is gone, however it went."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def ending(
    code: int | None, killed: str = "killed by", exited: str = "ended with exit code"
) -> str:
    """How a process ended, in words. `code`: as `subprocess` has it, negative for a signal."""
    if code is None:
        return "ended, how is not known"
    if code >= 0:
        return f"{exited} {code}"
    known = -code in set(signal.Signals)  # those of real time have numbers only
    return f"{killed} {signal.Signals(-code).name if known else f'signal {-code}'}"


def end_descendants(grace_s: float = 0.0, spare: Iterable[int] = ()) -> None:
    """Wait up to `grace_s` for all descendants to end by themselves, kill those that did not, and
    reap them.

    `spare`: processes that, with their own children, are waited for and then left alone.
    """
    deadline = time.monotonic() + grace_s
    while found := psutil.Process().children(recursive=True):
        _, alive = psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))
        alive = [process for process in alive if not _is_spared(process, set(spare))]
        if not alive:
            return
        if time.monotonic() > deadline + KILL_WAIT_S:
            log.error("these processes cannot be killed: %s", alive)
            return
        log.warning("killing %s", alive)
        _kill(alive)
        psutil.wait_procs(alive, timeout=KILL_WAIT_S)


def family(pid: int) -> list[psutil.Process]:
    """A process and all of its descendants, as they are now; none when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    return []


def kill_family(pid: int) -> list[psutil.Process]:
    """Kill a process, the group that it leads, which may outlive it, and all of its descendants,
    stopped ones and those that left the group too. Waits for none; returns the family.
    """
    found = family(pid)
    with contextlib.suppress(ProcessLookupError):  # it leads no group, or all of it is gone
        os.killpg(pid, signal.SIGKILL)
    _kill(found)  # also whoever has left the group
    return found


def end_family(leader: "int | subprocess.Popen[bytes]", within_s: float = KILL_WAIT_S) -> None:
    """Kill a family, wait for its end, and say so if that does not come."""
    pid = leader if isinstance(leader, int) else leader.pid
    log.warning("killing process %d with its family", pid)
    deadline = time.monotonic() + within_s
    found = kill_family(pid)
    if not isinstance(leader, int):  # first: its exit code is the Popen's to take
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(within_s)
    _await(found, max(0.0, deadline - time.monotonic()))


def end_marked(variable: str, value: str) -> None:
    """Kill the descendants that were started with this in their environment, whoever their parent
    is now, and reap them.
    """
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if _is_marked(process, variable, value)
    ]
    if found:
        log.warning("killing %s", found)
    _kill(found)
    _await(found, KILL_WAIT_S)


def _kill(found: list[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _await(killed: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(killed, timeout=within_s)
    if alive:
        log.error("these processes cannot be killed: %s", alive)


def _is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or a zombie
        return process.environ().get(variable) == value
    return False


def _is_spared(process: psutil.Process, spare: set[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(spare & {process.pid, *(parent.pid for parent in process.parents())})
    return False
