"""Class 8: corruptions of versions, which are patches of each other: those of class "drawn", over a
chain of versions of two ranks, then every version is read as an engine reads it.

Asked for: whatever is handed out as a version has all of its bits; a version is read where nothing
was done to it and to what it is a patch of; anything else is refused as damaged or not there, and
nothing is changed by reading. What is untouched is for this judge to say, by comparing files.
"""

import shutil
import time
from pathlib import Path

import numpy as np

from bench.faults.drawn import FILES, Dice, contents
from bench.faults.judge import Tally
from bench.faults.kills import Ground
from bench.faults.toy import output, settings
from rft.checkpoint import catalog, commit, sharding
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.reader import Checkpoint, Mismatch
from rft.checkpoint.records import Begin, Receipt, Report, decode_json
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import VERSIONS, Disk, LocalStorage
from rft.checkpoint.versions import VersionKeeper
from rft.checkpoint.writer import Writer, receipt_name

WORLD, ROWS, COLUMNS = 2, 80, 64
CHANGED = 0.01  # of the elements, from one version to the next


class VersionDice(Dice):
    steps = tuple(range(1, 10))
    prefix = "v_"


def publish(root: Path) -> dict[int, np.ndarray]:
    """A chain through the product's writers and committers; what each version holds."""
    storage, chance = LocalStorage(root, Disk()), np.random.default_rng(0)
    storage.prepare()
    control = root.parent / "control"
    claims = [
        Claim(
            "model/w",
            "bfloat16",
            (ROWS, COLUMNS),
            (rank * ROWS // WORLD, 0),
            (ROWS // WORLD, COLUMNS),
            None,
        )
        for rank in range(WORLD)
    ]
    regions = [sharding.place([claim]) for claim in claims]
    told = [settings(str(root), str(control), rank, WORLD, 1, [], 0) for rank in range(WORLD)]
    keepers, heard = [VersionKeeper() for _ in range(WORLD)], list[Report]()
    weights, published = chance.integers(0, 2**16, (ROWS, COLUMNS), np.uint16), {}
    for step in VersionDice.steps:
        weights = np.where(chance.random(weights.shape) < CHANGED, weights + 1, weights)
        published[step], identity = weights, f"e0001n{step:04d}"
        for rank, keeper in reversed(list(enumerate(keepers))):
            place = output(storage, VERSIONS, step, identity, regions, rank)
            loop = {"step": step} if rank == 0 else None
            begin = Begin(
                id=identity, step=step, outputs=[place], small={}, local={}, loop=loop, about={}
            )
            writer = Writer(begin, told[rank], storage, lambda count: None, keeper.stream)
            data = bytearray(place.bytes)
            own = weights[rank * ROWS // WORLD : (rank + 1) * ROWS // WORLD].tobytes()
            data[: len(own)] = own
            writer.window(memoryview(data), 0)
            writer.finish()
        committer = commit.Committer(storage, told[0], heard.append)
        committer.watch(begin, place, time.monotonic())
        committer.look()
    return published


def chains(place: Path) -> dict[int, set[int]]:
    """Of each version those that it needs, itself among them."""
    needed: dict[int, set[int]] = {}
    for step in VersionDice.steps:
        files = [place / f"v_{step:08d}" / receipt_name(rank) for rank in range(WORLD)]
        patches = [decode_json(file.read_bytes(), Receipt).patch for file in files]
        bases = {patch.base[0] for patch in patches if patch is not None}
        needed[step] = {step}.union(*(needed[base] for base in bases))
    return needed


def run(ground: Ground, count: int, seed: int) -> Tally:
    tally = Tally("patches")
    print(f"\ncorruptions of patches are drawn from seed {seed}", flush=True)
    whole = ground.top / "versions_whole"
    published = publish(whole)
    needed = chains(whole / VERSIONS)
    assert max(map(len, needed.values())) > 2, "no chain of patches"
    for number in range(count):
        dice, root = VersionDice(f"{seed}:{number}"), ground.top / "versions_drawn"
        shutil.copytree(whole, root)
        names = dice.damage(root / VERSIONS)
        words = f"{number} of seed {seed}: {', '.join(names)}"
        tally.note(names[0], words, judged(whole, root, published, needed))
        shutil.rmtree(root)
    shutil.rmtree(whole)
    return tally


def judged(
    whole: Path, root: Path, published: dict[int, np.ndarray], needed: dict[int, set[int]]
) -> list[str]:
    before, storage = contents(root), LocalStorage(root, Disk())
    sound = {step for step in published if is_same(whole, root, f"v_{step:08d}")}
    problems, read = [], set()
    for path in catalog.committed(storage, VERSIONS):
        try:
            with Checkpoint(storage, path) as saved:
                saved.verify()
                found, step = saved.whole("model/w"), saved.manifest.step
        except (Damaged, Mismatch, OSError):
            continue
        if not np.array_equal(found, published[step]):
            problems.append(f"WRONG {path} was read as version {step} with other bits")
        read.add(Path(path).name)
    for step, chain in needed.items():
        if chain <= sound and f"v_{step:08d}" not in read:
            problems.append(f"LOST version {step} is sound and is not read")
    if before != contents(root):
        problems.append("something was deleted or changed")
    return problems


def is_same(whole: Path, root: Path, name: str) -> bool:
    """Whether nothing was done to that version; what was put beside its files changes nothing."""
    for file in FILES:
        one, other = (top / VERSIONS / name / file for top in (whole, root))
        if other.is_symlink() or not other.is_file() or one.read_bytes() != other.read_bytes():
            return False
    return True
