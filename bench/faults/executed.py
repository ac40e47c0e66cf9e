"""Class 1 with nothing in the way: agents started by `rft.checkpoint.link`, killed at a call, and
started again by it.

Two saves are staged at once. Both must be committed in spite of the death, and every slot be given
back once, by its own save.
"""

import mmap
import os
import queue
import random
import shutil
import sys

from bench.faults.disks import WHEN
from bench.faults.job import PATIENCE_S
from bench.faults.judge import Tally, judge
from bench.faults.kills import Ground
from bench.faults.toy import Cut, begin, plan, settings
from rft.checkpoint import fence, sharding
from rft.checkpoint.link import Link
from rft.checkpoint.records import Committed, Freed, Report, SaveFailed, Window
from rft.checkpoint.storage import Disk, LocalStorage

CUTS = {1: Cut(2), 0: Cut(3)}  # by slot
CALLS = 60  # of an undisturbed agent over both saves, about


def run(ground: Ground, count: int) -> Tally:
    tally = Tally("kill -9, exec'd")
    dice = random.Random(5)
    for _ in range(count):
        number, when = dice.randrange(1, CALLS), dice.choice(WHEN)
        tally.note("agent", f"killed {when} call {number}", strike(ground, number, when))
    return tally


def strike(ground: Ground, number: int, when: str) -> list[str]:
    root = ground.fresh(1)
    control, epoch = root / "control", fence.take_epoch(root / "control")
    regions = plan(1, 1)[0]
    size = -(-sharding.extent(regions) // mmap.PAGESIZE) * mmap.PAGESIZE
    slots = [os.memfd_create("slot") for _ in range(2)]
    for descriptor in slots:
        os.ftruncate(descriptor, size)
    heard: queue.SimpleQueue[Report] = queue.SimpleQueue()
    command = (
        sys.executable,
        "-m",
        "bench.faults.faulty_agent",
        str(ground.top / f"{root.name}.marker"),
        str(number),
    )
    told = settings(str(root), str(control), 0, 1, epoch, slots, size)
    link = Link(told, heard.put, ground.top / "agents.log", (*command, when))
    storage = LocalStorage(root, Disk())
    for slot, cut in CUTS.items():
        identity = f"e{epoch:04d}n{cut.step:04d}"
        data = cut.file(regions)
        os.pwrite(slots[slot], data, 0)
        link.begin(begin(storage, cut, 0, 1, identity, keep=1))
        link.window(Window(id=identity, slot=slot, start=0, stop=len(data), last=True))
    problems = listen(heard)
    link.close(PATIENCE_S)
    if link.deaths > 1:
        problems.append(f"{link.deaths} deaths")
    for descriptor in slots:
        os.close(descriptor)
    found, _ = judge(root, ground.loader, 3)
    shutil.rmtree(root)
    return problems + found


def listen(heard: "queue.SimpleQueue[Report]") -> list[str]:
    """Until both saves are committed and both slots are back."""
    problems, steps, freed = [], set(), set()
    owners = {cut.step: slot for slot, cut in CUTS.items()}
    while len(steps) < 2 or len(freed) < 2:
        try:
            report = heard.get(timeout=PATIENCE_S)
        except queue.Empty:
            return [*problems, f"silence: committed {steps}, slots back {freed}"]
        if isinstance(report, Committed):
            steps.add(report.step)
        elif isinstance(report, SaveFailed):
            return [*problems, f"save of step {report.step} failed: {report.cause}"]
        elif isinstance(report, Freed):
            if owners[int(report.id[-4:])] != report.slot:
                problems.append(
                    f"WRONG slot {report.slot} given back by save {report.id}, which was in another"
                )
            freed.add(report.slot)
    return problems
