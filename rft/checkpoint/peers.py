"""What agents of different nodes say to each other, and ranks that come back to agents of other
nodes: one TCP connection for one errand, and both ends show first that they belong to one run.

    caller ── PeerHello: run, who, what for, a number ──► agent     (another run: refused by name)
           ◄── Challenge: its number, its proof ──
           ── Proof ──►
           ◄── Welcome ──                                       then the errand's own messages

In: the run's name and secret, which a node keeps for the attempts after (`remember`). Out: a `Line`
for messages and raw bytes, within deadlines. Invariants: the secret goes over no network, for a
proof is a keyed hash of both numbers; who has not proved that he knows it is given nothing and
costs a thread for HELLO_S; nothing here is encrypted, and whoever gets bytes compares them with
hashes. No torch.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from rft.checkpoint.records import Receipt, decode_json, encode_json, sha256
from rft.ground import durable
from rft.ground.process import NamedThread, accepted, frame, one_message

log = logging.getLogger(__name__)
HELLO_S = 5.0  # for the first words, and to reach a node
IDLE_S = 10.0  # without a byte: the other end is stopped, or its node is gone
FIRST_BYTES, MOST_BYTES = 2**12, 2**30  # of a message, before and after the proof
STRANGERS = 64  # connections that have proved nothing yet
Sent = TypeVar("Sent", bound=msgspec.Struct)


class AgentRefused(OSError):
    """The other end is there and says no."""


class RunKey(msgspec.Struct, frozen=True):
    """What agents of one run know, and no others."""

    name: str
    secret: str

    @classmethod
    def new(cls) -> "RunKey":
        return cls(secrets.token_hex(8), secrets.token_hex(16))

    def proof(self, who: str, hello: bytes, number: str) -> str:
        words = b"\0".join([who.encode(), number.encode(), hello])
        return hmac.new(self.secret.encode(), words, "sha256").hexdigest()


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """`errand`: "replica" of `rank`, "word" of it for the first agent, or "read"."""

    run: str
    errand: str
    rank: int
    epoch: int
    number: str


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    number: str = ""
    proof: str = ""
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    proof: str


class Welcome(msgspec.Struct, frozen=True):
    """`held`: ids of the caller's parts that are here."""

    held: list[str] = []


class Whole(msgspec.Struct, frozen=True, tag=True):
    """Every rank's part of this state is in the memory of two nodes; sha256 of their receipts."""

    id: str
    step: int
    receipts: list[str]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A part that some agent holds. `at`: where it is reached from other nodes; `is_own`: it is of
    the agent's own rank.
    """

    id: str
    step: int
    epoch: int
    world: int
    rank: int
    receipt: str  # its sha256
    is_own: bool = True
    at: tuple[str, int] | None = None

    @classmethod
    def of(cls, receipt: Receipt, is_own: bool, at: tuple[str, int] | None) -> "Offer":
        return cls(
            id=receipt.id,
            step=receipt.step,
            epoch=receipt.epoch,
            world=receipt.world,
            rank=receipt.rank,
            receipt=digest_of(receipt),
            is_own=is_own,
            at=at,
        )


def digest_of(receipt: Receipt) -> str:
    return sha256(encode_json(receipt))


class PeerLine:
    """One end of a connection. Raises OSError for whatever is wrong with the other end."""

    def __init__(self, end: socket.socket):
        self.end = end
        self.limit = FIRST_BYTES
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self.end.settimeout(IDLE_S)
            self.end.sendall(frame(msgspec.msgpack.encode(message)))

    def receive(self, kind: type[Sent], within_s: float = IDLE_S) -> Sent:
        """`kind`: what must come now. Anything else is ConnectionError."""
        body = one_message(self.end, self.limit, within_s)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConnectionError(f"it says something else than {kind}: {error}") from error

    def wait(self, within_s: float | None = None) -> bool:
        """Whether something has come, or the end. Raises OSError where this end was closed."""
        try:
            return bool(select.select([self.end], [], [], within_s)[0])
        except ValueError as error:
            raise ConnectionError("it was closed here") from error

    def send_bytes(self, data: memoryview | bytes) -> None:
        with self._lock:
            self.end.settimeout(IDLE_S)
            self.end.sendall(data)

    def receive_into(self, place: memoryview) -> None:
        at = 0
        self.end.settimeout(IDLE_S)
        while at < len(place):
            got = self.end.recv_into(place[at:])
            if not got:
                raise ConnectionError("the connection ended inside a chunk")
            at += got

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a thread that reads wakes up
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def dial(
    at: tuple[str, int], run: RunKey, errand: str, rank: int, epoch: int
) -> tuple[PeerLine, Welcome]:
    """Raises AgentRefused, or another OSError where nobody is there."""
    line = PeerLine(socket.create_connection(at, HELLO_S))
    try:
        line.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_hex(16)
        hello = PeerHello(run=run.name, errand=errand, rank=rank, epoch=epoch, number=own)
        line.send(hello)
        answer = line.receive(Challenge)
        if answer.refused:
            raise AgentRefused(answer.refused)
        said = msgspec.msgpack.encode(hello)
        if not hmac.compare_digest(answer.proof, run.proof("agent", said, answer.number)):
            raise AgentRefused(
                f"who listens at {at[0]}:{at[1]} does not know the secret of this run"
            )
        line.send(Proof(run.proof("caller", said, answer.number)))
        line.limit = MOST_BYTES
        return line, line.receive(Welcome)
    except BaseException:
        line.close()
        raise


def greet(line: PeerLine, run: RunKey) -> PeerHello:
    """What a caller wants who has proved that he may. Raises OSError."""
    hello = line.receive(PeerHello, HELLO_S)
    if hello.run != run.name:
        refused = f"this agent is of run {run.name}, not of {hello.run}"
        line.send(Challenge(refused=refused))
        raise AgentRefused(refused)
    said, number = msgspec.msgpack.encode(hello), secrets.token_hex(16)
    line.send(Challenge(number=number, proof=run.proof("agent", said, number)))
    shown = line.receive(Proof, HELLO_S).proof
    if not hmac.compare_digest(shown, run.proof("caller", said, number)):
        raise AgentRefused("a caller does not know the secret of this run")
    line.limit = MOST_BYTES
    return hello


def listen(end: socket.socket, run: RunKey, serve: Callable[[PeerLine, PeerHello], None]) -> None:
    """Serve callers, each in a thread of its own, for as long as this process lives."""
    free = threading.BoundedSemaphore(STRANGERS)

    def attend(caller: socket.socket) -> None:
        line, is_stranger = PeerLine(caller), True
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = greet(line, run)
            free.release()
            is_stranger = False
            serve(line, hello)
        except OSError as error:
            log.info("a caller is left: %s", error)
        finally:
            if is_stranger:
                free.release()
            line.close()

    def accept() -> None:
        while True:
            caller = accepted(end, threading.Event().wait)
            if caller is None:
                continue
            free.acquire()
            NamedThread(target=attend, args=(caller,), name="peer", daemon=True).start()

    NamedThread(target=accept, name="peers", daemon=True).start()


# --- what a node knows of its run -----------------------------------------------------------------


class Remembered(msgspec.Struct, frozen=True):
    """`at`: of every rank's agent, in the attempt `epoch`; `is_shared`: all nodes had one control
    directory; `own`: of agents of this node, in that attempt and earlier ones, the newest last.
    """

    run: RunKey
    epoch: int
    at: list[tuple[str, int]]
    is_shared: bool = False
    own: list[tuple[str, int]] = []


def _record(control: Path) -> Path:
    return control / "replicas" / "run.json"


def remember(control: Path, known: Remembered) -> None:
    """For later attempts, readable for nobody else: it has the secret. Raises OSError."""
    path = _record(control)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    durable.put(path, encode_json(known))


def remembered(control: Path) -> Remembered | None:
    """What the last attempt has left on this node."""
    try:
        return decode_json(_record(control).read_bytes(), Remembered)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.error("%s is no record of ours and is passed over: %s", _record(control), error)
        return None
