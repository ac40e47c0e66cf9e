"""Explorers and trainers as processes of their own on one database, and the account of what each
has trained on.

    python -m tests.unit.sql_world explorer URL NAME GROUPS HANG_AT
            admits and stores, says `admitted GROUP`
    python -m tests.unit.sql_world trainer URL RUN DIRECTORY HANG_AT
            takes and trains, says `taken STEP [GROUPS]`

`HANG_AT`: after so many groups or at this step it does nothing more, so that a test can kill it
there; -1: it ends by itself. A trainer's checkpoint is a file with its step and the groups that it
has learned from, written every second step.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sql

from rft.buffer.delivery import opened
from rft.buffer.progress import Progress
from rft.buffer.sql_buffer import SqlBuffer
from rft.buffer.sql_schema import Tables
from rft.buffer.sql_tables import connect
from rft.config import ExperienceBufferConfig
from rft.ground.experience import Experience, VersionSpan, decode, encode

TASKS = 2


def rows(*rewards: float, version: int = 0) -> bytes:
    span = VersionSpan(version=version, start=0, end=2)
    return encode(
        [
            Experience(
                tokens=[1, 2, 3],
                prompt_length=1,
                action_mask=[1, 1],
                reward=reward,
                task="t",
                versions=[span],
            )
            for reward in rewards
        ]
    )


def buffer(
    url: str,
    run: str = "p/run",
    max_staleness: int | None = None,
    experiences: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    life: str = "",
    total_steps: int | None = None,
    tasks: int = TASKS,
    **settings: Any,
) -> SqlBuffer:
    config = ExperienceBufferConfig(storage_type="sql", path=url, **settings)
    return SqlBuffer(config, run, tasks, 2, max_staleness, total_steps, experiences, life, clock)


class Clock:
    """Of one process; goes on when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def silent_but_for(clock: Clock, lease_s: float, *living: SqlBuffer) -> None:
    """A lease goes by on `clock`, in which only these say that they live, and look around."""
    for _ in range(5):
        clock.now += lease_s / 4
        for one in living:
            await one._beat_once()


def check_views(db: sql.Connection, name: str, progress: Progress) -> None:
    """What readers see in SQL is what processes decide by."""

    def seen(kind: str, columns: str) -> set[tuple[Any, ...]]:
        return {tuple(row) for row in db.execute(sql.text(f"select {columns} from {name}_{kind}"))}

    courses, held = progress.courses.items(), progress.held().values()
    assert seen("trainers", "name, run_epoch, version, saved, oldest_step") == {
        (name, c.run_epoch, c.finished, c.saved, c.oldest_step) for name, c in courses
    }
    assert seen("explorers", "name, incarnation, done") == {
        (name, one.incarnation, int(one.done)) for name, one in progress.explorers.items()
    }
    leases = [(name, step, lease) for name, c in courses for step, lease in c.leases.items()]
    assert seen("leases", "trainer, step, run_epoch") == {
        (name, step, lease.run_epoch) for name, step, lease in leases
    }
    at = {g.number: (name, step) for name, step, lease in leases for g in lease.groups}
    done = db.execute(  # as docs/buffers.md asks for them
        sql.text(
            f"select g.number, g.trainer, g.step from {name}_groups g join {name}_trainers t "
            "on t.name = g.trainer where g.state = 'stored' and g.step < t.version"
        )
    )
    assert {tuple(row) for row in done} == {
        (number, *by) for number, by in at.items() if by[1] < progress.courses[by[0]].finished
    }
    known = seen("groups", "number, explorer, run_epoch, state, size, trained, trainer, step")
    lost = {row for row in known if row[3] in ("failed", "evicted")}
    assert known - lost == {
        *((*(g.number, g.explorer, g.run_epoch), "stored", g.rows, g.size)
        + at.get(g.number, (None, None)) for g in held if g.stored),
        *((*(g.number, g.explorer, g.run_epoch), "running", *[None] * 4)
        for g in held if not g.stored),
    }  # fmt: skip
    ((consumed, failed, evicted, trained),) = seen("totals", "consumed, failed, evicted, trained")
    gone = {state: sum(row[3] == state for row in lost) for state in ("failed", "evicted")}
    there = [g.size for g in held if g.stored]
    assert consumed + len(there) + evicted + gone["evicted"] == progress.num_stored
    assert (failed + gone["failed"], trained + sum(there)) == (
        progress.num_failed,
        progress.num_experiences,
    )
    assert evicted + gone["evicted"] == progress.num_evicted


OLD_COLUMNS = {
    "groups": "number:big explorer task:blob version:int run_epoch:int state reason size:int "
    "trained:int most:int model_version:int stored_at:float trainer step:int told:blob",
    "experiences": "group:big number:int task model_version:int reward:float data:blob",
    "leases": "trainer step:int run_epoch:int at:float",
    "trainers": "name run_epoch:int version:int saved:int oldest_step:int heard:float",
    "explorers": "name incarnation:int cursor:blob done:int heard:float",
    "totals": "consumed:big failed:big evicted:big trained:big",
}
OLD_TYPES = {"": sql.String, "big": sql.BigInteger, "int": sql.Integer, "float": sql.Float}
OLD_TYPES |= {"blob": sql.LargeBinary}


def older_tables(url: str, version: int, name: str = "experience_buffer") -> None:
    """As an rft of before made them: four groups are stored, a step has two of them."""
    engine, metadata = connect(url), sql.MetaData()

    def table(kind: str) -> sql.Table:
        found = [column.partition(":") for column in OLD_COLUMNS[kind].split()]
        if kind == "groups" and version == 1:
            found = [column for column in found if column[0] not in ("trained", "most")]
        columns = [sql.Column(called, OLD_TYPES[one]) for called, _, one in found]
        return sql.Table(f"{name}_{kind}", metadata, *columns)

    filled = {
        "groups": [
            {
                **{"number": number, "explorer": "p/run/e", "task": b"", "run_epoch": 0},
                **{"state": "stored", "size": 2, "model_version": 0, "stored_at": 1.0 + number},
                **({} if version == 1 else {"trained": 2}),
                "trainer": "p/run/trainer" if number < 2 else None,
                "step": 0 if number < 2 else None,
                "told": encode(["t", 1, 0, 1.0]) if number == 1 else None,
            }
            for number in range(4)
        ],
        "experiences": [
            {"group": group, "number": number, "task": "t", "reward": 1.0, "data": bytes(data)}
            for group in range(4)
            for number, data in enumerate(decode(rows(1.0, 0.0), list[msgspec.Raw]))
        ],
        "leases": [{"trainer": "p/run/trainer", "step": 0, "run_epoch": 1, "at": 1.0}],
        "trainers": [
            {"name": "p/run/trainer", "run_epoch": 1, "version": 0, "saved": 0}
            | {"oldest_step": 0, "heard": 1.0}
        ],
        "explorers": [
            {"name": "p/run/e", "incarnation": 1, "cursor": encode({"next": 4}), "done": 0}
            | {"heard": 1.0}
        ],
        "totals": [dict.fromkeys(("consumed", "failed", "evicted", "trained"), 0)],
    }
    here = {"name": name, "version": version, "next_group": 4}
    with engine.begin() as db:
        Tables(name).buffers.create(db, checkfirst=True)
        db.execute(Tables(name).buffers.insert().values(here))
        for kind, values in filled.items():
            if kind != "totals" or version == 3:
                made = table(kind)
                made.create(db)
                db.execute(made.insert(), values)
    engine.dispose()


async def explore(url: str, name: str, groups: int, hang_at: int) -> None:
    mine = buffer(url)
    start = await mine.attach_explorer(name)
    for group, _ in start["reissue"]:
        await mine.readmit(name, group)
        await mine.put(group, rows(1.0, 0.0))
    done = start["cursor"]["next"] if start["cursor"] else 0
    while done < groups:
        done += 1
        group = await mine.admit(name, b"a task", {"next": done})
        print("admitted", group, flush=True)
        if done == hang_at:
            threading.Event().wait()
        assert group is not None
        await mine.put(group, rows(1.0, 0.0))
    await mine.input_done(name)
    await mine.shutdown()


async def train(url: str, run: str, directory: str, hang_at: int) -> None:
    saved = Path(directory) / f"{run}.json"
    state = (
        json.loads(saved.read_text()) if saved.exists() else {"step": 0, "epoch": 0, "groups": []}
    )
    state["epoch"] += 1
    saved.write_text(json.dumps(state))
    mine = buffer(url, f"p/{run}", max_read_timeout=60.0)
    await mine.attach_trainer(state["step"], state["epoch"])
    while True:
        step = state["step"]
        groups = sorted({e.group for e in opened(await mine.take(step)).experiences})
        print("taken", step, groups, flush=True)
        if step == hang_at:
            threading.Event().wait()
        if not groups:
            break
        state["groups"] += groups
        state["step"] += 1
        await mine.consumed(step)
        if state["step"] % 2 == 0:
            saved.write_text(json.dumps(state))
            await mine.saved(state["step"])
            await mine.retain(0, state["step"])
    saved.write_text(json.dumps(state))
    await mine.shutdown()


class Process:
    def __init__(self, *arguments: object):
        command = [sys.executable, "-m", "tests.unit.sql_world", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def until(self, start: str) -> str:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"ended without {start!r}: {self.lines}"
            self.lines.append(line.strip())
            if line.startswith(start):
                return line.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        assert self.process.wait(120) == 0


def exactly_once(url: str, directory: Path, writers: int, leasers: int, groups: int) -> None:
    """`writers` x `groups` groups through `leasers` trainers, one of each killed and begun again:
    each group is trained once.
    """
    explorers = [
        Process("explorer", url, f"e{n}", groups, groups // 2 if n == 0 else -1)
        for n in range(writers)
    ]
    # alone, or others could leave nothing for it to hold
    first = Process("trainer", url, "t0", directory, 3)
    given = first.until("taken 3")
    assert given != "taken 3 []", "it must be killed while it holds a batch"
    first.kill()
    trainers = [Process("trainer", url, f"t{n}", directory, -1) for n in range(leasers)]
    while explorers[0].until("admitted") and len(explorers[0].lines) < groups // 2:
        pass
    explorers[0].kill()
    explorers[0] = Process("explorer", url, "e0", groups, -1)
    for process in [*explorers, *trainers]:
        process.end()
    again = {line.split()[1]: line for line in trainers[0].lines}
    for line in first.lines:
        step = line.split()[1]
        assert int(step) < 2 or again[step] == line, (
            "what was taken after the checkpoint comes again, the same"
        )
    trained = [
        group
        for n in range(leasers)
        for group in json.loads((directory / f"t{n}.json").read_text())["groups"]
    ]
    assert sorted(trained) == list(range(writers * groups))


if __name__ == "__main__":
    role, url, *rest = sys.argv[1:]
    if role == "explorer":
        asyncio.run(explore(url, rest[0], int(rest[1]), int(rest[2])))
    else:
        asyncio.run(train(url, rest[0], rest[1], int(rest[2])))
