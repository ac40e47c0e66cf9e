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
from pathlib import Path

from rft.checkpoint import sharding
from rft.checkpoint.link import Link
from rft.checkpoint.memory import Inherited, Memory
from rft.checkpoint.records import Begin, Kept, Region, SaveFailed, Window
from rft.checkpoint.stager import RELEASE_S
from rft.ground.protocols import Collective

log = logging.getLogger(__name__)
SLOTS = 2


class KeptStates:
    """`is_on`: whether this run keeps any; it reads what is there in any case."""

    def __init__(self, control: Path, ranks: Collective, is_on: bool):
        self.ranks, self.is_on = ranks, is_on
        self.remembered: int | None = None  # step of the last save or load
        self.skipped = 0  # states that were not kept: both slots were in use
        self._memory = Memory(control)
        self._inherited: Inherited | None = None
        self._kept: list[tuple[str, int]] = []  # saves and their steps, oldest first
        self._link: Link | None = None

    @property
    def newest(self) -> int | None:
        """Step of the newest state that is kept."""
        return self._kept[-1][1] if self._kept else None

    @property
    def slot_bytes(self) -> int:
        """Of the slots that may be taken over; 0: there are none."""
        return self._inherited.slot_bytes if self._inherited is not None else 0

    def look(self) -> Memory:
        """What agents of this host have kept of earlier attempts."""
        self._memory.look()
        return self._memory

    def resumed(self, identity: str, step: int) -> None:
        """This state was read; no `identity`: a checkpoint was."""
        if identity:
            self.remembered = step
        self._inherited = self._memory.inherited(identity, self.ranks.rank)

    def take_over(self, regions: list[Region], slot_bytes: int) -> Inherited | None:
        """The slots of the agent before, where they are what this rank needs; else they are given
        back.
        """
        found, self._inherited = self._inherited, None
        if self.remembered is None:  # all that they hold is on disk too
            self.end_resting()
        if found is None:
            return None
        is_same = found.slot_bytes == slot_bytes and len(found.slots) == SLOTS
        if is_same and found.kept is None:
            return found
        if is_same and self.is_on and found.kept.receipt.regions == regions:
            return found
        for descriptor in found.slots:
            os.close(descriptor)
        return None

    def start(self, link: Link, inherited: Inherited | None) -> None:
        """Let this rank's agent keep what was taken over. The one before rests on, until this one
        must be there.
        """
        self._link = link
        if inherited is None or inherited.kept is None:
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
            kept=Kept(
                regions=receipt.regions,
                layout=receipt.layout,
                bytes=receipt.bytes,
                chunks=receipt.chunks,
            ),
        )
        link.begin(begin)
        link.window(
            Window(id=receipt.id, slot=inherited.kept.slot, start=0, stop=receipt.bytes, last=True)
        )
        self.staged(begin)

    def kept(self, regions: list[Region], layout: str) -> Kept | None:
        """What the agent is told of a save of everything."""
        if not self.is_on:
            return None
        return Kept(regions=regions, layout=layout, bytes=sharding.extent(regions))

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
            self.end_resting()
            self._link.release(self._kept.pop(0)[0])

    def patience_s(self, writing: set[str]) -> float:
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
        return {
            "checkpoint/in_memory": -1 if self.newest is None else self.newest,
            "checkpoint/memory_skipped": self.skipped,
        }
