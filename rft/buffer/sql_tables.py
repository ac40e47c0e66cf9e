"""The tables of a buffer in a database: how they are opened, made, and brought up to date.

In: a URL (`sqlite:///file` on one machine, `postgresql://user@host/base` for several) and the
buffer's name. Out: an `Engine`, and tables that are there. A transaction that decides has them
alone: SQLite's begin with the write lock, PostgreSQL's lock the buffer's row. Invariant: tables are
made, or converted, in one transaction.
"""

import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection, Engine

from rft.buffer.sql_events import row_of
from rft.buffer.sql_older import taken_out
from rft.buffer.sql_patience import client_limits, patient, server_limits
from rft.buffer.sql_schema import COLUMNS, SCHEMA, VIEWS, Tables, view
from rft.config import ConfigError, ExperienceBufferConfig
from rft.ground import redact
from rft.ground.errors import refuse_all

OLDER = (1, 2, 3)  # versions that are converted
WITHOUT_ANSWERS = 4  # has all tables but that one
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
LOCK_WAIT_S = 5.0  # for SQLite's one write lock; then a call tries again
LOOK_S = 0.02
KEY = "buffer.trainer_input.experience_buffer"


def shown(url: str) -> str:
    """Without a password."""
    return redact.text(url)


def connect(url: str) -> Engine:
    """Raises ConfigError for a URL that names no database that can be used."""
    kind, found, _ = url.partition("://")
    kind = kind.partition("+")[0]
    if not found or kind not in DRIVERS:
        raise ConfigError(
            f"{KEY}.path={shown(url)}: storage_type=sql needs "
            "sqlite:////absolute/file.db, or postgresql://user:password@host/database"
        )
    try:
        address = sql.make_url(url).set(drivername=DRIVERS[kind])
        if kind == "sqlite":
            return _sqlite(
                sql.create_engine(
                    address, connect_args={"timeout": LOCK_WAIT_S, "check_same_thread": False}
                )
            )
        return _postgres(
            sql.create_engine(
                address,
                pool_pre_ping=True,
                isolation_level="READ COMMITTED",
                connect_args=client_limits(address.query.__contains__),
            )
        )
    except (sql.exc.ArgumentError, ValueError) as error:
        raise ConfigError(
            f"{KEY}.path={shown(url)}: no database URL ({error}); correct it"
        ) from None
    except ImportError as error:
        raise ConfigError(f"{KEY}.path={shown(url)}: {error}; install psycopg[binary]") from None


def _postgres(engine: Engine) -> Engine:
    @sql.event.listens_for(engine, "do_connect")
    def do_connect(_dialect: Any, _record: object, given: Any, named: Any) -> Any:
        return patient().connect(*given, **named)

    @sql.event.listens_for(engine, "connect")
    def on_connect(connection: object, _record: object) -> None:
        with connection.cursor() as cursor:  # type: ignore[attr-defined]
            for name, value in server_limits().items():
                cursor.execute("select set_config(%s, %s, false)", (name, str(value)))
        connection.commit()  # type: ignore[attr-defined]

    return engine


def _sqlite(engine: Engine) -> Engine:
    @sql.event.listens_for(engine, "connect")
    def on_connect(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]  # begins by itself only in front of a write, which is too late
        _write_ahead(connection)  # type: ignore[arg-type]
        connection.execute("PRAGMA synchronous=FULL")  # type: ignore[attr-defined]

    @sql.event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Of processes that open a new file at once one changes its journal; SQLite refuses the others
    without waiting.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def create(engine: Engine, tables: Tables) -> None:
    """Make the tables where they are not there; several processes may do so at a time.

    Those of an older rft are brought up to date. Raises ConfigError for another schema.
    """
    with engine.begin() as db:
        if engine.dialect.name == "postgresql":
            db.execute(sql.text("select pg_advisory_xact_lock(hashtext('rft_buffers'))"))
        version, here = None, tables.buffers.c.name == tables.name
        if sql.inspect(db).has_table(tables.buffers.name):
            version = db.execute(sql.select(tables.buffers.c.version).where(here)).scalar()
        if version not in (None, *OLDER, WITHOUT_ANSWERS, SCHEMA):
            raise _unusable(
                f"has version {version} of the tables, and this rft knows version {SCHEMA}"
            )
        records, lives = taken_out(db, tables) if version in OLDER else ([], [])
        _check_columns(db, tables)
        tables.metadata.create_all(db)
        if version is None:
            db.execute(
                tables.buffers.insert().values(name=tables.name, version=SCHEMA, next_group=0)
            )
        elif version in OLDER:
            rows = [row_of(number, record) for number, record in enumerate(records, 1)]
            db.execute(tables.events.insert(), rows)
            if lives:
                db.execute(tables.lives.insert(), lives)
        if version not in (None, SCHEMA):
            db.execute(tables.buffers.update().where(here).values(version=SCHEMA))
        there = sql.inspect(db).get_view_names()
        for kind in VIEWS:
            if f"{tables.name}_{kind}" not in there:
                db.exec_driver_sql(view(engine.dialect.name, tables.name, kind))


def _check_columns(db: Connection, tables: Tables) -> None:
    """Somebody else's tables may have the names of these."""
    inspector = sql.inspect(db)
    expected = {f"{tables.name}_{kind}": set(COLUMNS[kind].split()) for kind in VIEWS}
    of_us = (tables.events, tables.experiences, tables.answers, tables.lives, tables.stands)
    expected |= {table.name: {column.name for column in table.columns} for table in of_us}
    for name in sorted(expected.keys() & set(inspector.get_table_names())):
        missing = sorted(
            expected[name] - {column["name"] for column in inspector.get_columns(name)}
        )
        if missing:
            raise _unusable(f"has a table {name} without {', '.join(missing)}")
        if name.removeprefix(f"{tables.name}_") in VIEWS:
            raise _unusable(f"has a table {name}, which is a view of this rft")


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"{KEY}.path: the database {why}: set another {KEY}.name, or another database"
    )


def _absent(engine: Engine, config: ExperienceBufferConfig) -> Iterator[str]:
    """Why there is nothing to read. Asking SQLite would make the file."""
    where, known = shown(str(config.path)), list[str]()
    if engine.dialect.name == "sqlite" and not Path(str(engine.url.database)).is_file():
        yield f"{where}: there is no such file; give the URL of a run's database"
        return
    with engine.connect() as db:
        if sql.inspect(db).has_table("rft_buffers"):
            known = list(db.scalars(sql.select(Tables(config.name).buffers.c.name)))
    if config.name not in known:
        there = f"it has {', '.join(known)}" if known else "no run has stored anything there"
        yield f"{where}: there is no buffer {config.name}: {there}"


def check_database(
    config: ExperienceBufferConfig, at_start: bool = True, to_read: bool = False
) -> None:
    """Refuse, before anything starts, a database that does not answer or holds something else.

    `at_start`: it may be asked; `to_read`: what it has not is not made, but refused as well.
    """
    problems = []
    if not config.path:
        problems.append(
            f"{KEY}.path: storage_type=sql needs a database: sqlite:////absolute/file.db or "
            "postgresql://..."
        )
    if not NAME.fullmatch(config.name):
        problems.append(
            f"{KEY}.name={config.name}: it begins the names of tables: use letters, digits and _, "
            "at most 40"
        )
    refuse_all(problems)
    if not at_start or config.path is None:
        return
    engine = connect(config.path)
    try:
        if to_read:
            refuse_all(_absent(engine, config))
        create(engine, Tables(config.name))
    except sql.exc.SQLAlchemyError as error:
        cause = redact.text(str(getattr(error, "orig", None) or error).strip().splitlines()[0])
        raise ConfigError(
            f"{KEY}.path={shown(config.path)}: the database cannot be used: {cause}; "
            "correct it or start it"
        ) from None
    finally:
        engine.dispose()
