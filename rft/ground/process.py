"""What rft knows about processes: how one is started, talks, ends with its parent and has ended,
and how nobody is left behind.

    Child.start ──► python -m MODULE <socket fd> <parent pid>   (own process group)
    Child.send, receive: messages
    Child.kill ──► its whole family; a reader wakes with EOF

One framing rule for every stream between two processes: the length of the body, 4 bytes, little
endian, and the body, msgpack mostly. A message is received whole or not at all.

In: process numbers, or what `subprocess` gave. Out: whole messages, or
EOFError; after `end_family` a process, its group and its
descendants are gone, after `end_descendants` all that this process started, directly or through
others, however they detached themselves; `end_marked` ends those of one part of a run. Linux only;
elsewhere orphans are not adopted and only the family tree as it stands is ended. `ShortExit` ends
this process itself.
"""

import asyncio
import atexit
import contextlib
import ctypes
import errno
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rft.ground.device import thread_environment, turns_not_inherited
from rft.ground.surroundings import foreign

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
NAME_BYTES = 15  # that the kernel keeps of a thread's name
# a killed process is gone at once, unless the kernel still writes its memory somewhere
KILL_WAIT_S = 5.0
CLOSE_TIMEOUT_S = 10.0  # for killed processes to be gone
OPEN_FILES = 65536  # of a process: sockets and files of ranks that all know each other
EXIT_TIMEOUT_S = 1.0  # between the end of a child's socket and its exit status
HEADER = struct.Struct("<I")  # of a frame: the length of the body behind it
LONGEST = 2**32 - 1
ADDRESS_BYTES = 100  # of a Unix socket; the kernel's field has 108, and less elsewhere
AT_ONCE = 2**16  # bytes: small frames are read several at a time
SHORTAGE_S = 0.2  # until a listener asks again for what this process or machine had none of
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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


def one_message(stream: socket.socket, limit: int, within_s: float) -> bytes:
    """The next body and not one byte behind it, all of it in `within_s`, however slowly it comes.

    Raises BrokenFrame, or what `recv` raises: TimeoutError when the time is over.
    """
    deadline = time.monotonic() + within_s

    def exactly(size: int) -> bytearray:
        data, got = bytearray(size), 0
        while got < size:
            stream.settimeout(max(deadline - time.monotonic(), 1e-6))  # 0 would mean: never wait
            here = stream.recv_into(memoryview(data)[got:])
            if not here:
                raise BrokenFrame("the stream ended inside a message")
            got += here
        return data

    size = HEADER.unpack(exactly(HEADER.size))[0]
    if size > limit:
        raise BrokenFrame(f"a message of {size} bytes is too long")
    return bytes(exactly(size))


def accepted(listener: socket.socket, pause: Callable[[float], object]) -> socket.socket | None:
    """The next connection of a listener that goes on whatever happens to one. None: whoever came is
    gone again, or there was no descriptor left for it, and it waits in the kernel; then this has
    called `pause(SHORTAGE_S)`. Raises OSError when the listener itself is closed.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in SHORTAGES:
            log.warning("a connection has to wait: %s", error.strerror)
            pause(SHORTAGE_S)
        elif error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
            raise
        return None


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address of the Unix socket at `path` that is short enough for the kernel, however long the
    name of its directory is. Raises FileNotFoundError where that is missing.
    """
    plain = str(path)
    if len(os.fsencode(plain)) <= ADDRESS_BYTES:
        yield plain
        return
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path.parent}: no such directory") from error
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


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


def die_with_parent(parent: int | None = None) -> bool:
    """Ask Linux to kill this process when the thread that started it is gone, however it went.

    `parent`: its process, where that is known; False if it was gone before it could be asked for.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return parent is None or os.getppid() == parent


class NamedThread(threading.Thread):
    """A thread whose name the kernel knows too, so that its processor time, in /proc as in `top -H`
    and `perf`, says what it is for.
    """

    def run(self) -> None:
        _prctl(PR_SET_NAME, self.name.encode()[:NAME_BYTES])
        super().run()


def _prctl(option: int, value: int | bytes) -> None:
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


def await_end(pid: int, deadline_s: float | None = None) -> bool:
    """Return when a process is gone, False if it is not at the deadline. It may be anybody's child.

    Linux only.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ends = select.poll()  # a rank may have more descriptors than `select` takes
    ends.register(descriptor, select.POLLIN)
    try:
        return bool(ends.poll(None if deadline_s is None else 1000 * deadline_s))
    finally:
        os.close(descriptor)


def identity(pid: int) -> str:
    """A process that lives, by its number and when it began: numbers come again. The same after an
    exec; empty for one that has ended.

    Linux only.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # behind the name, which may have spaces: proc(5), fields 3 (state) and 22 (starttime)
        told = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if told[0] in "ZX" else f"{pid}-{told[19]}"
    return ""


def launcher() -> int:
    """Process number of the torchrun that has started this rank and may start it again, else 0."""
    return os.getppid() if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else 0


def end_descendants(grace_s: float = 0.0, spare: Iterable[int] = ()) -> None:
    """Wait up to `grace_s` for all descendants to end by themselves, kill those that did not, and
    reap them.

    `spare`: processes that, with their own children, are waited for and then left alone.
    """
    deadline = time.monotonic() + grace_s
    while _has_children():
        # one whose parent ends in this moment is not found; then it is this process's own child
        found = psutil.Process().children(recursive=True)
        _, alive = psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))
        others = [process for process in alive if not is_spared(process, set(spare))]
        if alive and not others and len(alive) == len(found):
            return
        if time.monotonic() > deadline + KILL_WAIT_S:
            log.error("these processes cannot be killed: %s", others)
            return
        if others:
            log.warning("killing %s", others)
            kill_these(others)
            psutil.wait_procs(others, timeout=KILL_WAIT_S)


def _has_children() -> bool:
    """Ended ones that nobody has waited for are children too."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def family(pid: int) -> list[psutil.Process]:
    """A process and all of its descendants, as they are now; none when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    return []


def is_stopped(process: psutil.Process) -> bool:
    """As the kernel shows it. Not one that a debugger holds: that has another state."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def kill_family(pid: int) -> list[psutil.Process]:
    """Kill a process, the group that it leads, which may outlive it, and all of its descendants,
    stopped ones and those that left the group too. Waits for none; returns the family.
    """
    found = family(pid)
    with contextlib.suppress(ProcessLookupError):  # it leads no group, or all of it is gone
        os.killpg(pid, signal.SIGKILL)
    kill_these(found)  # also whoever has left the group
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
        if is_marked(process, variable, value)
    ]
    if found:
        log.warning("killing %s", found)
    kill_these(found)
    _await(found, KILL_WAIT_S)


def kill_these(found: list[psutil.Process]) -> None:
    """Waits for none."""
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _await(killed: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(killed, timeout=within_s)
    if alive:
        log.error("these processes cannot be killed: %s", alive)


def is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    """Whether it was started with this in its environment."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or a zombie
        return process.environ().get(variable) == value
    return False


def is_spared(process: psutil.Process, spare: set[int]) -> bool:
    """Whether it is one of these, or started by one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(spare & {process.pid, *(parent.pid for parent in process.parents())})
    return False


def python_path() -> dict[str, str]:
    """Environment in which another interpreter finds what this one finds."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def tied(command: Sequence[str]) -> list[str]:
    """A command that runs this one, and ends with this process, whatever kills that: the program,
    and all that it has started, which know nothing of it. Its end is the program's own.
    """
    return [sys.executable, "-m", "rft.ground.process", str(os.getpid()), *command]


def raise_open_files() -> None:
    """Let this process, and what it starts, open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def parents_socket() -> socket.socket | None:
    """For the module that is run: the socket to its parent; None if that died before this process
    could be tied to its life. Whoever asks the run's terminal gets an error, and is not stopped.
    """
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # not for the processes that user code starts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return socket.socket(fileno=descriptor) if die_with_parent(parent) else None


class Child:
    """One child process at a time, `python -m MODULE <socket fd> <parent pid>` in a process group
    of its own, the socket to it, and the killed ones that are not reaped yet.

    No session of its own: where Linux shares cores among sessions first (autogroup, see sched(7)),
    one that sleeps most of the time was seen to wait for more than a second, beside an engine on
    the same core, each time it was asked.

    `command`, `environment`: instead of that module, a program that gets these two arguments.
    """

    def __init__(
        self,
        module: str = "",
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command) or [sys.executable, "-m", module]
        self._environment = environment  # None: of a reward's process, and this one's packages
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = Frames()
        self._come: deque[bytes] = deque()  # messages that nobody has asked for yet
        self._dying: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a process.

        In the calling thread: PR_SET_PDEATHSIG follows the life of the thread that forked.
        """
        if self._socket is not None:
            self._socket.close()
        self._dying = [process for process in self._dying if process.poll() is None]
        self._socket, theirs = socket.socketpair()
        self._frames, self._come = Frames(), deque()
        self._socket.setblocking(False)
        with theirs, turns_not_inherited():
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=foreign("rewards") | thread_environment(1) | python_path()
                if self._environment is None
                else {**self._environment, **thread_environment(1)},
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def stopped(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._process is not None and is_stopped(psutil.Process(self._process.pid))
        return False

    async def send(self, body: bytes) -> None:
        assert self._socket is not None
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, frame(body))
        except ConnectionError as error:
            raise EOFError("the worker is gone") from error

    def come(self) -> bytes | None:
        """The next message, if it is here already."""
        return self._come.popleft() if self._come else None

    async def receive(self) -> bytes:
        """The next message; EOFError when the process has closed its end, or was killed."""
        assert self._socket is not None
        while (body := self.come()) is None:
            try:
                part = await asyncio.get_running_loop().sock_recv(self._socket, AT_ONCE)
            except ConnectionError as error:
                raise EOFError("the worker is gone") from error
            if not part:
                raise EOFError("the worker is gone")
            self._come += self._frames.split(part)
        return body

    async def end(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return ending(code, killed="was killed by", exited="exited with code")

    def kill(self) -> None:
        """Kill the family; end the socket, so that a reader of it wakes up with EOF."""
        if self._process is None or self._socket is None:  # already killed
            return
        kill_family(self._process.pid)
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._dying.append(self._process)
        self._process = None

    def reap(self) -> None:
        """Wait for everything killed to be gone. Only when nobody reads the socket any more."""
        for process in self._dying:
            process.wait(CLOSE_TIMEOUT_S)
        self._dying.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def guard(parent: int, command: list[str]) -> None:
    """Body of `tied`. The kernel tells it of its parent's end, and orphans of the program are its
    children: a program that was only told to die itself would leave its own children behind.
    """
    guarding = os.getpid()

    def end(*_: object) -> None:
        end_descendants()
        os._exit(1)

    def begin() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(guarding)

    logging.disable()  # what is on stderr is the program's
    adopt_orphans()
    signal.signal(signal.SIGTERM, end)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    code = subprocess.Popen(command, close_fds=False, preexec_fn=begin).wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(guarding, -code)
    os._exit(code)


if __name__ == "__main__":  # see `tied`
    guard(int(sys.argv[1]), sys.argv[2:])
