"""What has happened to a buffer in a database: numbered records that every process replays into a
`Progress` of its own.

    turn ─► all records of the others are in `progress`; nobody else decides
         ── decide by `progress` ── add(record) ─► in it
    its end ─► in the table, committed; where that failed, or nobody knows: all is read again

In: records of one process, in the transaction in which it has decided. Out: `progress`, the fold of
the records of all. Invariants: numbers have no gap, because they are taken under the lock of the
buffer's row, which every transaction that decides has to its end; what is read is the whole of what
was decided before. A snapshot takes the place of all records before it, under numbers behind them,
so a process that is behind reads it like anything else.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import sqlalchemy as sql
from sqlalchemy import Connection, Engine

from rft.buffer.progress import Began, JournalRecord, Progress, decode_record
from rft.buffer.sql_schema import Tables
from rft.ground.experience import encode

HIDDEN = ("experiences", "answers", "task", "cursor", "told", "cursors")  # bytes, and what has them
SMALL = 10_000  # records; a table with fewer is always cut


def row_of(number: int, record: JournalRecord) -> dict[str, Any]:
    facts = {name: getattr(record, name) for name in record.__struct_fields__ if name not in HIDDEN}
    return {
        "number": number,
        "kind": record.__struct_config__.tag,
        "facts": msgspec.json.encode(facts).decode(),
        "record": encode(record),
    }


class Events:
    """One process's end of the table. Of any thread; one at a time has its turn."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.progress = Progress()
        self.last = 0  # number of the last record in `progress`
        self._rows: list[dict[str, Any]] = []  # in `progress`, and not yet in the table
        self._added = False  # by this turn
        self._lock = threading.RLock()

    @contextmanager
    def turn(self, engine: Engine) -> Iterator[Connection]:
        """A transaction. Until its end nobody else decides; all that was decided is known."""
        buffers = self.tables.buffers
        mine = buffers.c.name == self.tables.name
        with self._lock:
            self._added = False
            try:
                with engine.begin() as db:
                    db.execute(sql.select(buffers.c.version).where(mine).with_for_update())
                    yield self.look(db)
                    self._write(db)
            except BaseException:
                if self._added:  # nobody knows whether it was committed
                    self._forget()
                raise

    @contextmanager
    def looking(self, engine: Engine) -> Iterator[Connection]:
        """A transaction that decides nothing: nobody waits for it, and it waits for nobody."""
        with self._lock, engine.begin() as db:
            yield self.look(db)

    def look(self, db: Connection) -> Connection:
        """Read on. Outside of a turn: what others may add meanwhile is not known."""
        events = self.tables.events
        with self._lock:
            query = sql.select(events.c.number, events.c.record).where(events.c.number > self.last)
            for row in db.execute(query.order_by(events.c.number)):
                self.progress.apply(decode_record(bytes(row.record)))
                self.last = int(row.number)
        return db

    def add(self, *records: JournalRecord) -> None:
        """In a turn."""
        for record in records:
            self._rows.append(row_of(self.last + 1, record))
            self._added = True
            self.progress.apply(record)
            self.last += 1

    def cut(self, db: Connection) -> bool:
        """A snapshot in the place of all records, where it is much less than they are, or little;
        in a turn.
        """
        self._write(db)
        events = self.tables.events
        there = int(db.execute(sql.select(sql.func.count()).select_from(events)).scalar_one())
        if there > SMALL and there < 4 * len(self.progress.held()):
            return False
        end = self.last
        # as they are read back, so that nothing is shared with the state that they describe
        survivors = [decode_record(encode(one)) for one in self.progress.survivors()]
        self.add(Began(), *survivors)
        db.execute(events.delete().where(events.c.number <= end))
        return True

    def _write(self, db: Connection) -> None:
        rows, self._rows = self._rows, []
        if rows:
            db.execute(self.tables.events.insert(), rows)

    def _forget(self) -> None:
        self.progress.apply(Began())
        self.last, self._rows = 0, []
