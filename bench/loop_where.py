"""Where the processor seconds of a run of rft go: `bench.loop`'s rows.

In: the kernel's counts of all threads of a run's processes when the clock begins and when it ends,
and the run's timeline for the two threads that do several rows' work. Out: seconds by row. Their
sum is what the kernel counted for all processes, those that ended and were waited for included.

    decode      engine: vLLM's model
    sampling    engine: vLLM's sampler, with the log-probabilities
    steps       engine: the rest of vLLM's steps: scheduler, batch, answers
    front       the engine's actor: vLLM's `AsyncLLM`, requests and answers
    rewards     explorer and reward workers: workflows, rewards, experiences
    journal     the experience buffer
    pack        trainer rank: takes, decodes, credits, packs and lays out a batch
    forward     trainer rank: forward pass, with the loss
    backward    trainer rank: backward pass
    optimizer   trainer rank: norm, clipping, Adam
    loop        trainer rank: what is left of its thread: publishes, metrics, checkpoints
    sync        threads that send and receive weights, and the synchronizer
    rest        Ray, the supervisor, the checkpoint agent, and helper threads of the rank
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft.tools.timeline import Track, load

ROWS = (
    *("decode", "sampling", "steps", "front", "rewards", "journal"),
    *("pack", "forward", "backward", "optimizer", "loop", "sync", "rest"),
)
PARTS = {  # what a process's title tells of who it is; the first that fits counts
    "rft.run.rank": "trainer",
    "EngineCore": "engine",
    "RolloutEngine": "front",
    "Explorer": "rewards",
    "reward_worker": "rewards",
    "rewards": "rewards",
    "ExperienceBuffer": "journal",
    "Synchronizer": "sync",
}
WEIGHT_THREADS = ("weights-", "stream-", "stage", "group", "leave-weights")  # see `NamedThread`
OF_SPANS = {  # of the rank's main thread: a span's own time, without those inside it
    "wait_batch": "pack",
    "lay out": "pack",
    "forward": "forward",
    "train": "backward",
    "optimizer": "optimizer",
}
OF_COUNTERS = {"model": "decode", "sampler": "sampling"}
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Counts:
    """Processor seconds since each began. `at`: seconds of the wall clock."""

    at: float
    whole: float = 0.0  # of all processes and their children that were waited for
    threads: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)  # row or part


def counted(processes: Iterable[psutil.Process], at: float) -> Counts:
    found = Counts(at)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            part = part_of(process)
            found.whole += sum(_fields(Path(f"/proc/{process.pid}/stat"))[1:])
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                name, user, system, *_ = _fields(task / "stat")
                thread = int(task.name)
                key = process.pid, thread
                found.threads[key] = row_of(part, name, thread == process.pid), user + system
    return found


def part_of(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next((part for mark, part in PARTS.items() if mark in title), "rest")


def row_of(part: str, name: str, is_main: bool) -> str:
    """The row of a thread, or the part whose rows its timeline tells apart."""
    if part in ("engine", "trainer") and name.startswith(WEIGHT_THREADS):
        return "sync"
    if part == "trainer":
        return "trainer" if is_main else "rest"
    return part


def _fields(stat: Path) -> tuple:
    """Name and seconds: user, system, and those of children that were waited for."""
    head, _, tail = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
    ticks = map(int, tail.split()[11:15])
    return head.partition("(")[2], *(count * TICK for count in ticks)


def where(begin: Counts, end: Counts, job: Path) -> dict[str, float]:
    """Seconds by row between the two. `job`: the run's directory."""
    found = dict.fromkeys(ROWS, 0.0)
    shared = {"trainer": 0.0, "engine": 0.0}
    for key, (row, seconds) in end.threads.items():
        spent = seconds - begin.threads.get(key, (row, 0.0))[1]
        into = shared if row in shared else found
        into[row] += spent
    tracks = load(job)
    for track in tracks:
        if track.part == "rank_0":
            own = {row: s for row, s in own_times(track, begin.at, end.at).items()}
            for row, seconds in own.items():
                found[row] += seconds
                shared["trainer"] -= seconds
        for name, row in OF_COUNTERS.items():
            seconds = counter(track, name, begin.at, end.at)
            found[row] += seconds
            shared["engine"] -= seconds
    found["loop"], found["steps"] = shared["trainer"], shared["engine"]
    found["rest"] += end.whole - begin.whole - sum(found.values())  # threads that ended
    return found


def own_times(track: Track, begin: float, end: float) -> dict[str, float]:
    """Processor seconds of the spans of `OF_SPANS` that began and ended between the two."""
    found: dict[str, float] = {}
    stack: list[list[float]] = []  # of each open span: what those inside it took
    for event in track.events:
        if event["ph"] not in "BE" or "tts" not in event or event["tid"] != event["pid"]:
            continue
        if event["ph"] == "B":
            stack.append([event["tts"], 0.0])
        elif stack:
            began, inner = stack.pop()
            took = event["tts"] - began
            if stack:
                stack[-1][1] += took
            if begin <= event["ts"] / 1e6 <= end and (row := OF_SPANS.get(event["name"])):
                found[row] = found.get(row, 0.0) + (took - inner) / 1e6
    return found


def counter(track: Track, name: str, begin: float, end: float) -> float:
    """How much a counter of the timeline has grown between the two."""
    told = [
        (event["ts"] / 1e6, event["args"][name])
        for event in track.events
        if event["ph"] == "C" and event["name"] == name
    ]
    before = [value for at, value in told if at <= begin]
    until = [value for at, value in told if at <= end]
    return (until[-1] if until else 0.0) - (before[-1] if before else 0.0)
