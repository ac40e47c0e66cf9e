"""One run of `bench.chaos`: the quickstart's GRPO stage as a user starts it, under faults or not.

    python -m rft.train experiment=quickstart ... ──lines of stdout, with when──► steps kept, words
       ▲ its processes, ten looks a second ──► a part that died: gone, back, or named in a line
       └── a fault every so many seconds, from a deck (`bench.chaos_faults`)

In: a directory that holds the finished warm-up, the deck, the pace. Out: `Outcome`. Invariant: the
run is ended with all that it started when this returns.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from bench.chaos_faults import (
    DISK,
    FULL,
    KILL,
    LASTS,
    LONG,
    RESET,
    SHORT,
    Card,
    Fault,
    RunDisk,
    found,
    lives,
    reset,
)
from rft.buffer.journal import Journal
from rft.buffer.progress import Consumed, Leased, Progress, Resumed, Stored, decode_record
from rft.ground.process import adopt_orphans

REPOSITORY = Path(__file__).resolve().parents[1]
STAGE = Path("rft", "quickstart", "rft")
LOOK_S = 0.1
KILLED_S, STOPPED_S = 5.0, 35.0  # in which the death, or the long stop, of a part is noticed
STEP = re.compile(r"^\[ *(\d+)/\d+ .*loss")
RESTARTS = 1000
SEGMENT = 64 * 2**20


@dataclass
class Outcome:
    code: int | None  # None: it did not come to an end
    accuracy: float | None = None
    steps: list[tuple[float, int]] = field(default_factory=list)  # when each line came
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """From the first step's line to the last one's."""
        return self.steps[-1][0] - self.steps[0][0] if self.steps else 0.0

    @property
    def kept(self) -> int:
        return max((step for _, step in self.steps), default=0)

    def kept_at(self, moment: float) -> int:
        return max((step for when, step in self.steps if when <= moment), default=0)


class ChaosRun:
    def __init__(
        self, arguments: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
    ):
        adopt_orphans()
        self.before = {one.pid for one in psutil.Process().children(recursive=True)}
        self.lines: list[tuple[float, str]] = []
        self.errors = log.open("w", buffering=1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rft.train", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))
            self.errors.write(line)

    def steps(self) -> list[tuple[float, int]]:
        return [(when, int(hit[1])) for when, line in self.lines if (hit := STEP.match(line))]

    def family(self) -> list[psutil.Process]:
        """Reaps what it adopted: Ray takes a zombie for alive."""
        all_ = psutil.Process().children(recursive=True)
        mine = [one for one in all_ if one.pid not in self.before]
        psutil.wait_procs([one for one in mine if one.pid != self.process.pid], timeout=0)
        return mine

    def said(self, since: float, part: str) -> bool:
        """Whether a line names the part since then."""
        word = part.split()[-1]  # "rank" of "trainer rank 0", "worker", "agent"
        return any(
            when >= since and word in line and not STEP.match(line)
            for when, line in list(self.lines)
        )

    def close(self) -> None:
        while family := [one for one in self.family() if lives(one)]:
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family, timeout=5)
        self.process.wait(10)
        self.reader.join(10)
        self.errors.close()


class Chaos:
    """Faults at a run, in the one thread that also looks what comes of them."""

    def __init__(
        self,
        run: ChaosRun,
        disk: RunDisk,
        cards: Iterator[Card],
        every: float,
        seed: int,
    ):
        self.run = run
        self.disk = disk
        self.cards = cards
        self.every = every
        self.dice = random.Random(f"{seed} connections")
        self.faults: list[Fault] = []
        self.stopped: list[tuple[float, psutil.Process, Fault]] = []
        self.watched: list[tuple[psutil.Process, Fault]] = []
        self.full_until = 0.0
        self.card: Card | None = None  # which waits for its part to be there
        self.slow: threading.Thread | None = None

    def until_its_end(self, deadline: float) -> None:
        """Begins with the first step that was told."""
        due = 0.0
        while self.run.process.poll() is None and time.monotonic() < deadline:
            now = time.monotonic()
            if not due and self.run.steps():
                due = now + self.every / 2
            if due and now >= due:
                due += self.every
                self.card = self.card or next(self.cards)
            if self.card and self.strike(*self.card):
                self.card = None
            self.look(now)
            time.sleep(LOOK_S)
        self.end()

    def strike(self, kind: str, part: str) -> bool:
        """False: the part has no process just now; the next look tries again."""
        fault = Fault(kind, part, time.monotonic())
        if part == DISK:
            self._disk(fault)
        elif (process := found(self.run.family(), part)) is None:
            return False
        else:
            fault.pid = process.pid
            self._process(fault, process)
        self.faults.append(fault)
        print(f"    {kind:<10} {part:<17} {fault.words}", flush=True)
        return True

    def _disk(self, fault: Fault) -> None:
        if fault.kind == FULL:
            fault.words = self.disk.fill()
            self.full_until = fault.began + LASTS[FULL]
        elif self.slow is None or not self.slow.is_alive():
            over = lambda: self.run.process.poll() is not None  # noqa: E731
            self.slow = threading.Thread(target=self.disk.be_slow, args=(over,))
            self.slow.start()

    def _process(self, fault: Fault, process: psutil.Process) -> None:
        fault.words = f"process {process.pid}"
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault.kind == RESET:
                fault.words += f", {reset(process, self.dice)}"
            elif fault.kind == KILL:
                process.kill()
                self.watched.append((process, fault))
            else:
                process.send_signal(signal.SIGSTOP)
                self.stopped.append((fault.began + LASTS[fault.kind], process, fault))

    def look(self, now: float) -> None:
        """What ended since, who was named or replaced, and whose stop is over."""
        if self.full_until and now >= self.full_until:
            self.disk.empty()
            self.full_until = 0.0
        for process, fault in list(self.watched):
            other = found(self.run.family(), fault.part)
            back = other is not None and other.pid != fault.pid
            if back or self.run.said(fault.began, fault.part):
                fault.noticed = now
                self.watched.remove((process, fault))
        for until, process, fault in list(self.stopped):
            if not lives(process) and fault.noticed is None:
                fault.noticed = now
            if now >= until or fault.noticed is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
                self.stopped.remove((until, process, fault))

    def end(self) -> None:
        self.disk.empty()
        if self.slow is not None:
            self.slow.join()
        for _, process, _ in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def beside(short: Fault, other: Fault) -> bool:
    """Whether a part may have died of another fault, which took its part with it."""
    until = short.noticed or float("inf")
    over = (other.noticed or float("inf")) + KILLED_S
    return other.kind in (KILL, LONG) and other.began <= until and over >= short.began


def late(faults: list[Fault], ended: float) -> list[str]:
    """Faults that were noticed too late, or although they must not be; what the run's own end
    came before is no verdict.
    """
    problems = []
    for one in faults:
        took = None if one.noticed is None else one.noticed - one.began
        limit = {KILL: KILLED_S, LONG: STOPPED_S}.get(one.kind)
        if one.pid and limit and (took or ended - one.began) > limit:
            told = "not noticed" if took is None else f"noticed after {took:.1f} s"
            problems.append(f"{one.kind} of {one.part}: {told}")
        if (
            one.kind == SHORT
            and took is not None
            and not any(beside(one, other) for other in faults)
        ):
            problems.append(f"{one.kind} of {one.part}: it died after {took:.1f} s")
    return problems


def exactly_once(job: Path, steps: int) -> list[str]:
    """What the journal says against it: a group that two steps took, or none; a step that was
    trained twice or left out, except again from a checkpoint.
    """
    journal = Journal(str(job / "buffer" / "experience_buffer"), SEGMENT)
    records = [decode_record(payload) for _, payload in journal.records()]
    journal.close()
    progress, at, problems = Progress(), None, []
    for record in records:
        try:
            progress.apply(record)
        except KeyError as group:
            return [f"the journal does not replay: group {group} in {type(record).__name__}"]
        if isinstance(record, Resumed):
            at = record.step
        elif isinstance(record, Consumed):
            if at is not None and record.step != at:
                problems.append(f"step {record.step} was consumed where {at} was next")
            at = record.step + 1
    leased = [number for one in records if isinstance(one, Leased) for number in one.groups]
    stored = [one.group for one in records if isinstance(one, Stored)]
    for name, numbers in (("leased", leased), ("stored", stored)):
        if twice := len(numbers) - len(set(numbers)):
            problems.append(f"{twice} groups were {name} twice")
    left = set(stored) - set(leased) - set(progress.waiting)
    if left:
        problems.append(f"{len(left)} stored groups were lost")
    if progress.finished != steps or progress.next_step < steps:
        problems.append(f"{progress.finished} of {steps} steps were consumed")
    return problems


def accuracy(job: Path) -> float | None:
    """The last evaluation's."""
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    return scores[-1] if scores else None
