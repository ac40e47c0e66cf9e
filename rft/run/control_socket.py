"""Questions to a run that is under way: a Unix socket in its directory that only the run's owner
may use.

    rft engines RUN_DIR ──a framed record──► <job>/control/supervisor.sock
            ──► answer(question), in the supervisor
                        ◄──a framed record──

In: the job's directory; a function from question to answer. Out: `ask`, for a command in another
process; `NobodyAnswers` when no supervisor is there. Invariants: the socket is open to its owner
alone before anybody can connect; a caller that says nothing, or does not listen, is left after
`LINE_S`; one that is answered at is not taken over; closing it removes it.
"""

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rft.ground import durable
from rft.ground.experience import encode
from rft.ground.process import frame, messages

log = logging.getLogger(__name__)
NAME = "supervisor.sock"
MOST_BYTES = 2**20  # of a question or an answer
PAUSE_S = 0.1  # after a caller could not be let in
CLOSED = (errno.EBADF, errno.EINVAL)
LINE_S = 5.0  # for a question to come or an answer to go
ADDRESS_BYTES = 100  # of an address; the kernel's field has 108, and less elsewhere
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class NobodyAnswers(ConnectionError):
    """No supervisor listens there: the run has ended, or was never started."""


class ControlSocket:
    """Answers one caller after the other, in a thread of its own."""

    def __init__(self, directory: Path, answer: Answer):
        self.directory = directory
        self.answer = answer
        self.thread: threading.Thread | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._lock: int | None = None

    def open(self) -> None:
        """Raises OSError where it cannot listen, or another supervisor does."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / NAME
        self._lock = durable.lock(self.directory / f"{NAME}.lock")
        if self._lock is None:
            raise OSError(errno.EADDRINUSE, f"another process answers at {path}")
        path.unlink(missing_ok=True)  # of a supervisor that was killed
        with _address(self.directory) as address:
            self._listener.bind(address)
        os.chmod(path, 0o600)  # nobody can connect before `listen`
        self._listener.listen()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self, timeout: float = LINE_S) -> None:
        """Whoever is being answered has `timeout` seconds."""
        with contextlib.suppress(OSError):  # never opened
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        if self.thread is not None:
            self.thread.join(timeout)
            (self.directory / NAME).unlink(missing_ok=True)
        self._listener.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                if error.errno in CLOSED:
                    return
                log.warning("a caller could not be let in: %s", error)
                time.sleep(PAUSE_S)  # of too many open files: the caller still waits
                continue
            with caller:
                try:
                    self._reply_to(caller)
                except OSError as error:
                    log.warning("a caller was lost: %s", error)

    def _reply_to(self, caller: socket.socket) -> None:
        caller.settimeout(LINE_S)
        try:
            reply = self.answer(_read(caller))
        except Exception as error:  # the run goes on; the caller hears what was wrong
            log.exception("a question could not be answered")
            reply = {"error": f"{type(error).__name__}: {error}"}
        caller.sendall(frame(encode(reply)))


def ask(directory: Path, question: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The supervisor's answer.

    Raises NobodyAnswers, or TimeoutError when it does not answer in `timeout` seconds.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(timeout)
        try:
            with _address(directory) as address:
                line.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NobodyAnswers(f"nothing answers at {directory / NAME}") from error
        line.sendall(frame(encode(question)))
        return _read(line)


def _read(line: socket.socket) -> dict[str, Any]:
    body = next(messages(line, MOST_BYTES), None)
    if body is None:
        raise ConnectionError("the line ended before its end")
    message = msgspec.msgpack.decode(body)
    if not isinstance(message, dict):
        raise ValueError("a question is an object")
    return message


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """An address of `NAME` in `directory` that is short enough for a socket, however long the
    directory's own name is.
    """
    plain = str(directory / NAME)
    if len(os.fsencode(plain)) <= ADDRESS_BYTES:
        yield plain
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{directory}: no such directory") from error
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
