"""How the parts of one start of a run stand with its end of a buffer in a database, for a process
that takes the place of one that died.

    call that changes it ── keep ──► a row of the database ── read ──► the next process

In: the name of this start (`life`); what only the process knew. Out: the same, where a process of
this life was before. Invariant: what a call has changed is there before the call is answered; one
that was not answered comes again.
"""

import sqlalchemy as sql
from sqlalchemy import Connection, Engine

from rft.buffer.sql_schema import Tables
from rft.ground.experience import Record, decode


class Stand(Record, kw_only=True):
    """`Stood`, of one of several processes."""

    explorers: dict[str, int] = {}  # attached to this process, and as which incarnation
    trainer: tuple[str, int] | None = None  # attached to this process, and its run epoch
    published: int | None = None  # what this process's engines serve
    done_before: int = 0
    exploring: set[str] = set()  # let go, since a trainer attached
    all_done: bool = False
    stopped: str = ""
    stop_is_failure: bool = False

    @property
    def me(self) -> tuple[str, int]:
        """The trainer, as far as there is one."""
        return self.trainer or ("", 0)

    def begin(self, trainer: str, run_epoch: int, step: int) -> None:
        """A trainer has attached, as version `step`."""
        self.trainer = trainer, run_epoch
        self.exploring.clear()
        # engines that outlived the trainer before this one may serve an older version
        self.published = step if self.published is None else min(step, self.published)
        # a plain stop was meant for the trainer before
        self.stopped = self.stopped if self.stop_is_failure else ""


class Stands:
    """`life`: empty: nobody outlives the process, and nothing is kept."""

    def __init__(self, tables: Tables, owner: str, life: str) -> None:
        self.table = tables.stands
        self.life = f"{owner} {life}" if life else ""

    def read(self, engine: Engine) -> Stand:
        if not self.life:
            return Stand()
        with engine.connect() as db:
            row = db.execute(sql.select(self.table.c.record).where(self._mine())).scalar()
        return Stand() if row is None else decode(bytes(row), Stand)

    def keep(self, record: bytes, db: Connection) -> None:
        """`record`: an encoded `Stand`."""
        found = db.execute(self.table.update().where(self._mine()).values(record=record))
        if not found.rowcount:
            db.execute(self.table.insert().values(life=self.life, record=record))

    def drop(self, engine: Engine) -> None:
        """This life is over."""
        if not self.life:
            return
        with engine.begin() as db:
            db.execute(self.table.delete().where(self._mine()))

    def _mine(self) -> sql.ColumnElement[bool]:
        return self.table.c.life == self.life
