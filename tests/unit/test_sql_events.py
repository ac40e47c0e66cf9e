"""Every process on a database replays the same records, also the one that a snapshot overtook; what
older tables hold becomes records.
"""

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rft.buffer.groups import Goal
from rft.buffer.progress import (
    Attached,
    Consumed,
    Evicted,
    Forgotten,
    GroupFailed,
    Handed,
    InputEnded,
    Issued,
    Leased,
    Resumed,
    StepSaved,
    StepSize,
    Stored,
)
from rft.buffer.sql_events import Events
from rft.buffer.sql_older import converted
from rft.buffer.sql_schema import Tables
from rft.buffer.sql_tables import connect, create
from tests.recorded.make_runs import ARCHIVE
from tests.unit.sql_world import check_views


@pytest.mark.parametrize("seed", range(4))
def test_processes_that_look_now_and_then_know_the_same(tmp_path: Path, seed: int) -> None:
    """Three of them decide in turns; transactions fail, snapshots overtake who is behind."""
    engine, chance = connect(f"sqlite:///{tmp_path / 'b.db'}"), random.Random(seed)
    ends = [Events(Tables("b")) for _ in range(3)]
    create(engine, ends[0].tables)
    with ends[0].turn(engine):
        begun = [Resumed(step=0, run_epoch=1, trainer=name) for name in "tu"]
        ends[0].add(*begun, Attached(explorer="e", incarnation=1))
    for _ in range(150):
        mine = chance.choice(ends)
        with contextlib.suppress(ConnectionError), mine.turn(engine) as db:
            act(mine, db, chance)
            if chance.random() < 0.1:
                raise ConnectionError
    with mine.turn(engine) as db:
        mine.add(StepSaved(step=0, trainer="t"))
        mine.cut(db)
    fresh = Events(Tables("b"))
    with engine.begin() as db:
        assert db.execute(sql.text("select kind from b_events order by number")).scalar() == "began"
        for one in (*ends, fresh):
            one.look(db)
        numbers = list(db.execute(sql.text("select number from b_events")).scalars())
        check_views(db, "b", fresh.progress)
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "no gap"
    assert all(one.progress == fresh.progress and one.last == fresh.last for one in ends)
    courses = fresh.progress.courses.values()
    leased = [g.number for c in courses for lease in c.leases.values() for g in lease.groups]
    assert fresh.progress.num_stored > 10 and len(leased) == len(set(leased))
    engine.dispose()


def act(mine: Events, db: sql.Connection, chance: random.Random) -> None:
    """One of the things that happen."""
    progress, trainer, two = mine.progress, chance.choice("tu"), StepSize(2)
    course = progress.course(trainer)
    running = [g.number for g in progress.waiting.values() if not g.stored]
    kinds = "issue issue issue store store store take take cut fail evict hand resume attach"
    match chance.choice(kinds.split()):
        case "issue":
            group, made = progress.next_group, {"explorer": "e", "run_epoch": 1, "task": b"t"}
            mine.add(Issued(group=group, cursor={"next": group}, **made))  # type: ignore[arg-type]
        case "store" if running:
            told = ["t", group := chance.choice(running), 0, 1.0, 0, b"belief"]
            mine.add(Stored(group=group, experiences=b"", size=2, rows=3, told=told))
        case "fail" if running and chance.random() < 0.3:
            mine.add(GroupFailed(group=chance.choice(running), reason="no"))
        case "evict" if (stored := progress.stored()) and chance.random() < 0.3:
            mine.add(Evicted(groups=[g.number for g in stored[:2]], reason="old"))
        case "take" if len(progress.stored()) >= 2:
            step, groups = course.next_step, [g.number for g in two.first(progress.stored())]
            mine.add(Leased(step=step, trainer=trainer, run_epoch=course.run_epoch, groups=groups))
            mine.add(*[Consumed(step=step, trainer=trainer)] * chance.choice([0, 1, 1]))
        case "hand":
            if steps := [step for step in course.leases if step >= course.saved]:
                mine.add(Handed(trainer=trainer, steps=steps))
        case "resume" if chance.random() < 0.5:
            again = {"step": course.saved, "run_epoch": course.run_epoch + 1}
            mine.add(Resumed(trainer=trainer, goal=Goal(steps=9, size=two), **again))
        case "attach":
            incarnation = progress.explorer("e").incarnation + 1
            known: Any = {"trainer": trainer, "goal": Goal(size=StepSize(1, 3))}
            mine.add(Attached(explorer="e", incarnation=incarnation, **known))
            mine.add(*[InputEnded(explorer="e")] * chance.choice([0, 1]))
        case "cut":
            if not course.handed:
                mine.add(StepSaved(step=course.finished, trainer=trainer))
            mine.add(Forgotten(step=max(course.saved - 1, 0), trainer=trainer))
            mine.cut(db)


def test_tables_of_8c2d7f2_become_records(tmp_path: Path) -> None:
    """As they were recorded: killed after step 5, saved at step 4, four groups under way."""
    shutil.unpack_archive(ARCHIVE, tmp_path)
    engine = connect(f"sqlite:///{tmp_path / 'buffer.db'}")
    tables = Tables("experience_buffer")
    with engine.begin() as db:
        before = converted(db, tables)
    create(engine, tables)
    fresh = Events(tables)
    with engine.begin() as db:
        fresh.look(db)
        check_views(db, tables.name, fresh.progress)
    found = fresh.progress
    assert found == before
    course = found.course("rft/sql/trainer")
    assert {step: [g.number for g in lease.groups] for step, lease in course.leases.items()} == {
        4: [8, 9],
        5: [10, 11],
    }
    assert (course.finished, course.saved, course.oldest_step, course.next_step) == (6, 4, 4, 6)
    assert [g.number for g in found.unfinished("rft/sql/explorer")] == [12, 13, 14, 15]
    assert all(len(g.task) == 212 for g in found.waiting.values())
    assert found.cursors == {"rft/sql/explorer": {"epoch": 0, "index": 16}}
    assert (found.next_group, found.num_stored, found.num_experiences) == (16, 12, 24)
    engine.dispose()
    with sqlite3.connect(tmp_path / "buffer.db") as db:  # a reader needs no msgpack
        (groups,) = db.execute(
            "select json_extract(facts, '$.groups') from experience_buffer_events "
            "where kind = 'leased' order by number limit 1"
        ).fetchone()
    assert groups == "[8,9]"
