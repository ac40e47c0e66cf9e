"""Class 3: the disk says no. Each kind of error at every call, once or until the next save; short
writes; a full file system.

Asked for: the save fails with one message that names the cause, or is committed whole; the old one
stays; the next save works.
"""

import contextlib
import ctypes
import itertools
import os
import random
import shutil
from pathlib import Path

from bench.faults.disks import ERRORS, FIRED, Board, Failing
from bench.faults.job import Outcome
from bench.faults.judge import Tally, judge
from bench.faults.kills import AFTER, NEW, OLD, SHAPES, Ground, Shape, job, points
from bench.faults.toy import Cut
from rft.checkpoint.storage import Disk

SHORT = "short write"
PAGE = 4096
REMOUNT = 32  # of mount(2)
HEALS = "step_00000003.tmp-"  # an error for ever ends where the next save begins


def run(ground: Ground, count: int) -> Tally:
    tally = Tally("I/O errors")
    found: list[tuple[Shape, int, int, str, str, bool]] = []
    for number, shape in enumerate(SHAPES):
        if number >= 2 and len(found) >= count * 1.05:
            break
        calls = {(p.rank, p.number, p.kind) for p in points(ground, shape) if p.rank >= 0}
        for rank, at, kind in sorted(calls):
            for error, for_ever in itertools.product(ERRORS, (False, True)):
                # for ever, at world 2, not even word can be left for the other rank: it waits until
                # its deadline
                if not for_ever or shape.world == 1 or (at == 1 and error == "ENOSPC"):
                    found.append((shape, rank, at, kind, error, for_ever))
            if kind == "write":
                found.append((shape, rank, at, kind, SHORT, False))
    for case in random.Random(2).sample(found, min(count, len(found))):
        problems, fired = one(ground, *case)
        if fired:
            tally.note(case[4], " ".join(map(str, case)), problems)
    return tally


def one(
    ground: Ground, shape: Shape, rank: int, at: int, kind: str, error: str, for_ever: bool
) -> tuple[list[str], bool]:
    """Save step 2 over the error, step 3 after it, in one job."""
    root, board = ground.fresh(shape.world, shape.scale), Board()
    disks: list[Disk] = [Disk() for _ in range(shape.world)]
    disks[rank] = Failing(at, ERRORS.get(error, 0), board, for_ever, HEALS)
    attempt = job(root, shape, disks, board, cuts=(NEW, AFTER))
    attempt.deadline_s = 4.0 if for_ever else attempt.deadline_s
    outcome = attempt.run()
    fired = bool(board.get(FIRED))
    board.close()
    code = ERRORS.get(error)
    # a receipt that may or may not be durable: the next start decides
    kept = for_ever or kind == "sync_directory"
    problems = verdict(
        ground, root, outcome, shape.scale, os.strerror(code) if code else None, kept
    )
    shutil.rmtree(root)
    return problems, fired


def verdict(
    ground: Ground, root: Path, outcome: Outcome, scale: int, words: str | None, kept: bool
) -> list[str]:
    """`words` must be in one of the causes, if the save failed; None: it must not fail.

    `kept`: its bytes may be there.
    """
    least = max([OLD.step, *outcome.acknowledged])
    problems, loaded = judge(root, ground.loader, least, scale)
    causes = outcome.failed.get(NEW.step, [])
    if not causes and NEW.step not in outcome.acknowledged:
        problems.append("the save neither failed nor was committed")
    if causes and (words is None or not any(words in cause for cause in causes)):
        problems.append(f"no message says {words}: {causes}")
    if AFTER.step not in outcome.acknowledged:
        problems.append(f"the next save failed: {outcome.failed.get(AFTER.step)}")
    if outcome.hung:
        problems.append("somebody did not end")
    if list(root.glob(".bad-*")):
        problems.append("an error made a committed checkpoint bad")
    dead = [path for path in root.glob("*.tmp-*/*.bin")]
    if dead and not kept:
        problems.append(
            f"a failed save keeps its bytes: {[str(path.relative_to(root)) for path in dead]}"
        )
    return problems


@contextlib.contextmanager
def small_disk(at: Path, size: int):
    """A tmpfs of `size` bytes mounted at `at`; yields False where that is not permitted."""
    at.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0
    try:
        yield mounted
    finally:
        if mounted and libc.umount(str(at).encode()) != 0:
            raise OSError(ctypes.get_errno(), f"cannot unmount {at}")
        at.rmdir()


def grow(at: Path) -> None:
    """Somebody makes room."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", REMOUNT, b"size=1m") != 0:
        raise OSError(ctypes.get_errno(), f"cannot remount {at}")


def full(ground: Ground, world: int, extra: int) -> list[str] | None:
    """Saves onto a file system with room for one checkpoint and `extra` bytes: refused, loud, and
    works again with room.

    None where nothing can be mounted.
    """
    old = ground.fresh(world)
    used = sum(-(-path.stat().st_size // PAGE) * PAGE for path in old.rglob("*") if path.is_file())
    place = ground.top / f"small{world}-{extra}"
    with small_disk(place, used + extra) as is_there:
        if not is_there:
            return None
        root, board = place / "root", Board()
        shutil.copytree(old, root)
        attempt = job(root, Shape(world, keep=0), [Disk() for _ in range(world)], board)
        attempt.deadline_s = 4.0  # there may be no room for word to the other rank
        outcome = attempt.run()
        problems, _ = judge(root, ground.loader, OLD.step)
        causes = outcome.failed.get(NEW.step, [])
        if not outcome.acknowledged and not any(
            "free" in cause or "No space left" in cause for cause in causes
        ):
            problems.append(f"no message about space: {causes} {outcome.acknowledged}")
        grow(place)
        ground.loader.load(root, sweep=True)  # the next attempt begins
        again = job(
            root,
            Shape(world, keep=0),
            [Disk() for _ in range(world)],
            board,
            cuts=(Cut(AFTER.step),),
        ).run()
        if AFTER.step not in again.acknowledged:
            problems.append(f"with room again: {again.failed}")
        board.close()
    shutil.rmtree(old)
    return problems
