"""Class 6, the control: a saver that writes in place, under the same kills. The harness must find
it guilty, or it proves nothing.

It does what many do: opens the files of the step again, writes, and then overwrites a tracker; its
reader believes the tracker.
"""

import json
import shutil
from pathlib import Path

from bench.faults.disks import FIRED, Board, Counting, Killing
from bench.faults.job import ended, fork
from bench.faults.judge import Tally
from bench.faults.kills import Ground
from bench.faults.toy import Cut, plan

BEFORE, AFTER = Cut(1, 0), Cut(1, 1)
PATIENCE_S = 30.0


def save_in_place(root: Path, cut: Cut, world: int, disk: Counting) -> None:
    (root / "step_1").mkdir(exist_ok=True)
    for rank in range(world):
        _overwrite(disk, root / "step_1" / f"r{rank}", cut.file(plan(cut.scale, world)[rank]))
    _overwrite(
        disk, root / "LATEST", json.dumps({"step": cut.step, "variant": cut.variant}).encode()
    )


def _overwrite(disk: Counting, path: Path, data: bytes) -> None:
    file = disk.call("open", str(path), lambda: open(path, "wb", buffering=0))  # noqa: SIM115 - one call each
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        disk.call(
            "write",
            str(path),
            lambda part=part: file.write(part),
            lambda part=part: file.write(part[::2]),
        )
    disk.call("close", str(path), file.close)


def accepted(root: Path, world: int) -> list[str]:
    """What its reader would have taken, held against what was saved."""
    try:
        cut = Cut(**json.loads((root / "LATEST").read_bytes()))
    except (OSError, ValueError) as error:
        return [f"LOST the tracker says nothing: {error}"]
    stored = [(root / "step_1" / f"r{rank}").read_bytes() for rank in range(world)]
    expected = [cut.file(regions) for regions in plan(cut.scale, world)]
    return [] if stored == expected else [f"WRONG accepted {cut} with other bytes"]


def run(ground: Ground, count: int) -> Tally:
    tally = Tally("control: in place")
    for number in range(count):
        world = 1 + number % 2
        at, when = 1 + number // 2 // 3, ("before", "middle", "after")[number // 2 % 3]
        root, board = ground.top / "control", Board()
        root.mkdir()
        save_in_place(root, BEFORE, world, Counting())
        disk = Killing(at, when, "agent", board)
        ended(fork(lambda: save_in_place(root, AFTER, world, disk)), PATIENCE_S)  # noqa: B023 - ends within the round
        if board.get(FIRED):
            tally.note(
                f"world {world}", f"killed {when} call {at}, world {world}", accepted(root, world)
            )
        board.close()
        shutil.rmtree(root)
    return tally


def points() -> int:
    """How many kills there are."""
    return 3 * 2 * 12
