"""A rank's hold on the states that its agent keeps in memory (`rft.checkpoint.memory`).

    look ─► resumed ─► take_over ─► start        what the agent before has kept: read, its slots
                                                 taken over, and kept by the new one
    staged ─► release ─► staged ...              of each save: the newest state has a slot, the
                                                 other one is for the next

In: what agents of earlier attempts keep; saves as they are staged. Out: the slots to go on with,
and which of them may be written. Invariants: a slot is written only after a newer state was staged
on every rank, and after nobody else can look at it; what the ranks decide by (`remembered`) is the
same on all of them.
"""

import logging
import os
from collections.abc import Set
from pathlib import Path

from rft.checkpoint import fence
from rft.checkpoint.link import Link
from rft.checkpoint.memory import Inherited, Memory
from rft.checkpoint.neighbours import RankPlace, agree
from rft.checkpoint.records import Begin, Region, Replication, SavedPart, SaveFailed, Window
from rft.checkpoint.stager import RELEASE_S
from rft.ground.protocols import Collective

log = logging.getLogger(__name__)
SLOTS = 2
REST_S = 60.0  # for agents of this node to finish what they write


class KeptStates:
    """`is_on`: whether this run keeps any; it reads what is there in any case. `place`: they are
    kept on two nodes, this rank's being there; then what was kept before stays until one is.
    A state that was gone on from and not taken over stays until a newer one is in memory.
    """

    def __init__(
        self, control: Path, ranks: Collective, is_on: bool, place: RankPlace | None = None
    ):
        self.ranks, self.is_on = ranks, is_on
        self._place, self.is_twice = place, place is not None
        self.remembered: int | None = None  # step of the last save or load
        self.skipped = 0  # states that were not kept: both slots were in use
        self.replicated: int | None = (
            None  # step of the newest that two nodes have, of this attempt
        )
        self._memory = Memory(control)
        self._held = 0  # bytes of replicas that agents before hold, until newer states are there
        self._inherited: Inherited | None = None
        self._kept: list[tuple[str, int]] = []  # saves and their steps, oldest first
        # of the saves that were admitted: the newest that is to be kept, and of those to storage
        # the last two that no word of rank 0's has called settled
        self._newest_admitted = ""
        self._unsettled: list[str] = []
        self._link: Link | None = None

    @property
    def newest(self) -> int | None:
        """Step of the newest state that is kept."""
        return self._kept[-1][1] if self._kept else None

    @property
    def slot_bytes(self) -> int:
        """Of the slots that may be taken over; 0: there are none."""
        return self._inherited.slot_bytes if self._inherited is not None else 0

    @property
    def _is_awaited(self) -> bool:
        """Whether states of this attempt are to come in the place of one that it has read."""
        return self.is_on and self.remembered is not None

    def look(self) -> Memory:
        """What agents of this host have kept of earlier attempts, once they write nothing more."""
        if self.is_twice:  # rank 0 has waited for those that it sees: nodes may share no directory
            fence.await_agents(self._memory.control, REST_S, log.warning)
        self._memory.look()
        return self._memory

    def resumed(self, identity: str, step: int) -> None:
        """This state was read; no `identity`: a checkpoint was."""
        if identity:
            self.remembered = step
            self._held = self._memory.keep_only(identity) if self.is_twice else 0
        self._inherited = self._memory.inherited(identity, self.ranks.rank)

    def take_over(self, regions: list[Region], slot_bytes: int) -> Inherited | None:
        """The slots of the agent before, where they are what this rank needs; else they are given
        back.
        """
        found, self._inherited = self._inherited, None
        if self.remembered is None and not self.is_twice:  # all that they hold is on disk too
            self.end_resting()
        is_same = found is not None and found.slot_bytes == slot_bytes and len(found.slots) == SLOTS
        if found is not None and found.kept is not None:
            is_same = is_same and self.is_on and found.kept.receipt.regions == regions
        elif self.is_twice or self._is_awaited:  # what lies in them is to stay
            is_same = False
        if self.is_twice:  # every rank goes on with it, or it stays with the agents before
            said = self.ranks.gather(is_same)
            is_same = self.ranks.broadcast(None if said is None else all(said))
        if found is None or is_same:
            return found
        for descriptor in found.slots:
            os.close(descriptor)
        return None

    def replication(self, epoch: int, total: int, wanted: int, free: int) -> Replication | None:
        """What this rank's agent is told of the others', in bytes of its part, of what the rank
        takes for itself, and of what its node has. Raises ConfigError, on every rank.
        """
        if self._place is None:
            return None
        sizes = (total, wanted, free, self._held)
        found = agree(self.ranks, self._memory.control, epoch, self._place, sizes)
        self.is_twice = found is not None
        return found

    def start(self, link: Link, inherited: Inherited | None) -> None:
        """Let this rank's agent keep what was taken over. The one before rests on, until this one
        must be there.
        """
        self._link = link
        if inherited is None or inherited.kept is None:
            rests = self._is_awaited or (self.is_twice and inherited is None)
            if not rests:
                self.end_resting()
            return
        receipt = inherited.kept.receipt
        begin = Begin(
            id=receipt.id,
            step=receipt.step,
            outputs=[],
            small=receipt.small,
            local=receipt.local,
            loop=receipt.loop,
            about=receipt.about,
            kept=SavedPart(
                regions=receipt.regions,
                layout=receipt.layout,
                bytes=receipt.bytes,
                chunks=receipt.chunks,
            ),
        )
        slot = inherited.kept.slot
        link.begin(begin, Window(id=receipt.id, slot=slot, start=0, stop=receipt.bytes, last=True))
        self.staged(begin)

    def admit(self, begin: Begin, writing: set[str]) -> bool:
        """Whether all ranks stage this save. One for memory alone needs the slot that the newest
        state is not in: where a save to storage may have it on some rank, rank 0 tells whether any
        is still `writing`, for all have written what is committed. Collective then.
        """
        newest = self._newest_admitted
        if not begin.outputs and set(self._unsettled) - {newest}:
            if not self.ranks.broadcast(not writing - {newest}):
                return False
            self._unsettled = [one for one in self._unsettled if one == newest]
        if begin.outputs:
            self._unsettled = [*self._unsettled[-1:], begin.id]
        if begin.kept is not None:
            self._newest_admitted = begin.id
        return True

    def everywhere(self, is_so: bool) -> bool:
        """On every rank: a save that one of them leaves out is nobody's. Collective."""
        found = self.ranks.gather(is_so)
        return bool(self.ranks.broadcast(found is None or all(found)))

    def staged(self, begin: Begin) -> None:
        """Called by the thread that copies."""
        if begin.kept is not None:
            self._kept.append((begin.id, begin.step))

    def release(self) -> None:
        """Before the next save is staged: every rank has made a step since the newest was, so all
        have that.
        """
        while len(self._kept) > 1:
            assert self._link is not None
            if not self.is_twice or self.replicated is not None:
                self.end_resting()
            self._link.release(self._kept.pop(0)[0])

    def patience_s(self, writing: Set[str] = frozenset()) -> float:
        """How long to wait for the slot that the newest state is not in: that one comes back at
        once, or it is among the saves that are `writing`.
        """
        newest = self._kept[-1][0] if self._kept else ""
        return RELEASE_S if self._kept and not writing - {newest} else 0.0

    def skip(self, report: SaveFailed) -> None:
        self.skipped += 1
        log.info("the state of step %d is not kept in memory: %s", report.step, report.cause)

    def end_resting(self) -> None:
        """Of the attempts before: their slots will be written."""
        self._memory.end(self.ranks.rank, self.ranks.world)

    def metrics(self) -> dict[str, float]:
        if not self.is_on:
            return {}
        found = {
            "checkpoint/in_memory": -1 if self.newest is None else self.newest,
            "checkpoint/memory_skipped": self.skipped,
        }
        if self.is_twice:
            found["checkpoint/replicated"] = -1 if self.replicated is None else self.replicated
        return found
