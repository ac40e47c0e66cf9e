"""What one process decides about a buffer in a database in its turn, by `Progress`, and the rows of
experiences that follow from it.

In: a connection that has its turn. Out: records, and rows in the same transaction. Invariant: a
group is stored with all of its experiences, and these are there while a lease that may come again
has it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from rft.buffer.calls import Lost
from rft.buffer.delivery import Facts, StoredGroup, facts_of, oldest_version, trained
from rft.buffer.journal import JournalError
from rft.buffer.progress import Answered, Forgotten, Group, GroupFailed, Progress, Stored
from rft.buffer.selection import BatchSelection
from rft.buffer.sql_events import Events
from rft.buffer.sql_lives import Parties
from rft.buffer.sql_schema import Tables, blobs, drop_answers, drop_blobs
from rft.ground.experience import encode

logger = logging.getLogger(__name__)


AT_ONCE = 64  # decisions of one turn

Change = Callable[[Connection], Any]
_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _Torn(Exception):
    """Of a shared turn: one of its decisions failed halfway."""


class SharedTurns:
    """What calls of about the same time decide shares a turn, and its one write to the disk.

    A decision that fails has decided nothing, and fails alone; a database that fails is every
    caller's, and each of them tries again.
    """

    def __init__(self, events: Events, pool: Executor) -> None:
        self.events = events
        self.pool = pool
        self._waiting: list[tuple[Change, asyncio.Future[Any]]] = []
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, engine: Engine, change: Change) -> Any:
        """Return what `change` does, committed."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(engine))
        return await done

    async def _run(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            now, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            changes = [change for change, _ in now]
            try:
                found = await loop.run_in_executor(self.pool, self._decide, engine, changes)
            except Exception as error:
                found = [(None, error)] * len(now)
            for (_, done), (result, failed) in zip(now, found, strict=True):
                if not done.done():  # cancelled
                    done.set_result(result) if failed is None else done.set_exception(failed)

    def _decide(self, engine: Engine, changes: list[Change]) -> list[tuple[Any, Exception | None]]:
        try:
            return self._turn(engine, changes)
        except _Torn:
            return [one for change in changes for one in self._alone(engine, change)]

    def _alone(self, engine: Engine, change: Change) -> list[tuple[Any, Exception | None]]:
        try:
            return self._turn(engine, [change])
        except Exception as error:
            return [(None, error.__cause__ if isinstance(error, _Torn) else error)]  # type: ignore[list-item]

    def _turn(self, engine: Engine, changes: list[Change]) -> list[tuple[Any, Exception | None]]:
        found = list[tuple[Any, Exception | None]]()
        with self.events.turn(engine) as db:
            for change in changes:
                last = self.events.last
                try:
                    found.append((change(db), None))
                except SQLAlchemyError:
                    raise
                except Exception as error:
                    if self.events.last != last:
                        raise _Torn from error
                    found.append((None, error))
        return found


class Put(msgspec.Struct):
    """A group's experiences on their way into the database."""

    group: int
    rows: Sequence[Any]  # each as it was encoded
    facts: list[Facts]
    tasks: list[str]
    told: list[Any] | None

    def lines(self) -> list[dict[str, Any]]:
        known = zip(self.rows, self.facts, self.tasks, strict=True)
        return [
            {
                "group": self.group,
                "number": number,
                "task": task,
                "model_version": oldest_version([fact]),
                "reward": fact.reward,
                "data": bytes(row),
            }
            for number, (row, fact, task) in enumerate(known)
        ]


class _Task(msgspec.Struct):
    task: str = ""


def put_of(group: int, experiences: bytes, told: list[Any] | None) -> Put:
    """Of an encoded list."""
    rows = _rows.decode(experiences)
    if not rows:
        raise ValueError(f"group {group} has no experiences: abandon it with a reason instead")
    tasks = [row.task for row in msgspec.msgpack.decode(experiences, type=list[_Task])]
    return Put(group, rows, facts_of(experiences), tasks, told)


@dataclass(frozen=True)
class Taken:
    """By a step. Without groups: nothing will ever come."""

    groups: list[Group]
    replayed: bool = False
    late: int = 0


@dataclass(frozen=True)
class Decisions:
    """Of one process."""

    events: Events
    selection: BatchSelection
    parties: Parties

    def open_group(self, number: int) -> Group | None:
        """One that waits for its experiences."""
        if not 0 <= number < self.events.progress.next_group:
            raise ValueError(f"group {number} was never admitted")
        group = self.events.progress.waiting.get(number)
        return None if group is None or group.stored else group

    def store(self, db: Connection, puts: list[Put]) -> list[int]:
        """The groups that waited for their experiences, and have them now."""
        lines, stored = list[dict[str, Any]](), list[int]()
        for put in puts:
            if (group := self.open_group(put.group)) is not None:
                if group.kept:
                    drop_answers(db, self.events.tables, put.group)
                lines += put.lines()
                record = Stored(
                    group=put.group,
                    experiences=b"",
                    version=oldest_version(put.facts),
                    told=put.told,
                    size=trained(put.facts),
                    rows=len(put.rows),
                )
                self.events.add(record)
                stored.append(put.group)
        if lines:
            db.execute(self.events.tables.experiences.insert(), lines)
        return stored

    def keep(self, db: Connection, answers: list[tuple[int, bytes, int | None]]) -> None:
        """Of groups that are not finished: what engines have answered."""
        rows = []
        for group, encoded, version in answers:
            if self.open_group(group) is not None:
                self.events.add(Answered(group=group, answers=b"", version=version))
                rows.append({"group": group, "number": self.events.last, "data": encoded})
        if rows:
            db.execute(self.events.tables.answers.insert(), rows)

    def fail(self, db: Connection, number: int, reason: str) -> bool:
        """Whether the group was open, and is given up now."""
        if (group := self.open_group(number)) is None:
            return False
        if group.kept:
            drop_answers(db, self.events.tables, number)
        self.events.add(GroupFailed(group=number, reason=reason))
        return True

    def choose(
        self,
        db: Connection,
        trainer: str,
        step: int,
        min_model_version: int | None,
        input_done: bool,
        incomplete: bool,
    ) -> list[Group] | None:
        """As `BatchSelection.groups`; what is there, if it is to be incomplete."""
        self.parties.look(db)
        self.parties.hand_over(db, trainer)
        if min_model_version is not None and (old := self.selection.too_old(min_model_version)):
            logger.warning("groups %s are dropped: %s", old.groups, old.reason)
            self.events.add(old)
            drop_blobs(db, self.events.tables, old.groups)
        if incomplete:
            return self.selection.here() or None
        explorers = self.events.progress.explorers.values()
        is_over = bool(explorers) and all(one.done for one in explorers)
        return self.selection.groups(step, is_over, abandoned=input_done)

    def away(self, db: Connection) -> set[str]:
        """Who was silent for a lease; nobody is asked where no other trainer is to get groups."""
        if not self.selection.others():
            return set()
        # not as of a moment ago: whoever is told that nothing is missing does not ask again
        lives = self.parties.lives
        return {*lives.silent_explorers(db, at_once=True), *lives.silent_trainers(db)}

    def parts(
        self, db: Connection, trainer: str, step: int, groups: list[Group]
    ) -> list[StoredGroup]:
        """The groups of a lease with all of their experiences."""
        found, parts = blobs(db, self.events.tables, [group.number for group in groups]), []
        for group in groups:
            rows = found[group.number]
            if len(rows) != group.rows:
                self.events.look(db)
                if step not in self.events.progress.course(trainer).leases:
                    raise self.parties.lost(trainer)
                raise JournalError(
                    f"the database has {len(rows)} of the {group.rows} "
                    f"experiences of group {group.number}, which step {step} of {trainer} needs: "
                    f"restore the rows of {self.events.tables.experiences.name} that were deleted, "
                    "or resume from another checkpoint"
                )
            part = StoredGroup(group=group.number, timeline=group.run_epoch, experiences=b"")
            part.experiences = encode(rows)
            parts.append(part)
        return parts

    def check_resume(self, trainer: str, step: int, run_epoch: int) -> None:
        course = self.events.progress.courses.get(trainer)
        if course is None:
            return
        if course.run_epoch > run_epoch:
            raise Lost(
                f"trainer {trainer} has begun a later attempt, {course.run_epoch}: this one, "
                f"{run_epoch}, is over"
            )
        if step < course.oldest_step:
            raise ValueError(
                f"cannot resume at step {step}: the database keeps batches "
                f"of {trainer} from step {course.oldest_step} on. Resume from a newer checkpoint, "
                "or set another buffer.trainer_input.experience_buffer.name."
            )

    def forget(self, db: Connection, trainer: str, step: int) -> None:
        """No retained checkpoint of this trainer resumes before `step`."""
        course = self.events.progress.courses.get(trainer)
        if course is None:
            return
        gone = [lease for at, lease in course.leases.items() if at < step]
        drop_blobs(db, self.events.tables, [g.number for lease in gone for g in lease.groups])
        if step > course.oldest_step:
            self.events.add(Forgotten(step=step, trainer=trainer))
        self.events.cut(db)


def counted(progress: Progress) -> dict[str, int]:
    """How many groups there ever were, and what became of them."""
    ready = len(progress.stored())
    return {
        "issued": progress.next_group,
        "stored": progress.num_stored,
        "failed": progress.num_failed,
        "evicted": progress.num_evicted,
        "ready_groups": ready,
        "running_groups": len(progress.waiting) - ready,
    }


def stored(db: Connection, tables: Tables) -> Iterator[StoredGroup]:
    """All groups whose experiences are there, by number."""
    events = Events(tables)
    events.look(db)
    for number, group in events.progress.held().items():
        if group.stored:
            rows = blobs(db, tables, [number])[number]
            yield StoredGroup(group=number, timeline=group.run_epoch, experiences=encode(rows))
