"""Which connections the endpoint keeps, and for how long.

    socket ──► ConnectionGate() makes a `ConnectionLine` around aiohttp's own protocol
           ──► a request has come whole (`ConnectionLine.answering`) ──► answered ──► idle

In: what the kernel accepted. Out: the bytes, passed on as they are. Invariants: from the beginning
of a connection, or the end of an answer, to the last byte of the next request's header there is one
limit, however slowly bytes come; of those that have not shown a key the oldest goes when there are
too many, so they never keep out who has one.
"""

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HEADER_S = 20.0  # from the connection to the end of the first header
IDLE_S = 75.0  # from an answer to the end of the next header
STRANGERS = 128  # connections that have not shown a key
MOST_LINES = 4096


class ConnectionGate:
    """Makes the protocol of every connection. `make`: aiohttp's."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.lines: dict[asyncio.BaseTransport, ConnectionLine] = {}
        self.strangers: dict[ConnectionLine, None] = {}  # oldest first
        # the process needs descriptors for other things, too
        self.most = min(MOST_LINES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def __call__(self) -> "ConnectionLine":
        return ConnectionLine(self, self.make())

    def enter(self, line: "ConnectionLine", transport: asyncio.Transport) -> None:
        if len(self.lines) >= self.most and not self.strangers:
            transport.abort()  # all of them belong to those who have a key
            return
        if len(self.strangers) >= STRANGERS or len(self.lines) >= self.most:
            next(iter(self.strangers)).cut()
        self.lines[transport] = line
        self.strangers[line] = None

    def leave(self, line: "ConnectionLine") -> None:
        self.strangers.pop(line, None)
        self.lines.pop(line.transport, None)  # type: ignore[arg-type]

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[Callable[[], None]]:
        """While a request of this connection is answered. Gives what to call when it has shown a
        key.
        """
        line = self.lines.get(transport)  # type: ignore[arg-type]
        if line is None:  # it has just gone
            yield lambda: None
            return
        line.limit(None)
        try:
            yield lambda: self.strangers.pop(line, None)
        finally:
            if line.transport is not None:
                line.limit(IDLE_S)


class ConnectionLine(asyncio.Protocol):
    """One connection, between the loop and aiohttp."""

    def __init__(self, gate: ConnectionGate, inner: Any):
        self.gate = gate
        self.inner = inner
        self.transport: asyncio.Transport | None = None
        self._over: asyncio.TimerHandle | None = None

    def limit(self, seconds: float | None) -> None:
        """It is cut after so long; None: it is not."""
        if self._over is not None:
            self._over.cancel()
        loop = asyncio.get_running_loop()
        self._over = None if seconds is None else loop.call_later(seconds, self.cut)

    def cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.gate.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.inner.connection_made(transport)
        self.limit(HEADER_S)
        self.gate.enter(self, transport)  # type: ignore[arg-type]

    def connection_lost(self, error: Exception | None) -> None:
        self.limit(None)
        self.gate.leave(self)
        self.transport = None
        self.inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()  # type: ignore[no-any-return]

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
