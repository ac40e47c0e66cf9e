"""Several processes share a buffer in a database: nothing is lost, nothing is trained twice,
whoever dies when. Here on SQLite.
"""

import asyncio
import contextlib
import random
import sqlite3
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rft import config as configs
from rft.buffer import sql_buffer, sql_tables
from rft.buffer.calls import Lost
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.journal import JournalError
from rft.buffer.sql_buffer import SqlBuffer
from rft.buffer.sql_lives import Silence
from rft.buffer.sql_patience import passes
from rft.buffer.sql_schema import SCHEMA, Tables
from rft.buffer.sql_tables import check_database, connect, create, shown
from rft.config import ConfigError, ExperienceBufferConfig
from tests.unit.sql_world import (
    Clock,
    buffer,
    check_views,
    exactly_once,
    older_tables,
    rows,
    silent_but_for,
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'buffer.db'}"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


async def admitted(mine: SqlBuffer, explorer: str, count: int) -> list[int]:
    found = [await mine.admit(explorer, b"task", {"next": number}) for number in range(count)]
    return [group for group in found if group is not None]


async def taken(mine: SqlBuffer | ExperienceBuffer, step: int, **how: int) -> list[int]:
    return sorted({e.group for e in opened(await mine.take(step, **how)).experiences})  # type: ignore[arg-type]


def change(url: str, statement: str) -> None:
    with sql.create_engine(url).begin() as connection:
        connection.execute(sql.text(statement))


def scalar(url: str, query: str) -> int:
    with sql.create_engine(url).connect() as connection:
        return int(connection.execute(sql.text(query)).scalar_one())


def test_processes_that_are_killed_lose_nothing_and_repeat_nothing(
    url: str, tmp_path: Path
) -> None:
    exactly_once(url, tmp_path, writers=2, leasers=2, groups=16)


def test_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    """One of them makes it a file with a journal; SQLite would refuse the others."""
    started = threading.Barrier(8)

    def opened_at_once(url: str) -> None:
        engine = connect(url)
        started.wait()
        create(engine, Tables("b"))
        engine.dispose()

    with ThreadPoolExecutor(8) as threads:
        for number in range(8):
            list(threads.map(opened_at_once, [f"sqlite:///{tmp_path / str(number)}.db"] * 8))


def test_the_oldest_come_first_and_a_resume_replays_batches_with_every_field(url: str) -> None:
    async def test() -> None:
        explorer, trainer = buffer(url), buffer(url)
        await explorer.attach_explorer("e")
        assert await admitted(explorer, "e", 5) == [0, 1, 2, 3, 4]
        await trainer.attach_trainer(0, 1)
        for group in (4, 3, 1, 0):
            await explorer.put(group, rows(0.25, float(group), version=7))
        assert await taken(trainer, 0) == [0, 1]
        await trainer.consumed(0)
        assert await taken(trainer, 1) == [3, 4]
        await trainer.shutdown()
        trainer = buffer(url)
        assert (await trainer.attach_trainer(0, 2))["replay"] == [0, 1]
        batch = opened(await trainer.take(0))
        assert batch.replayed and [e.reward for e in batch.experiences] == [0.25, 0.0, 0.25, 1.0]
        assert all(
            e.versions[0].version == 7 and e.tokens.tolist() == [1, 2, 3] for e in batch.experiences
        )
        await trainer.consumed(0)
        await trainer.retain(0, 1)
        with pytest.raises(ValueError, match="keeps batches of p/run/trainer from step 1 on"):
            await trainer.attach_trainer(0, 3)
        assert (await trainer.attach_trainer(1, 3))["replay"] == [1]
        with pytest.raises(ValueError, match="the next one is 2"):
            await trainer.take(5)

    run(test)


@pytest.mark.parametrize("experiences", [None, 5])
@pytest.mark.parametrize("seed", range(2))
def test_it_admits_and_takes_what_the_queue_does(
    url: str, tmp_path: Path, seed: int, experiences: int | None
) -> None:
    """One rule, two back ends: the same history of groups of any size, step by step."""
    chance, limit = random.Random(seed), seed
    table = [(chance.choice([1, 2, 3, 9]), chance.choice([None, 9, 10])) for _ in range(7)]

    async def test() -> None:
        theirs = buffer(url, max_staleness=limit, experiences=experiences)
        mine = ExperienceBuffer(
            *(ExperienceBufferConfig(), str(tmp_path / "queue"), 2, 2, limit, None),
            experiences_per_step=experiences,
            segment_bytes=300,
        )
        both, running, published, step = (mine, theirs), set[int](), 0, 0
        for one in both:
            await one.attach_explorer("e")
            await one.attach_trainer(0, 1)
        for _ in range(90):
            may = await theirs._do(lambda _: theirs._may_admit())
            assert (may is True) == mine._may_admit()
            act = chance.choice(["admit", "admit", "put", "put", "take", "publish", "save"])
            if act == "admit" and mine._may_admit():
                most = table[len(running) % 7][1]
                (number,) = {await one.admit("e", b"t", {"next": 0}, most) for one in both}
                running.add(number)
            elif act == "put" and running:
                group = chance.choice(sorted(running))
                running.remove(group)
                for one in both:
                    await one.put(group, rows(*[1.0] * table[group % 7][0]))
            elif act == "take" and mine._next_groups(step, None):
                assert await taken(theirs, step) == await taken(mine, step)
                for one in both:
                    await one.consumed(step)
                step += 1
            elif act == "publish" and published < step:
                published = step
                for one in both:
                    await one.published(step)
            elif act == "save":  # what is forgotten of the steps before still fills slots
                for one in both:
                    await one.saved(step)
                    await one.retain(await one.position(), step)
                await mine._ledger.retained()
            for interval in (1, 2):
                assert await mine.wants_weights(interval) == await theirs.wants_weights(interval)
        assert step > 3
        for one in both:
            await one.shutdown()

    run(test)


def test_slots_are_shared_by_all_explorers_and_freed_by_what_each_serves(url: str) -> None:
    async def test() -> None:
        one, two = (buffer(url, max_staleness=0, max_read_timeout=0.2) for _ in range(2))
        trainer = buffer(url, max_staleness=0)
        for mine, name in ((one, "a"), (two, "b")):
            await mine.attach_explorer(name)
            await mine.published(0)
        assert await one.admit("a", b"t", {}) == 0 and await two.admit("b", b"t", {}) == 1
        with pytest.raises(TimeoutError, match="no slot became free"):
            await one.admit("a", b"t", {})
        await trainer.attach_trainer(0, 1)
        await one.put(0, rows(1.0))
        await two.put(1, rows(1.0))
        assert await taken(trainer, 0) == [0, 1]
        await trainer.retain(0, 1)  # a checkpoint of step 1 is there before anybody serves it
        await two.published(1)
        assert await two.admit("b", b"t", {}) == 2, "b serves version 1, which covers step 0"
        with pytest.raises(TimeoutError):
            # a group of version 0 would be trained in step 1, too late
            await one.admit("a", b"t", {})

    run(test)


async def explored(ends: list[SqlBuffer], at_most: int) -> int:
    """How many groups explorers of all these runs make, in turns, until each is told that no more
    are needed.
    """
    made, asking = 0, deque(ends)
    while asking:
        group = await asking[0].admit("e", b"t", {"next": made})
        if group is None:
            await asking.popleft().input_done("e")
            continue
        await asking[0].put(group, rows(1.0, 0.0))
        made += 1
        assert made <= at_most
        asking.rotate()
    return made


@pytest.mark.parametrize("early", [True, False])
def test_explorers_go_on_until_each_trainer_of_a_database_has_its_groups(
    url: str, early: bool
) -> None:
    """Of steps of two groups and of three; whether or not explorers are there first, and whatever a
    snapshot has taken the place of.
    """

    async def test() -> None:
        steps = {"p/a": 3, "p/b": 2}
        ends = [
            buffer(url, run, total_steps=number, tasks=tasks, max_read_timeout=0.0)
            for (run, number), tasks in zip(steps.items(), (2, 3), strict=True)
        ]
        for one in ends:
            if not early:
                await one.attach_trainer(0, 1)
                await one.retain(0, 0)
            await one.attach_explorer("e")
        assert await explored(ends, at_most=12) == 3 * 2 + 2 * 3
        for one in ends if early else ():
            await one.attach_trainer(0, 1)
        for step in range(3):
            for one in ends:
                if step < steps[one.owner]:
                    assert len(await taken(one, step)) == one.size.groups
                    await one.consumed(step)
        assert [await taken(one, steps[one.owner]) for one in ends] == [[], []]

    run(test)


def test_nothing_is_made_for_a_trainer_that_is_silent_but_by_its_own_run(url: str) -> None:
    """Nor for that of a service, which has none."""

    async def test() -> None:
        await buffer(url, "p/service").attach_explorer("e")
        clock, settings = Clock(), {"lease_s": 40.0, "max_read_timeout": 0.0}
        lives, is_silent = (
            buffer(url, name, total_steps=2, clock=clock, **settings) for name in ("p/a", "p/b")
        )
        for one in (lives, is_silent):
            await one.attach_trainer(0, 1)
        await silent_but_for(clock, 40.0, lives)
        await lives.attach_explorer("e")
        assert await explored([lives], at_most=4) == 4
        await is_silent.attach_explorer("e")
        await is_silent._beat_once()
        assert await explored([is_silent], at_most=4) == 4

    run(test)


def test_groups_of_a_silent_explorer_are_not_waited_for(url: str) -> None:
    async def test() -> None:
        clock = Clock()
        dead, alive, trainer = (
            buffer(url, max_staleness=1, lease_s=50, clock=clock) for _ in range(3)
        )
        for mine, name in ((dead, "dead"), (alive, "alive")):
            await mine.attach_explorer(name)
            await mine.published(0)
        assert [
            await mine.admit(name, b"t", {})
            for mine, name in ((dead, "dead"), (alive, "alive"), (alive, "alive"))
        ] == [0, 1, 2]
        await trainer.attach_trainer(0, 1)
        taking = asyncio.create_task(taken(trainer, 0))
        await alive.put(1, rows(1.0))
        await alive.put(2, rows(1.0))
        change(url, "update experience_buffer_lives set heard = heard - 3600")
        await trainer._beat_once()
        assert not taking.done(), "group 0 is older, and under way, whatever a clock says"
        await silent_but_for(clock, 50, alive, trainer)
        assert await taking == [1, 2]
        again = buffer(url, max_staleness=1)
        assert (await again.attach_explorer("dead"))["reissue"] == [(0, b"t")]
        with pytest.raises(Lost, match="explorer.name"):
            await dead.admit("dead", b"t", {})

    run(test)


def test_unsaved_batches_of_a_silent_trainer_go_to_another_which_it_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        clock = Clock()
        explorer, silent, other = (
            buffer(url, name, clock=clock) for name in ("p/run", "p/silent", "p/other")
        )
        await explorer.attach_explorer("e")
        for group in await admitted(explorer, "e", 6):
            await explorer.put(group, rows(1.0))
        await silent.attach_trainer(0, 1)
        await other.attach_trainer(0, 1)
        assert await taken(silent, 0) == [0, 1]
        await silent.consumed(0)
        await silent.saved(1)
        assert await taken(silent, 1) == [2, 3]
        assert await taken(other, 0) == [4, 5], "nobody is silent yet"
        with monkeypatch.context() as patched:  # it said something after it was looked at
            patched.setattr(other._lives, "silent_trainers", lambda db: {"p/silent/trainer": 0.0})
            choose = partial(other._turns.choose, trainer="p/other/trainer", step=1)
            assert None is await other._do(
                partial(choose, min_model_version=None, input_done=False, incomplete=False)
            )
        await silent_but_for(clock, 60, explorer, other)
        assert await taken(other, 1) == [2, 3]
        with pytest.raises(Lost, match="another trainer has it"):
            await silent.consumed(1)
        assert (await silent.attach_trainer(0, 2))["replay"] == [0], (
            "what its checkpoint holds stays its own"
        )

    run(test)


def test_a_trainer_that_was_silent_between_two_steps_is_told_by_its_next_call(url: str) -> None:
    """What it has learned of is trained by another: it may neither go on nor save."""

    async def test() -> None:
        clock = Clock()
        explorer, silent, other = (
            buffer(url, name, clock=clock) for name in ("p/run", "p/silent", "p/other")
        )
        await explorer.attach_explorer("e")
        for group in await admitted(explorer, "e", 4):
            await explorer.put(group, rows(1.0))
        await silent.attach_trainer(0, 1)
        await other.attach_trainer(0, 1)
        assert await taken(silent, 0) == [0, 1]
        await silent.consumed(0)
        await silent_but_for(clock, 60, explorer, other)
        assert await taken(other, 0) == [0, 1]
        for call in (silent.take(1), silent.consumed(0), silent.saved(1)):
            with pytest.raises(Lost, match="another trainer has it"):
                await call
        assert (await silent.attach_trainer(0, 2))["replay"] == []
        assert await taken(silent, 0) == [2, 3]

    run(test)


def test_lessons_are_kept_until_a_belief_takes_their_place(url: str, tmp_path: Path) -> None:
    """In both stores."""
    lessons = [["t", n, n, 0.5] for n in range(3)] + [["u", 0, 0, 1.0]]
    lessons += [["t", 3, 3, 0.5, 2, b"belief"], ["t", 4, 4, 0.5], ["t", 5, 5, 0.5, 4, b"later"]]
    kept = [["u", 0, 0, 1.0], ["t", 4, 4, 0.5], ["t", 5, 5, 0.5, 4, b"later"]]

    async def test() -> None:
        mine = ExperienceBuffer(ExperienceBufferConfig(), str(tmp_path / "q"), 2, 2, None, None)
        for one in (mine, buffer(url)):
            await one.attach_explorer("e")
            for lesson in lessons:
                await one.put((await one.admit("e", b"t", {"next": 0})) or 0, rows(1.0), lesson)
            assert (await one.attach_explorer("e"))["told"] == kept
            assert (await one.attach_explorer("f"))["told"] == []
            await one.shutdown()

    run(test)


@pytest.mark.parametrize("jump", [9000.0, -9000.0])
def test_a_step_of_the_databases_clock_makes_nobody_silent(jump: float) -> None:
    """Nor does an hour in which nobody reached the database, nor one's own standstill; a process
    that was dead before one looked is known after half a lease.
    """
    mine, wall, lease = Clock(), 1e9, 60.0
    silence = Silence(lease, mine)
    heard = {"alive": wall, "dead": wall, "long dead": wall - 9999}
    first: dict[str, float] = {}
    for beat in range(12):
        if beat == 2:
            wall += jump
        if beat == 3:  # nobody could beat or look
            mine.now, wall = mine.now + 3600, wall + 3600
        heard["alive"] = wall if beat != 3 else heard["alive"]
        for name in silence.of(heard, wall):
            first.setdefault(name, mine.now)
        mine.now, wall = mine.now + lease / 4, wall + lease / 4
    assert first == {"long dead": 30.0, "dead": 3600 + lease}


class Postgres(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        super().__init__(f"error {sqlstate}")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "again"),
    [(code, True) for code in ("40P01", "40001", "55P03", "57014", "57P01", "08006", "53100", None)]
    + [(code, False) for code in ("42P01", "23505", "28P01", "22001", "XX001")],
)
def test_what_passes_is_tried_again(sqlstate: str | None, again: bool) -> None:
    assert passes(sql.exc.OperationalError("select 1", {}, Postgres(sqlstate))) is again
    assert not passes(sql.exc.ArgumentError("no"))


class LosesAnswers:
    """An engine whose every first commit of a change is not told of: the connection is gone."""

    def __init__(self, engine: sql.Engine) -> None:
        self.engine, self.is_lost = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @contextlib.contextmanager
    def begin(self) -> Iterator[sql.Connection]:
        with self.engine.begin() as db:
            yield db
        self.is_lost = not self.is_lost
        if self.is_lost:
            locked = sqlite3.OperationalError("database is locked")
            locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise sql.exc.OperationalError("commit", {}, locked)


def test_a_call_whose_answer_was_lost_is_made_again_and_changes_nothing_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_buffer, "NAP_S", 0.0)

    async def test() -> None:
        mine = buffer(url, max_staleness=3)
        mine._engine = LosesAnswers(mine._engine)  # type: ignore[assignment]
        await mine.published(0)
        await mine.attach_explorer("e")
        tasks = [(b"t", {"next": number}) for number in range(3)]
        assert await mine.admit_some("e", tasks) == [0, 1, 2]
        assert await mine.admit_some("e", tasks) == [3, 4, 5]
        assert len((await mine.attach_explorer("e"))["reissue"]) == 6
        for group in range(6):
            await mine.answered([(group, b"answers", 0)])
        for group in range(6):  # kept twice, as each is known by its name
            assert set(await mine.readmit("e", group)) == {b"answers"}
        for group in range(5):
            await mine.put(group, rows(1.0))
        await mine.abandon(5, "failed")
        await mine.attach_trainer(0, 1)
        for step in range(2):
            assert await taken(mine, step) == [2 * step, 2 * step + 1]
            await mine.consumed(step)
            await mine.saved(step + 1)
        await mine.retain(0, 2)
        found = await mine.stats()
        names = ("issued", "stored", "failed", "duplicate_puts", "late_abandons", "experiences")
        assert [found[name] for name in names] == [6, 5, 1, 0, 0, 5]
        assert found["database_retries"] > 20

    run(test)


def test_a_lock_that_another_holds_is_waited_for_and_then_the_call_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_tables, "LOCK_WAIT_S", 0.01)
    monkeypatch.setattr(sql_buffer, "NAP_S", 0.0)

    async def test() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        def lets_go(error: sql.exc.SQLAlchemyError) -> bool:
            other.execute("ROLLBACK")
            return passes(error)

        monkeypatch.setattr(sql_buffer, "passes", lets_go)
        assert await admitted(mine, "e", 1) == [0]
        assert (await mine.stats())["database_retries"] == 1
        monkeypatch.setattr(sql_buffer, "passes", passes)
        monkeypatch.setattr(sql_buffer, "RETRY_S", -1.0)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="database is locked"):
            await mine._do(lambda _: None, patience=-1.0)
        other.close()
        with pytest.raises(JournalError, match="stopped"):
            await mine.stats()

    run(test)


def test_puts_of_one_call_are_stored_together_or_not_at_all(url: str) -> None:
    async def test() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        puts = [(group, rows(1.0, 0.0), None) for group in await admitted(mine, "e", 3)]
        with pytest.raises(ValueError, match="group 9 was never admitted"):
            await mine.put_some([*puts, (9, rows(1.0), None)])
        assert (await mine.stats())["running_groups"] == 3
        await mine.put_some([*puts[1:], puts[1], (0, rows(float("nan")), None)])
        await mine.put_some(puts)
        found = await mine.stats()
        names = ("stored", "failed", "bad_rewards", "duplicate_puts", "experiences")
        assert [found[name] for name in names] == [2, 1, 1, 4, 4]

    run(test)


def test_answers_to_a_group_are_there_for_whoever_begins_it_again_until_it_is_finished(
    url: str,
) -> None:
    async def test() -> None:
        first = buffer(url)
        await first.attach_explorer("e")
        assert await admitted(first, "e", 3) == [0, 1, 2]
        await first.answered([(0, b"a", 1), (1, b"b", 1)])
        await first.answered([(0, b"c", None), (2, b"d", 2)])
        await killed(first)
        mine = buffer(url)
        assert [group for group, _ in (await mine.attach_explorer("e"))["reissue"]] == [0, 1, 2]
        assert [await mine.readmit("e", group) for group in range(3)] == [
            [b"a", b"c"],
            [b"b"],
            [b"d"],
        ]
        await mine.put(0, rows(1.0, 0.0))
        await mine.abandon(1, "failed")
        await mine.answered([(0, b"late", 0), (1, b"late", 0)])
        assert scalar(url, "select count(*) from experience_buffer_answers") == 1
        assert mine._progress.oldest_version() == 0, "that of the experiences"
        trainer = buffer(url)
        await trainer.attach_trainer(0, 1)
        await trainer.retain(0, 0)  # all events become a snapshot
        assert await mine.readmit("e", 2) == [b"d"]
        with sql.create_engine(url).connect() as db:
            check_views(db, "experience_buffer", mine._progress)

    run(test)


def test_tables_without_answers_get_them(url: str) -> None:
    """Those of version 4 have all others."""

    async def before() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        await admitted(mine, "e", 1)
        await mine.shutdown()

    async def after() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        await mine.answered([(0, b"a", 0)])
        assert await mine.readmit("e", 0) == [b"a"]

    run(before)
    change(url, "drop table experience_buffer_answers")
    change(url, "update rft_buffers set version = 4")
    run(after)
    assert scalar(url, "select version from rft_buffers") == SCHEMA


def test_rows_of_groups_that_nobody_needs_are_deleted_and_still_counted(url: str) -> None:
    async def test() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        for group in await admitted(mine, "e", 8):
            await mine.put(group, rows(1.0), ["t", group, 0, 1.0] if group == 1 else None)
        await mine.abandon((await admitted(mine, "e", 1))[0], "failed")
        await mine.attach_trainer(0, 1)
        before = await mine.stats()
        for step in range(3):
            await taken(mine, step)
            await mine.consumed(step)
        await mine.retain(0, 2)
        after = await mine.stats()
        names = ("issued", "stored", "failed", "evicted", "running_groups")
        assert (
            [after[name] for name in names] == [before[name] for name in names] == [9, 8, 1, 0, 0]
        )
        await mine.put(0, rows(1.0))
        await mine.abandon(8, "again")
        assert (await mine.stats())["duplicate_puts"] == 1
        with pytest.raises(ValueError, match="never admitted"):
            await mine.put(9, rows(1.0))
        assert (await mine.attach_explorer("e"))["told"] == [["t", 1, 0, 1.0]]
        assert await taken(mine, 2) == [4, 5] and await taken(mine, 3) == [6, 7]

    run(test)
    assert scalar(url, "select count(*) from experience_buffer_groups") == 4
    assert scalar(url, "select count(*) from experience_buffer_experiences") == 4


@pytest.mark.parametrize("version", [1, 2, 3])
def test_tables_of_an_older_rft_are_brought_up_to_date(
    url: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go_on() -> None:
        mine = buffer(url)
        assert (await mine.attach_explorer("e"))["told"] == [["t", 1, 0, 1.0]]
        assert (await mine.attach_trainer(0, 2))["replay"] == [0]
        assert await taken(mine, 0) == [0, 1] and await taken(mine, 1) == [2, 3]
        await mine.consumed(0)
        await mine.retain(0, 1)
        found = await mine.stats()
        assert (found["issued"], found["stored"]) == (4, 4)

    older_tables(url, version)
    before = scalar(url, "select count(*) from sqlite_master")
    with monkeypatch.context() as patched:  # a process that dies on the way
        patched.setattr(sql_tables, "view", lambda *_: "create view of nothing")
        with pytest.raises(sql.exc.OperationalError):
            buffer(url)
    assert scalar(url, "select version from rft_buffers") == version
    assert scalar(url, "select count(*) from sqlite_master") == before
    run(go_on)
    assert scalar(url, "select version from rft_buffers") == SCHEMA


def test_a_later_attempt_of_a_trainer_ends_the_earlier_one(url: str) -> None:
    async def test() -> None:
        first, second = buffer(url), buffer(url)
        await first.attach_trainer(0, 1)
        await second.attach_trainer(0, 2)
        with pytest.raises(Lost, match="another process has begun as trainer"):
            await first.take(0)
        with pytest.raises(Lost, match="a later attempt"):
            await first.attach_trainer(0, 1)

    run(test)


def test_a_timed_out_step_takes_what_is_there_and_then_raises(url: str) -> None:
    async def test() -> None:
        explorer, trainer = buffer(url), buffer(url, max_read_timeout=0.3)
        await explorer.attach_explorer("e")
        groups = await admitted(explorer, "e", 2)
        await explorer.put(groups[0], rows(1.0))
        await trainer.attach_trainer(0, 1)
        assert await taken(trainer, 0) == [0]
        with pytest.raises(TimeoutError, match="0 groups ready, 1 running"):
            await trainer.take(1)
        await explorer.put(groups[1], rows(1.0))
        await explorer.input_done("e")
        assert await taken(trainer, 1) == [1]
        assert await taken(trainer, 2) == [], "the explorer is done, and so is the run"
        assert (await trainer.stats())["incomplete_batches"] == 1

    run(test)


async def killed(mine: SqlBuffer) -> None:
    """As far as others see it."""
    if mine._beating is not None:
        mine._beating.cancel()
    mine._pool.shutdown()
    mine._engine.dispose()


Calls = list[tuple[str, tuple[Any, ...]]]


async def answers(url: str, calls: Calls, dies: bool) -> list[Any]:
    """Of calls, one after the other. `dies`: the process of the buffer, behind each; the next one
    is asked the same again, as nobody has heard the answer, and dies too.
    """
    mine, found = buffer(url, max_staleness=1, life="a"), list[Any]()
    for method, arguments in calls:
        found.append(await getattr(mine, method)(*arguments))
        if dies and method not in ("attach_explorer", "attach_trainer"):
            await killed(mine)
            mine = buffer(url, max_staleness=1, life="a")
            again = await getattr(mine, method)(*arguments)
            assert again == found[-1] or method == "take", (method, arguments)
            found[-1] = again
        if dies:
            await killed(mine)
            mine = buffer(url, max_staleness=1, life="a")
    steps = [opened(one).experiences for one in found if isinstance(one, bytes)]
    found = [one for one in found if not isinstance(one, bytes)] + steps
    found.append({k: v for k, v in (await mine.stats()).items() if k not in sql_buffer.COUNTERS})
    found.append(await mine.wants_weights(1))
    await mine.shutdown()
    return found


def test_a_buffer_that_dies_behind_every_call_answers_as_one_that_does_not(tmp_path: Path) -> None:
    """Calls that nobody has heard the answer of come again; explorer and trainer live on."""
    calls: Calls = [
        ("attach_explorer", ("e",)),
        ("is_let_go", ("e",)),
        ("attach_trainer", (0, 1)),
        ("let_go", ("e",)),
        ("is_let_go", ("e",)),
    ]
    for step in range(3):
        groups = range(2 * step, 2 * step + 2)
        tasks = [(f"task {group}".encode(), {"next": group}) for group in groups]
        calls += [
            ("admit_some", ("e", tasks, None, groups[0] - 1)),
            ("answered", ([(group, b"a", step) for group in groups],)),
            ("put_some", ([(group, rows(float(group)), None) for group in groups],)),
            ("take", (step,)),
            ("consumed", (step,)),
            ("saved", (step + 1,)),
            ("published", (step + 1, 1)),
            ("wants_weights", (1,)),
            ("retain", (0, step)),
            ("position", ()),
        ]
    calls += [("input_done", (None,)), ("take", (3,)), ("stop", ()), ("take", (4,))]

    async def test() -> None:
        urls = [f"sqlite:///{tmp_path / name}.db" for name in ("lives", "dies")]
        lived, died = [await answers(url, calls, url is urls[1]) for url in urls]
        assert died == lived

    run(test)


def test_a_buffer_that_comes_back_is_that_of_its_start_of_the_run_and_of_nobody_elses(
    url: str,
) -> None:
    async def test() -> None:
        first = buffer(url, life="a")
        await first.attach_explorer("e")
        await first.attach_trainer(0, 1)
        await killed(first)
        again, other = buffer(url, life="a"), buffer(url, life="b")
        assert await admitted(again, "e", 1) == [0]
        with pytest.raises(Lost, match="another process has begun as explorer p/run/e"):
            await other.admit("e", b"task", {})
        watching = asyncio.create_task(again.watch())  # as the supervisor does at once
        await asyncio.sleep(0)
        assert again._beating is not None
        assert again._stood.trainer == ("p/run/trainer", 1) and other._stood.trainer is None
        await other.attach_explorer("e")
        await killed(again)
        again = buffer(url, life="a")
        with pytest.raises(Lost, match="another process has begun as explorer p/run/e"):
            await again.admit("e", b"task", {})
        watching.cancel()
        await other.shutdown()
        await again.shutdown()
        assert scalar(url, "select count(*) from experience_buffer_stands") == 0

    run(test)


def test_what_cannot_be_trained_on_is_counted_and_never_shrinks_a_batch(url: str) -> None:
    async def test() -> None:
        mine = buffer(url, max_experience_mb=0.001)
        await mine.attach_explorer("e")
        groups = await admitted(mine, "e", 5)
        await mine.put(groups[0], rows(1.0, float("nan")))
        await mine.put(groups[1], rows(*[1.0] * 2).replace(b"\xa1t", b"\xda\x10\x00" + b"t" * 4096))
        for group in groups[2:4]:
            await mine.put(group, rows(1.0, 0.0))
            await mine.put(group, rows(0.0))
        await mine.put(groups[4], rows(1.0, version=5))
        found = await mine.stats()
        assert (
            found["failed"],
            found["bad_rewards"],
            found["oversized_groups"],
            found["duplicate_puts"],
        ) == (
            2,
            1,
            1,
            2,
        )
        await mine.attach_trainer(0, 1)
        assert await taken(mine, 0) == [2, 3]
        change(url, "delete from experience_buffer_experiences where number = 1")
        with pytest.raises(JournalError, match="1 of the 2 experiences of group 2"):
            await mine.take(0)

    run(test)


def test_groups_from_before_a_version_are_dropped_and_counted(url: str) -> None:
    async def test() -> None:
        mine = buffer(url)
        await mine.attach_explorer("e")
        for group in await admitted(mine, "e", 4):
            await mine.put(group, rows(1.0, version=group))
        await mine.attach_trainer(0, 1)
        assert await taken(mine, 0, min_model_version=2) == [2, 3]
        assert (await mine.stats())["evicted"] == 2

    run(test)


def test_a_database_with_another_schema_is_refused(url: str) -> None:
    config = ExperienceBufferConfig(storage_type="sql", path=url)
    check_database(config)
    change(url, "update rft_buffers set version = 9")
    with pytest.raises(ConfigError, match=r"version 9 of the tables.*experience_buffer\.name"):
        check_database(config)
    config.name = "rewards"
    change(url, "create table rewards_groups (number integer)")
    with pytest.raises(ConfigError, match="rewards_groups without explorer"):
        check_database(config)


def test_a_password_in_the_url_is_in_no_file_and_reaches_the_processes_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configs.Config(name="a")
    config.model.model_path = "DIR"
    address = "postgresql://rft:open-sesame@db.example/rft"
    config.buffer.trainer_input.experience_buffer.path = address
    name = "RFT_SECRET_BUFFER_TRAINER_INPUT_EXPERIENCE_BUFFER_PATH"
    monkeypatch.delenv(name, raising=False)
    configs.save(config, tmp_path / "resolved.yaml")
    assert "sesame" not in (tmp_path / "resolved.yaml").read_text()
    assert (
        configs.load(tmp_path / "resolved.yaml").buffer.trainer_input.experience_buffer.path
        == address
    )
    assert "sesame" not in shown(address)
    monkeypatch.delenv(name)


def test_a_database_that_fails_ends_the_run_through_watch(url: str) -> None:
    async def test() -> None:
        mine = buffer(url)
        watching = asyncio.create_task(mine.watch())
        change(url, "drop table experience_buffer_events")
        with pytest.raises(JournalError, match="database failed"):
            await mine.stats()
        with pytest.raises(JournalError, match="the experience buffer stopped"):
            await watching

    run(test)
