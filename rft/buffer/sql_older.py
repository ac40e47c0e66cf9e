"""Tables of versions 1 to 3 become records: then a buffer's state lay in rows of its own, in the
tables that are views now.

In: a connection whose transaction the caller began. Out: the state that they say. Invariant: all of
it or nothing, in one transaction; experiences stay where they are.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection

from rft.buffer.groups import Course, Explored, Group, Lease, remember
from rft.buffer.progress import Began, JournalRecord, Progress
from rft.buffer.sql_schema import Tables, drop_blobs
from rft.ground.experience import decode

KINDS = ("groups", "totals", "leases", "trainers", "explorers")


def taken_out(db: Connection, tables: Tables) -> tuple[list[JournalRecord], list[dict[str, Any]]]:
    """The records that stand for the old tables, which are gone then, and who was heard when."""
    progress = converted(db, tables)
    rows = tables.experiences
    there = db.execute(sql.select(rows.c.group).distinct()).scalars()
    drop_blobs(db, tables, set(there) - set(progress.held()))
    lives = [
        {"role": role, "name": row["name"], "heard": row["heard"]}
        for role in ("explorer", "trainer")
        for row in _rows(db, f"{tables.name}_{role}s")
    ]
    for kind in KINDS:
        sql.Table(f"{tables.name}_{kind}", sql.MetaData()).drop(db, checkfirst=True)
    return [Began(), *progress.survivors()], lives


def converted(db: Connection, tables: Tables) -> Progress:
    """What they say. Version 1 counted groups only: greedy baselines are counted with the others of
    a group.
    """
    progress = Progress()
    there = set(sql.inspect(db).get_table_names())
    everything = _rows(db, f"{tables.name}_groups", "number")
    gone = _rows(db, f"{tables.name}_totals") if f"{tables.name}_totals" in there else []
    totals = dict(gone[0]) if gone else dict.fromkeys(("consumed", "failed", "evicted"), 0)
    epochs = {
        (row["trainer"], row["step"]): row["run_epoch"]
        for row in _rows(db, f"{tables.name}_leases")
    }
    for row in _rows(db, f"{tables.name}_explorers"):
        progress.explorers[row["name"]] = Explored(
            incarnation=row["incarnation"], done=bool(row["done"])
        )
        if row["cursor"]:
            progress.cursors[row["name"]] = decode(bytes(row["cursor"]), dict[str, Any])
    for row in _rows(db, f"{tables.name}_trainers"):
        progress.courses[row["name"]] = Course(
            oldest_step=row["oldest_step"],
            finished=row["version"],
            run_epoch=row["run_epoch"],
            saved=row["saved"],
        )
    for (trainer, step), epoch in sorted(epochs.items()):
        progress.courses[trainer].leases[step] = Lease(trainer, epoch, [])
    for course in progress.courses.values():
        course.go_on(course.finished)
    _convert_groups(progress, everything)
    kinds = [row["state"] for row in everything]
    known = {
        kind: kinds.count(kind) + totals.get(kind, 0) for kind in ("consumed", "failed", "evicted")
    }
    progress.num_failed, progress.num_evicted = known["failed"], known["evicted"]
    progress.num_stored = kinds.count("stored") + known["consumed"] + known["evicted"]
    size = sum(_size(row) for row in everything)
    progress.num_experiences = size + totals.get("trained", 0)
    for row in sorted(everything, key=lambda row: row["stored_at"] or 0.0):
        if row["told"] is not None:
            kept = progress.told.setdefault(row["explorer"], [])
            remember(kept, decode(bytes(row["told"]), list[Any]))
    here = tables.buffers.c.name == tables.name
    progress.next_group = int(
        db.execute(sql.select(tables.buffers.c.next_group).where(here)).scalar_one()
    )
    return progress


def _convert_groups(progress: Progress, rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        if row["state"] not in ("running", "left", "stored"):
            continue
        group = Group(
            *(row["number"], row["explorer"], bytes(row["task"] or b""), row["version"]),
            run_epoch=row["run_epoch"],
            stored=row["state"] == "stored",
            model_version=row["model_version"],
            most=row.get("most"),
            size=_size(row),
            rows=row["size"] or 0,
        )
        if group.stored and group.model_version is None:
            group.model_version = group.version
        if row["trainer"] is None:
            progress.waiting[group.number] = group
        else:
            progress.courses[row["trainer"]].leases[row["step"]].groups.append(group)


def _size(row: dict[str, Any]) -> int:
    return int(row.get("trained", row["size"]) or 0)


def _rows(db: Connection, table: str, *order: str) -> list[dict[str, Any]]:
    """All columns that there are: versions differ in them."""
    query = sql.select(sql.text("*")).select_from(sql.table(table))
    found = db.execute(query.order_by(*map(sql.column, order)))
    return [dict(row) for row in found.mappings()]
