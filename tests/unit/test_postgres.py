"""The buffer on a real PostgreSQL: what SQLite does with one lock, it does with locked rows."""

import asyncio
import logging
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sql

from rft.buffer import sql_patience
from rft.buffer.delivery import opened
from rft.buffer.journal import JournalError
from rft.buffer.progress import Handed
from rft.buffer.sql_events import Events
from rft.buffer.sql_schema import Tables
from rft.buffer.sql_tables import check_database, connect
from rft.buffer.sql_turns import counted
from rft.config import ConfigError, ExperienceBufferConfig
from tests.unit.postgres import PASSWORD, postgres, proxied
from tests.unit.sql_world import buffer, check_views, exactly_once, older_tables, rows


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="rft-postgres-") as root,
        postgres(Path(root)) as address,
    ):
        yield address


@pytest.mark.verify
def test_four_writers_and_three_trainers_with_kills_train_every_group_once(
    url: str, tmp_path: Path
) -> None:
    exactly_once(url, tmp_path, writers=4, leasers=3, groups=20)
    with sql.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:")
    ).connect() as connection:
        events = Events(Tables("experience_buffer"))
        events.look(connection)
        found = counted(events.progress)
    assert (found["stored"], found["failed"], found["running_groups"]) == (80, 0, 0)


def test_many_take_at_once_and_none_gets_what_another_has(url: str) -> None:
    """Without a kill, in one process: the transactions really
    overlap, on connections of their own.
    """

    async def test() -> None:
        name = "overlap"
        explorer = buffer(url, name=name)
        await explorer.attach_explorer("e")
        groups = [await explorer.admit("e", b"t", {}) for _ in range(24)]
        await asyncio.gather(*(explorer.put(int(group or 0), rows(1.0)) for group in groups))
        trainers = [buffer(url, f"p/{number}", name=name) for number in range(4)]
        for trainer in trainers:
            await trainer.attach_trainer(0, 1)

        async def take_three(trainer: object) -> list[int]:
            found = []
            for step in range(3):
                found += [e.group for e in opened(await trainer.take(step)).experiences]  # type: ignore[attr-defined]
            return found

        taken = await asyncio.gather(*(take_three(trainer) for trainer in trainers))
        assert sorted(group for found in taken for group in found) == groups
        for mine in (explorer, *trainers):
            await mine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_older_tables_are_converted_and_readers_find_views_in_their_place(url: str) -> None:
    async def test() -> None:
        older_tables(url, 3, name="older")
        mine = buffer(url, name="older")
        assert (await mine.attach_explorer("e"))["told"] == [["t", 1, 0, 1.0]]
        assert (await mine.attach_trainer(0, 2))["replay"] == [0]
        for group in [await mine.admit("e", b"t", {}) for _ in range(4)]:
            await (mine.put(group, rows(1.0)) if group != 7 else mine.abandon(7, "no"))  # type: ignore[arg-type]
        for step in range(3):
            assert opened(await mine.take(step)).experiences
            await mine.consumed(step)
        await mine.saved(1)
        await mine.retain(0, 1)
        await mine._do(lambda _: mine._events.add(Handed(trainer="p/run/trainer", steps=[2])))
        await mine.input_done("e")
        with mine._engine.begin() as db:
            check_views(db, "older", mine._progress)
            assert db.execute(sql.text("select step from older_leases")).scalars().all() == [1]
        await mine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_who_stands_still_in_a_transaction_holds_the_others_up_for_a_limited_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like an explorer that is stopped while it has the row that admits: the server ends its
    session. And a session that is ended in a call is opened anew.
    """
    monkeypatch.setattr(sql_patience, "IDLE_S", 1)
    stopped = connect(url)
    monkeypatch.setattr(sql_patience, "LOCK_S", 0.1)
    name = "stopped"

    async def test() -> None:
        mine = buffer(url, name=name)
        await mine.attach_explorer("e")
        with stopped.connect() as holder:
            holder.execute(sql.text("select * from rft_buffers for update"))
            assert await mine.admit("e", b"t", {}) == 0
            with pytest.raises(sql.exc.DBAPIError):
                holder.execute(sql.text("select 1"))
            holder.invalidate()
        assert (await mine.stats())["database_retries"] > 0
        with mine._engine.connect() as one:
            limits = [
                one.execute(sql.text(f"show {limit}")).scalar_one()
                for limit in ("statement_timeout", "lock_timeout", "tcp_user_timeout")
            ]
            assert limits == ["1min", "100ms", "30000"]

        ended = False

        def change(db: sql.Connection) -> int:
            nonlocal ended
            if not ended:
                ended = True
                db.execute(sql.text("select pg_terminate_backend(pg_backend_pid())"))
            return int(db.execute(sql.text("select 7")).scalar_one())

        assert await mine._do(change) == 7
        await mine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))
    stopped.dispose()


def until(true: Callable[[], bool]) -> Awaitable[None]:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.01)

    return asyncio.wait_for(wait(), 60)


def test_a_partition_in_a_call_is_waited_out_and_nothing_is_done_twice(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections stay open and nothing comes: the kernel's probes are answered."""
    monkeypatch.setattr(sql_patience, "CALL_S", 0.5)
    monkeypatch.setattr(sql_patience, "CONNECT_S", 2)

    async def test(there: str, flows: threading.Event) -> None:
        mine = buffer(there, name="partition")
        await mine.attach_explorer("e")
        assert await mine.admit("e", b"t", {}) == 0
        flows.clear()
        calls = [
            asyncio.create_task(mine.put(0, rows(1.0))),
            asyncio.create_task(mine.admit("e", b"t", {"next": 1})),
        ]
        await until(lambda: mine._counts["database_retries"] > 1)
        assert not any(call.done() for call in calls)
        flows.set()
        assert await asyncio.gather(*calls) == [None, 1]
        found = await mine.stats()
        assert (found["stored"], found["running_groups"]) == (1, 1)
        await mine.shutdown()

    with proxied(url) as (there, flows):
        asyncio.run(asyncio.wait_for(test(there, flows), 120))


def test_a_partition_that_stays_ends_the_call_at_its_deadline(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_patience, "CALL_S", 0.5)
    monkeypatch.setattr(sql_patience, "CONNECT_S", 2)

    async def test(there: str, flows: threading.Event) -> None:
        mine = buffer(there, name="for_good")
        watching = asyncio.create_task(mine.watch())
        await mine.attach_explorer("e")
        flows.clear()
        with pytest.raises(JournalError, match=r"no answer in 0.5 s|[tT]imeout|timed out"):
            await mine._do(lambda db: db.execute(sql.text("select 1")), patience=1.0)
        with pytest.raises(JournalError):
            await watching
        flows.set()
        await mine.shutdown()

    with proxied(url) as (there, flows):
        asyncio.run(asyncio.wait_for(test(there, flows), 60))


def test_a_lost_server_ends_the_run_and_no_message_has_the_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        mine = buffer(url, name="lost")
        watching = asyncio.create_task(mine.watch())
        with sql.create_engine(
            url.replace("postgresql:", "postgresql+psycopg:")
        ).begin() as connection:
            connection.execute(sql.text("drop table lost_events cascade"))
        with pytest.raises(JournalError) as failed:
            await mine.stats()
        with pytest.raises(JournalError):
            await watching
        assert PASSWORD not in str(failed.value)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(asyncio.wait_for(test(), 60))
    bad = url.replace("@127.0.0.1", "x@127.0.0.1")
    with pytest.raises(ConfigError, match="password authentication failed") as refused:
        check_database(ExperienceBufferConfig(storage_type="sql", path=bad))
    assert PASSWORD not in str(refused.value) + caplog.text
