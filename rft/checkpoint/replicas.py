"""Parts of a state in the memory of two nodes: the agent's side.

    agent of rank r ── its part, chunk by chunk, paced ──► agent on the next node, which hashes it
                    ◄── it is here ──
                    ── "mine is there" ──► agent of rank 0: of all ranks?
                    ◄── whole, with the hashes of all receipts ── to every agent
    later, a rank that comes back ── what do you hold? this chunk ──► any of them

In: parts that the agent keeps (`rft.checkpoint.agent`), and those of another node's agent. Out:
replicas in memory; reports of states that are whole; which own slots may go. Invariants: a state
that is whole stays, on both nodes, until a newer one is; a chunk that is not what its receipt says
is not acknowledged; nobody waits for a peer that does not get on: the newest state is then given up
for the next one, and the last whole one stays. No torch, and nothing of it in the training process.
"""

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rft.checkpoint import fence, journal_copy
from rft.checkpoint.peers import (
    AgentRefused,
    PeerHello,
    PeerLine,
    RunKey,
    Welcome,
    Whole,
    dial,
    digest_of,
    listen,
)
from rft.checkpoint.records import CHUNK, CheckpointSettings, Receipt, Replicated, Report
from rft.checkpoint.writer import Pacer
from rft.ground import host_memory
from rft.ground.process import NamedThread

log = logging.getLogger(__name__)
LOOK_S = 0.2  # between looks at what holds slots, and at a peer that says nothing
AGAIN_S = 0.5  # between tries to reach a peer
STALLED_S = 5.0  # without a chunk taken: a slot that is wanted is not kept for it
HELD_S = 10.0  # for the word that all others have theirs, beside what own parts take; likewise
BUFFERS = 2  # of each part that comes here: one that is whole, one that arrives


def peer_of(rank: int, nodes: list[str]) -> int | None:
    """Whose agent holds the replica of this rank's part: on the next node, in the order in which
    nodes come, the rank of the same place there; None where there is one node.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) < 2:
        return None
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    following = order[(order.index(nodes[rank]) + 1) % len(order)]
    there = [other for other, node in enumerate(nodes) if node == following]
    return there[here.index(rank) % len(there)]


def held_by(rank: int, nodes: list[str]) -> list[int]:
    """Whose replicas are with this rank's agent."""
    return [other for other in range(len(nodes)) if peer_of(other, nodes) == rank]


# --- messages -------------------------------------------------------------------------------------


class PartSent(msgspec.Struct, frozen=True, tag=True):
    """Its bytes follow, once it is accepted. `keep`: ids of the caller's other parts that stay."""

    receipt: Receipt
    keep: list[str]


class PartTaken(msgspec.Struct, frozen=True, tag=True):
    refused: str = ""


class There(msgspec.Struct, frozen=True, tag=True):
    """The caller's part of this state is with its peer."""

    id: str
    step: int
    receipt: str


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Some rank's part of this state will not come."""

    id: str


class Look(msgspec.Struct, frozen=True, tag=True): ...


class Fetch(msgspec.Struct, frozen=True, tag=True):
    id: str
    rank: int
    start: int
    count: int


class End(msgspec.Struct, frozen=True, tag=True):
    """Nobody needs what is here any more."""


class Grant(msgspec.Struct, frozen=True, tag=True):
    """No older attempt than this one, of this caller, is to publish anything."""

    epoch: int
    token: str


class Held(msgspec.Struct, frozen=True):
    """`receipts`: of the agent's own parts, oldest first; `others`: of replicas. Not at rest: it
    still has work, and is to be asked again.
    """

    is_resting: bool
    receipts: list[Receipt] = []
    others: list[Receipt] = []
    whole: list[Whole] = []


# --- the first agent: which states are whole ------------------------------------------------------


@dataclass
class Roll:
    """What all ranks have said of states that are not whole yet."""

    world: int
    newest: Whole | None = None
    gone: list[str] = field(default_factory=list)
    _there: dict[str, dict[int, str]] = field(default_factory=dict)

    def hear(self, rank: int, said: There | Gone) -> Whole | Gone | None:
        """What everybody is to be told then."""
        if isinstance(said, Gone):
            if said.id in self.gone:
                return None
            self.gone = [*self.gone[-8:], said.id]
            self._there.pop(said.id, None)
            return said
        if said.id in self.gone:
            return Gone(said.id)
        if self.newest is not None and said.step < self.newest.step:
            return None
        parts = self._there.setdefault(said.id, {})
        parts[rank] = said.receipt
        if len(parts) < self.world:
            return None
        self.newest = Whole(said.id, said.step, [parts[rank] for rank in range(self.world)])
        del self._there[said.id]
        return self.newest


# --- one agent ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnPart:
    receipt: Receipt
    data: memoryview


@dataclass
class Replica:
    """Of another rank's part; `is_whole`: every chunk was compared with its hash."""

    receipt: Receipt
    descriptor: int
    data: mmap.mmap
    is_whole: bool = False

    def close(self) -> None:
        """The mapping goes with the last that reads it."""
        os.close(self.descriptor)


class Replicas:
    """`report`: to the trainer. `free(id)`: this own state's slot may be given back."""

    def __init__(
        self,
        settings: CheckpointSettings,
        report: Callable[[Report], object],
        free: Callable[[str], object],
    ):
        assert settings.replicas is not None
        self.settings, self.told = settings, settings.replicas
        self.run = RunKey(self.told.run, self.told.secret)
        self.is_resting = threading.Event()
        self.is_over = threading.Event()  # a rank that came back has said so
        self._report, self._free = report, free
        self._pace = Pacer(settings.rate_limit)
        self._changed = threading.Condition()
        self._own: dict[str, OwnPart] = {}
        self._released: dict[str, float] = {}  # own states that the trainer is done with; since
        self._given: set[str] = set()  # given up for the next one, and not yet released
        self._lost: deque[str] = deque(maxlen=4)  # that will never be whole, by this rank's word
        self._there: set[str] = set()  # own states that the peer has
        self._whole: list[Whole] = []  # the newest last
        self._replicas: dict[tuple[int, str], Replica] = {}
        self._moved = time.monotonic()  # when the peer last took something, or had all
        self._took_s = 0.0  # the newest part of those that the peer has, on its way
        self._roll = Roll(settings.world)
        self._lines: dict[int, PeerLine] = {}  # first agent: to all others; the others: to it

    def start(self) -> None:
        listen(socket.socket(fileno=os.dup(self.told.listener)), self.run, self._serve)
        loops = [("replica-out", self._send_all), ("replica-slots", self._watch)]
        loops += [("replica-word", self._hear_first)] * (self.settings.rank > 0)
        loops += [("replica-before", self._listen_before)] * bool(self.told.before)
        for name, loop in loops:
            NamedThread(target=loop, name=name, daemon=True).start()

    # --- own states -------------------------------------------------------------------------------

    def keep(self, receipt: Receipt, data: memoryview) -> None:
        with self._changed:
            if not self._unsent():
                self._moved = time.monotonic()
            self._own[receipt.id] = OwnPart(receipt, data)
            self._changed.notify_all()

    def release(self, identity: str) -> None:
        """The trainer is done with it; its slot is free once a newer state is whole."""
        with self._changed:
            if identity in self._given:
                self._given.discard(identity)
                return
            self._released[identity] = time.monotonic()
        self._let_go()

    def lose(self, identity: str) -> None:
        """This rank's part of it will not come."""
        self._lost.append(identity)
        self._say(Gone(identity))

    def _let_go(self) -> None:
        with self._changed:
            goes = [one for one in self._released if self._may_go(one)]
            goes = goes or self._useless() or self._stuck()
            for identity in goes:
                self._own.pop(identity, None)
                self._there.discard(identity)
                if self._released.pop(identity, None) is None:
                    self._given.add(identity)
        for identity in goes:
            self._free(identity)

    def _may_go(self, identity: str) -> bool:
        part, newest = self._own.get(identity), self._whole[-1] if self._whole else None
        if part is None or identity in self._roll.gone:
            return True
        return newest is not None and newest.id != identity and part.receipt.step <= newest.step

    def _useless(self) -> list[str]:
        """For a slot that is wanted: states that will never be whole."""
        return [name for name in self._own if self._released and name in self._roll.gone]

    def _stuck(self) -> list[str]:
        """What is given up for a slot that is wanted, where a peer does not get on."""
        if not self._released:
            return []
        now = time.monotonic()
        limit_s = STALLED_S if self._unsent() else HELD_S + 2 * self._took_s
        since = max(self._moved, min(self._released.values()))
        if now < since + limit_s:
            return []
        whole = self._whole[-1].id if self._whole else ""
        open_ones = {part.receipt.step: name for name, part in self._own.items() if name != whole}
        if not open_ones:
            return []
        goes = open_ones[max(open_ones) if whole in self._own else min(open_ones)]
        log.error("the state of save %s is not in the memory of two nodes, and is given up", goes)
        NamedThread(target=self.lose, args=(goes,), name="replica-lost", daemon=True).start()
        return [goes]

    def _unsent(self) -> list[OwnPart]:
        waiting = [part for name, part in self._own.items() if name not in self._there]
        return sorted(waiting, key=lambda part: part.receipt.step)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._let_go()

    # --- to the next node -------------------------------------------------------------------------

    def _send_all(self) -> None:
        peer = peer_of(self.settings.rank, self.told.nodes)
        assert peer is not None
        at, said = self.told.at[peer], ""
        while True:
            try:
                line, welcome = self._dial(at, "replica")
                with self._changed:
                    self._there = set(welcome.held) & set(self._own)
                said = ""
                self._send_to(line)
            except OSError as error:
                with self._changed:
                    self._there.clear()
                if said != str(error):
                    log.warning("the agent of rank %d holds no replica: %s", peer, error)
                    said = str(error)
            time.sleep(AGAIN_S)

    def _dial(self, at: tuple[str, int], errand: str) -> tuple[PeerLine, Welcome]:
        return dial(at, self.run, errand, self.settings.rank, self.settings.epoch)

    def _send_to(self, line: PeerLine) -> None:
        """Until the peer is gone: raises OSError."""
        journal: dict[str, tuple[int, int]] = {}
        try:
            with self._changed:
                there = [self._own[name].receipt for name in self._there]
            for receipt in there:  # of the agent before
                self._acknowledged(receipt)
            while True:
                with self._changed:
                    if not (waiting := self._unsent()):
                        self._changed.wait(LOOK_S)
                        waiting = self._unsent()
                    keep = list(self._own)
                if waiting:
                    self._send(line, waiting[0], keep, journal)
                elif line.wait(0):
                    raise ConnectionError("it has ended")
        finally:
            line.close()

    def _send(
        self, line: PeerLine, part: OwnPart, keep: list[str], journal: dict[str, tuple[int, int]]
    ) -> None:
        receipt, begun = part.receipt, time.monotonic()
        if self.told.journal and isinstance(position := (receipt.loop or {}).get("journal"), int):
            journal_copy.send(line, Path(self.told.journal), position, journal)
            self._moved = time.monotonic()
        line.send(PartSent(receipt, keep))
        self._expect(line)
        for start in range(0, receipt.bytes, CHUNK):
            piece = part.data[start : min(start + CHUNK, receipt.bytes)]
            line.send_bytes(piece)
            self._pace(len(piece))
            self._moved = time.monotonic()
            if receipt.id not in self._own:
                raise ConnectionError("its slot was needed")  # what was sent of it is no part
        self._expect(line)
        with self._changed:
            self._moved = time.monotonic()
            self._took_s = self._moved - begun
            if receipt.id not in self._own:
                return
            self._there.add(receipt.id)
        self._acknowledged(receipt)

    def _acknowledged(self, receipt: Receipt) -> None:
        self._say(There(receipt.id, receipt.step, digest_of(receipt)))

    @staticmethod
    def _expect(line: PeerLine) -> None:
        if refused := line.receive(PartTaken).refused:
            raise AgentRefused(refused)

    # --- which states are whole -------------------------------------------------------------------

    def _say(self, said: There | Gone) -> None:
        if self.settings.rank == 0:
            self._enroll(0, said)
        elif (line := self._lines.get(0)) is not None:
            try:
                line.send(said)
            except OSError:  # said again when it is back
                line.close()

    def _enroll(self, rank: int, said: There | Gone) -> None:
        with self._changed:
            news = self._roll.hear(rank, said)
        if news is None:
            return
        for line in list(self._lines.values()):
            try:
                line.send(news)
            except OSError:
                line.close()  # it comes again, and is told then
        self._hear(news)

    def _hear(self, news: Whole | Gone) -> None:
        if isinstance(news, Gone):
            with self._changed:
                self._roll.gone = [*self._roll.gone[-8:], news.id]
        elif not self._whole or self._whole[-1].step < news.step:  # lines may pass each other
            with self._changed:
                self._whole = [*self._whole[-1:], news]
            self._report(Replicated(id=news.id, step=news.step))
        self._let_go()

    def _hear_first(self) -> None:
        """What the first agent says."""
        while True:
            try:
                line, _ = self._dial(self.told.at[0], "word")
                self._lines[0] = line
                with self._changed:
                    parts = [self._own[name].receipt for name in self._there if name in self._own]
                for identity in list(self._lost):
                    self._say(Gone(identity))
                for receipt in parts:
                    self._acknowledged(receipt)
                while line.wait():
                    self._hear(line.receive(Whole | Gone))
            except OSError:  # it is gone, or this end was closed
                self._lines.pop(0, None)
            time.sleep(AGAIN_S)

    # --- for others -------------------------------------------------------------------------------

    def _serve(self, line: PeerLine, hello: PeerHello) -> None:
        if hello.errand != "read" and hello.epoch != self.settings.epoch:
            raise AgentRefused(f"a caller of attempt {hello.epoch}")
        with self._changed:
            held = [
                name
                for (rank, name), one in self._replicas.items()
                if rank == hello.rank and one.is_whole
            ]
        line.send(Welcome(held))
        if hello.errand == "replica":
            self._take_all(line, hello.rank)
        elif hello.errand == "word":
            self._lines[hello.rank] = line
            if self._whole:
                line.send(self._whole[-1])
            while line.wait():
                self._enroll(hello.rank, line.receive(There | Gone))
        else:
            self._answer_all(line)

    def _listen_before(self) -> None:
        """Also where agents of this node have listened before, once they are gone: a start on a
        node that was cut off asks there, and would hear that nobody is left.
        """
        waiting = list(self.told.before)
        while waiting:
            for at in list(waiting):
                with contextlib.suppress(OSError):  # it is still there
                    listen(socket.create_server(at), self.run, self._serve_before)
                    waiting.remove(at)
            time.sleep(AGAIN_S)

    def _serve_before(self, line: PeerLine, hello: PeerHello) -> None:
        """Whoever looks for an earlier agent finds nothing of it, and whose attempt this is."""
        line.send(Welcome())
        while line.wait():
            asked: Any = line.receive(Look | Fetch | End | Grant)
            if isinstance(asked, Look):
                line.send(Held(is_resting=True))
            elif isinstance(asked, Grant):
                self._grant(line, asked)
            elif isinstance(asked, End):
                line.send(PartTaken())
            else:
                self._refuse(line, f"no such bytes of rank {asked.rank} in {asked.id} are here")

    def _grant(self, line: PeerLine, asked: Grant) -> None:
        control = Path(self.settings.control)
        line.send(PartTaken(fence.grant(control, asked.epoch, asked.token)))

    def _take_all(self, line: PeerLine, rank: int) -> None:
        while line.wait():
            part = line.receive(PartSent | journal_copy.JournalFiles)
            if isinstance(part, journal_copy.JournalFiles):
                journal_copy.take(line, part, journal_copy.directory(Path(self.settings.control)))
                continue
            replica = self._room_for(line, part, rank)
            receipt, view = replica.receipt, memoryview(replica.data)
            line.send(PartTaken())
            for number, start in enumerate(range(0, receipt.bytes, CHUNK)):
                place = view[start : min(start + CHUNK, receipt.bytes)]
                line.receive_into(place)
                if xxhash.xxh3_128_hexdigest(place) != receipt.chunks[number]:
                    self._refuse(line, f"chunk {number} of {receipt.id} is another one")
            with self._changed:
                replica.is_whole = True
            line.send(PartTaken())

    def _room_for(self, line: PeerLine, part: PartSent, rank: int) -> Replica:
        """Memory for one more of this rank, after what it does not need any more is given back."""
        receipt = part.receipt
        if receipt.rank != rank or len(receipt.chunks) != -(-receipt.bytes // CHUNK):
            self._refuse(line, f"{receipt.id} is no part of rank {rank}")
        with self._changed:
            here = {key: one for key, one in self._replicas.items() if key[0] == rank}
            goes = [key for key, one in here.items() if not one.is_whole or key[1] not in part.keep]
            spare = None
            for key in goes:
                gone = self._replicas.pop(key)
                if spare is None and len(gone.data) == max(1, receipt.bytes):
                    spare = gone
                else:
                    gone.close()
            if len(here) - len(goes) >= BUFFERS:
                self._refuse(line, f"{BUFFERS} parts of rank {rank} are here already")
            if spare is None:
                spare = self._new(line, receipt)
            replica = Replica(receipt, spare.descriptor, spare.data)
            self._replicas[rank, receipt.id] = replica
        return replica

    def _new(self, line: PeerLine, receipt: Receipt) -> Replica:
        size = max(1, receipt.bytes)
        if (free := host_memory.available()) < size:
            self._refuse(line, f"a part of {size / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free")
        descriptor = os.memfd_create("rft-checkpoint-replica", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return Replica(receipt, descriptor, mmap.mmap(descriptor, size))

    @staticmethod
    def _refuse(line: PeerLine, why: str) -> None:
        line.send(PartTaken(why))
        raise AgentRefused(why)

    def _answer_all(self, line: PeerLine) -> None:
        """A rank that came back asks."""
        while line.wait():
            asked: Any = line.receive(Look | Fetch | End | Grant)
            if isinstance(asked, Look):
                line.send(self.held() if self.is_resting.is_set() else Held(is_resting=False))
            elif isinstance(asked, Grant):
                self._grant(line, asked)
            elif isinstance(asked, End):
                line.send(PartTaken())
                self.is_over.set()
            else:
                self._give(line, asked)

    def _give(self, line: PeerLine, asked: Fetch) -> None:
        with self._changed:
            own, other = self._own.get(asked.id), self._replicas.get((asked.rank, asked.id))
        data = None
        if asked.rank == self.settings.rank and own is not None:
            data = own.data
        elif other is not None and other.is_whole:
            data = memoryview(other.data)
        if data is None or not 0 <= asked.start <= asked.start + asked.count <= len(data):
            self._refuse(line, f"no such bytes of rank {asked.rank} in {asked.id} are here")
        line.send(PartTaken())
        line.send_bytes(data[asked.start : asked.start + asked.count])

    # --- at rest ----------------------------------------------------------------------------------

    def held(self) -> Held:
        with self._changed:
            own = sorted((one.receipt for one in self._own.values()), key=lambda one: one.step)
            others = [one.receipt for one in self._replicas.values() if one.is_whole]
            return Held(True, own, others, list(self._whole))

    def keep_only(self, identity: str) -> None:
        """Ranks go on from this state: the memory of what else is held for others is free."""
        with self._changed:
            for key in [key for key in self._replicas if key[1] != identity]:
                self._replicas.pop(key).close()

    def others(self) -> list[tuple[Receipt, int]]:
        """Replicas that are whole, and descriptors of their memory."""
        with self._changed:
            found = [one for one in self._replicas.values() if one.is_whole]
            return [(one.receipt, one.descriptor) for one in found]
