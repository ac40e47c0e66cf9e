"""Injected faults against checkpoints: kill -9, power loss, I/O errors, corruption (as listed, and
drawn anew each time), concurrency, and a control that must fail. With `--only nodes`: nodes that
are lost with their disks while their states travel to others.

    python -m bench.checkpoint_faults [--quick] [--count N] [--only CLASS] [--seed N]

Out: a table per class and one last JSON line. `meets`: nothing accepted that was not saved, the
newest good one always found, no acknowledged commit lost, and the control and every mutant (a disk
that skips one kind of sync) found guilty by the same judges.
"""

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable

from bench import report
from bench.faults import (
    concurrency,
    control,
    corruption,
    drawn,
    errors,
    executed,
    kills,
    nodes,
    patches,
    power,
)
from bench.faults.judge import Tally
from bench.faults.kills import Ground
from bench.faults.loader import Loader

FULL = 10_600  # injections without the control and the mutants
SHARES = {  # of all injections; the rest is corruption
    "kills": (kills.run, 0.39),
    "executed": (executed.run, 0.01),
    "power": (power.run, 0.20),
    "errors": (errors.run, 0.10),
    "concurrency": (concurrency.run, 0.01),
    "corruption": (corruption.run, 0.29),
}
QUICK = {
    "kills": 110,
    "executed": 6,
    "power": 130,
    "errors": 55,
    "concurrency": 15,
    "corruption": 170,
}
DRAWN = {True: 50, False: 1000}
NODES = {True: 30, False: 1000}
CONTROLS = 72
MUTANT_STATES = {True: 40, False: 200}
SHOWN = 12  # problems printed per class


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Inject faults into checkpoints and judge what is left."
    )
    parser.add_argument("--quick", action="store_true", help="about 500 injections")
    parser.add_argument(
        "--count", type=int, help="injections in all, without the control and what is drawn"
    )
    parser.add_argument(
        "--only",
        choices=[*SHARES, "drawn", "patches", "control", "mutants", "nodes"],
        help="one class",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10**9),
        help="of what is drawn: corruptions, nodes",
    )
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or what is on the RAM disk would stay
    counts = counts_of(asked)
    tallies: dict[str, Tally] = {}
    with Loader() as loader, Ground(loader) as ground:
        for name, (run, _) in SHARES.items():
            if asked.only in (None, name):
                tallies[name] = timed(lambda run=run, name=name: run(ground, counts[name]))
        if asked.only in (None, "drawn"):
            tallies["drawn"] = timed(lambda: drawn.run(ground, DRAWN[asked.quick], asked.seed))
        if asked.only in (None, "patches"):
            tallies["patches"] = timed(lambda: patches.run(ground, DRAWN[asked.quick], asked.seed))
        if asked.only in (None, "errors"):
            tallies["full disk"] = timed(
                lambda: full_disks(ground, (0, 3, 6) if asked.quick else range(9))
            )
        if asked.only == "nodes":
            count = asked.count or NODES[asked.quick]
            tallies["nodes"] = timed(lambda: nodes.run(ground.top, count, asked.seed))
        guilty = (
            timed(lambda: control.run(ground, CONTROLS))
            if asked.only in (None, "control")
            else None
        )
        mutants = (
            power.mutants(ground, MUTANT_STATES[asked.quick])
            if asked.only in (None, "mutants")
            else {}
        )
    if mutants:
        report.table(
            "syncs left out",
            ("mutant", "failures found"),
            [(name, str(n)) for name, n in mutants.items()],
        )
    finish(tallies, guilty, mutants, asked)


def counts_of(asked: argparse.Namespace) -> dict[str, int]:
    """Injections by class."""
    if asked.quick:
        scale = (asked.count or sum(QUICK.values())) / sum(QUICK.values())
        return {name: max(1, round(count * scale)) for name, count in QUICK.items()}
    return {name: max(1, round((asked.count or FULL) * s)) for name, (_, s) in SHARES.items()}


def timed(work: Callable[[], Tally]) -> Tally:
    before = time.monotonic()
    tally = work()
    show(tally, time.monotonic() - before)
    return tally


def full_disks(ground: Ground, room: Iterable[int]) -> Tally:
    """File systems with less and less room; none where nothing can be mounted."""
    tally = Tally("full disk")
    for world in (1, 2):
        for pages in room:
            problems = errors.full(ground, world, pages * errors.PAGE)
            if problems is not None:
                tally.note(f"world {world}", f"world {world}, {pages} pages left", problems)
    return tally


def show(tally: Tally, seconds: float) -> None:
    rows = [(kind, str(count)) for kind, count in sorted(tally.kinds.items())]
    rows += [
        ("all", str(tally.injected)),
        ("accepted wrong", str(tally.wrong)),
        ("good one lost", str(tally.lost)),
    ]
    rows += [("other failures", str(tally.other)), ("seconds", f"{seconds:.1f}")]
    report.table(tally.name, ("injected", "count"), rows)
    if not tally.name.startswith("control"):
        for problem in tally.problems[:SHOWN]:
            print(f"  {problem[:700]}", flush=True)


def finish(
    tallies: dict[str, Tally],
    guilty: Tally | None,
    mutants: dict[str, int],
    asked: argparse.Namespace,
) -> None:
    counts: dict[str, object] = {
        "injected": sum(tally.injected for tally in tallies.values()),
        "accepted_wrong": sum(tally.wrong for tally in tallies.values()),
        "lost": sum(tally.lost for tally in tallies.values()),
        "other": sum(tally.other for tally in tallies.values()),
        "by_class": {name: [t.injected, t.wrong, t.lost, t.other] for name, t in tallies.items()},
        "control": [guilty.injected, guilty.wrong, guilty.lost] if guilty else [],
        "mutants": mutants,
    }
    sound = not any(tally.bad for tally in tallies.values())
    seeing = (guilty is None or (guilty.wrong > 0 and guilty.lost > 0)) and all(mutants.values())
    config = {
        **{"quick": asked.quick, "count": asked.count or FULL, "only": asked.only},
        **{"worlds": [1, 2], "seed": asked.seed},
    }
    report.last_line(
        "checkpoint_faults",
        {},
        counts,
        config,
        report.versions("xxhash", "msgspec", "torch"),
        sound and seeing,
    )


if __name__ == "__main__":
    main()
