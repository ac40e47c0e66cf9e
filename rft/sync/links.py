"""How the packed buckets of one trainer rank reach one engine worker: over CUDA IPC on one machine,
over NCCL between two, and over their wire where one worker catches up alone
(`rft.sync.transport` says why).

In: the wire of the pair and each end's device. Out: the same kind of `BucketLink` at both ends. The
worker says where it is, the trainer rank lets it try to open some memory, decides and tells.
Invariant: the choice is the first that goes over the wire, so both agree or part with an error.
Weights in host memory need no link: they go over the wire as they lie there. A trainer of the one
kind and an engine of the other refuse each other as they shake hands (`mismatch`).
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import Store

from rft.ground import device as devices
from rft.ground.experience import Record
from rft.ground.rounds import HOST, PACKED
from rft.sync.communicator import (
    Communicator,
    MakeTransport,
    Posted,
    Transport,
    hosted,
    joined,
    nccl,
)
from rft.sync.connection import PeerConnection, PeerLost, machine
from rft.sync.transfer import channels
from rft.sync.transport import IPC, NCCL, WIRE, of_pair

WORDS = {HOST: "bytes of host memory (host)", PACKED: "packed buckets of device memory (packed)"}
log = logging.getLogger(__name__)
SENDER, RECEIVER = 0, 1  # ranks in a pair
BUFFERS = 2  # of NCCL: one is filled while the other travels
SLOTS = 2  # of IPC: one is filled while the other is read
# bytes: buckets differ a little in size, and the device's allocator gives no less
GRAIN = 2 * 2**20
PROBE = 8  # bytes that show that memory was really opened


class BucketLink(Protocol):
    """Two verbs for buckets that must be packed first, because they lie on a device: both lend
    memory of the link's to a function, so that nothing need be copied in between, and return what
    that made of it.
    """

    def room_to_send(self, size: int, links: int) -> None:
        """Make all that `send` will need for messages of up to `size` bytes, as one of so many
        links of this process.
        """

    def room_to_receive(self, size: int, links: int) -> None:
        """The same for `receive`."""

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        """`fill` writes `size` bytes; they travel while the next ones are filled."""

    def flush(self) -> None:
        """Return when the memory of all that was sent may be written to again."""

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        """`use` reads the next `size` bytes; when it returns, their memory is the link's again."""

    def close(self) -> None: ...


MakeLink = Callable[[PeerConnection], BucketLink]  # at a trainer rank
# at an engine worker; True: it catches up alone, and wants no communicator for that
JoinLink = Callable[[PeerConnection, bool], BucketLink]


class LinkSide(Record, frozen=True):
    """What each end says of itself in its first words."""

    kind: str
    device: str

    @staticmethod
    def of(make_link: MakeLink | JoinLink | None, device: str) -> "LinkSide":
        return LinkSide(kind=PACKED if make_link else HOST, device=device)


def host_links(device: torch.device, address: str) -> MakeLink | None:
    """Make the trainer rank's ends; None where its weights lie in host memory. `address`: where a
    rendezvous may listen.
    """
    if not is_packed(device):
        return None
    return lambda wire: host_link(wire, devices.SharedCard(device), address, device, nccl)


def join_links(device: torch.device) -> JoinLink | None:
    """Make the engine worker's ends; None where it takes buckets from the wire, straight into host
    memory.
    """
    if not is_packed(device):
        return None
    return lambda wire, alone: join_link(wire, devices.SharedCard(device), device, nccl, alone)


def host_link(
    wire: PeerConnection,
    memory: "CardMemory",
    address: str,
    device: torch.device,
    make: MakeTransport,
) -> BucketLink:
    chosen = decide(wire, memory)
    if chosen == NCCL:
        return host_nccl(wire, address, device, make)
    return IpcLink(wire, memory) if chosen == IPC else WireLink(wire, device)


def join_link(
    wire: PeerConnection,
    memory: "CardMemory",
    device: torch.device,
    make: MakeTransport,
    alone: bool,
) -> BucketLink:
    chosen = ask(wire, memory, alone)
    if chosen == NCCL:
        return join_nccl(wire, device, make)
    return IpcLink(wire, memory) if chosen == IPC else WireLink(wire, device)


def is_packed(device: torch.device) -> bool:
    return devices.choose(device.type).backend == "nccl"


def mismatch(rank: int, trainer: LinkSide, name: str, engine: LinkSide) -> str | None:
    """Why trainer rank `rank` and the engine worker `name` cannot exchange buckets, with the fix;
    None when they can.
    """
    if trainer.kind == engine.kind:
        return None
    build, device = ("CPU", "cuda") if trainer.kind == HOST else ("CUDA", "cpu")
    return (
        f"trainer rank {rank} is on {trainer.device} and sends {WORDS[trainer.kind]}, {name} is "
        f"on {engine.device} and takes {WORDS[engine.kind]}: set device={device}, or install the "
        f"{build} build of vLLM where that engine runs"
    )


class LinkAsked(Record):
    """A worker's word on where it is; `alone`: it catches up."""

    machine: str
    alone: bool


class LinkOpens(Record):
    """Whether it can open the trainer's memory."""

    opens: bool


def decide(wire: PeerConnection, memory: "CardMemory") -> str:
    """The trainer rank's side."""
    theirs = wire.receive_as(LinkAsked)
    is_here, opens = theirs.machine == machine(), False
    if is_here and not theirs.alone:
        told, probe = secrets.token_bytes(PROBE), memory.room(GRAIN)
        probe[:PROBE].copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        memory.settle()
        wire.send_record({"memory": memory.share(probe), "holds": told})
        opens = wire.receive_as(LinkOpens).opens
    chosen = of_pair(PACKED, is_here, opens, theirs.alone)
    wire.send_record({"link": chosen})
    return chosen


def ask(wire: PeerConnection, memory: "CardMemory", alone: bool = False) -> str:
    """The worker's side. `alone`: it catches up, no communicator is wanted."""
    wire.send_record({"machine": machine(), "alone": alone})
    record = wire.receive_record()
    if "memory" in record:
        wire.send_record({"opens": can_open(memory, record, wire.name)})
        record = wire.receive_record()
    chosen = record.get("link")
    if chosen not in (IPC, NCCL, WIRE):
        raise PeerLost(f"{wire.name}: no word on how buckets travel, but {chosen}")
    return str(chosen)


def can_open(memory: "CardMemory", record: dict[str, Any], name: str) -> bool:
    try:
        return bytes(memory.open(record["memory"])[:PROBE].cpu().numpy()) == record["holds"]
    except (RuntimeError, OSError) as error:
        log.warning("%s: no CUDA IPC, its memory cannot be opened here: %s", name, error)
        return False


# --- over the wire -------------------------------------------------------------------------------


class WireLink:
    """Through host memory and the wire itself: nothing has to be built for it."""

    def __init__(self, wire: PeerConnection, device: torch.device):
        self.wire = wire
        self._device = device
        self._host = self._message = torch.empty(0, dtype=torch.uint8)

    def room_to_send(self, size: int, links: int) -> None:
        self._host = self._message = devices.staging_memory(size, self._device)
        if is_packed(self._device):
            self._message = torch.empty(size, dtype=torch.uint8, device=self._device)

    room_to_receive = room_to_send

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        host, message = self._room(size)
        made = fill(message)
        if host is not message:
            host.copy_(message)
        self.wire.send(host.numpy().data)
        return made

    def flush(self) -> None: ...

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        host, message = self._room(size)
        self.wire.receive(host.numpy().data)
        if host is not message:
            message.copy_(host)
        return use(message)

    def close(self) -> None:
        self._host = self._message = torch.empty(0, dtype=torch.uint8)

    def _room(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Twice the same memory where it is the host's."""
        host = self._host[:size]
        return host, host if self._message is self._host else self._message[:size]


# --- over NCCL -----------------------------------------------------------------------------------


class NcclLink:
    """A communicator of two, one trainer rank and one engine worker, beside torch's default group,
    which both sides need for themselves. The end of the wire between the two ends it.
    """

    def __init__(
        self,
        wire: PeerConnection,
        side: int,
        device: torch.device,
        store: Store,
        make: MakeTransport,
    ):
        self._store = store  # the group keeps no reference of its own
        self._wire = wire
        self._peer = 1 - side
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._travelling: Posted | None = None
        self._turn = 0
        self._communicator = Communicator[Transport](wire.name, wire.timeout, device)
        self._communicator.watch(wire)
        self._make = partial(make, store, side, 2, device)

    def room_to_send(self, size: int, links: int) -> None:
        self._build(BUFFERS, size, links)

    def room_to_receive(self, size: int, links: int) -> None:
        self._build(1, size, links)

    def _build(self, messages: int, size: int, links: int) -> None:
        """With one message as large as any: what NCCL needs of memory is its own then, and both
        know that they reach each other.
        """
        self._memory = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(messages)
        ]
        self._communicator.build(lambda: self._make(channels(links)), self._first)

    def _first(self, transport: Transport) -> list[Posted]:
        move = transport.recv if self._peer == SENDER else transport.send
        return [move([self._memory[0]], self._peer, 0)]

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        """One travels at a time (`communicator.await_posted`), so the next memory is free; and none
        is posted before the other end has a place for it: until then it would be a kernel, for
        whose end the allocator of a card that is full waits with all that computes there.
        """
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        message = self._memory[turn][:size]
        with self._communicator.running():
            made = fill(message)
            self._await()
            if (told := self._wire.receive_record()) != {"takes": size}:
                raise PeerLost(f"{self._wire.name}: {size} bytes for one who says {told}")
            with self._communicator.talking() as transport:
                self._travelling = transport.send([message], self._peer, 0)
        return made

    def flush(self) -> None:
        with self._communicator.running():
            self._await()

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        message = self._memory[0][:size]
        with self._communicator.running():
            self._wire.send_record({"takes": size})
            with self._communicator.talking() as transport:
                coming = transport.recv([message], self._peer, 0)
            self._communicator.finish(coming)
            return use(message)

    def close(self) -> None:
        self._communicator.close()

    def _await(self) -> None:
        """What travels has left its memory."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            self._communicator.finish(travelling)


def host_nccl(
    wire: PeerConnection, address: str, device: torch.device, make: MakeTransport
) -> NcclLink:
    """The trainer's end: a store for this pair alone, so that a pair can form at any time and end
    without others.
    """
    store = hosted(wire.name, address, wire.timeout)
    wire.send_record({"host": address, "port": store.port})
    return NcclLink(wire, SENDER, device, store, make)


def join_nccl(wire: PeerConnection, device: torch.device, make: MakeTransport) -> NcclLink:
    """The engine worker's end."""
    store = joined(wire.name, wire.receive_record(), wire.timeout)
    return NcclLink(wire, RECEIVER, device, store, make)


# --- over CUDA IPC -------------------------------------------------------------------------------


class CardMemory(Protocol):
    def room(self, size: int) -> torch.Tensor:
        """New memory: flat uint8."""

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        """What another process needs to open it."""

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        """The memory that another process shared."""

    def settle(self) -> None:
        """Return when all that this thread has asked of the device is done."""


def opened(memory: CardMemory, told: dict[str, Any], name: str) -> torch.Tensor:
    try:
        return memory.open(told)
    # the driver, or the kernel: it ended after it had said so
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"{name}: its memory cannot be opened: {error}") from error


class IpcLink:
    """Packed buckets between two processes on one machine: the receiver reads what the sender has
    packed, where it lies. One end; the same class on both.

        sender                                   wire                                receiver
        pack into slot 0, then 1, then 0 ...  ── memory of a slot, once ──►  opens it
                                              ── "slot n is full" ────────►  uses the bytes in place
        packs into it again                   ◄── "slot n is free" ───────

    The handles that the driver makes of the memory travel as a plain record of bytes and numbers. A
    slot is packed again only after the receiver has said that it is free, and read only after the
    sender's stream has filled it; waiting for the other end is waiting on the wire, so it has that
    one's deadline, and a death is an error at once.
    """

    def __init__(self, wire: PeerConnection, memory: CardMemory):
        self.wire = wire
        self.memory = memory
        self.opened = 0  # memory of the other end, so far
        self._slots: dict[int, torch.Tensor] = {}
        self._told: set[int] = set()  # slots whose memory the receiver has been told of
        self._under_way: deque[int] = deque()  # slots that were filled and not yet said to be free
        self._turn = 0

    def room_to_send(self, size: int, links: int) -> None:
        for slot in range(SLOTS):
            self._slots[slot] = self.memory.room(-(-size // GRAIN) * GRAIN)

    def room_to_receive(self, size: int, links: int) -> None:
        """It is the sender's."""

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        while slot in self._under_way:
            self._hear()
        if slot not in self._told:
            self.wire.send_record({"slot": slot, "memory": self.memory.share(self._slots[slot])})
            self._told.add(slot)
        made = fill(self._slots[slot][:size])
        self.memory.settle()
        self._under_way.append(slot)
        self.wire.send_record({"full": slot})
        return made

    def flush(self) -> None:
        while self._under_way:
            self._hear()

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        record = self.wire.receive_record()
        while "memory" in record:
            self._slots[record["slot"]] = opened(self.memory, record["memory"], self.wire.name)
            self.opened += 1
            record = self.wire.receive_record()
        slot = record.get("full")
        if slot not in self._slots or len(self._slots[slot]) < size:
            raise PeerLost(
                f"{self.wire.name}: expected a bucket of {size} bytes, got {sorted(record)} of "
                f"slot {slot}"
            )
        made = use(self._slots[slot][:size])
        self.memory.settle()
        self.wire.send_record({"free": slot})
        return made

    def close(self) -> None:
        self._slots.clear()

    def _hear(self) -> None:
        """One word of the receiver, which takes slots in the order in which they were filled."""
        record, expected = self.wire.receive_record(), self._under_way.popleft()
        if record.get("free") != expected:
            raise PeerLost(
                f"{self.wire.name}: expected slot {expected} to become free, heard {record}"
            )
