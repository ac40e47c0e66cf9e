"""How the packed buckets of one trainer rank reach one engine worker: over CUDA IPC on the same
card, else over NCCL.

In: the wire of the pair and each end's device. Out: the same kind of `BucketLink` at both ends. The
worker says which card it is on, the trainer rank decides and tells. Invariant: the choice is the
first that goes over the wire, so both agree or part with an error. Weights in host memory need no
link: they go over the wire as they lie there. A trainer of the one kind and an engine of the other
refuse each other as they shake hands (`mismatch`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore

from rft.ground import device as devices
from rft.ground.device import collective_timeout, hosted_store
from rft.ground.experience import Record
from rft.ground.rounds import HOST, PACKED
from rft.sync.connection import PeerConnection, PeerLost, machine

IPC, NCCL = "ipc", "nccl"
WORDS = {HOST: "bytes of host memory (host)", PACKED: "packed buckets of device memory (packed)"}
SENDER, RECEIVER = 0, 1  # ranks in a pair
BUFFERS = 2  # of NCCL: one is filled while the other travels
SLOTS = 2  # of IPC: one is filled while the other is read
# bytes: buckets differ a little in size, and the device's allocator gives no less
GRAIN = 2 * 2**20


class BucketLink(Protocol):
    """Two verbs for buckets that must be packed first, because they lie on a device: both lend
    memory of the link's to a function, so that nothing need be copied in between, and return what
    that made of it.
    """

    def room_to_send(self, size: int) -> None:
        """Make all memory that `send` will need for messages of up to `size` bytes."""

    def room_to_receive(self, size: int) -> None:
        """The same for `receive`."""

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        """`fill` writes `size` bytes; they travel while the next ones are filled."""

    def flush(self) -> None:
        """Return when the memory of all that was sent may be written to again."""

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        """`use` reads the next `size` bytes; when it returns, their memory is the link's again."""

    def close(self) -> None: ...


MakeLink = Callable[[PeerConnection], BucketLink]


class LinkSide(Record, frozen=True):
    """What each end says of itself in its first words."""

    kind: str
    device: str

    @staticmethod
    def of(make_link: MakeLink | None, device: str) -> "LinkSide":
        return LinkSide(kind=PACKED if make_link else HOST, device=device)


def host_links(device: torch.device, address: str) -> MakeLink | None:
    """Make the trainer rank's ends; None where its weights lie in host memory. `address`: where a
    rendezvous may listen.
    """
    if not is_packed(device):
        return None

    def host(wire: PeerConnection) -> BucketLink:
        if decide(wire, card(device)) == IPC:
            return IpcLink(wire, devices.SharedCard(device))
        return host_nccl(wire, address, device)

    return host


def join_links(device: torch.device) -> MakeLink | None:
    """Make the engine worker's ends; None where it takes buckets from the wire, straight into host
    memory.
    """
    if not is_packed(device):
        return None

    def join(wire: PeerConnection) -> BucketLink:
        if ask(wire, card(device)) == IPC:
            return IpcLink(wire, devices.SharedCard(device))
        return join_nccl(wire, device)

    return join


def is_packed(device: torch.device) -> bool:
    return devices.choose(device.type).backend == NCCL


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


def decide(wire: PeerConnection, ours: str) -> str:
    kind = IPC if wire.receive_record().get("card") == ours else NCCL
    wire.send_record({"link": kind})
    return kind


def ask(wire: PeerConnection, ours: str) -> str:
    wire.send_record({"card": ours})
    kind = wire.receive_record().get("link")
    if kind not in (IPC, NCCL):
        raise PeerLost(f"{wire.name}: no word on how buckets travel, but {kind}")
    return str(kind)


def card(device: torch.device) -> str:
    """Equal for two processes that can open each other's memory on this device."""
    return f"{machine()} {devices.SharedCard(device).uuid()}"


# --- over NCCL -----------------------------------------------------------------------------------


class NcclLink:
    """A private NCCL group of two, one trainer rank and one engine worker, beside torch's default
    group, which both sides need for themselves.

    Every operation ends within the timeout; whatever NCCL or its store raise is about the pair, and
    neither side's own failure.
    """

    def __init__(self, name: str, store: TCPStore, side: int, timeout: float, device: torch.device):
        # missing in a torch that was built without NCCL
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = collective_timeout(timeout)
        self.name = name
        self._store = store  # the group keeps no reference of its own
        self._peer = 1 - side
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._travelling: dict[int, Any] = {}  # work, by buffer
        self._turn = 0
        with pair(name):
            self._group: Any = ProcessGroupNCCL(store, side, 2, options)

    def room_to_send(self, size: int) -> None:
        self._memory = [self._room(size) for _ in range(BUFFERS)]

    def room_to_receive(self, size: int) -> None:
        self._memory = [self._room(size)]

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if turn in self._travelling:
            self._await(turn)
        message = self._memory[turn][:size]
        made = fill(message)
        with pair(self.name):
            self._travelling[turn] = self._group.send([message], self._peer, 0)
        return made

    def flush(self) -> None:
        for turn in list(self._travelling):
            self._await(turn)

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        message = self._memory[0][:size]
        with pair(self.name):
            self._group.recv([message], self._peer, 0).wait()
        return use(message)

    def close(self) -> None:
        self._group.abort()

    def _await(self, turn: int) -> None:
        with pair(self.name):
            self._travelling.pop(turn).wait()

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


@contextmanager
def pair(name: str) -> Iterator[None]:
    """Errors of NCCL become those of a wire: the other end is lost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{name}: {error}") from error


def host_nccl(wire: PeerConnection, address: str, device: torch.device) -> NcclLink:
    """The trainer's end: a store for this pair alone, so that a pair can form at any time and end
    without others.
    """
    timeout = collective_timeout(wire.timeout)
    with pair(wire.name):
        store = hosted_store(address, 0, timeout)
    wire.send_record({"host": address, "port": store.port})
    return NcclLink(wire.name, store, SENDER, wire.timeout, device)


def join_nccl(wire: PeerConnection, device: torch.device) -> NcclLink:
    """The engine worker's end."""
    where, timeout = wire.receive_record(), collective_timeout(wire.timeout)
    with pair(wire.name):
        store = TCPStore(
            where["host"], where["port"], is_master=False, wait_for_workers=False, timeout=timeout
        )
    return NcclLink(wire.name, store, RECEIVER, wire.timeout, device)


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


class IpcLink:
    """Packed buckets between two processes on one card: the receiver reads what the sender has
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

    def room_to_send(self, size: int) -> None:
        for slot in range(SLOTS):
            self._slots[slot] = self.memory.room(-(-size // GRAIN) * GRAIN)

    def room_to_receive(self, size: int) -> None:
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
            self._slots[record["slot"]] = self._opened(record["memory"])
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

    def _opened(self, told: dict[str, Any]) -> torch.Tensor:
        try:
            memory = self.memory.open(told)
        # the driver, or the kernel: it ended after it had said so
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"{self.wire.name}: its memory cannot be opened: {error}") from error
        self.opened += 1
        return memory

    def _hear(self) -> None:
        """One word of the receiver, which takes slots in the order in which they were filled."""
        record, expected = self.wire.receive_record(), self._under_way.popleft()
        if record.get("free") != expected:
            raise PeerLost(
                f"{self.wire.name}: expected slot {expected} to become free, heard {record}"
            )
