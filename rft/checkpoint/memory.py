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
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rft.checkpoint import fence
from rft.checkpoint.left import LeftChunks, Lying
from rft.checkpoint.parts import ChosenState, choose, newest_offered
from rft.checkpoint.peers import Offer, RunKey, Whole, digest_of, remembered
from rft.checkpoint.records import CHUNK, CheckpointSettings, Receipt
from rft.checkpoint.remote import HeldFile, RemoteAgent, Sources
from rft.checkpoint.replicas import Replicas
from rft.ground.process import await_end, frame, one_message, socket_address

log = logging.getLogger(__name__)
LOOK_S = 0.1  # between looks whether anybody may still come; nothing tells when a lock goes
UNOWNED_S = 2.0  # from the end of who starts ranks to that of who rests for them
ANSWER_S = 5.0  # of either end of a socket, and for an agent that was told to end
# what a rank asks; the identity of a state follows the last
LOOKED, ENDED, KEEP = b"look", b"end", b"keep"
MOST_NAMED = 64  # bytes of an identity
MOST_BYTES = 2**30  # of an answer: regions of a rank's part
SLOTS = 64  # descriptors of one agent, at most


class KeptState(msgspec.Struct, frozen=True):
    receipt: Receipt
    slot: int


class Answer(msgspec.Struct, frozen=True):
    """What an agent keeps, oldest first, then what it holds for others. Descriptors of its slots
    come beside it, `own` of them, then those of replicas. `run`, `at`: by which, and where, agents
    and ranks of other nodes ask it; `whole`: what it knows to be in the memory of two nodes.
    """

    pid: int
    rank: int
    slot_bytes: int
    states: list[KeptState]
    own: int
    lying: list[Lying] = []
    run: RunKey | None = None
    at: tuple[str, int] | None = None
    whole: list[Whole] = []


# --- the agent's side -----------------------------------------------------------------------------


def may_come(settings: CheckpointSettings) -> bool:
    """Whether somebody lives who may start ranks again: the run's own, or torchrun."""
    if fence.is_owned(Path(settings.control)):
        return True
    return settings.launcher > 0 and not await_end(settings.launcher, 0.0)


class Resting:
    """An agent without a rank: it waits for one that takes over its states, or what lies in its
    slots.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        states: list[tuple[Receipt, int]],
        lying: list[Lying],
        replicas: Replicas | None = None,
    ):
        self.settings, self.states, self.lying = settings, states, lying
        self.replicas = replicas
        self.control = Path(settings.control)

    def answer(self) -> tuple[Answer, list[int]]:
        """And the descriptors: a replica may still come while it rests."""
        settings, replicas = self.settings, self.replicas
        told = Answer(
            os.getpid(),
            settings.rank,
            settings.slot_bytes,
            [KeptState(receipt, slot) for receipt, slot in self.states],
            len(settings.slots),
            self.lying,
        )
        if replicas is None or settings.replicas is None:
            return told, settings.slots
        others = replicas.others()
        held = [
            KeptState(receipt, len(settings.slots) + number)
            for number, (receipt, _) in enumerate(others)
        ]
        told = msgspec.structs.replace(
            told,
            states=told.states + held,
            run=replicas.run,
            at=settings.replicas.at[settings.rank],
            whole=replicas.held().whole,
        )
        return told, [*settings.slots, *(descriptor for _, descriptor in others)]

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
                if self.replicas is not None:
                    self.replicas.is_resting.set()
                self._serve(listener)
            finally:
                path.unlink(missing_ok=True)

    def _serve(self, listener: socket.socket) -> None:
        now = time.monotonic()
        end, awaited = now + self.settings.deadline_s, now
        kept = [f"step {receipt.step}" for receipt, _ in self.states]
        log.info("resting: %s kept", ", ".join(kept) if kept else "what was written is")
        while now < end and now < awaited + UNOWNED_S:
            if select.select([listener], [], [], LOOK_S)[0]:
                with listener.accept()[0] as caller:
                    if self._reply(caller):
                        return
            if fence.is_over(self.control, self.settings.epoch):
                return
            now = time.monotonic()
            if self.replicas is not None:  # who starts ranks again may have been on a lost node
                if self.replicas.is_over.is_set():
                    return
                awaited = now
            elif may_come(self.settings):
                awaited = now

    def _reply(self, caller: socket.socket) -> bool:
        """Whether it was told to end; a caller that breaks off is nobody."""
        with contextlib.suppress(OSError):
            asked = one_message(caller, len(LOOKED), ANSWER_S)
            caller.settimeout(ANSWER_S)
            if asked == KEEP:
                identity = one_message(caller, MOST_NAMED, ANSWER_S).decode(errors="replace")
                if self.replicas is not None:
                    self.replicas.keep_only(identity)
            if asked in (ENDED, KEEP):
                caller.sendall(frame(b""))
                return asked == ENDED
            answer, descriptors = self.answer()
            socket.send_fds(caller, [b"\0"], descriptors)
            caller.sendall(frame(msgspec.msgpack.encode(answer)))
        return False


# --- the rank's side ------------------------------------------------------------------------------


@dataclass
class RestingAgent:
    """One that has answered; `slots`: descriptors of this process, from then on."""

    path: Path
    answer: Answer
    slots: list[int]

    def keep_only(self, identity: str) -> int:
        """Bytes that it holds for others then: parts of this state."""
        states, own = self.answer.states, self.answer.own
        kept = [one for one in states if one.slot < own or one.receipt.id == identity]
        order = [*range(own), *(one.slot for one in kept if one.slot >= own)]
        for slot in set(range(len(self.slots))) - set(order):
            os.close(self.slots[slot])
        places = {slot: place for place, slot in enumerate(order)}
        kept = [msgspec.structs.replace(one, slot=places[one.slot]) for one in kept]
        self.slots = [self.slots[slot] for slot in order]
        self.answer = msgspec.structs.replace(self.answer, states=kept)
        try:
            with _asked(self.path, KEEP) as line:
                line.sendall(frame(identity.encode()))
                one_message(line, 0, ANSWER_S)
        except OSError as error:  # its memory is counted as gone
            log.warning("%s gives no memory back: %s", self.path.name, error)
        return sum(one.receipt.bytes for one in kept if one.slot >= own)

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
    """The agents of this host that rest, and those of other nodes that were asked; none where
    nothing was kept.
    """

    control: Path
    agents: list[RestingAgent] = field(default_factory=list)
    others: dict[tuple[str, int], RemoteAgent] = field(default_factory=dict)
    reached: int = 0  # rank 0's: the newest step that any agent has a part of

    def look(self) -> None:
        """Ask all of this host. One that does not answer is as if it were not there."""
        own = fence.state_path(self.control, 0, 0).parent
        for path in fence.resting(self.control):
            if path.parent == own:
                try:
                    self.agents.append(_answer(path))
                except (OSError, msgspec.DecodeError) as error:
                    log.warning("%s keeps a state and does not answer: %s", path.name, error)

    def told(self) -> "MemoryTold":
        """What is here, for rank 0."""
        before = remembered(self.control)
        answers = [agent.answer for agent in self.agents]
        run = next((one.run for one in answers if one.run), before.run if before else None)
        return MemoryTold(
            [one for _, one in self._offered()],
            [Head.of(receipt) for receipt, _ in self._offered() if receipt.rank == 0],
            [whole for one in answers for whole in one.whole],
            run,
            before.at if before else [],
            [one.at for one in answers if one.at],
        )

    def _offered(self) -> Iterator[tuple[Receipt, Offer]]:
        for agent in self.agents:
            for state in agent.answer.states:
                is_own = state.slot < agent.answer.own
                yield state.receipt, Offer.of(state.receipt, is_own, agent.answer.at)

    def ask_others(self, told: "list[MemoryTold]") -> "MemoryTold":
        """Agents of other nodes, all at once, of those that no rank has found on its own."""
        run = next((one.run for one in told if one.run), None)
        found = {tuple(at) for one in told for at in one.here}
        wanted = sorted({tuple(at) for one in told for at in one.before} - found - set(self.others))
        if run is None or not wanted:
            return MemoryTold()  # they have been asked
        with ThreadPoolExecutor(len(wanted)) as pool:
            for agent in pool.map(lambda at: RemoteAgent.asked(at, run), wanted):
                if agent is not None:
                    self.others[agent.at] = agent
        offers = [one for agent in self.others.values() for one in agent.offers()]
        heads = [
            Head.of(receipt)
            for agent in self.others.values()
            for receipt in agent.receipts
            if receipt.rank == 0
        ]
        return MemoryTold(
            offers, heads, [one for a in self.others.values() for one in a.held.whole]
        )

    def parts(self, chosen: ChosenState, run: RunKey | None) -> "dict[int, Sources]":
        """By rank, all that can be read of this state: from this host, then from other nodes.

        Raises OSError where a part is on a node that does not answer any more.
        """
        found: dict[int, Sources] = {}
        own_first = sorted(self._kept(chosen), key=lambda one: not one[2])
        for agent, state, _ in own_first:
            receipt = state.receipt
            where = f"memory of {agent.path.name}"
            fetch = partial(_read_slot, agent.slots[state.slot])
            file = HeldFile(receipt, where, fetch)
            found.setdefault(receipt.rank, Sources(receipt)).add(lambda file=file: file)
        here = {agent.answer.at for agent in self.agents}
        for rank, places in enumerate(chosen.at if run is not None else []):
            for at in places:
                if at in here:
                    continue
                if rank in found:  # asked only if what comes first does not give it
                    found[rank].add(partial(self._file, at, run, chosen, rank))
                    continue
                with contextlib.suppress(OSError):  # the next one, or it is missing
                    file = self._file(at, run, chosen, rank)
                    found[rank] = Sources(file.receipt)
                    found[rank].add(partial(self._file, at, run, chosen, rank))
        missing = [rank for rank in range(chosen.world) if rank not in found]
        if missing:
            raise OSError(f"the part(s) of rank(s) {missing} lie on other hosts")
        return found

    def _kept(self, chosen: ChosenState) -> Iterator[tuple[RestingAgent, KeptState, bool]]:
        for agent in self.agents:
            for state in agent.answer.states:
                one = state.receipt
                if one.id == chosen.id and digest_of(one) == chosen.receipts[one.rank]:
                    yield agent, state, state.slot < agent.answer.own

    def _file(self, at: tuple[str, int], run: RunKey, chosen: ChosenState, rank: int) -> HeldFile:
        if at not in self.others:
            agent = RemoteAgent.asked(at, run)
            if agent is None:
                raise OSError(f"nobody answers at {at[0]}:{at[1]}")
            self.others[at] = agent
        for receipt in self.others[at].receipts:
            is_it = receipt.id == chosen.id and receipt.rank == rank
            if is_it and digest_of(receipt) == chosen.receipts[rank]:
                where = f"the agent at {at[0]}:{at[1]}"
                return HeldFile(receipt, where, partial(self.others[at].fetch, receipt), CHUNK)
        raise OSError(f"{at[0]}:{at[1]} does not hold the part of rank {rank} any more")

    def inherited(self, identity: str, rank: int) -> Inherited | None:
        """This rank's own part of the state that was gone on from; without one, the slots of its
        agent, with what is left there.
        """
        mine = [
            (agent, state)
            for agent in self.agents
            for state in agent.answer.states
            if (state.receipt.id, state.receipt.rank) == (identity, rank)
            and agent.answer.rank == rank
            and state.slot < agent.answer.own
        ]
        mine += [(agent, None) for agent in self.agents if agent.answer.rank == rank]
        for agent, state in mine:
            slots = [os.dup(slot) for slot in agent.slots[: agent.answer.own]]
            return Inherited(state, slots, agent.answer.slot_bytes)
        return None

    def left(self) -> LeftChunks:
        """What lies in slots beside the states."""
        return LeftChunks(
            (agent.slots[lying.slot], lying)
            for agent in self.agents
            for lying in agent.answer.lying
        )

    def keep_only(self, identity: str) -> int:
        """Let the agents of this host hold parts of this state alone for others; how many bytes
        they hold then.
        """
        return sum(agent.keep_only(identity) for agent in self.agents)

    def end(self, rank: int, world: int) -> None:
        """Let the agents end whose ranks are this one now, or were of this host and are of another
        now, where ranks of a host are numbered in a row; forget the others. Of agents with replicas
        every rank ends all that it knows.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        for agent in self.agents:
            if agent.answer.rank % here == rank % here or agent.answer.run is not None:
                agent.end()
            for slot in agent.slots:
                os.close(slot)
        self.agents.clear()
        for other in self.others.values():
            other.end()
        self.others.clear()


def _read_slot(descriptor: int, start: int, places: list[memoryview]) -> None:
    """Without a map of it, which would cost a page fault for every 64 KiB. What is not there stays
    as it was, and is no such chunk.
    """
    os.preadv(descriptor, places, start)


class Head(msgspec.Struct, frozen=True):
    """What rank 0 kept of a state beside its bytes; `receipt`: sha256 of where it stands."""

    receipt: str
    loop: dict[str, Any]
    about: dict[str, Any]
    small: dict[str, bytes]

    @classmethod
    def of(cls, receipt: Receipt) -> "Head":
        return cls(digest_of(receipt), receipt.loop or {}, receipt.about or {}, receipt.small)


class MemoryTold(msgspec.Struct, frozen=True):
    """What a rank tells of its host: parts, what is known to be whole, how agents of other nodes
    are asked (`run`), where they were in the last attempt (`before`), which of them it has found.
    """

    offers: list[Offer] = []
    heads: list[Head] = []
    whole: list[Whole] = []
    run: RunKey | None = None
    before: list[tuple[str, int]] = []
    here: list[tuple[str, int]] = []


def states(
    memory: Memory, told: list[MemoryTold], others: bool
) -> tuple[list[ChosenState], list[str]]:
    """Rank 0's: what may be gone on from, newest first, and who contradicts, by what ranks have
    `told`. Agents of other nodes are asked, and `told` grows, where something is missing, or where
    ranks could not read what they have found (`others`). Before that only the newest is told: where
    its bytes have changed, nodes on which no rank has come back may have them.
    """

    def chosen() -> tuple[list[ChosenState], list[str]]:
        offers = [one for each in told for one in each.offers]
        return choose(offers, [one for each in told for one in each.whole])

    found, lies = chosen()
    newest = newest_offered([one for each in told for one in each.offers])
    if others or not found or (found[0].epoch, found[0].step) < newest:
        told.append(memory.ask_others(told))
        found, lies = chosen()
    memory.reached = newest_offered([one for each in told for one in each.offers])[1]
    return (found if others else found[:1]), lies


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
