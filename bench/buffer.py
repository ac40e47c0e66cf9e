"""Experiences through the durable queue, and what kill -9 leaves of them.

    python -m bench.buffer [--quick] [--against CHECKOUT]

In: nothing; experiences of 1,024 tokens (256 of the prompt; ids below 151,936, a log-probability
for every token of the response). Out: a table and one last line of JSON.

    queue   explorers admit and put groups of 8, 64 at a time, each acknowledged when it is durable,
            while a trainer takes batches
            of 256 experiences, decodes them and says consumed, each of these durable too; the
            trainer is a process of its own, as it is in a run, and explorers share the queue's
    raw     the same encoded groups appended to a file, with an fsync for as many of them as shared
            one in the queue
    kills   a writer and trainer of this kind in a process of its own, killed with -9 at a random
            moment, again and again on one
            journal: acknowledged groups that are not there afterwards, groups in two batches,
            batches that a restart changed

    SQL     the same through tables, a file of SQLite and, where it is installed, a PostgreSQL of
            this bench's own: rounds in processes of their own (`bench.buffer_round`)

Rounds of queue and raw alternate. The bars: 5,000 experiences/s (median), nothing lost and nothing
twice in 200 kills. `--against`: only rounds of the queue and of SQL, of this checkout and of the
other one in turn; the bar is 0.95 of what the other does. By the processor's seconds too, which
other work on the machine changes less.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.buffer_round import AT_ONCE, REPEATS, TASKS, TOKENS, group
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.journal import Journal
from rft.buffer.progress import Leased, Stored, decode_record
from rft.config import ExperienceBufferConfig

ROUNDS, QUICK_ROUNDS, STEPS = 10, 5, 40
SQL_ROUNDS = 3
KILLS, QUICK_KILLS = 200, 200
BAR, OF_BEFORE = 5000.0, 0.95
IN_TURN, QUICK_IN_TURN = 10, 5  # rounds of each checkout
STORES = {"queue": 40, "SQLite": 8, "PostgreSQL": 8}  # steps of a round
HERE = Path(__file__).resolve().parents[1]
LENGTH = struct.Struct("<Q")


def queue(directory: str, max_staleness: int | None = None) -> ExperienceBuffer:
    return ExperienceBuffer(
        ExperienceBufferConfig(), directory, TASKS, REPEATS, max_staleness, None
    )


class Trainer:
    """A process that gets every batch as the queue delivers it, and makes experiences of it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.buffer", "--trainer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def open(self, delivery: bytes) -> int:
        """How many experiences there were."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(LENGTH.pack(len(delivery)) + delivery)
        self.process.stdin.flush()
        return LENGTH.unpack(self.process.stdout.read(LENGTH.size))[0]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve_trainer() -> None:
    """The other end, in the process."""
    while header := sys.stdin.buffer.read(LENGTH.size):
        batch = opened(sys.stdin.buffer.read(LENGTH.unpack(header)[0]))
        sys.stdout.buffer.write(LENGTH.pack(len(batch.experiences)))
        sys.stdout.buffer.flush()


async def through(
    buffer: ExperienceBuffer, trainer: Trainer, groups: list[bytes], steps: int
) -> float:
    """Seconds for so many steps' groups from `admit` to `consumed`."""
    await buffer.attach_trainer(0, 1)
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with free:
            admitted = await buffer.admit("explorer", b"task", {"next": number})
            assert admitted is not None
            await buffer.put(admitted, groups[number % len(groups)])

    async def train() -> None:
        for step in range(steps):
            count = await asyncio.to_thread(trainer.open, await buffer.take(step))
            assert count == TASKS * REPEATS
            await buffer.consumed(step)

    began = time.perf_counter()
    await asyncio.gather(train(), *(one(number) for number in range(steps * TASKS)))
    return time.perf_counter() - began


def round_of(
    groups: list[bytes], trainer: Trainer, steps: int, directory: str
) -> tuple[float, float, float]:
    """(experiences/s of the queue, of the raw file, groups per fsync)."""

    async def run() -> tuple[float, float]:
        buffer = queue(directory)
        seconds = await through(buffer, trainer, groups, steps)
        shared = steps * TASKS / max(1, buffer.stats()["fsyncs"])
        await buffer.shutdown()
        return seconds, shared

    seconds, shared = asyncio.run(run())
    total = steps * TASKS
    return (
        total * REPEATS / seconds,
        total * REPEATS / raw(groups, total, max(1, round(shared)), directory),
        shared,
    )


def raw(groups: list[bytes], total: int, per_fsync: int, directory: str) -> float:
    """Seconds to append the same bytes, with an fsync after every `per_fsync` groups."""
    fd = os.open(Path(directory) / "raw", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    began = time.perf_counter()
    for number in range(total):
        os.write(fd, groups[number % len(groups)])
        if (number + 1) % per_fsync == 0:
            os.fsync(fd)
    os.fsync(fd)
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


async def endless(directory: str) -> None:
    """Explorers and a trainer until somebody kills this process;
    every acknowledgement is told on stdout.
    """
    buffer = queue(directory)
    progress = buffer.stats()
    step, content = progress["finished_steps"], group(0, tokens=64, prompt=16)
    await buffer.attach_trainer(step, progress["run_epoch"] + 1)
    start = await buffer.attach_explorer("explorer")

    async def explore(unfinished: list[int]) -> None:
        for left in unfinished:
            await buffer.put(left, content)
            os.write(1, b"stored %d\n" % left)
        while True:
            admitted = await buffer.admit("explorer", b"task", {})
            assert admitted is not None
            await buffer.put(admitted, content)
            os.write(1, b"stored %d\n" % admitted)

    async def train() -> None:
        for number in range(step, sys.maxsize):
            opened(await buffer.take(number))
            await buffer.consumed(number)
            os.write(1, b"consumed %d\n" % number)
            if number % 50 == 49:
                await buffer.retain(await buffer.position(), number - 20)

    await asyncio.gather(
        train(),
        explore([number for number, _ in start["reissue"]]),
        *(explore([]) for _ in range(7)),
    )


def kills(count: int, seed: int = 0) -> dict[str, int]:
    """What so many kills of one history left."""
    draw, stored, batches = random.Random(seed), set[int](), dict[int, list[int]]()
    found = {"kills": count, "acknowledged": 0, "lost": 0, "twice": 0, "changed": 0}
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as directory:
        for _ in range(count):
            told = killed_after(draw.randrange(1, 400), directory)
            there, leases = held(directory)
            found["acknowledged"] += len(told)
            found["lost"] += len(
                told - stored - there
            )  # a group that was there may go with its segment, trained and saved
            found["changed"] += sum(
                batches.get(step, groups) != groups for step, groups in leases.items()
            )
            stored |= there
            batches |= leases
    trained = [number for groups in batches.values() for number in groups]
    found["twice"] = len(trained) - len(set(trained))
    return found


def killed_after(lines: int, directory: str) -> set[int]:
    """Groups that the process said are stored, up to its death."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.buffer", "--endless", directory], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    told += process.stdout.read().split(b"\n")[:-1]
    process.wait()
    return {int(line.split()[1]) for line in told if line.startswith(b"stored")}


def held(directory: str) -> tuple[set[int], dict[int, list[int]]]:
    """Groups whose experiences the journal has, and its batches."""
    journal, found, batches = Journal(directory), set[int](), dict[int, list[int]]()
    for _, payload in journal.records():
        record = decode_record(payload)
        if isinstance(record, Stored):
            found.add(record.group)
        elif isinstance(record, Leased):
            batches[record.step] = record.groups
    journal.close()
    return found, batches


# --- rounds in processes of their own -------------------------------------------------------------


@contextlib.contextmanager
def places(store: str, top: Path) -> Iterator[Iterator[str] | None]:
    """Where each round's buffer is; None: there is no such store here."""
    if store != "PostgreSQL":
        form = "{}" if store == "queue" else "sqlite:///{}/buffer.db"
        yield (form.format(tempfile.mkdtemp(dir=top)) for _ in iter(int, 1))
        return
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        yield None
        return
    from tests.unit.postgres import postgres

    with postgres(top) as url:
        yield (_empty(url) for _ in iter(int, 1))


def _empty(url: str) -> str:
    import sqlalchemy as sql

    engine = sql.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as db:
        db.execute(sql.text("drop schema public cascade"))
        db.execute(sql.text("create schema public"))
    engine.dispose()
    return url


def round_in(checkout: Path, store: str, where: str) -> dict[str, float]:
    """Of its rft: experiences per second, and per second of the processor."""
    kind = "queue" if store == "queue" else "sql"
    command = [sys.executable, str(HERE / "bench" / "buffer_round.py"), kind, where]
    done = subprocess.run(
        [*command, str(STORES[store])],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"a round of {store} in {checkout} failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["rft"].startswith(f"{checkout}/"):
        raise RuntimeError(f"{found['rft']} is not of {checkout}")
    return found


def in_turn(checkouts: list[Path], rounds: int) -> dict[str, list[list[dict[str, float]]]]:
    """By store, of each checkout its rounds."""
    found: dict[str, list[list[dict[str, float]]]] = {}
    for store in STORES if len(checkouts) > 1 else list(STORES)[1:]:
        with (
            tempfile.TemporaryDirectory(prefix="rft-bench-") as top,
            places(store, Path(top)) as where,
        ):
            if where is None:
                print(f"no {store} is installed here: left out", flush=True)
                continue
            found[store] = [[] for _ in checkouts]
            for _ in range(rounds):
                for rows, checkout in zip(found[store], checkouts, strict=True):
                    rows.append(round_in(checkout, store, next(where)))
    return found


def tell(found: dict[str, list[list[dict[str, float]]]], checkouts: list[Path]) -> None:
    rows = []
    for store, of_each in found.items():
        for checkout, rounds in zip(checkouts, of_each, strict=True):
            cells = [store, "this" if checkout == HERE else str(checkout)]
            for what in ("per_s", "per_cpu_s"):
                values = [one[what] for one in rounds]
                low, high = report.spread(values)
                cells += [f"{report.median(values):,.0f}", f"{low:,.0f} - {high:,.0f}"]
            rows.append(cells)
    report.table(
        f"experiences of {TOKENS} tokens, {len(of_each[0])} rounds",
        ["store", "of", "per second", "middle half", "per s of the processor", "middle half"],
        rows,
    )


def against(other: Path, rounds: int) -> None:
    checkouts = [HERE, other]
    found = in_turn(checkouts, rounds)
    tell(found, checkouts)
    ratios = {}
    for what in ("per_s", "per_cpu_s"):
        for store, (ours, theirs) in found.items():
            pairs = [a[what] / b[what] for a, b in zip(ours, theirs, strict=True)]
            ratios[f"{store} {what}"] = round(report.median(pairs), 3)
    load = [round(value, 1) for value in os.getloadavg()]
    report.last_line(
        "buffer against",
        ratios,
        {"rounds": rounds},
        {"other": str(other), "bar": OF_BEFORE, "load": load},
        report.versions("msgspec", "sqlalchemy"),
        all(ratios[f"{store} per_s"] >= OF_BEFORE for store in found),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--endless", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        serve_trainer()
        return
    if arguments.endless:
        asyncio.run(endless(arguments.endless))
        return
    if arguments.against:
        against(arguments.against.resolve(), QUICK_IN_TURN if arguments.quick else IN_TURN)
        return
    rounds, count = (QUICK_ROUNDS, QUICK_KILLS) if arguments.quick else (ROUNDS, KILLS)
    groups = [group(seed) for seed in range(TASKS)]
    found, trainer = [], Trainer()
    for _ in range(rounds + 1):  # the first warms up
        with tempfile.TemporaryDirectory(prefix="rft-bench-") as directory:
            found.append(round_of(groups, trainer, STEPS, directory))
    trainer.close()
    ours, theirs, shared = ([row[column] for row in found[1:]] for column in range(3))
    left = kills(count)
    tell(in_turn([HERE], SQL_ROUNDS), [HERE])
    rows = [
        [name, f"{report.median(values):,.0f}", "{:,.0f} - {:,.0f}".format(*report.spread(values))]
        for name, values in (("durable queue", ours), ("raw append and fsync", theirs))
    ]
    report.table(
        f"experiences of {TOKENS} tokens per second, {rounds} rounds",
        ["", "median", "middle half"],
        rows,
    )
    report.table(
        f"{count} kills with -9",
        ["", "number"],
        [
            ["groups acknowledged as stored", f"{left['acknowledged']:,}"],
            ["of them lost", str(left["lost"])],
            ["groups in two batches", str(left["twice"])],
            ["batches changed by a restart", str(left["changed"])],
        ],
    )
    report.last_line(
        "buffer",
        {
            "experiences_per_s": report.median(ours),
            "queue/raw": report.median(ours) / report.median(theirs),
        },
        {"rounds": rounds, **left},
        {
            "tokens": TOKENS,
            "bytes": len(groups[0]) // REPEATS,
            "group": REPEATS,
            "batch": TASKS * REPEATS,
            "at_once": AT_ONCE,
            "groups_per_fsync": round(report.median(shared), 1),
        },
        report.versions("msgspec", "xxhash"),
        report.median(ours) >= BAR
        and not (left["lost"] or left["twice"] or left["changed"])
        and count >= KILLS,
    )


if __name__ == "__main__":
    main()
