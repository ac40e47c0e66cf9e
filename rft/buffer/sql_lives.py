"""Which of the processes on a database live, and who is who.

In: the names of this process's explorers and trainer, every quarter of a lease; what the others
have entered. Out: the names of those that were silent for a lease, and records of what that costs
them. Invariant: silence is time that this process has watched, by its own steady clock: neither a
step of the database host's clock makes a living process silent, nor a time in which nobody could
reach the database.
"""

import threading
import time
from collections.abc import Callable, Iterable

import sqlalchemy as sql
from sqlalchemy import Connection

from rft.buffer.calls import Lost
from rft.buffer.groups import Course, Explored, Goal
from rft.buffer.progress import Attached, Handed, Silent
from rft.buffer.sql_events import Events
from rft.buffer.sql_schema import Tables, now

LOOK_S = 0.1
EXPLORER, TRAINER = "explorer", "trainer"


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

    def enter(self, db: Connection, role: str, names: Iterable[str]) -> None:
        """These have just been heard of."""
        lives, heard = self.tables.lives, now(db)
        for name in names:
            mine = (lives.c.role == role) & (lives.c.name == name)
            if not db.execute(lives.update().where(mine).values(heard=heard)).rowcount:
                db.execute(lives.insert().values(role=role, name=name, heard=heard))

    def beat(self, db: Connection, explorers: Iterable[str], trainer: str | None) -> None:
        """Tell the others that these live, and look at them: who looks seldom sees late."""
        self.enter(db, EXPLORER, sorted(explorers))
        self.enter(db, TRAINER, [trainer] if trainer else [])
        self.silent_explorers(db)
        self.silent_trainers(db)

    def silent_explorers(self, db: Connection, at_once: bool = False) -> dict[str, float]:
        """As of `LOOK_S` ago at most: it is asked for every group."""
        at = self.clock()
        if at_once or at - self._looked >= LOOK_S:
            self._found = self._silent(db, EXPLORER, self._explorers)
            self._looked = at
        return self._found

    def silent_trainers(self, db: Connection) -> dict[str, float]:
        return self._silent(db, TRAINER, self._trainers)

    def heard(self, db: Connection, role: str) -> dict[str, float]:
        lives = self.tables.lives
        query = sql.select(lives.c.name, lives.c.heard).where(lives.c.role == role)
        return {row.name: row.heard for row in db.execute(query)}

    def _silent(self, db: Connection, role: str, silence: Silence) -> dict[str, float]:
        return silence.of(self.heard(db, role), now(db))


class Parties:
    """Explorers and trainers, in a turn."""

    def __init__(self, events: Events, lives: Lives) -> None:
        self.events = events
        self.lives = lives

    def attach_explorer(self, db: Connection, name: str, trainer: str, goal: Goal) -> int:
        """Which process this is of those that have begun as it."""
        incarnation = self._known(name).incarnation + 1
        self.lives.enter(db, EXPLORER, [name])
        self.events.add(
            Attached(explorer=name, incarnation=incarnation, trainer=trainer, goal=goal)
        )
        return incarnation

    def check_explorer(self, db: Connection, name: str, incarnation: int | None) -> None:
        if self._known(name).incarnation != incarnation:
            raise Lost(
                f"another process has begun as explorer {name}: "
                "give every explorer of a run its own explorer.name"
            )
        self.back(db, [name])

    def trainer(self, name: str, run_epoch: int) -> Course:
        """How far it is; raises Lost if it is another's now."""
        course = self.events.progress.courses.get(name)
        if course is None or course.run_epoch != run_epoch:
            raise Lost(
                f"another process has begun as trainer {name} since: "
                f"this one, of run epoch {run_epoch}, is over"
            )
        if course.handed:
            raise self.lost(name)
        return course

    def lost(self, name: str) -> Lost:
        return Lost(
            f"batches of {name} since its newest checkpoint are no longer its own: "
            f"it was silent for experience_buffer.lease_s={self.lives.lease_s:g} s, "
            "and another trainer has it; go on from the newest checkpoint"
        )

    def look(self, db: Connection) -> None:
        """Explorers that were silent for a lease are not waited for, until they are back."""
        silent = [name for name in self.lives.silent_explorers(db) if self._is_awaited(name)]
        if silent:  # what this one saw is a moment old
            heard = self.lives.silent_explorers(db, at_once=True)
            silent = [name for name in silent if name in heard]
        if silent:
            self.events.add(Silent(explorers=silent))

    def back(self, db: Connection, explorers: Iterable[str]) -> None:
        if back := [name for name in explorers if self._known(name).silent]:
            self.lives.enter(db, EXPLORER, back)
            self.events.add(Silent(explorers=back, back=True))

    def _is_awaited(self, name: str) -> bool:
        one = self._known(name)
        return one.incarnation > 0 and not one.done and not one.silent

    def _known(self, name: str) -> Explored:
        return self.events.progress.explorers.get(name, Explored())

    def hand_over(self, db: Connection, asking: str) -> None:
        """What other trainers took and have not saved is free again, where they are silent."""
        if len(courses := self.events.progress.courses) < 2:
            return
        silent = self.lives.silent_trainers(db)
        if not silent:
            return
        heard = self.lives.heard(db, TRAINER)
        for name in sorted(silent.keys() & courses.keys() - {asking}):
            steps = [step for step in courses[name].leases if step >= courses[name].saved]
            if steps and heard[name] == silent[name]:  # it has said nothing since
                self.events.add(Handed(trainer=name, steps=sorted(steps)))
