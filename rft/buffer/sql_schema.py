"""The tables of a buffer in a database, and what readers may ask of it in SQL.

In: the buffer's name, which the names of its tables begin with. Out: tables to decide with, views
to look at. Invariant: an experience is msgpack, and no column holds anything executable.

    events       what has happened, `number` without a gap; kind and facts, a JSON text, for
                 readers; record, msgpack, which counts
    experiences  one row per experience, until no retained checkpoint of the trainer that holds it
                 is older
    answers      what engines have answered to a group that is not finished, until it is
    lives        when explorers and trainers were last heard of
    stands       what one process of a run must know that takes the place of another: sql_stands

What follows from the events, for readers; no process of a run asks these:

    groups       one row per task admitted, `number` in admission order; who made it, who holds it
                 for which step; until nobody needs it
    totals       what the rows that are gone were
    leases       which trainer took which step's batch      trainers, explorers
            how far each is
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sql
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

SCHEMA = 5
AT_ONCE = 500  # values in one statement


@dataclass
class Tables:
    """Of one buffer."""

    name: str
    metadata: MetaData = field(default_factory=MetaData)

    def __post_init__(self) -> None:
        text, big = String, BigInteger
        self.buffers = Table(
            "rft_buffers",
            self.metadata,
            Column("name", text, primary_key=True),
            Column("version", Integer, nullable=False),
            # up to version 3, which other buffers of the database may have
            Column("next_group", big, nullable=False),
        )
        self.events = self._table(
            "events",
            Column("number", big, primary_key=True, autoincrement=False),
            Column("kind", text, nullable=False),
            Column("facts", Text, nullable=False),
            Column("record", LargeBinary, nullable=False),
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
        self.answers = self._table(
            "answers",
            Column("group", big, primary_key=True, autoincrement=False),
            Column("number", big, primary_key=True, autoincrement=False),  # of the event
            Column("data", LargeBinary, nullable=False),
        )
        self.lives = self._table(
            "lives",
            Column("role", text, primary_key=True),
            Column("name", text, primary_key=True),
            Column("heard", Float, nullable=False),
        )
        self.stands = self._table(
            "stands",
            Column("life", text, primary_key=True),
            Column("record", LargeBinary, nullable=False),
        )

    def _table(self, kind: str, *columns: Column) -> Table:
        return Table(f"{self.name}_{kind}", self.metadata, *columns)


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


def blobs(
    connection: Connection, tables: Tables, groups: Iterable[int]
) -> dict[int, list[msgspec.Raw]]:
    """The groups' experiences, each as it was encoded."""
    rows, found = tables.experiences, {group: list[msgspec.Raw]() for group in groups}
    for some in _some(found):
        query = sql.select(rows.c.group, rows.c.data).where(rows.c.group.in_(some))
        for group, data in connection.execute(query.order_by(rows.c.group, rows.c.number)):
            found[group].append(msgspec.Raw(bytes(data)))
    return found


def drop_blobs(connection: Connection, tables: Tables, groups: Iterable[int]) -> None:
    """Nobody will need the experiences of these groups."""
    rows = tables.experiences
    for some in _some(groups):
        connection.execute(rows.delete().where(rows.c.group.in_(some)))


def answers_to(connection: Connection, tables: Tables, group: int) -> list[bytes]:
    """In the order in which they were kept."""
    rows = tables.answers
    query = sql.select(rows.c.data).where(rows.c.group == group).order_by(rows.c.number)
    return [bytes(data) for data in connection.execute(query).scalars()]


def drop_answers(connection: Connection, tables: Tables, group: int) -> None:
    """The group is finished, or failed."""
    connection.execute(tables.answers.delete().where(tables.answers.c.group == group))


def _some(groups: Iterable[int]) -> Iterable[list[int]]:
    everything = list(groups)
    return (everything[at : at + AT_ONCE] for at in range(0, len(everything), AT_ONCE))


# For readers. $name is a fact, $name:int a number; {each} goes through a record's `groups`

_ISSUED = (
    "select number as at, $group:int as number, $explorer as explorer, $version:int as version, "
    "$run_epoch:int as run_epoch, $most:int as most from {events} where kind = 'issued'"
)
_HELD = (
    "select l.number, l.trainer, l.step, l.run_epoch, l.facts from (select number, "
    "$trainer as trainer, $step:int as step, $run_epoch:int as run_epoch, facts "
    "from {events} where kind = 'leased') l where not exists (select 1 from {events} h, "
    "{each_step} where h.kind = 'handed' and h.number > l.number "
    "and {h_trainer} = l.trainer and {step} = l.step)"
)
VIEWS = {
    "trainers": """
with resumed as (
    select number, $trainer as name, $run_epoch:int as run_epoch, $step:int as step,
        row_number() over (partition by $trainer order by number) as first,
        row_number() over (partition by $trainer order by number desc) as last
    from {events} where kind = 'resumed'),
said as (
    select number, kind, $trainer as name, $step:int as step
    from {events} where kind in ('consumed', 'saved', 'forgotten'))
select r.name, r.run_epoch,
    coalesce((select max(s.step) + 1 from said s where s.kind = 'consumed' and s.name = r.name
        and s.number > r.number and s.step >= r.step), r.step) as version,
    coalesce((select max(s.step) from said s where s.kind = 'saved' and s.name = r.name
        and s.step > b.step), b.step) as saved,
    coalesce((select max(s.step) from said s
        where s.kind = 'forgotten' and s.name = r.name), 0) as oldest_step,
    (select heard from {lives} v where v.role = 'trainer' and v.name = r.name) as heard
from resumed r join resumed b on b.name = r.name and b.first = 1 where r.last = 1""",
    "explorers": """
with attached as (
    select $explorer as name, max($incarnation:int) as incarnation, max(number) as at
    from {events} where kind = 'attached' group by $explorer),
ended as (
    select $explorer as name, max(number) as at
    from {events} where kind = 'input_ended' group by $explorer)
select a.name, a.incarnation, case when e.at > a.at then 1 else 0 end as done,
    (select heard from {lives} v where v.role = 'explorer' and v.name = a.name) as heard
from attached a left join ended e on e.name = a.name""",
    "leases": """
with held as ({held})
select h.trainer, h.step, h.run_epoch from held h left join {trainers} t on t.name = h.trainer
where h.step >= coalesce(t.oldest_step, 0)""",
    "groups": """
with issued as ({issued}),
again as (
    select $group:int as number, $version:int as version, $run_epoch:int as run_epoch,
        row_number() over (partition by $group:int order by number desc) as last
    from {events} where kind = 'restarted'),
stored as (
    select $group:int as number, $rows:int as size, $size:int as trained,
        $version:int as model_version from {events} where kind = 'stored'),
lost as (
    select $group:int as number, kind as state, $reason as reason
    from {events} where kind = 'failed'
    union all select {each}, 'evicted', $reason from {events}, {each_group}
    where kind = 'evicted'),
held as ({held}),
taken as (select {each} as number, trainer, step from held, {each_group})
select i.number, i.explorer, coalesce(a.version, i.version) as version,
    coalesce(a.run_epoch, i.run_epoch) as run_epoch,
    coalesce(l.state, case when s.number is null then 'running' else 'stored' end) as state,
    l.reason, s.size, s.trained, i.most, s.model_version, t.trainer, t.step
from issued i
left join again a on a.number = i.number and a.last = 1
left join stored s on s.number = i.number
left join lost l on l.number = i.number
left join taken t on t.number = i.number
left join {trainers} r on r.name = t.trainer
where t.step is null or t.step >= coalesce(r.oldest_step, 0)""",
    "totals": """
with fold as (
    select coalesce(max(number), 0) as at, coalesce(max($num_stored:int), 0) as stored,
        coalesce(max($num_failed:int), 0) as failed, coalesce(max($num_evicted:int), 0) as evicted,
        coalesce(max($num_experiences:int), 0) as trained
    from {events} where kind = 'folded'),
later as (
    select count(*) as stored, coalesce(sum($size:int), 0) as trained
    from {events}, fold where kind = 'stored' and number > fold.at),
dropped as (
    select count(*) as evicted from {events}, fold, {each_group}
    where kind = 'evicted' and number > fold.at),
here as (
    select count(*) as stored, coalesce(sum(trained), 0) as trained
    from {groups} where state = 'stored')
select fold.stored + later.stored - fold.evicted - dropped.evicted - here.stored as consumed,
    fold.failed as failed, fold.evicted as evicted,
    fold.trained + later.trained - here.trained as trained
from fold, later, dropped, here""",
}
COLUMNS = {
    "trainers": "name run_epoch version saved oldest_step heard",
    "explorers": "name incarnation done heard",
    "leases": "trainer step run_epoch",
    "groups": "number explorer version run_epoch state reason size trained most model_version "
    "trainer step",
    "totals": "consumed failed evicted trained",
}
_FACT = re.compile(r"\$(\w+)(:int)?")


def view(dialect: str, name: str, kind: str) -> str:
    """How to make it."""
    is_postgres = dialect == "postgresql"

    def fact(found: "re.Match[str]") -> str:
        key, number = found.group(1), found.group(2)
        if not is_postgres:
            return f"json_extract(facts, '$.{key}')"
        return f"(facts::jsonb ->> '{key}')" + ("::bigint" if number else "")

    def each(key: str, of: str, called: str) -> str:
        if is_postgres:
            return f"jsonb_array_elements_text({of}::jsonb -> '{key}') as {called}(value)"
        return f"json_each({of}, '$.{key}') as {called}"

    number = "{}.value::bigint" if is_postgres else "{}.value"
    words = {
        **{part: f'"{name}_{part}"' for part in ("events", "lives", "trainers", "groups")},
        "held": _HELD,
        "issued": _ISSUED,
        "each": number.format("g"),
        "step": number.format("p"),
        "each_group": each("groups", "facts", "g"),
        "each_step": each("steps", "h.facts", "p"),
        "h_trainer": "(h.facts::jsonb ->> 'trainer')"
        if is_postgres
        else "json_extract(h.facts, '$.trainer')",
    }
    query = VIEWS[kind]
    for _ in range(2):
        query = re.sub(r"\{(\w+)\}", lambda found: words[found.group(1)], query)
    return f'create view "{name}_{kind}" as {_FACT.sub(fact, query)}'
