"""Class 1: kill -9 of agent, trainer or both, around every call
to the disk and after every message.
"""

import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.faults.disks import FIRED, Board, Counting, Killing
from bench.faults.job import Job, Outcome, save_here
from bench.faults.judge import Tally, judge
from bench.faults.loader import Loader
from bench.faults.toy import Cut
from rft.checkpoint import fence
from rft.checkpoint.records import Committed
from rft.checkpoint.storage import Disk

OLD, NEW, AFTER = Cut(1), Cut(2), Cut(3)
VICTIMS = ("agent", "trainer", "both")


@dataclass(frozen=True)
class Shape:
    """What kind of job is hit."""

    world: int
    windows: int = 1
    keep: int = 1
    weights: bool = False
    scale: int = 1


SHAPES = [
    Shape(world, windows, keep, weights, scale)
    for scale, weights, keep, windows, world in itertools.product(
        (1, 3), (False, True), (1, 0), (1, 2), (1, 2)
    )
]


@dataclass(frozen=True)
class Point:
    """`rank`'s agent at its call `number`; rank -1: the trainer after its message `number`."""

    shape: Shape
    rank: int
    number: int
    when: str
    victim: str
    kind: str

    def __str__(self) -> str:
        return (
            f"{self.victim} killed {self.when} call {self.number} ({self.kind}) of rank "
            f"{self.rank}, {self.shape}"
        )


class Ground:
    """A fresh root per case with the checkpoint of step 1 in it; nothing of it stays."""

    def __init__(self, loader: Loader):
        self.loader = loader
        place = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.top = Path(tempfile.mkdtemp(prefix="rft-faults-", dir=place))
        self._count = itertools.count()
        self._old: dict[tuple[int, int], Path] = {}

    def fresh(self, world: int, scale: int = 1) -> Path:
        if (world, scale) not in self._old:
            old = self._old[world, scale] = self.top / f"old{world}-{scale}"
            (old / "weights").mkdir(parents=True)
            save_here(old, Cut(OLD.step, scale=scale), world)
        root = self.top / f"case{next(self._count)}"
        shutil.copytree(self._old[world, scale], root)
        return root

    def close(self) -> None:
        shutil.rmtree(self.top)

    def __enter__(self) -> "Ground":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def job(
    root: Path,
    shape: Shape,
    disks: list[Disk],
    board: Board,
    messages: int = 0,
    cuts: tuple[Cut, ...] = (NEW,),
) -> Job:
    scaled = [Cut(cut.step, cut.variant, shape.scale) for cut in cuts]
    return Job(
        root, shape.world, scaled, disks, board, shape.windows, shape.keep, shape.weights, messages
    )


def points(ground: Ground, shape: Shape) -> Iterator[Point]:
    """All of one shape: what an undisturbed job calls is counted first."""
    root, board = ground.fresh(shape.world, shape.scale), Board()
    lists = [ground.top / f"calls{rank}" for rank in range(shape.world)]

    class Listing(Counting):
        def __init__(self, target: Path):
            super().__init__()
            self.target = target

        def call(self, kind, path, action, half=None):  # type: ignore[no-untyped-def]
            with open(self.target, "a") as file:
                file.write(f"{kind}\n")
            return super().call(kind, path, action, half)

    done = job(root, shape, [Listing(target) for target in lists], board).run()
    assert set(done.acknowledged) == {NEW.step}, done
    for rank, target in enumerate(lists):
        for number, kind in enumerate(target.read_text().split(), 1):
            for when in (
                ("before", "middle", "after")
                if kind in ("write", "remove_tree")
                else ("before", "after")
            ):
                yield from (Point(shape, rank, number, when, victim, kind) for victim in VICTIMS)
        target.unlink()
    for number in range(1, shape.world * (shape.windows + 2) + 1):
        yield Point(shape, -1, number, "after", "trainer", "message")
    shutil.rmtree(root)
    board.close()


def strike(ground: Ground, point: Point) -> tuple[list[str], bool]:
    """Problems of one injection, and whether it happened at all."""
    shape, board = point.shape, Board()
    root = ground.fresh(shape.world, shape.scale)
    disks: list[Disk] = [Disk() for _ in range(shape.world)]
    if point.rank >= 0:
        disks[point.rank] = Killing(point.number, point.when, point.victim, board)
    else:
        board.set(FIRED, 1)
    outcome = job(root, shape, disks, board, point.number if point.rank < 0 else 0).run()
    fired = bool(board.get(FIRED))
    board.close()
    problems = aftermath(ground, root, outcome, shape.scale, must_land=point.victim == "trainer")
    problems += the_next_one_works(ground, root, shape)
    shutil.rmtree(root)
    return problems, fired


def aftermath(
    ground: Ground, root: Path, outcome: Outcome, scale: int, must_land: bool
) -> list[str]:
    """A staged save whose trainer alone died must be there; so must every acknowledged one."""
    least = max([OLD.step, *outcome.acknowledged, *(outcome.staged if must_land else [])])
    problems, _ = judge(root, ground.loader, least, scale)
    if list(root.glob(".bad-*")):
        problems.append("a kill made a committed checkpoint bad")
    return problems + (["somebody did not end"] if outcome.hung else [])


def the_next_one_works(ground: Ground, root: Path, shape: Shape) -> list[str]:
    """The next attempt sweeps, saves the next step, and that is found."""
    left = fence.await_agents(root / "control", 0.0, lambda text: None)
    if left:
        return [f"agents still live: {left}"]
    ground.loader.load(root, shape.scale, sweep=True)
    drafts = [
        path.name for path in root.iterdir() if ".tmp-" in path.name or ".trash-" in path.name
    ]
    cut = Cut(AFTER.step, scale=shape.scale)
    reports = save_here(root, cut, shape.world)
    if not any(isinstance(report, Committed) for report in reports):
        return [f"the next attempt's save: {reports}"]
    problems, loaded = judge(root, ground.loader, cut.step, shape.scale)
    return problems + ([f"left over after the sweep: {drafts}"] if drafts else [])


def run(ground: Ground, count: int) -> Tally:
    """`count` points, spread evenly over all there are of as many shapes as it takes."""
    tally = Tally("kill -9")
    found: list[Point] = []
    per_shape = 0
    for number, shape in enumerate(SHAPES):
        if number >= 2 and per_shape * number >= count * 1.05:
            break
        found += points(ground, shape)
        per_shape = len(found) // (number + 1)
    chosen = random.Random(1).sample(found, min(count, len(found)))
    for point in chosen:
        problems, fired = strike(ground, point)
        if fired or problems:
            tally.note(f"{point.victim}, world {point.shape.world}", str(point), problems)
    return tally
