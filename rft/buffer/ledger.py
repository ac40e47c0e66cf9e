"""Progress that survives: a journal, the state it folds to, and where in it every group's
experiences lie.

In: `append(record)`, durable after `await commit()`. Out: `progress`, and the experiences of a
lease, read from the journal. `retain` drops what no checkpoint needs, beside everything else:
nobody waits for it, and where it fails (a full disk) the journal stays as it was, until the next
one. Invariant: `progress` is the fold of the journal's records, in order; a record that cannot be
written changes nothing.
"""

import asyncio
import logging
from collections.abc import Iterator

from rft.buffer.delivery import StoredGroup
from rft.buffer.journal import Journal, JournalError
from rft.buffer.progress import JournalRecord, Lease, Progress, Stored, decode_record
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


def folded(journal: Journal, end: int, oldest_step: int) -> Iterator[tuple[int | None, bytes]]:
    """What must stay of the records before `end`, each with its group where it holds the
    experiences of one.
    """
    progress, rows = Progress(), {}
    for position, payload in journal.records(stop=end):
        record = decode_record(payload)
        progress.apply(record)
        if isinstance(record, Stored):
            rows[record.group] = position
    progress.forget(oldest_step)
    for record in progress.survivors():
        if isinstance(record, Stored):
            yield record.group, journal.read(rows[record.group])
        else:
            yield None, encode(record)


class Ledger:
    """The journal in `directory` and the progress it records."""

    def __init__(self, directory: str, segment_bytes: int, files: Files = FILES) -> None:
        self.journal = Journal(directory, segment_bytes, files)
        self.progress = Progress()
        self._rows: dict[int, int] = {}  # group -> position of its experiences
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
        if isinstance(record, Stored):
            self._rows[record.group] = position
        if self.progress.finished != finished:
            self._finished.append((position, self.progress.finished))

    async def parts(self, lease: Lease) -> list[StoredGroup]:
        """The groups of a lease with their experiences, in the lease's order."""
        uses = lease.uses or [0] * len(lease.groups)
        async with self._files:
            rows = [
                (
                    self._rows[g.number],
                    StoredGroup(group=g.number, timeline=g.run_epoch, experiences=b"", uses=count),
                )
                for g, count in zip(lease.groups, uses, strict=True)
            ]
            return await asyncio.to_thread(read_parts, self.journal, rows)

    def stored(self) -> Iterator[StoredGroup]:
        """All groups that have experiences here, by number."""
        progress = self.progress
        leased = {
            group.number: group for lease in progress.leases.values() for group in lease.groups
        }
        for number, group in sorted((leased | progress.pool | progress.waiting).items()):
            if group.stored:
                part = StoredGroup(group=number, timeline=group.run_epoch, experiences=b"")
                yield from read_parts(self.journal, [(self._rows[number], part)])

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
        before, groups = self.journal.size, []

        def payloads() -> Iterator[bytes]:
            for group, payload in folded(self.journal, end, oldest):
                if self._closing:
                    raise JournalError("it is closed, and will be cut after its next start")
                groups.append(group)
                yield payload

        base = await asyncio.to_thread(self.journal.write_base, end, payloads())
        async with self._files:
            await asyncio.to_thread(self.journal.install, base)
            moved = {
                group: at
                for group, at in zip(groups, base.positions, strict=True)
                if group is not None
            }
            self._rows = moved | {group: at for group, at in self._rows.items() if at >= end}
            earlier = [mark for mark in self._finished if mark[0] < end]
            self._finished = [*earlier[-1:], *(mark for mark in self._finished if mark[0] >= end)]
            self.progress.forget(oldest)
        logger.info(
            "journal cut from %d to %d bytes; batches from step %d on stay",
            before,
            self.journal.size,
            oldest,
        )
