"""Questions to a run that is under way: a Unix socket in its directory that only the run's owner
may use.

    rft engines RUN_DIR ──a framed record──► <job>/control/supervisor.sock
            ──► answer(question), in the supervisor
                        ◄──a framed record──

In: the job's directory; a function from question to answer. Out: `ask`, for a command in another
process; `NobodyAnswers` when no supervisor is there. Invariants: the socket is open to its owner
alone before anybody can connect; a caller that says nothing, or does not listen, is left after
`LINE_S`, however slowly it speaks; no caller and no shortage of descriptors ends the thread; one
that is answered at is not taken over; closing it removes it.
"""

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rft.ground import durable
from rft.ground.experience import encode
from rft.ground.process import accepted, frame, one_message, socket_address

log = logging.getLogger(__name__)
NAME = "supervisor.sock"
MOST_BYTES = 2**20  # of a question or an answer
LINE_S = 5.0  # for a question to come or an answer to go
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
        self._closing = threading.Event()
        self._lock: int | None = None

    def open(self) -> None:
        """Raises OSError where it cannot listen, or another supervisor does."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / NAME
        self._lock = durable.lock(self.directory / f"{NAME}.lock")
        if self._lock is None:
            raise OSError(errno.EADDRINUSE, f"another process answers at {path}")
        path.unlink(missing_ok=True)  # of a supervisor that was killed
        with socket_address(path) as address:
            self._listener.bind(address)
        os.chmod(path, 0o600)  # nobody can connect before `listen`
        self._listener.listen()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self, timeout: float = LINE_S) -> None:
        """Whoever is being answered has `timeout` seconds."""
        self._closing.set()
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
                caller = accepted(self._listener, self._closing.wait)
            except OSError:  # closed
                return
            if caller is None:
                continue
            with caller:
                try:
                    self._reply_to(caller)
                except OSError as error:
                    log.warning("a caller was lost: %s", error)

    def _reply_to(self, caller: socket.socket) -> None:
        try:
            reply = self.answer(_read(caller, LINE_S))
        except Exception as error:  # the run goes on; the caller hears what was wrong
            log.exception("a question could not be answered")
            reply = {"error": f"{type(error).__name__}: {error}"}
        caller.settimeout(LINE_S)
        caller.sendall(frame(encode(reply)))


def ask(directory: Path, question: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The supervisor's answer.

    Raises NobodyAnswers, or TimeoutError when it does not answer in `timeout` seconds.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(timeout)
        try:
            with socket_address(directory / NAME) as address:
                line.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NobodyAnswers(f"nothing answers at {directory / NAME}") from error
        line.sendall(frame(encode(question)))
        return _read(line, timeout)


def _read(line: socket.socket, within_s: float) -> dict[str, Any]:
    message = msgspec.msgpack.decode(one_message(line, MOST_BYTES, within_s))
    if not isinstance(message, dict):
        raise ValueError("a question is an object")
    return message
