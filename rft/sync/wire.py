"""The wire between one trainer rank and one engine worker: a socket, a deadline for everything, and no copy on the way.

    Door (trainer rank): listens ──► one thread and one `Wire` per engine worker that knocks
    Wire: small records (msgpack, length first) and raw bytes, straight from and into the memory of tensors

On one host a Unix socket (abstract name, no file), otherwise TCP. In: an endpoint record, which travels through the control
plane and holds the secret without which nobody is let in. Invariants: every operation inside a round ends within the timeout,
with an exception if need be; a peer that dies or closes is an error at once, not after the timeout; nothing listens on another
address than the one configured.
"""

import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

CHUNK = 4 * 2**20  # bytes handed to the kernel at a time; what was just moved is still in the cache when it is hashed
BUFFER = 4 * 2**20  # of a socket; the kernel may grant less
BACKLOG = 1024  # engine workers that may knock at the same moment
RECORD_LIMIT = 2**20  # a longer record is no record of ours


class Lost(ConnectionError):
    """The other end is gone, or did not move for the whole timeout; the message names it."""


class Refused(RuntimeError):
    """The other end is there and says no."""


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, name: str, timeout: float):
        self.name = name
        self.timeout = timeout
        self._socket = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(
            None
        )  # the kernel keeps the time: one call moves a whole chunk without the interpreter's lock
        self._keep_time(timeout)

    def send_record(self, record: dict[str, Any]) -> None:
        data = msgspec.msgpack.encode(record)
        self.send(memoryview(len(data).to_bytes(4, "little") + data))

    def receive_record(self, patient: bool = False) -> dict[str, Any]:
        """The next record. `patient`: wait for its beginning as long as the other end lives."""
        head = bytearray(4)
        if patient:
            self._keep_time(0)
        self.receive(memoryview(head))
        if patient:
            self._keep_time(self.timeout)
        size = int.from_bytes(head, "little")
        if size > RECORD_LIMIT:
            raise Lost(f"{self.name}: a record of {size} bytes cannot be")
        body = bytearray(size)
        self.receive(memoryview(body))
        return msgspec.msgpack.decode(body)  # type: ignore[no-any-return]

    def send(self, data: memoryview) -> None:
        """All of `data`, contiguous bytes; they may change again once this returns."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, into: memoryview) -> None:
        """Fill `into`, contiguous bytes."""
        got = 0
        try:
            while got < len(into):
                size = self._socket.recv_into(into[got:], 0, socket.MSG_WAITALL)
                if not size:
                    raise Lost(f"{self.name}: the other end closed")
                got += size
        except Lost:
            raise
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """From any thread: whoever sends or receives here, on either end, fails at once."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _keep_time(self, seconds: float) -> None:
        """Let the kernel end a call in which nothing moves for so long; 0: never."""
        span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        try:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, span)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Lost:
        if isinstance(error, BlockingIOError):
            return Lost(f"{self.name}: nothing moved for {self.timeout:g} s")
        return Lost(f"{self.name}: {error.strerror or type(error).__name__}")


class Door:
    """Lets engine workers in. `welcome(hello)` names a new wire, or raises Refused; `serve(wire, hello)` then owns it."""

    def __init__(
        self, address: str, timeout: float, welcome: Callable[[dict[str, Any]], str],
        serve: Callable[[Wire, dict[str, Any]], None],
    ):  # fmt: skip
        self.timeout = timeout
        self._welcome = welcome
        self._serve = serve
        self._secret = secrets.token_hex(16)
        tcp = socket.create_server((address, 0), backlog=BACKLOG)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("")  # Linux gives it an abstract name
        unix.listen(BACKLOG)
        self.endpoint = {
            "host": address, "port": tcp.getsockname()[1], "machine": machine(), "unix": unix.getsockname(),
            "secret": self._secret,
        }  # fmt: skip
        self._wake, asleep = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for listener in (tcp, unix, asleep):
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._listen, args=(asleep,), name="weights-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is let in any more; wires that are open stay so."""
        self._wake.close()
        self._thread.join()

    def _listen(self, asleep: socket.socket) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if asleep in ready:
                break
            for listener in ready:
                connection, _ = listener.accept()  # type: ignore[union-attr]
                threading.Thread(target=self._let_in, args=(connection,), name="weights-out", daemon=True).start()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _let_in(self, connection: socket.socket) -> None:
        wire = Wire(connection, "somebody at the door", self.timeout)
        try:
            hello = wire.receive_record()
            if not hmac.compare_digest(str(hello.pop("secret", "")), self._secret):
                raise Refused("wrong secret")
            wire.name = self._welcome(hello)
            wire.send_record({"welcome": True})
        except Lost:
            wire.close()
            return
        except Refused as no:
            with suppress(Lost):  # it may not wait for the answer
                wire.send_record({"refused": str(no)})
            wire.close()
            return
        self._serve(wire, hello)


def knock(endpoint: dict[str, Any], hello: dict[str, Any], name: str, timeout: float) -> Wire:
    """Connect to a `Door`. Raises Lost when nobody is there, Refused with the reason when it does not open."""
    try:
        if endpoint["machine"] == machine():
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            connection.connect(endpoint["unix"])
        else:
            connection = socket.create_connection((endpoint["host"], endpoint["port"]), timeout)
    except OSError as error:
        raise Lost(f"{name}: nobody at {endpoint['host']}:{endpoint['port']} ({error.strerror or error})") from error
    wire = Wire(connection, name, timeout)
    try:
        wire.send_record({**hello, "secret": endpoint["secret"]})
        answer = wire.receive_record()
    except Lost:
        wire.close()
        raise
    if "refused" in answer:
        wire.close()
        raise Refused(f"{name}: {answer['refused']}")
    return wire


def machine() -> str:
    """Equal for two processes that can meet in an abstract Unix socket: one boot of one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{socket.gethostname()} {secrets.token_hex(8)}"  # no Linux: TCP is always right
    return f"{boot.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/net')}"


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`: loopback for loopback. Sends nothing (UDP connect only routes)."""
    if peer == "localhost" or ipaddress.ip_address(peer).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
