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

from rft.buffer.delivery import opened
from rft.buffer.sql_buffer import SqlBuffer
from rft.config import ExperienceBufferConfig
from rft.ground.experience import Experience, VersionSpan, encode

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
    **settings: Any,
) -> SqlBuffer:
    config = ExperienceBufferConfig(storage_type="sql", path=url, **settings)
    return SqlBuffer(config, run, TASKS, 2, max_staleness, None, experiences, clock)


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
