"""The transactions of a buffer in a database, piece by piece: admission, storing, leases, what
silent processes held.

In: a connection whose transaction the caller began. Out: rows read and changed in it. Invariant:
whoever decides about a row has it locked (PostgreSQL: for update; SQLite: the whole database), so
two processes never decide about the same one at the same time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection

from rft.buffer.delivery import Facts, StoredGroup, oldest_version, trained
from rft.buffer.journal import JournalError
from rft.buffer.progress import Group, StepSize, due, remember
from rft.buffer.sql_lives import Lives
from rft.buffer.sql_tables import GONE, OPEN, Tables, blobs, counted, now
from rft.ground.experience import decode, encode

WAIT = object()  # not now: look again after a change


class Lost(RuntimeError):
    """Another process has taken over what this one held."""


@dataclass(frozen=True)
class Steps:
    tables: Tables
    size: StepSize
    max_staleness: int | None
    lives: Lives

    # Explorers

    def attach_explorer(self, db: Connection, name: str) -> tuple[int, dict[str, Any] | None]:
        """(incarnation, cursor); what the last one left has to be started again."""
        explorers, groups = self.tables.explorers, self.tables.groups
        found = db.execute(
            sql.select(explorers).where(explorers.c.name == name).with_for_update()
        ).first()
        incarnation = found.incarnation + 1 if found else 1
        if found is None:
            db.execute(
                explorers.insert().values(name=name, incarnation=incarnation, done=0, heard=now(db))
            )
        else:
            again = {"incarnation": incarnation, "done": 0, "heard": now(db)}
            db.execute(explorers.update().where(explorers.c.name == name).values(again))
        mine = (groups.c.explorer == name) & (groups.c.state == "running")
        db.execute(groups.update().where(mine).values(state="left", version=None))
        return incarnation, decode(found.cursor, dict[str, Any]) if found and found.cursor else None

    def unfinished(self, db: Connection, name: str) -> list[tuple[int, bytes]]:
        groups = self.tables.groups
        query = sql.select(groups.c.number, groups.c.task).where(
            groups.c.explorer == name, groups.c.state == "left"
        )
        return [(row.number, row.task) for row in db.execute(query.order_by(groups.c.number))]

    def told(self, db: Connection, name: str) -> list[list[Any]]:
        """What the task selector of this explorer was told and has to know."""
        groups, kept = self.tables.groups, list[list[Any]]()
        query = sql.select(groups.c.told).where(
            groups.c.explorer == name, groups.c.told.is_not(None)
        )
        for lesson in db.execute(query.order_by(groups.c.stored_at)).scalars():
            remember(kept, decode(lesson, list[Any]))
        return kept

    def forget_told(self, db: Connection, explorer: str) -> None:
        """Lessons that a later one has taken the place of."""
        groups = self.tables.groups
        mine = (groups.c.explorer == explorer) & groups.c.told.is_not(None)
        kept = {encode(lesson) for lesson in self.told(db, explorer)}
        rows = db.execute(sql.select(groups.c.number, groups.c.told).where(mine)).all()
        for number, told in rows:
            short = encode(decode(told, list[Any])[:4])
            if bytes(told) not in kept:
                left = short if short in kept else None
                db.execute(groups.update().where(groups.c.number == number).values(told=left))

    def incarnation(self, db: Connection, name: str) -> int | None:
        explorers = self.tables.explorers
        return db.execute(
            sql.select(explorers.c.incarnation).where(explorers.c.name == name)
        ).scalar()

    def done(self, db: Connection, name: str) -> None:
        explorers = self.tables.explorers
        db.execute(explorers.update().where(explorers.c.name == name).values(done=1))

    def lock_buffer(self, db: Connection) -> None:
        """Admission is one after another, over all explorers."""
        buffers = self.tables.buffers
        db.execute(
            sql.select(buffers.c.next_group)
            .where(buffers.c.name == self.tables.name)
            .with_for_update()
        )

    def may_admit(
        self, db: Connection, trainer: str, published: int | None, total_steps: int | None
    ) -> bool | object | None:
        """True, or WAIT, or None: the steps that are left have all that they need."""
        steps, running = self._formed(db)
        if total_steps is not None and total_steps - self.next_step(db, trainer) <= steps:
            return WAIT if running else None
        if self.max_staleness is None:
            return True
        if published is None:
            return WAIT
        ahead = steps + self._uncovered(db, trainer, published)
        return True if ahead <= self.max_staleness else WAIT

    def issue(
        self,
        db: Connection,
        explorer: str,
        task: bytes,
        cursor: bytes,
        version: int | None,
        run_epoch: int,
        most: int | None = None,
    ) -> int:
        buffers, groups, explorers = self.tables.buffers, self.tables.groups, self.tables.explorers
        here = buffers.c.name == self.tables.name
        number = int(db.execute(sql.select(buffers.c.next_group).where(here)).scalar_one())
        db.execute(buffers.update().where(here).values(next_group=number + 1))
        db.execute(
            groups.insert().values(
                number=number,
                explorer=explorer,
                task=task,
                version=version,
                run_epoch=run_epoch,
                most=most,
                state="running",
            )
        )
        db.execute(
            explorers.update()
            .where(explorers.c.name == explorer)
            .values(cursor=cursor, heard=now(db))
        )
        return number

    def is_running(self, db: Connection, explorer: str, group: int) -> bool:
        groups = self.tables.groups
        mine = (groups.c.number == group) & (groups.c.explorer == explorer)
        return db.execute(sql.select(groups.c.state).where(mine)).scalar() == "running"

    def is_free(self, db: Connection, trainer: str, group: int, published: int | None) -> bool:
        """Whether an unfinished group may start again: few enough that no step has taken are in
        front of it.
        """
        groups = self.tables.groups
        state = db.execute(sql.select(groups.c.state).where(groups.c.number == group)).scalar()
        if self.max_staleness is None or state != "left":
            return True
        if published is None:
            return False
        steps, _ = self._formed(db, before=group)
        return steps + self._uncovered(db, trainer, published) <= self.max_staleness

    def restart(
        self, db: Connection, explorer: str, group: int, version: int | None, run_epoch: int
    ) -> bool:
        groups = self.tables.groups
        mine = (
            (groups.c.number == group)
            & (groups.c.explorer == explorer)
            & (groups.c.state == "left")
        )
        again = {"state": "running", "version": version, "run_epoch": run_epoch}
        return db.execute(groups.update().where(mine).values(again)).rowcount == 1

    def is_open(self, db: Connection, group: int) -> bool:
        """Whether the group waits for its experiences; locks it."""
        groups = self.tables.groups
        state = db.execute(
            sql.select(groups.c.state).where(groups.c.number == group).with_for_update()
        ).scalar()
        if state is None:  # nobody needs it any more, or there never was one
            buffers = self.tables.buffers
            query = sql.select(buffers.c.next_group).where(buffers.c.name == self.tables.name)
            if not 0 <= group < int(db.execute(query).scalar_one()):
                raise ValueError(f"group {group} was never admitted")
        return state in ("running", "left")

    def store(
        self,
        db: Connection,
        group: int,
        rows: Sequence[Any],
        facts: list[Facts],
        tasks: list[str],
        told: list[Any] | None,
    ) -> None:
        groups = self.tables.groups
        values = [
            {
                "group": group,
                "number": number,
                "task": task,
                "model_version": oldest_version([fact]),
                "reward": fact.reward,
                "data": bytes(row),
            }
            for number, (row, fact, task) in enumerate(zip(rows, facts, tasks, strict=True))
        ]
        db.execute(self.tables.experiences.insert(), values)
        found = {
            "state": "stored",
            "task": b"",
            "size": len(rows),
            "trained": trained(facts),
            "model_version": oldest_version(facts),
            "stored_at": now(db),
        }
        found["told"] = None if told is None else encode(told)
        mine = groups.c.number == group
        db.execute(groups.update().where(mine).values(found))
        if told is not None and len(told) > 4:
            explorer = db.execute(sql.select(groups.c.explorer).where(mine)).scalar_one()
            self.forget_told(db, explorer)

    def fail(self, db: Connection, group: int, reason: str) -> None:
        groups = self.tables.groups
        db.execute(
            groups.update()
            .where(groups.c.number == group)
            .values(state="failed", task=b"", reason=reason)
        )

    # Trainers

    def attach_trainer(self, db: Connection, name: str, step: int, run_epoch: int) -> None:
        trainers = self.tables.trainers
        found = db.execute(
            sql.select(trainers).where(trainers.c.name == name).with_for_update()
        ).first()
        values = {"run_epoch": run_epoch, "version": step, "heard": now(db)}
        if found is None:
            db.execute(trainers.insert().values(name=name, saved=step, oldest_step=0, **values))
            return
        if found.run_epoch > run_epoch:
            raise Lost(
                f"trainer {name} has begun a later attempt, {found.run_epoch}: this one, "
                f"{run_epoch}, is over"
            )
        if step < found.oldest_step:
            raise ValueError(
                f"cannot resume at step {step}: the database keeps batches "
                f"of {name} from step {found.oldest_step} on. Resume from a newer checkpoint, "
                "or set another buffer.trainer_input.experience_buffer.name."
            )
        db.execute(trainers.update().where(trainers.c.name == name).values(values))

    def position(self, db: Connection, trainer: str) -> dict[str, Any]:
        leases = self.tables.leases
        step = self._trainer(db, trainer).version
        held = sql.select(leases.c.step).where(leases.c.trainer == trainer, leases.c.step >= step)
        stored, running = self._waiting(db)
        return {
            "replay": sorted(db.execute(held).scalars()),
            "next_step": self.next_step(db, trainer),
            "stored": stored,
            "waiting": stored + running,
        }

    def lock_trainer(self, db: Connection, name: str, run_epoch: int) -> None:
        trainers = self.tables.trainers
        found = db.execute(
            sql.select(trainers.c.run_epoch).where(trainers.c.name == name).with_for_update()
        ).scalar()
        if found != run_epoch:
            raise Lost(
                f"another process has begun as trainer {name} since: "
                f"this one, of run epoch {run_epoch}, is over"
            )

    def lease(self, db: Connection, trainer: str, step: int) -> int | None:
        """The run epoch that took the batch of `step` first; None: nobody has."""
        leases = self.tables.leases
        query = sql.select(leases.c.run_epoch).where(
            leases.c.trainer == trainer, leases.c.step == step
        )
        return db.execute(query).scalar()

    def choose(
        self,
        db: Connection,
        trainer: str,
        step: int,
        min_model_version: int | None,
        input_done: bool,
        incomplete: bool,
    ) -> list[int] | object:
        """The groups of `step`, the oldest first, locked; none
        when nothing will ever come; WAIT.
        """
        if step != self.next_step(db, trainer):
            raise ValueError(
                f"cannot take step {step}: the next one is {self.next_step(db, trainer)}"
            )
        groups = self.tables.groups
        is_over = input_done or self._all_done(
            db
        )  # asked first: what the last explorer stored before it said so is seen
        self._release_of_the_silent(db, trainer)
        if min_model_version is not None:
            old = (
                (groups.c.state == "stored")
                & groups.c.trainer.is_(None)
                & (groups.c.model_version < min_model_version)
            )
            db.execute(
                groups.update()
                .where(old)
                .values(state="evicted", reason=f"before version {min_model_version}")
            )
        ordered = self.max_staleness is not None and not incomplete and not input_done
        found = self._ordered(db, step) if ordered else self._stored(db)
        numbers, is_stored = [group.number for group in found], all(g.stored for g in found)
        if (is_stored and self.size.are(found) >= self.size.units) or (incomplete and found):
            return numbers
        if incomplete or not is_over:
            return WAIT
        return numbers if is_stored else WAIT

    def _stored(self, db: Connection) -> list[Group]:
        """The oldest stored groups that no other transaction is about to take."""
        groups = self.tables.groups
        is_free = (groups.c.state == "stored") & groups.c.trainer.is_(None)
        # a group counts one at least
        query = self._facts(is_free).limit(self.size.units).with_for_update(skip_locked=True)
        return self.size.first(self._groups(db, query))

    def _ordered(self, db: Connection, step: int) -> list[Group]:
        """The next groups in admission order, stored or not, and those that the next step would
        train too late.
        """
        query = self._facts(self._is_awaited(db)).with_for_update()
        return due(self._groups(db, query), step, self.size, int(self.max_staleness or 0))

    def _facts(self, chosen: sql.ColumnElement[bool]) -> "sql.Select[Any]":
        """What `StepSize` wants to know of groups, in admission order."""
        columns = self.tables.groups.c
        query = sql.select(
            columns.number, columns.state, columns.version, columns.trained, columns.most
        )
        return query.where(chosen).order_by(columns.number)

    @staticmethod
    def _groups(db: Connection, query: "sql.Select[Any]") -> list[Group]:
        return [
            Group(
                row.number,
                "",
                b"",
                row.version,
                0,
                stored=row.state == "stored",
                most=row.most,
                size=row.trained or 0,
            )
            for row in db.execute(query)
        ]

    def take(
        self, db: Connection, trainer: str, step: int, run_epoch: int, numbers: list[int]
    ) -> list[int]:
        """Lease these groups; returns those that are trained later than `max_staleness` allows."""
        groups, limit = self.tables.groups, self.max_staleness
        db.execute(
            self.tables.leases.insert().values(
                trainer=trainer, step=step, run_epoch=run_epoch, at=now(db)
            )
        )
        chosen = groups.c.number.in_(numbers)
        db.execute(groups.update().where(chosen).values(trainer=trainer, step=step))
        if limit is None:
            return []
        return list(
            db.execute(
                sql.select(groups.c.number).where(chosen, groups.c.version < step - limit)
            ).scalars()
        )

    def parts(self, db: Connection, trainer: str, run_epoch: int, step: int) -> list[StoredGroup]:
        """The groups of a lease with all of their experiences, in admission order."""
        self.check_lease(db, trainer, run_epoch, step)
        groups = self.tables.groups
        held = (groups.c.trainer == trainer) & (groups.c.step == step)
        query = (
            sql.select(groups.c.number, groups.c.run_epoch, groups.c.size)
            .where(held)
            .order_by(groups.c.number)
        )
        found = []
        for group in db.execute(query).all():
            experiences = blobs(db, self.tables, group.number)
            if len(experiences) != group.size:
                raise JournalError(
                    f"the database has {len(experiences)} of the {group.size} "
                    f"experiences of group {group.number}, which step {step} of {trainer} needs: "
                    f"restore the rows of {self.tables.experiences.name} that were deleted, "
                    "or resume from another checkpoint"
                )
            found.append(
                StoredGroup(
                    group=group.number, timeline=group.run_epoch, experiences=encode(experiences)
                )
            )
        return found

    def check_lease(self, db: Connection, trainer: str, run_epoch: int, step: int) -> None:
        """Raise Lost where the batch is another's; until the end of the transaction it is not."""
        self.lock_trainer(db, trainer, run_epoch)
        if self.lease(db, trainer, step) is None:
            raise Lost(
                f"the batch of step {step} is no longer {trainer}'s: "
                f"it was silent for experience_buffer.lease_s={self.lives.lease_s:g} s, "
                "and another trainer has it; go on from the newest checkpoint"
            )

    def consumed(self, db: Connection, trainer: str, run_epoch: int, step: int) -> None:
        self.check_lease(db, trainer, run_epoch, step)
        trainers = self.tables.trainers
        db.execute(
            trainers.update()
            .where(trainers.c.name == trainer)
            .values(version=step + 1, heard=now(db))
        )

    def saved(self, db: Connection, trainer: str, step: int) -> None:
        trainers = self.tables.trainers
        newer = (trainers.c.name == trainer) & (trainers.c.saved < step)
        db.execute(trainers.update().where(newer).values(saved=step))

    def forget(self, db: Connection, trainer: str, step: int) -> None:
        groups, rows = self.tables.groups, self.tables.experiences
        leases, trainers = self.tables.leases, self.tables.trainers
        done = (groups.c.trainer == trainer) & (groups.c.step < step) & (groups.c.state == "stored")
        db.execute(rows.delete().where(rows.c.group.in_(sql.select(groups.c.number).where(done))))
        db.execute(groups.update().where(done).values(state="consumed"))
        self._drop_groups(db, trainer)
        db.execute(leases.delete().where(leases.c.trainer == trainer, leases.c.step < step))
        older = (trainers.c.name == trainer) & (trainers.c.oldest_step < step)
        db.execute(trainers.update().where(older).values(oldest_step=step))

    def _drop_groups(self, db: Connection, trainer: str) -> None:
        """Rows of groups that are over, once nobody learns from what they told; counted."""
        groups, totals = self.tables.groups, self.tables.totals
        over = (
            (groups.c.state == "consumed") & (groups.c.trainer == trainer)
        ) | groups.c.state.in_(("failed", "evicted"))
        gone = groups.delete().where(over, groups.c.told.is_(None))
        rows = db.execute(gone.returning(groups.c.number, groups.c.state, groups.c.trained)).all()
        counts = Counter(row.state for row in rows)
        counts["trained"] = sum(row.trained or 0 for row in rows)
        evicted = [row.number for row in rows if row.state == "evicted"]
        data = self.tables.experiences
        db.execute(data.delete().where(data.c.group.in_(evicted)))
        db.execute(totals.update().values({name: totals.c[name] + counts[name] for name in GONE}))

    def next_step(self, db: Connection, trainer: str) -> int:
        """The first step of this trainer that has no lease."""
        leases, trainers = self.tables.leases, self.tables.trainers
        last = db.execute(
            sql.select(sql.func.max(leases.c.step)).where(leases.c.trainer == trainer)
        ).scalar()
        version = db.execute(
            sql.select(trainers.c.version).where(trainers.c.name == trainer)
        ).scalar()
        return max(int(version or 0), -1 if last is None else int(last) + 1)

    def run_epoch(self, db: Connection, trainer: str) -> int:
        trainers = self.tables.trainers
        return int(
            db.execute(sql.select(trainers.c.run_epoch).where(trainers.c.name == trainer)).scalar()
            or 0
        )

    def asks(
        self, db: Connection, trainer: str, published: int, done_before: int, interval: int
    ) -> bool:
        """As `Progress.asks`."""
        if self.stored_units(db) - done_before >= interval * self.size.units:
            return True
        steps, running = self._formed(db)
        if self.max_staleness is None or running:
            return False
        return steps + self._uncovered(db, trainer, published) > self.max_staleness

    def stored_units(self, db: Connection) -> int:
        """As `Progress.done`."""
        if self.size.experiences is None:
            return self.count(db)["stored"]
        total = sql.func.coalesce(sql.func.sum(self.tables.groups.c.trained), 0)
        gone = sql.select(self.tables.totals.c.trained).scalar_subquery()
        return int(db.execute(sql.select(total + gone)).scalar_one())

    # All

    def count(self, db: Connection) -> dict[str, int]:
        return counted(db, self.tables)

    def _trainer(self, db: Connection, name: str) -> Any:
        trainers = self.tables.trainers
        return db.execute(sql.select(trainers).where(trainers.c.name == name)).one()

    def _waiting(self, db: Connection, before: int | None = None) -> tuple[int, int]:
        """Groups that no step has taken: stored, and those that an explorer that lives works on."""
        groups = self.tables.groups
        query = sql.select(groups.c.state, sql.func.count().label("number")).where(
            self._in_front(db, before)
        )
        found = {row.state: int(row.number) for row in db.execute(query.group_by(groups.c.state))}
        stored = found.pop("stored", 0)
        return stored, sum(found.values())

    def _formed(self, db: Connection, before: int | None = None) -> tuple[int, int]:
        """Steps that these fill, and how many of the groups are not stored."""
        if self.size.experiences is None:
            stored, running = self._waiting(db, before)
            return (stored + running) // self.size.groups, running
        groups = self._groups(db, self._facts(self._in_front(db, before)))
        return self.size.formed(groups), sum(not group.stored for group in groups)

    def _in_front(self, db: Connection, before: int | None) -> sql.ColumnElement[bool]:
        awaited = self._is_awaited(db)
        return awaited if before is None else awaited & (self.tables.groups.c.number < before)

    def _is_awaited(self, db: Connection) -> sql.ColumnElement[bool]:
        groups, explorers = self.tables.groups, self.tables.explorers
        silent = self.lives.silent_explorers(db)
        alive = sql.select(explorers.c.name).where(
            explorers.c.done == 0, explorers.c.name.not_in(silent)
        )
        is_open = groups.c.state.in_(OPEN) & groups.c.trainer.is_(None)
        return is_open & ((groups.c.state == "stored") | groups.c.explorer.in_(alive))

    def _uncovered(self, db: Connection, trainer: str, published: int) -> int:
        """Steps that were taken and that the published version does not contain; of those before
        `oldest_step` the leases are gone.
        """
        leases, trainers = self.tables.leases, self.tables.trainers
        held = sql.select(sql.func.count()).where(
            leases.c.trainer == trainer, leases.c.step >= published
        )
        oldest = sql.select(trainers.c.oldest_step).where(trainers.c.name == trainer)
        row = db.execute(sql.select(held.scalar_subquery(), oldest.scalar_subquery())).one()
        return int(row[0]) + max(0, int(row[1] or 0) - published)

    def _all_done(self, db: Connection) -> bool:
        """Explorers were here, and each has said that it has nothing more."""
        explorers = self.tables.explorers
        done = list(db.execute(sql.select(explorers.c.done)).scalars())
        return bool(done) and all(done)

    def _release_of_the_silent(self, db: Connection, asking: str) -> None:
        """Batches that a silent trainer took and has not saved are free again."""
        trainers, groups, leases = self.tables.trainers, self.tables.groups, self.tables.leases
        silent = self.lives.silent_trainers(db)
        others = trainers.c.name.in_(silent.keys() - {asking})
        for row in db.execute(
            sql.select(trainers).where(others).with_for_update(skip_locked=True)
        ).all():
            if row.heard != silent[row.name]:
                continue  # it has said something since
            lost = (leases.c.trainer == row.name) & (leases.c.step >= row.saved)
            if db.execute(leases.delete().where(lost)).rowcount:
                mine = (
                    (groups.c.trainer == row.name)
                    & (groups.c.step >= row.saved)
                    & (groups.c.state == "stored")
                )
                db.execute(groups.update().where(mine).values(trainer=None, step=None))
