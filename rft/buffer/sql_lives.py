"""Which of the processes on a database live.

In: the names of this process's explorers and trainer, every quarter of a lease; what the others
have entered. Out: the names of those that were silent for a lease. Invariant: silence is time that
this process has watched, by its own steady clock: neither a step of the database host's clock makes
a living process silent, nor a time in which nobody could reach the database.
"""

import threading
import time
from collections.abc import Callable

import sqlalchemy as sql
from sqlalchemy import Connection

from rft.buffer.sql_tables import Tables, now

LOOK_S = 0.1


class Silence:
    """Who has been silent for `lease_s`: its entry, which each process changes every `lease_s / 4`,
    stayed the same for so long. Of any thread.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self.clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._watched = 0.0
        # name: its entry, and what was watched when it came
        self._seen: dict[str, tuple[float, float]] = {}

    def of(self, heard: dict[str, float], now: float) -> dict[str, float]:
        """The silent ones of these, with their entries. `now`: by the clock that wrote the entries;
        for one that is seen for the first time it counts as half of a lease, at most.
        """
        with self._lock:
            last, self._last = self._last, self.clock()
            # what was not looked at was not watched
            self._watched += min(self._last - last, self.lease_s / 4)
            for name, entry in heard.items():
                if name not in self._seen:
                    before = min(max(now - entry, 0.0), self.lease_s / 2)
                    self._seen[name] = entry, self._watched - before
                elif self._seen[name][0] != entry:
                    self._seen[name] = entry, self._watched
            return {
                name: entry
                for name, entry in heard.items()
                if self._watched - self._seen[name][1] >= self.lease_s
            }


class Lives:
    """`clock`: seconds, of this process; it only goes forward."""

    def __init__(
        self, tables: Tables, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tables = tables
        self.lease_s = lease_s
        self.clock = clock
        self._explorers, self._trainers = Silence(lease_s, clock), Silence(lease_s, clock)
        self._looked, self._found = -LOOK_S, dict[str, float]()

    def beat(self, db: Connection, explorers: list[str], trainer: str | None) -> None:
        """Tell the others that these live, and look at them: who looks seldom sees late."""
        heard = now(db)
        for table, names in (
            (self.tables.explorers, explorers),
            (self.tables.trainers, [trainer] if trainer else []),
        ):
            if names:
                db.execute(table.update().where(table.c.name.in_(names)).values(heard=heard))
        self.silent_explorers(db)
        self.silent_trainers(db)

    def silent_explorers(self, db: Connection) -> dict[str, float]:
        """As of `LOOK_S` ago at most: it is asked for every group."""
        at = self.clock()
        if at - self._looked >= LOOK_S:
            self._found = self._silent(db, self.tables.explorers, self._explorers)
            self._looked = at
        return self._found

    def silent_trainers(self, db: Connection) -> dict[str, float]:
        return self._silent(db, self.tables.trainers, self._trainers)

    @staticmethod
    def _silent(db: Connection, table: sql.Table, silence: Silence) -> dict[str, float]:
        heard = {row.name: row.heard for row in db.execute(sql.select(table.c.name, table.c.heard))}
        return silence.of(heard, now(db))
