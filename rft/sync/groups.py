"""Worker t of every engine of one shape, as one group that passes packed buckets on.

                 engine 0 (leader)                 what a control connection carries
                /    |     \\                       hello ──►  who, of which group, on which machine
        engine 1  engine 2  engine 3               ◄── how bytes travel, and where the store is
        one control connection each                ◄─► "lost": why it is over, once

In: a `GroupSeat`, and at the leader the connections that came to its listener (`Meeting`). Out: a
`WorkerGroup`, whose members all call `start` and `finish` for the same buckets in the same order,
with the same root. How bytes travel is decided by the leader, for all (`rft.sync.transport`): over
CUDA IPC where all are on one machine, else NCCL. Invariants: the end of any control connection, or
a member's own failure, is told to all by the leader and ends the group everywhere, within the time
that a word takes; whoever is blocked in it gets the reason, which names who is lost. A group that
has ended stays so: what follows has another generation.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore

from rft.ground.experience import Record
from rft.ground.rounds import PACKED, GroupSeat
from rft.sync.communicator import (
    Broadcasts,
    Communicator,
    Ended,
    MakeTransport,
    Posted,
    hosted,
    joined,
)
from rft.sync.connection import PeerConnection, PeerLost, PeerRefused, handshake, machine
from rft.sync.links import GRAIN, CardMemory, opened
from rft.sync.transfer import OF_ONE
from rft.sync.transport import IPC, NCCL, WORDS, of_group

log = logging.getLogger(__name__)
STAR, MESH = 0, 1  # connections to the leader; between each two
Key = tuple[int, int, int]  # epoch, generation, and which of these


class MemberHello(Record):
    """First words of a member, to its leader or to another one."""

    peer: str
    engine: str
    group: tuple[int, int, int]
    place: int
    machine: str = ""
    endpoint: dict[str, Any] = {}


class Meeting:
    """Where the members of a group come to their leader: `admit` and `serve` are those of its
    listener, for whoever says a "group" in its first words.
    """

    def __init__(self) -> None:
        self.opens = True  # as far as is known, what others here share over IPC
        self._changed = threading.Condition()
        self._come: dict[Key, dict[int, tuple[PeerConnection, dict[str, Any]]]] = {}
        self._gathered: set[Key] = set()
        self._over = -1  # generation

    @staticmethod
    def admit(hello: dict[str, Any]) -> str:
        said = msgspec.convert(hello, MemberHello)
        return f"{said.peer} in group {said.group[1]}"

    def serve(self, wire: PeerConnection, hello: dict[str, Any]) -> None:
        epoch, generation, which = hello["group"]
        key = (epoch, generation, which)
        wire.engine = hello["engine"]
        with self._changed:
            if key in self._gathered or generation <= self._over:
                wire.close()  # it is full, or over
                return
            self._come.setdefault(key, {})[hello["place"]] = wire, hello
            self._changed.notify_all()

    def disband(self, generation: int) -> None:
        """No group of `generation` or before comes together any more: whoever waits for one goes.
        What has come together stays. Another synchronizer may count from anew.
        """
        with self._changed:
            self._over = generation
            over = [other for other in self._come if other[1] <= generation]
            gone = [wire for other in over for wire, _ in self._come.pop(other).values()]
            self._changed.notify_all()
        for wire in gone:
            wire.close()

    def gather(
        self, key: Key, names: dict[int, str], timeout: float
    ) -> dict[int, tuple[PeerConnection, dict[str, Any]]]:
        """Those of these places. Whoever still waits for an older group is sent away."""
        with self._changed:

            def is_decided() -> bool:
                return len(self._come.get(key, ())) == len(names) or key[1] <= self._over

            in_time = self._changed.wait_for(is_decided, timeout)
            here = self._come.pop(key, {})
            older = [other for other in self._come if other[:2] < key[:2]]
            gone = [wire for other in older for wire, _ in self._come.pop(other).values()]
            self._gathered = {other for other in self._gathered if other[:2] == key[:2]} | {key}
        missing = [name for place, name in names.items() if place not in here]
        for wire in [*gone, *(wire for wire, _ in here.values() if missing)]:
            wire.close()
        if missing:
            why = "before it was over" if in_time else f"within {timeout:g} s"
            raise PeerLost(
                f"{', '.join(missing)} did not come to group {key[1]} {why}",
                missing[0],
            )
        return dict(sorted(here.items()))


class Star:
    """The control connections of one member: all to the leader, or the one to it."""

    def __init__(self, seat: GroupSeat, wires: list[PeerConnection]):
        self.seat = seat
        self.wires = wires

    def tell(self, why: Ended) -> None:
        """To all, or to the leader, who tells all."""
        told = {"lost": str(why), "engine": "", "refused": True}
        if isinstance(why, PeerLost):
            told = {"lost": str(why), "engine": why.lost, "refused": False}
        for wire in self.wires:
            with suppress(PeerLost):  # that one has gone itself
                wire.send_record(told)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def ended(record: dict[str, Any]) -> Ended:
    if record.get("refused"):
        return PeerRefused(record["lost"])
    return PeerLost(record.get("lost", f"heard {sorted(record)}"), record.get("engine", ""))


class WorkerGroup:
    """A communicator and its star. A broadcast has two halves, so that something can be done in
    between.
    """

    def __init__(
        self, star: Star, name: str, timeout: float, device: torch.device, memory: CardMemory
    ):
        self.place = star.seat.mine
        self.name = f"group {star.seat.generation} of {', '.join(star.seat.names)}"
        self.store: TCPStore | None = None  # a transport keeps no reference of its own
        self._star = star
        self._memory = memory
        self._left = PeerLost(f"{name} has left its group", name)
        self._communicator = Communicator[Broadcasts](self.name, timeout, device, ended=star.tell)
        for wire in star.wires:
            self._communicator.watch(wire, hear=self._hear)

    def build(self, make: Callable[[], Broadcasts]) -> None:
        self._communicator.build(make, self._first)

    def _first(self, transport: Broadcasts) -> list[Posted]:
        """All are connected afterwards, and what that takes of memory is taken."""
        return [transport.broadcast(self._memory.room(GRAIN), 0)]

    def start(self, message: torch.Tensor, root: int) -> Posted:
        """`message`: of the same size everywhere, flat uint8; it must stay until `finish`."""
        with self._communicator.running(), self._communicator.talking() as transport:
            return transport.broadcast(message, root)

    def finish(self, started: Posted) -> None:
        """Return when the message has been sent, or is here, if its checksum says so."""
        with self._communicator.running():
            self._communicator.finish(started)

    def abort(self, why: Ended) -> None:
        """This member cannot go on, so nobody can."""
        self._communicator.abort(why)

    def close(self) -> None:
        self._communicator.abort(self._left)
        self._communicator.close()
        self._star.close()

    def _hear(self, record: dict[str, Any]) -> None:
        self._communicator.abort(ended(record))


class IpcTransport:
    """A broadcast on one machine: everybody copies what it needs from where it lies in the root's
    memory, which is the root's again when all have said so.

        root                          wires                         every other member
        memory of a message, once  ──────────────►  opens it
        "full"                     ──────────────►  copies it to its own message
        may write to it again      ◄──────────────  "free"
    """

    def __init__(self, wires: dict[int, PeerConnection], place: int, memory: CardMemory):
        self.wires = wires
        self.place = place
        self.memory = memory
        self._shared: set[int] = set()  # by where it is
        self._opened: dict[tuple[int, int], torch.Tensor] = {}  # by root and number

    def broadcast(self, tensor: torch.Tensor, root: int) -> "IpcWork":
        if root != self.place:
            return IpcWork(lambda: self._take(tensor, root))
        self.memory.settle()
        where = tensor.data_ptr()
        whole = tensor.new_empty(0).set_(tensor.untyped_storage())  # a message begins there
        for wire in self.wires.values():
            if where not in self._shared:
                wire.send_record({"memory": self.memory.share(whole), "number": where})
            wire.send_record({"full": where})
        self._shared.add(where)
        return IpcWork(self._wait)

    def abort(self) -> None:
        for wire in self.wires.values():
            wire.close()

    def _wait(self) -> None:
        for wire in self.wires.values():
            wire.receive_record()

    def _take(self, tensor: torch.Tensor, root: int) -> None:
        wire = self.wires[root]
        while "full" not in (record := wire.receive_record()):
            self._opened[root, record["number"]] = opened(self.memory, record["memory"], wire.name)
        tensor.copy_(self._opened[root, record["full"]][: len(tensor)])
        self.memory.settle()
        wire.send_record({"free": record["full"]})


class IpcWork:
    """Done by who waits for it, with its own deadline."""

    def __init__(self, wait: Callable[[], None]):
        self.wait = wait

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class Way:
    """How to join. `endpoint`: of this worker's own listener; `meeting`: what that serves."""

    endpoint: dict[str, Any]
    meeting: Meeting
    make: MakeTransport
    memory: CardMemory
    device: torch.device
    timeout: float


def join_group(seat: GroupSeat, epoch: int, way: Way) -> WorkerGroup:
    """Returns when all are there. Raises PeerLost, by name, when one is not."""
    name = seat.names[seat.mine]
    key = (epoch, seat.generation)
    hello = {"engine": name, "peer": name, "place": seat.mine, "machine": machine()}
    if seat.mine == 0:
        came = way.meeting.gather((*key, STAR), dict(enumerate(seat.names[1:], 1)), way.timeout)
        wires = [wire for wire, _ in came.values()]
        machines = {machine(), *(theirs["machine"] for _, theirs in came.values())}
        ends = [way.endpoint, *(theirs["endpoint"] for _, theirs in came.values())]
        chosen = of_group(PACKED, len(machines), way.meeting.opens)
    else:
        hello |= {"group": [*key, STAR], "endpoint": way.endpoint}
        to = f"{seat.names[0]}, which leads group {seat.generation}"
        wires = [handshake(seat.leader, hello, to, way.timeout, seat.names[0])]
        told = wires[0].receive_record()
        if "transport" not in told:
            raise ended(told)
        chosen, ends = told["transport"], told["endpoints"]
    group = WorkerGroup(Star(seat, wires), name, way.timeout, way.device, way.memory)
    try:
        if seat.mine == 0:
            told = {"transport": chosen, "endpoints": ends}
            if chosen == NCCL:
                group.store = hosted(group.name, seat.leader["host"], way.timeout)
                told |= {"host": seat.leader["host"], "port": group.store.port}
            for wire in wires:
                wire.send_record(told)
        elif chosen == NCCL:
            group.store = joined(group.name, told, way.timeout)
        if chosen == IPC:
            hello["group"] = [*key, MESH]
            group.build(lambda: ipc_transport(seat, key, hello, ends, way))
        else:
            group.build(
                lambda: way.make(group.store, seat.mine, len(seat.names), way.device, OF_ONE)
            )
    except (PeerLost, PeerRefused):
        way.meeting.opens = False  # the next one goes the other way, whatever it was
        group.close()
        raise
    log.info("%s passes weights on over %s", group.name, WORDS[chosen])
    return group


def ipc_transport(
    seat: GroupSeat,
    key: tuple[int, int],
    hello: dict[str, Any],
    endpoints: list[dict[str, Any]],
    way: Way,
) -> IpcTransport:
    """A connection between each two: everybody goes to those before it."""
    wires = {
        place: handshake(endpoints[place], hello, name, way.timeout, name)
        for place, name in enumerate(seat.names[: seat.mine])
    }
    behind = dict(enumerate(seat.names[seat.mine + 1 :], seat.mine + 1))
    came = way.meeting.gather((*key, MESH), behind, way.timeout)
    wires |= {place: wire for place, (wire, _) in came.items()}
    return IpcTransport(wires, seat.mine, way.memory)
