"""A child process that its parent can kill at any time, and the socket to it.

    start ──► python -m MODULE <socket fd> <parent pid>   (own session)
    send, receive: messages, framed
    kill ──► its whole family; a reader wakes with EOF

In: the module to run. Out: whole messages, or EOFError. Invariant: the process ends with its
parent, and `reap` leaves none behind.
"""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections import deque

from rft.ground.device import thread_environment
from rft.ground.process import AT_ONCE, Frames, die_with_parent, ending, frame, kill_family
from rft.monitor import logs

CLOSE_TIMEOUT_S = 10.0  # for killed processes to be gone
EXIT_TIMEOUT_S = 1.0  # between the end of a worker's socket and its exit status


def parents_socket() -> socket.socket | None:
    """For the module that is run: the socket to its parent; None if that died before this process
    could be tied to its life.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # not for the processes that user code starts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logs.hide_secrets()
    die_with_parent()
    return socket.socket(fileno=descriptor) if os.getppid() == parent else None


class Child:
    """One child process at a time, the socket to it, and the
    killed ones that are not reaped yet.
    """

    def __init__(self, module: str) -> None:
        self._module = module
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
        environment = (
            os.environ
            | thread_environment(1)
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

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
