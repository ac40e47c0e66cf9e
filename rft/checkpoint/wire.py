"""Messages between a trainer rank and its agent: msgpack records with a length prefix over one socket pair. No torch.

Invariant: a message is received whole or not at all; the death of either end is the end of the stream, seen at once.
"""

import socket
import struct
import threading
from typing import Any

import msgspec

from rft.checkpoint.records import Report, Request

LENGTH = struct.Struct("<I")


class Wire:
    """One end of the socket pair. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket, incoming: Any):
        self.end = end
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    @classmethod
    def of_trainer(cls, end: socket.socket) -> "Wire":
        return cls(end, Report)

    @classmethod
    def of_agent(cls, end: socket.socket) -> "Wire":
        return cls(end, Request)

    def send(self, message: Request | Report) -> bool:
        """False when nobody is there any more."""
        data = self._encoder.encode(message)
        with self._lock:
            try:
                self.end.sendall(LENGTH.pack(len(data)) + data)
            except OSError:
                return False
        return True

    def receive(self) -> Any:
        """The next message; None at the end of the stream, also if it breaks off inside a message."""
        head = self._exactly(LENGTH.size)
        body = self._exactly(LENGTH.unpack(head)[0]) if head else None
        return self._decoder.decode(body) if body is not None else None

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self.end.recv(min(count - len(parts), 2**20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.end.close()
