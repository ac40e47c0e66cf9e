"""The connection between one trainer rank and one engine worker: a socket, a deadline for
everything, and no copy on the way.

    Listener (trainer rank) ──► one thread, one `PeerConnection` per engine worker that connects
    PeerConnection: small records (msgpack, length first); raw bytes, straight from and into tensors

On one host a Unix socket (abstract name, no file), otherwise TCP. In: an endpoint record, which
travels through the control plane and holds the secret without which no connection is accepted.
Invariants: every operation inside a round ends within the timeout, with an exception if need be; a
peer that dies or closes is an error at once, not after the timeout; nothing listens on another
address than the one configured. Who has not said the secret costs one of `STRANGERS` threads for
`HELLO_S` at most, and a listener goes on whatever one connection does.
"""

import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rft.ground.device import socket_family
from rft.ground.experience import Record, encode
from rft.ground.process import HEADER, NamedThread, accepted, frame, one_message

log = logging.getLogger(__name__)
# bytes handed to the kernel at a time; what was just moved is still in the cache when it is hashed
CHUNK = 4 * 2**20
BUFFER = 4 * 2**20  # of a socket; the kernel may grant less
BACKLOG = 1024  # engine workers that may connect at the same moment
RECORD_LIMIT = 2**20  # a longer record is no record of ours
HELLO_LIMIT = 2**16  # and of somebody who has not said the secret yet
HELLO_S = 10.0  # for the first words, from the connection to their last byte
STRANGERS = 128  # connections that have not said the secret; the oldest goes when more come
T = TypeVar("T")


class PeerLost(ConnectionError):
    """The other end is gone, or did not move for the whole timeout; the message names it.

    `lost`: the engine that it is; "": it belongs to the trainer.
    """

    def __init__(self, message: str, lost: str = ""):
        super().__init__(message)
        self.lost = lost


class PeerRefused(RuntimeError):
    """The other end is there and says no."""


class PeerConnection:
    """One end of a connection. `limit`: bytes of a record, of whoever is at the other end.
    `engine`: the other end, where that is an engine.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        timeout: float,
        limit: int = RECORD_LIMIT,
        engine: str = "",
    ):
        self.name = name
        self.engine = engine
        self.timeout = timeout
        self._socket = connection
        self._limit = limit
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(
            None
        )  # the kernel keeps the time: one call moves a whole chunk without the interpreter's lock
        self._keep_time(timeout)

    def send_record(self, record: dict[str, Any] | Record) -> None:
        self.send(memoryview(frame(encode(record))))

    def receive_record(self, patient: bool = False) -> dict[str, Any]:
        """The next record. `patient`: wait for its beginning as long as the other end lives.

        Reads not one byte too many: those behind it go straight into a tensor.
        """
        head = bytearray(HEADER.size)
        if patient:
            self._keep_time(0)
        self.receive(memoryview(head))
        if patient:
            self._keep_time(self.timeout)
        size = HEADER.unpack(head)[0]
        if size > self._limit:
            raise PeerLost(f"{self.name}: a record of {size} bytes cannot be", self.engine)
        body = bytearray(size)
        self.receive(memoryview(body))
        try:
            return read_record(body)
        except ValueError as error:
            raise self.said_wrong(error) from error

    def receive_as(self, kind: type[T], patient: bool = False) -> T:
        """The next record as one of `kind`. Raises PeerLost for what is none: who says such things
        is no peer of ours any more, and this end is none the worse.
        """
        record = self.receive_record(patient)
        try:
            return msgspec.convert(record, kind)
        except msgspec.ValidationError as error:
            raise self.said_wrong(error) from error

    def said_wrong(self, why: object) -> PeerLost:
        return PeerLost(f"{self.name} said what cannot be: {why}", self.engine)

    def send(self, data: memoryview) -> None:
        """All of `data`, contiguous bytes; they may change again once this returns."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def wait(self) -> None:
        """Until something is there to receive."""
        try:
            some = self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise self._lost(error) from error
        if not some:
            raise self._closed()

    def receive(self, into: memoryview) -> None:
        """Fill `into`, contiguous bytes."""
        got = 0
        try:
            while got < len(into):
                size = self._socket.recv_into(into[got:], 0, socket.MSG_WAITALL)
                if not size:
                    raise self._closed()
                got += size
        except PeerLost:
            raise
        except OSError as error:
            raise self._lost(error) from error

    def _closed(self) -> PeerLost:
        return PeerLost(f"{self.name}: the other end closed", self.engine)

    def fileno(self) -> int:
        return self._socket.fileno()

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

    def _lost(self, error: OSError) -> PeerLost:
        if isinstance(error, BlockingIOError):
            return PeerLost(f"{self.name}: nothing moved for {self.timeout:g} s", self.engine)
        return PeerLost(f"{self.name}: {error.strerror or type(error).__name__}", self.engine)


class Listener:
    """Accepts connections that know the secret.

    `admit(hello)` names a new connection, or raises PeerRefused; `serve(wire, hello)` then owns it.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        admit: Callable[[dict[str, Any]], str],
        serve: Callable[[PeerConnection, dict[str, Any]], None],
    ):
        self.timeout = timeout
        self._admit = admit
        self._serve = serve
        self._secret = secrets.token_hex(16)
        tcp = socket.create_server((address, 0), family=socket_family(address), backlog=BACKLOG)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("")  # Linux gives it an abstract name
        unix.listen(BACKLOG)
        self.endpoint = {
            "host": address,
            "port": tcp.getsockname()[1],
            "machine": machine(),
            "unix": unix.getsockname(),
            "secret": self._secret,
        }
        self._closed = threading.Event()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._changing = threading.Lock()
        self._wake, asleep = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for listener in (tcp, unix, asleep):
            listener.setblocking(False)  # whoever came may be gone before it is accepted
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = NamedThread(
            target=self._listen, args=(asleep,), name="weights-listener", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; those that are open stay so."""
        self._closed.set()
        self._wake.close()
        self._thread.join()

    def _listen(self, asleep: socket.socket) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if asleep in ready:
                break
            for listener in ready:
                connection = accepted(listener, self._closed.wait)  # type: ignore[arg-type]
                if connection is not None:
                    self._meet(connection)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _meet(self, connection: socket.socket) -> None:
        """A thread for it, and the end of the oldest stranger where there are too many."""
        with self._changing:
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):  # it has just gone
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes and closes it
            self._strangers[connection] = None
        try:
            NamedThread(
                target=self._handshake, args=(connection,), name="weights-out", daemon=True
            ).start()
        except RuntimeError as error:  # this machine has no more threads now
            log.warning("a connection is refused: %s", error)
            self._forget(connection)
            connection.close()

    def _forget(self, stranger: socket.socket) -> None:
        with self._changing:
            self._strangers.pop(stranger, None)

    def _handshake(self, connection: socket.socket) -> None:
        try:
            hello = self._hello(connection)
            wire = PeerConnection(connection, "an unknown peer", self.timeout)
        except (OSError, ValueError) as error:
            log.info("a stranger is left: %s", error)
            connection.close()
            return
        finally:
            self._forget(connection)
        try:
            if hello is None:
                raise PeerRefused("wrong secret")
            try:
                wire.name = self._admit(hello)
            except (LookupError, TypeError, ValueError) as error:
                raise PeerRefused(f"these are no first words of ours: {error!r}") from error
            wire.send_record({"accepted": True})
        except PeerLost:
            wire.close()
            return
        except PeerRefused as no:
            log.warning("refused: %s", no)
            with suppress(PeerLost):  # it may not wait for the answer
                wire.send_record({"refused": str(no)})
            wire.close()
            return
        self._serve(wire, hello)

    def _hello(self, connection: socket.socket) -> dict[str, Any] | None:
        """What a stranger says first, without the secret; None where that is wrong."""
        body = one_message(connection, HELLO_LIMIT, min(self.timeout, HELLO_S))
        hello = read_record(body)
        theirs = str(hello.pop("secret", "")).encode(errors="replace")
        return hello if hmac.compare_digest(theirs, self._secret.encode()) else None


def read_record(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        found = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no record: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"no record, but {type(found).__name__}")
    return found


def handshake(
    endpoint: dict[str, Any], hello: dict[str, Any], name: str, timeout: float, engine: str = ""
) -> PeerConnection:
    """Connect to a `Listener`, of `engine`'s if it has a name.

    Raises PeerLost when none is there, PeerRefused with the reason when it does not accept.
    """
    try:
        if endpoint["machine"] == machine():
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            connection.connect(endpoint["unix"])
        else:
            connection = socket.create_connection((endpoint["host"], endpoint["port"]), timeout)
    except OSError as error:
        raise PeerLost(
            f"{name}: nobody at {endpoint['host']}:{endpoint['port']} ({error.strerror or error})",
            engine,
        ) from error
    wire = PeerConnection(connection, name, timeout, engine=engine)
    try:
        wire.send_record({**hello, "secret": endpoint["secret"]})
        answer = wire.receive_record()
    except PeerLost:
        wire.close()
        raise
    if "refused" in answer:
        wire.close()
        raise PeerRefused(f"{name}: {answer['refused']}")
    return wire


def told(wire: PeerConnection) -> dict[str, Any]:
    """The next word of who sends, when there is more to say than that it waits.

    Raises what it says instead of bytes.
    """
    while "wait" in (record := wire.receive_record()):
        pass
    if "refused" in record:
        raise PeerRefused(f"{wire.name}: {record['refused']}")
    if "lost" in record:
        raise PeerLost(f"{wire.name}: {record['why']}", record["lost"])
    return record


def machine() -> str:
    """Equal for two processes that can meet in an abstract Unix socket: one boot of one kernel, one
    network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{socket.gethostname()} {secrets.token_hex(8)}"  # no Linux: TCP is always right
    return f"{boot.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/net')}"


def own_address(cluster: str | None) -> str:
    """Where engines find this rank: loopback with a private Ray, else this machine's address on the
    way to the cluster's head, "host:port". Sends nothing (UDP connect only routes).
    """
    if cluster is None:
        return "127.0.0.1"
    host = cluster.rpartition(":")[0].strip("[]")
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, peer = min((each[0], each[4]) for each in found)  # IPv4, where there is one
    if ipaddress.ip_address(peer[0]).is_loopback:
        return "127.0.0.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
