"""Progress that survives: a journal, the state it folds to, and where in it every group's
experiences lie, or, until it has them, what engines have answered to it.

In: `append(record)`, durable after `await commit()`. Out: `progress`, the experiences of a lease
and the answers to a group, read from the journal. `retain` drops what no checkpoint needs, beside
everything else: nobody waits for it, and where it fails (a full disk) the journal stays as it was,
until the next one. Invariant: `progress` is the fold of the journal's records, in order; a record
that cannot be written changes nothing.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from rft.buffer.delivery import PartKey, StoredGroup
from rft.buffer.journal import Journal, JournalError
from rft.buffer.progress import (
    Answered,
    GroupFailed,
    JournalRecord,
    Lease,
    Progress,
    Stored,
    decode_record,
)
from rft.ground.durable import FILES, Files
from rft.ground.experience import encode

logger = logging.getLogger(__name__)


def read_parts(journal: Journal, rows: list[tuple[int, StoredGroup]]) -> list[StoredGroup]:
    """The parts of a batch, each with its experiences, which lie in the record at this position."""
    for position, part in rows:
        record = decode_record(journal.read(position))
        assert isinstance(record, Stored) and record.group == part.group
        part.experiences = record.experiences
    return [part for _, part in rows]


def read_answers(journal: Journal, positions: list[int]) -> list[bytes]:
    found = [decode_record(journal.read(position)) for position in positions]
    return [record.answers for record in found if isinstance(record, Answered)]


@dataclass
class Places:
    """Positions, by group, of the records that hold what is too large for the state."""

    experiences: dict[int, int] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)  # of open groups, in their order

    def apply(self, record: JournalRecord, position: int, progress: Progress) -> None:
        """`progress`: with this record."""
        match record:
            case Stored():
                self.experiences[record.group] = position
                self.answers.pop(record.group, None)
            case GroupFailed():
                self.answers.pop(record.group, None)
            case Answered():
                if progress.is_open(record.group):
                    self.answers.setdefault(record.group, []).append(position)


def folded(journal: Journal, end: int, oldest_step: int) -> Iterator[tuple[JournalRecord, bytes]]:
    """What must stay of the records before `end`, with their payloads. Of those that say where
    bytes lie, only the payload has these.
    """
    progress, places = Progress(), Places()
    for position, payload in journal.records(stop=end):
        record = decode_record(payload)
        progress.apply(record)
        places.apply(record, position, progress)
    progress.forget(oldest_step)
    for record in progress.survivors():
        match record:
            case Stored():
                yield record, journal.read(places.experiences[record.group])
            case Answered():
                for position in places.answers[record.group]:
                    yield record, journal.read(position)
            case _:
                yield record, encode(record)


class Ledger:
    """The journal in `directory` and the progress it records."""

    def __init__(self, directory: str, segment_bytes: int, files: Files = FILES) -> None:
        self.journal = Journal(directory, segment_bytes, files)
        self.progress = Progress()
        self._places = Places()
        # (position, finished steps there), where it changed
        self._finished: list[tuple[int, int]] = []
        self._files = asyncio.Lock()  # rows do not move while a batch is read
        self._wanted: tuple[int, int | None] | None = None  # of the next retention
        self._retention: asyncio.Task[None] | None = None
        self._closing = False
        self.failed_retentions = 0
        for position, payload in self.journal.records():
            self._apply(decode_record(payload), position)

    def append(self, record: JournalRecord) -> None:
        """Journal a record, not yet durably, and take it into the state."""
        position = self.journal.position
        self.journal.append([encode(record)])
        self._apply(record, position)

    def _apply(self, record: JournalRecord, position: int) -> None:
        finished = self.progress.finished
        self.progress.apply(record)
        self._places.apply(record, position, self.progress)
        if self.progress.finished != finished:
            self._finished.append((position, self.progress.finished))

    async def parts(self, lease: Lease, seen: Collection[PartKey] = ()) -> list[StoredGroup]:
        """The groups of a lease with their experiences, in the lease's order; those that were
        `seen` without.
        """
        uses = lease.uses or [0] * len(lease.groups)
        parts = [
            StoredGroup(group=group.number, timeline=group.run_epoch, experiences=b"", uses=count)
            for group, count in zip(lease.groups, uses, strict=True)
        ]
        async with self._files:
            places = self._places.experiences
            rows = [(places[part.group], part) for part in parts if part.key not in seen]
            await asyncio.to_thread(read_parts, self.journal, rows)
        return parts

    async def answers(self, group: int) -> list[bytes]:
        """What engines have answered to a group that is not finished, in the order in which it was
        kept.
        """
        async with self._files:
            positions = list(self._places.answers.get(group, ()))
            if not positions:
                return []
            return await asyncio.to_thread(read_answers, self.journal, positions)

    def stored(self) -> Iterator[StoredGroup]:
        """All groups that have experiences here, by number."""
        progress = self.progress
        leased = {
            group.number: group for lease in progress.leases.values() for group in lease.groups
        }
        for number, group in sorted((leased | progress.pool | progress.waiting).items()):
            if group.stored:
                part = StoredGroup(group=number, timeline=group.run_epoch, experiences=b"")
                at = self._places.experiences[number]
                yield from read_parts(self.journal, [(at, part)])

    def stats(self) -> dict[str, int]:
        """Counters and sizes now."""
        progress, journal = self.progress, self.journal
        stored = len(progress.stored())
        return {
            "issued": progress.next_group,
            "stored": progress.num_stored,
            "failed": progress.num_failed,
            "evicted": progress.num_evicted,
            "kept_groups": len(progress.pool),
            "ready_groups": stored,
            "running_groups": len(progress.waiting) - stored,
            "next_step": progress.next_step,
            "finished_steps": progress.finished,
            "run_epoch": progress.run_epoch,
            "journal_bytes": journal.size,
            "journal_position": journal.position,
            "failed_retentions": self.failed_retentions,
            "fsyncs": journal.fsyncs,
            "commits": journal.commits,
        }

    def retain(self, position: int, step: int | None) -> None:
        """Begin to drop whole segments before `position`, except for what a resume at `step` or
        later needs; of several that wait the last one counts.

        Without `step` it is the number of steps that were finished at `position`.
        """
        self._wanted = (position, step)
        if self._retention is None or self._retention.done():
            self._retention = asyncio.create_task(self._retain())

    async def retained(self) -> None:
        """Return when nothing is being dropped."""
        if self._retention is not None:
            await self._retention

    async def close(self) -> None:
        self._closing = True
        await self.retained()
        self.journal.close()

    async def _retain(self) -> None:
        while self._wanted is not None:
            (position, step), self._wanted = self._wanted, None
            finished = next((steps for at, steps in reversed(self._finished) if at < position), 0)
            oldest = min(finished, self.progress.finished, finished if step is None else step)
            end = self.journal.cut(position)
            if end is None:
                continue
            try:
                await self._compact(end, oldest)
            except (OSError, JournalError) as error:
                self.failed_retentions += 1
                logger.warning("the journal could not be cut, and stays as it is: %s", error)

    async def _compact(self, end: int, oldest: int) -> None:
        before, kept = self.journal.size, list[Stored | Answered | None]()

        def payloads() -> Iterator[bytes]:
            for record, payload in folded(self.journal, end, oldest):
                if self._closing:
                    raise JournalError("it is closed, and will be cut after its next start")
                kept.append(record if isinstance(record, Stored | Answered) else None)
                yield payload

        base = await asyncio.to_thread(self.journal.write_base, end, payloads())
        async with self._files:
            await asyncio.to_thread(self.journal.install, base)
            self._move(zip(kept, base.positions, strict=True), end)
            earlier = [mark for mark in self._finished if mark[0] < end]
            self._finished = [*earlier[-1:], *(mark for mark in self._finished if mark[0] >= end)]
            self.progress.forget(oldest)
        logger.info(
            "journal cut from %d to %d bytes; batches from step %d on stay",
            before,
            self.journal.size,
            oldest,
        )

    def _move(self, kept: Iterable[tuple[Stored | Answered | None, int]], end: int) -> None:
        """What lay before `end` lies there now; groups may have been finished meanwhile."""
        old, new = self._places, Places()
        for record, position in kept:
            if isinstance(record, Stored):
                new.experiences[record.group] = position
            elif isinstance(record, Answered) and record.group in old.answers:
                new.answers.setdefault(record.group, []).append(position)
        new.experiences |= {group: at for group, at in old.experiences.items() if at >= end}
        for group, positions in old.answers.items():
            new.answers.setdefault(group, []).extend(at for at in positions if at >= end)
        self._places = new
