"""States that agents keep in memory, for ranks that come back: a restart reads what its last
attempt has staged, and no disk.

    trainer rank ── stage ──► slot ◄── its agent: hashes it, and keeps it until a newer one is
         ╳ dies                              staged on every rank
                                 agent: writes what is to be written, then rests, at a socket
    new rank ── look ──►                 ◄── the slots' descriptors, what lies in which, and hashes
             ── end ──► the agent ends; the slots are the new rank's, whose agent has the state

In: slots that a trainer has staged (`rft.checkpoint.stager`). Out: at the agent, `Resting`; at a
rank, `Memory`: the states of all agents of its host, and the pieces of one. Invariants: a slot that
may be looked at is written by nobody; a byte that is handed out was compared with the hash made of
it when it was staged; a state is gone on from only where every rank finds all that it needs of it.
An agent rests no longer than somebody lives who may start ranks again, and `deadline_s`.
"""

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rft.checkpoint import fence
from rft.checkpoint.left import LeftChunks, Lying
from rft.checkpoint.records import CHUNK, CheckpointSettings, Receipt
from rft.ground.process import frame, one_message, socket_address

log = logging.getLogger(__name__)
LOOK_S = 0.1  # between looks whether anybody may still come; nothing tells when a lock goes
UNOWNED_S = 2.0  # from the end of who starts ranks to that of who rests for them
ANSWER_S = 5.0  # of either end of a socket, and for an agent that was told to end
LOOKED, ENDED = b"look", b"end"  # what a rank asks
MOST_BYTES = 2**30  # of an answer: regions of a rank's part
SLOTS = 8  # descriptors of one agent, at most


class KeptState(msgspec.Struct, frozen=True):
    receipt: Receipt
    slot: int


class Answer(msgspec.Struct, frozen=True):
    """What an agent keeps, oldest first. Its slots' descriptors come beside it."""

    pid: int
    rank: int
    slot_bytes: int
    states: list[KeptState]
    lying: list[Lying] = []


# --- the agent's side -----------------------------------------------------------------------------


class Resting:
    """An agent without a rank: it waits for one that takes over its states, or what lies in its
    slots.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        states: list[tuple[Receipt, int]],
        lying: list[Lying],
    ):
        self.settings = settings
        self.control = Path(settings.control)
        self.answer = msgspec.msgpack.encode(
            Answer(
                os.getpid(),
                settings.rank,
                settings.slot_bytes,
                [KeptState(receipt, slot) for receipt, slot in states],
                lying,
            )
        )
        self._what = f"the state of step {states[-1][0].step}" if states else "what was written"

    def serve(self) -> None:
        """Until a rank says that it has all, nobody can come any more, or `deadline_s`."""
        path = fence.state_path(self.control, self.settings.epoch, self.settings.rank)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with socket_address(path) as address:
                listener.bind(address)
            try:
                os.chmod(path, 0o600)  # nobody can connect before `listen`
                listener.listen()
                self._serve(listener)
            finally:
                path.unlink(missing_ok=True)

    def _serve(self, listener: socket.socket) -> None:
        now = time.monotonic()
        end, awaited = now + self.settings.deadline_s, now
        log.info("resting: %s is kept", self._what)
        while now < end and now < awaited + UNOWNED_S:
            if select.select([listener], [], [], LOOK_S)[0]:
                with listener.accept()[0] as caller:
                    if self._reply(caller):
                        return
            if fence.is_over(self.control, self.settings.epoch):
                return
            now = time.monotonic()
            awaited = now if fence.is_owned(self.control) else awaited

    def _reply(self, caller: socket.socket) -> bool:
        """Whether it was told to end; a caller that breaks off is nobody."""
        with contextlib.suppress(OSError):
            asked = one_message(caller, len(LOOKED), ANSWER_S)
            caller.settimeout(ANSWER_S)
            if asked == ENDED:
                caller.sendall(frame(b""))
                return True
            socket.send_fds(caller, [b"\0"], self.settings.slots)
            caller.sendall(frame(self.answer))
        return False


# --- the rank's side ------------------------------------------------------------------------------


@dataclass
class RestingAgent:
    """One that has answered; `slots`: descriptors of this process, from then on."""

    path: Path
    answer: Answer
    slots: list[int]

    def end(self) -> None:
        """Return when it is gone: its slots may be written."""
        try:
            with _asked(self.path, ENDED) as line:
                one_message(line, 0, ANSWER_S)
        except FileNotFoundError:  # it has ended by itself
            return
        except OSError as error:
            log.warning("%s does not end (%s) and is killed", self.path.name, error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.answer.pid, signal.SIGKILL)


class Inherited(msgspec.Struct, frozen=True):
    """What a rank takes over of the agent before its own: a state, if that was gone on from, and
    all slots.
    """

    kept: KeptState | None
    slots: list[int]
    slot_bytes: int


@dataclass
class Memory:
    """The agents of this host that rest; none where nothing was kept."""

    control: Path
    agents: list[RestingAgent] = field(default_factory=list)

    def look(self) -> None:
        """Ask all of them. One that does not answer is as if it were not there."""
        own = fence.state_path(self.control, 0, 0).parent
        for path in fence.resting(self.control):
            if path.parent == own:
                try:
                    self.agents.append(_answer(path))
                except (OSError, msgspec.DecodeError) as error:
                    log.warning("%s keeps a state and does not answer: %s", path.name, error)

    def offers(self) -> list[Any]:
        """[id, step, epoch, world, rank] of every part that is here."""
        return [
            [one.id, one.step, one.epoch, one.world, one.rank]
            for one in (state.receipt for agent in self.agents for state in agent.answer.states)
        ]

    def _parts(self, identity: str) -> Iterator[tuple[RestingAgent, KeptState]]:
        """Of several agents with the same part the last that came."""
        found = {
            state.receipt.rank: (agent, state)
            for agent in self.agents
            for state in agent.answer.states
            if state.receipt.id == identity
        }
        return iter(found.values())

    def receipts(self, identity: str) -> list[Receipt]:
        return [state.receipt for _, state in self._parts(identity)]

    def files(self, identity: str) -> dict[int, "KeptFile"]:
        """By rank."""
        return {
            state.receipt.rank: KeptFile(
                agent.path.name, state.receipt, agent.slots[state.slot], agent.answer.slot_bytes
            )
            for agent, state in self._parts(identity)
        }

    def inherited(self, identity: str, rank: int) -> Inherited | None:
        """This rank's own part of the state that was gone on from; without one, the slots of its
        agent, with what is left there.
        """
        mine = [
            (agent, state) for agent, state in self._parts(identity) if state.receipt.rank == rank
        ]
        mine += [(agent, None) for agent in self.agents if agent.answer.rank == rank]
        for agent, state in mine:
            return Inherited(state, [os.dup(slot) for slot in agent.slots], agent.answer.slot_bytes)
        return None

    def left(self) -> LeftChunks:
        """What lies in slots beside the states."""
        return LeftChunks(
            (agent.slots[lying.slot], lying)
            for agent in self.agents
            for lying in agent.answer.lying
        )

    def end(self, rank: int, world: int) -> None:
        """Let the agents end whose ranks are this one now; forget the others."""
        for agent in self.agents:
            if agent.answer.rank % world == rank:
                agent.end()
            for slot in agent.slots:
                os.close(slot)
        self.agents.clear()


class KeptFile:
    """One rank's part in a slot: `reader.RankBytes`, without a copy."""

    def __init__(self, name: str, receipt: Receipt, descriptor: int, size: int):
        self.name, self.bytes = name, receipt.bytes
        self._receipt = receipt
        self._descriptor, self._size = descriptor, size
        self._view: memoryview | None = None
        self._sound: set[int] = set()  # chunks that were compared with their hash

    def read(self, start: int, count: int) -> memoryview:
        """Raises Damaged."""
        from rft.checkpoint.reader import Damaged  # with numpy, which an agent has no use for

        if self._view is None:
            # not all of it may be asked for, and its pages come sixteen at a time
            self._view = memoryview(mmap.mmap(self._descriptor, self._size, prot=mmap.PROT_READ))
        for number in range(start // CHUNK, -(-(start + count) // CHUNK)):
            if number not in self._sound:
                part = self._view[number * CHUNK : min((number + 1) * CHUNK, self.bytes)]
                if xxhash.xxh3_128_hexdigest(part) != self._receipt.chunks[number]:
                    raise Damaged(f"memory of {self.name}: chunk {number} was changed", self.name)
                self._sound.add(number)
        return self._view[start : start + count]


@contextlib.contextmanager
def _asked(path: Path, question: bytes) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ANSWER_S)
        with socket_address(path) as address:
            line.connect(address)
        line.sendall(frame(question))
        yield line


def _answer(path: Path) -> RestingAgent:
    with _asked(path, LOOKED) as line:
        _, slots, _, _ = socket.recv_fds(line, 1, SLOTS)
        answer = msgspec.msgpack.decode(one_message(line, MOST_BYTES, ANSWER_S), type=Answer)
    return RestingAgent(path, answer, list(slots))
