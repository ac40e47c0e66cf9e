"""Messages between a trainer rank and its agent: msgpack records, framed, over one socket pair. No
torch.

Invariant: a message is received whole or not at all; the death of either end is the end of the
stream, seen at once. An end that is stopped takes nothing and says nothing: whoever must not wait
for it sends through an `Outbox`.
"""

import queue
import socket
import threading
from typing import Any

import msgspec

from rft.checkpoint.records import Report, Request
from rft.ground.process import NamedThread, frame, messages

BACKLOG = 16  # messages that wait to be taken; an agent that listens takes each at once


class Wire:
    """One end of the socket pair. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket, incoming: Any):
        self.end = end
        self._come = messages(end)
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    @classmethod
    def of_trainer(cls, end: socket.socket) -> "Wire":
        return cls(end, Report)

    @classmethod
    def of_agent(cls, end: socket.socket) -> "Wire":
        return cls(end, Request)

    def encode(self, message: Request | Report) -> bytes:
        return frame(self._encoder.encode(message))

    def send(self, message: Request | Report) -> bool:
        """Wait until it is taken. False when nobody is there any more."""
        return self.send_encoded(self.encode(message))

    def send_encoded(self, data: bytes) -> bool:
        with self._lock:
            try:
                self.end.sendall(data)
            except OSError:
                return False
        return True

    def send_some(self, data: bytes) -> bytes:
        """What the other end does not take at once. Nobody else may be sending."""
        try:
            return data[self.end.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError:  # nobody is there any more
            return b""

    def receive(self) -> Any:
        """The next message; None at the end of the stream, also
        if it breaks off inside a message.
        """
        try:
            body = next(self._come, None)
        except OSError:
            return None
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        self.end.close()


class Outbox:
    """Who hands a message over never waits for the other end, however long that is stopped: what it
    does not take at once is sent by a thread. Each turn of that thread takes the interpreter's lock
    from whoever computes, so an agent that listens needs none.
    """

    def __init__(self, wire: Wire):
        self._wire = wire
        self._lock = threading.Lock()
        self._left = 0  # messages that the thread has not sent
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        NamedThread(target=self._run, name="checkpoint-outbox", daemon=True).start()

    def send(self, *sent: Request) -> None:
        data = b"".join(map(self._wire.encode, sent))
        with self._lock:
            rest = data if self._left else self._wire.send_some(data)
            if rest:
                self._left += 1
                self._waiting.put(rest)

    def is_full(self) -> bool:
        """Begin nothing more: nothing is being taken.

        What belongs to something begun is small, and still accepted.
        """
        return self._left >= BACKLOG

    def close(self) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None and self._wire.send_encoded(data):
            with self._lock:
                self._left -= 1
