"""Class 5: more than one at a time. Two writers of a step, a writer that wakes up too late, one
that never comes back, readers.

Every scene ends before the judges; what else it asks for is said in it.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from bench.faults.disks import Board, Signalling
from bench.faults.job import Job
from bench.faults.judge import Tally, committed, judge
from bench.faults.kills import Ground
from bench.faults.toy import Cut
from rft.checkpoint import fence
from rft.checkpoint.catalog import list_entries
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.rank_files import StorageUnreachable
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.storage import Disk, LocalStorage

FIRST, SECOND = Cut(2, 1), Cut(2, 2)  # two saves of one step
# (call, expression for its path) at which the zombie is stopped, in the order in which they come
STOPS = [
    ("mkdir", "step_00000002[.]tmp-"),
    ("create", "r00000.bin"),
    ("sync", "r00000.bin"),
    ("create", "r00000.json"),
    ("rename", "r00000.json"),
    ("create", "MANIFEST"),
    ("rename", "MANIFEST"),
    ("rename", "step_00000002$"),
]


def clean(world: int) -> list[Disk]:
    return [Disk() for _ in range(world)]


def two_writers(ground: Ground, root: Path, world: int, number: int) -> list[str]:
    """Both attempts live, nobody swept: each may commit, and the newer attempt's is what counts."""
    board, results = Board(), []
    other = Job(root, world, [SECOND], clean(world), Board(), windows=1 + number % 2)
    one = Job(
        root, world, [FIRST], clean(world), board, watch=lambda job: results.append(other.run())
    )
    results.append(one.run())
    problems, loaded = judge(root, ground.loader, 2)
    if loaded.cut != SECOND or SECOND.step not in results[0].acknowledged:
        problems.append(f"LOST the newer attempt's save: {loaded.cut} {results}")
    return problems


def zombie(ground: Ground, root: Path, world: int, number: int) -> list[str]:
    """Stopped anywhere before it publishes, woken after a newer attempt has saved the same step: it
    publishes nothing.
    """
    kind, inside = STOPS[number % len(STOPS)]
    disks = clean(world)
    disks[0] = Signalling(kind, inside, signal.SIGSTOP)
    fresh = Job(
        root,
        world,
        [SECOND],
        clean(world),
        Board(),
        swept=lambda: ground.loader.load(root, sweep=True),
    )
    results, alive = [], []

    def overtake(job: Job) -> None:
        pid = job.pids["agent0"]
        os.waitpid(pid, os.WUNTRACED)
        alive.extend(fence.await_agents(root / "control", 0.0, lambda text: None))
        results.append(fresh.run())
        os.kill(pid, signal.SIGCONT)

    stopped = Job(
        root, world, [FIRST], disks, Board(), lease_s=60.0, deadline_s=4.0, watch=overtake
    ).run()
    problems, loaded = judge(root, ground.loader, 2)
    if not alive:
        problems.append("the stopped agent was not seen")
    if (
        loaded.cut != SECOND
        or stopped.acknowledged
        or any(held.cut == FIRST for held in committed(root))
    ):
        problems.append(f"WRONG the zombie published: {loaded.cut} {stopped}")
    return problems


def takeover(ground: Ground, root: Path, world: int, number: int) -> list[str]:
    """Rank 0's agent dies between the receipts and the commit:
    rank 1's commits when its lease comes.
    """
    kind, inside = STOPS[5 + number % 3]
    disks = [Signalling(kind, inside, signal.SIGKILL), *clean(world - 1)]
    outcome = Job(root, world, [FIRST], disks, Board(), lease_s=0.05, keep=number % 2).run()
    problems, _ = judge(root, ground.loader, FIRST.step)
    return problems + ([] if not outcome.failed else [f"reported as failed: {outcome.failed}"])


def sizes(ground: Ground, root: Path, world: int, number: int) -> list[str]:
    """A small state after a big one, and back, through the same slots."""
    cuts = [Cut(2, 0, 4), Cut(3, 0, 1), Cut(4, 0, 2)][: 2 + number % 2]
    outcome = Job(root, world, cuts, clean(world), Board(), windows=1 + number % 2).run()
    problems, _ = judge(root, ground.loader, cuts[-1].step)
    return problems + ([] if outcome.acknowledged else [f"{outcome}"])


def reader_beside(ground: Ground, root: Path, world: int, number: int) -> list[str]:
    """While every save retires the one before, a reader always finds a whole one."""
    problems: list[str] = []
    storage = LocalStorage(root, Disk())

    def read(job: Job) -> None:
        while not committed_step(root, 5):
            try:
                entries = list_entries(storage)
                if entries:
                    with Checkpoint(storage, entries[-1].path) as checkpoint:
                        checkpoint.verify()
            except (Damaged, StorageUnreachable) as error:
                if (root / entries[-1].path / "MANIFEST.json").exists():
                    problems.append(f"WRONG {error}")
            except FileNotFoundError:
                continue  # retired between the list and the look
            if (
                os.waitid(os.P_PID, job.pids["trainer"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is not None
            ):
                return

    Job(
        root, world, [Cut(step) for step in range(2, 6)], clean(world), Board(), keep=1, watch=read
    ).run()
    found, _ = judge(root, ground.loader, 5)
    return problems + found


def committed_step(root: Path, step: int) -> bool:
    return (root / f"step_{step:08d}" / "MANIFEST.json").exists()


Scene = Callable[[Ground, Path, int, int], list[str]]
SCENES: list[tuple[str, Scene, tuple[int, ...]]] = [
    ("two writers", two_writers, (1, 2)),
    ("zombie", zombie, (1, 2)),
    ("takeover", takeover, (2,)),
    ("small after big", sizes, (1, 2)),
    ("reader beside", reader_beside, (1, 2)),
]


def run(ground: Ground, count: int) -> Tally:
    """`count` scenes, kinds in turn, worlds and variations in turn within each."""
    tally = Tally("concurrency")
    for number in range(count):
        name, scene, worlds = SCENES[number % len(SCENES)]
        turn = number // len(SCENES)
        world = worlds[turn % len(worlds)]
        root = ground.fresh(world)
        problems = scene(ground, root, world, turn // len(worlds))
        tally.note(name, f"{name}, world {world}, variation {turn // len(worlds)}", problems)
        shutil.rmtree(root)
    return tally
