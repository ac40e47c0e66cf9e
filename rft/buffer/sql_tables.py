"""The tables of a buffer in a database, how they are opened, and the questions that more than one
call asks of them.

In: a URL (`sqlite:///file` on one machine, `postgresql://user@host/base` for several) and the
buffer's name, which the names of its tables begin with. Out: an `Engine` and the tables. A
transaction sees and changes them alone: SQLite's begin with the write lock, PostgreSQL's lock the
rows that they decide about. Invariant: an experience is msgpack, and no column holds anything
executable.

    groups       one row per task admitted, `number` in admission order; who made it, who holds it
                 for which step; until nobody needs it
    totals       what the rows that are gone were
    experiences  one row per experience, until no retained checkpoint of the trainer that holds it
                 is older
    leases       which trainer took which step's batch      trainers, explorers
            how far each is, and when it was last heard of
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sql
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

from rft.buffer.delivery import StoredGroup
from rft.buffer.sql_patience import client_limits, server_limits
from rft.config import ConfigError, ExperienceBufferConfig
from rft.ground import redact
from rft.ground.errors import refuse_all
from rft.ground.experience import encode

SCHEMA = 3
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
LOCK_WAIT_S = 5.0  # for SQLite's one write lock; then a call tries again
LOOK_S = 0.02
KEY = "buffer.trainer_input.experience_buffer"
GONE = ("consumed", "failed", "evicted", "trained")  # states of groups; the last: experiences
OPEN = ("running", "left", "stored")  # states of a group that some step may still take


@dataclass
class Tables:
    """Of one buffer.

    A group's states: running, left (its explorer has to start it again), stored, consumed, failed,
    evicted.
    """

    name: str
    metadata: MetaData = field(default_factory=MetaData)

    def __post_init__(self) -> None:
        text, big = String, BigInteger
        self.buffers = Table(
            "rft_buffers",
            self.metadata,
            Column("name", text, primary_key=True),
            Column("version", Integer, nullable=False),
            Column("next_group", big, nullable=False),
        )
        self.groups = self._table(
            "groups",
            Column("number", big, primary_key=True, autoincrement=False),
            Column("explorer", text),
            Column("task", LargeBinary),
            Column("version", Integer),
            Column("run_epoch", Integer),
            Column("state", text, nullable=False),
            Column("reason", text),
            *(Column(name, Integer) for name in ("size", "trained", "most", "model_version")),
            Column("stored_at", Float),
            Column("trainer", text),
            Column("step", Integer),
            Column("told", LargeBinary),
            sql.Index(f"{self.name}_by_state", "state", "number"),
            sql.Index(f"{self.name}_by_lease", "trainer", "step"),
        )
        self.experiences = self._table(
            "experiences",
            Column("group", big, primary_key=True, autoincrement=False),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("task", text),
            Column("model_version", Integer),
            Column("reward", Float),
            Column("data", LargeBinary, nullable=False),
        )
        self.totals = self._table("totals", *(Column(n, big, nullable=False) for n in GONE))
        self.leases = self._table(
            "leases",
            Column("trainer", text, primary_key=True),
            Column("step", Integer, primary_key=True, autoincrement=False),
            Column("run_epoch", Integer),
            Column("at", Float),
        )
        self.trainers = self._table(
            "trainers",
            Column("name", text, primary_key=True),
            Column("run_epoch", Integer),
            Column("version", Integer),
            Column("saved", Integer),
            Column("oldest_step", Integer),
            Column("heard", Float),
        )
        self.explorers = self._table(
            "explorers",
            Column("name", text, primary_key=True),
            Column("incarnation", Integer),
            Column("cursor", LargeBinary),
            Column("done", Integer),
            Column("heard", Float),
        )

    def _table(self, kind: str, *columns: Column | sql.Index) -> Table:
        return Table(f"{self.name}_{kind}", self.metadata, *columns)


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
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sql.text("select pg_advisory_xact_lock(hashtext('rft_buffers'))"))
        _check_schema(connection, tables)
        tables.metadata.create_all(connection)
        if (
            connection.execute(
                sql.select(tables.buffers).where(tables.buffers.c.name == tables.name)
            ).first()
            is None
        ):
            connection.execute(
                tables.buffers.insert().values(name=tables.name, version=SCHEMA, next_group=0)
            )
        if connection.execute(sql.select(tables.totals)).first() is None:
            connection.execute(tables.totals.insert().values(dict.fromkeys(GONE, 0)))


def _check_schema(connection: Connection, tables: Tables) -> None:
    there = sql.inspect(connection).get_table_names()
    wrong = None
    if "rft_buffers" in there:
        query = sql.select(tables.buffers.c.version).where(tables.buffers.c.name == tables.name)
        version = connection.execute(query).scalar()
        if version == 1:
            _count_experiences(connection, tables)
        if version in (1, 2):  # without totals, which are made with the other tables
            here = tables.buffers.c.name == tables.name
            connection.execute(tables.buffers.update().where(here).values(version=SCHEMA))
            version = SCHEMA
        wrong = (
            None
            if version in (None, SCHEMA)
            else f"has version {version} of the tables, and this rft knows version {SCHEMA}"
        )
    if wrong is None and tables.groups.name in there:
        found = {
            column["name"] for column in sql.inspect(connection).get_columns(tables.groups.name)
        }
        missing = sorted({column.name for column in tables.groups.columns} - found)
        wrong = (
            f"has a table {tables.groups.name} without {', '.join(missing)}" if missing else None
        )
    if wrong:
        raise ConfigError(
            f"{KEY}.path: the database {wrong}: set another {KEY}.name, or another database"
        )


def _count_experiences(connection: Connection, tables: Tables) -> None:
    """Tables of version 1 counted groups. Greedy baselines, which are not trained on, are counted
    with the others of a group that was stored under it.
    """
    groups = tables.groups
    for name in ("trained", "most"):
        connection.execute(sql.text(f'ALTER TABLE "{groups.name}" ADD COLUMN {name} INTEGER'))
    connection.execute(groups.update().values(trained=groups.c.size))


def check_database(config: ExperienceBufferConfig, at_start: bool = True) -> None:
    """Refuse, before anything starts, a database that does not answer or holds something else.

    `at_start`: it may be asked.
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
        create(engine, Tables(config.name))
    except sql.exc.SQLAlchemyError as error:
        cause = redact.text(str(getattr(error, "orig", None) or error).strip().splitlines()[0])
        raise ConfigError(
            f"{KEY}.path={shown(config.path)}: the database cannot be used: {cause}; "
            "correct it or start it"
        ) from None
    finally:
        engine.dispose()


def now(connection: Connection) -> float:
    """The database's clock: those of several machines differ."""
    if connection.dialect.name == "postgresql":
        return float(
            connection.execute(
                sql.text("select extract(epoch from clock_timestamp())")
            ).scalar_one()
        )
    return float(
        connection.execute(sql.text("select (julianday('now') - 2440587.5) * 86400.0")).scalar_one()
    )


def stored(connection: Connection, tables: Tables) -> Iterator[StoredGroup]:
    """All groups whose experiences are there, by number."""
    groups = tables.groups
    query = (
        sql.select(groups.c.number, groups.c.run_epoch)
        .where(groups.c.state == "stored")
        .order_by(groups.c.number)
    )
    for group in connection.execute(query).all():
        yield StoredGroup(
            group=group.number,
            timeline=group.run_epoch,
            experiences=encode(blobs(connection, tables, group.number)),
        )


def counted(connection: Connection, tables: Tables) -> dict[str, int]:
    """How many groups there ever were, in which state."""
    groups = tables.groups
    state, held = groups.c.state, groups.c.trainer.is_not(None)
    query = sql.select(state, held.label("held"), sql.func.count().label("number")).group_by(
        state, held
    )
    gone = [
        sql.select(sql.literal(name), sql.literal(None), tables.totals.c[name]) for name in GONE[:3]
    ]
    found = Counter[tuple[str, bool]]()
    for name, is_held, number in connection.execute(query.union_all(*gone)):  # at one moment
        found[name, bool(is_held)] += int(number)
    ready, stored = found.get(("stored", False), 0), found.get(("stored", True), 0)
    return {
        "issued": sum(found.values()),
        "stored": ready
        + stored
        + sum(n for (name, _), n in found.items() if name in ("consumed", "evicted")),
        "failed": found.get(("failed", False), 0),
        "evicted": found.get(("evicted", False), 0),
        "ready_groups": ready,
        "running_groups": sum(n for (name, _), n in found.items() if name in ("running", "left")),
    }


def blobs(connection: Connection, tables: Tables, group: int) -> list[msgspec.Raw]:
    """A group's experiences, each as it was encoded."""
    rows = tables.experiences
    query = sql.select(rows.c.data).where(rows.c.group == group).order_by(rows.c.number)
    return [msgspec.Raw(bytes(blob)) for blob in connection.execute(query).scalars()]
