"""What a save costs the training: rft's checkpoints beside DCP's and megatron-core's in the same
process group and run.

    python -m bench.checkpoint [--quick] [--world 1|2] [--threads N] [--mib 512]

In: nothing but the machine. Out: a table per case and one last line of JSON. The modes take turns
in random order; each save is loaded back and compared bit by bit with the state at the call, and a
mode that stores anything else gets no ratio.

    call     time of the training thread in save alone
    block    the same with before_update, poll and wait
    lost     wall(save .. durable) - steps x median clean step, the clean ones measured just before:
             what training lost
    durable  from the call until the checkpoint would survive
"""

import argparse
import math
import os
import socket
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from bench import report
from bench.checkpoint_harness import MODES, Case, Result, Sample, clear, receive, run_rank

ROUNDS = 10
PRIMARY = (1, 1)  # one compute thread and a free core, as on a GPU host
CASES = [PRIMARY, (1, 2), (2, 1)]
MIB = 512
# rounds of the primary and of the other cases, so that all end in ten minutes
QUICK_S = {True: 260.0, False: 80.0}
# the other cases of --quick
QUICK_MODES = ("none", "dcp_sync", "dcp_thread_staged", "dcp_process", "rft_lazy")
BARS = {
    "block_lazy/sync": 0.01,
    "lost_lazy/sync": 0.10,
    "lost_megatron_async/lost_lazy": 5.0,
    "durable_lazy/sync": 1.5,
    "first_lazy/steady": 1.5,
}
AT_LEAST = {"lost_megatron_async/lost_lazy"}  # the other bars are upper bounds
VISIBLE_S = 0.002  # blocking for less than this is nothing, whatever its ratio to something smaller


class Figures:
    """The steady saves of one mode in one case."""

    def __init__(self, name: str, samples: list[Sample], start_bytes: int) -> None:
        self.name = name
        self.peak = start_bytes + max(sample.peak for sample in samples)
        self.kind = MODES[name].kind
        self.first = next(sample for sample in samples if sample.first)
        self.steady = [sample for sample in samples if not sample.first]
        self.wrong = sum(bool(sample.wrong) for sample in samples)
        self.saves = len(samples)

    @property
    def exact(self) -> bool:
        return self.wrong == 0

    def values(self, what: str) -> list[float]:
        return [getattr(sample, what) for sample in self.steady]

    def median(self, what: str) -> float:
        return report.median(self.values(what))

    def row(self, sync: float) -> list[str]:
        low, high = report.spread(self.values("lost"))
        milli = [self.median(what) * 1e3 for what in ("call", "block", "lost")]
        exact = "-" if self.kind == "none" else f"{self.saves - self.wrong}/{self.saves}"
        ratio = (
            f"{self.median('lost') / sync:.0%}"
            if self.exact and self.kind != "none"
            else "torn" * (not self.exact)
        )
        return [
            self.name,
            f"{milli[0]:.1f}",
            f"{milli[1]:.1f}",
            f"{report.quantile(self.values('block'), 0.95) * 1e3:.1f}",
            f"{milli[2]:.0f}",
            f"{low * 1e3:.0f}..{high * 1e3:.0f}",
            f"{report.quantile(self.values('lost'), 0.95) * 1e3:.0f}",
            ratio,
            f"{self.median('durable') * 1e3:.0f}",
            f"{report.quantile(self.values('durable'), 0.95) * 1e3:.0f}",
            f"{self.first.block * 1e3:.0f}",
            f"{self.first.durable * 1e3:.0f}",
            f"{self.peak / 2**20:.0f}",
            exact,
        ]


HEADER = [
    "ms",
    "call",
    "block",
    "p95",
    "lost",
    "middle half",
    "p95",
    "/ sync",
    "durable",
    "p95",
    "1st block",
    "1st durable",
    "peak MiB",
    "exact",
]


def run(case: Case) -> Result:
    """The ranks as processes of their own; whatever they leave behind is ended here, also when one
    of them fails.
    """
    context = get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=run_rank, args=(case, rank, port, results))
        for rank in range(case.world)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = receive(results, ranks)
        for rank in ranks:
            rank.join(60)
        return found
    finally:
        left = [
            child
            for rank in ranks
            if rank.is_alive()
            for child in psutil.Process(rank.pid).children(recursive=True)
        ]
        for process in [*ranks, *left]:
            if process.is_alive() if hasattr(process, "is_alive") else process.is_running():
                process.kill()
        clear(case.root)


def figures_of(result: Result) -> dict[str, Figures]:
    names = dict.fromkeys(sample.mode for sample in result.samples)
    return {
        name: Figures(
            name,
            [sample for sample in result.samples if sample.mode == name],
            result.start_bytes[name],
        )
        for name in names
    }


def best(found: dict[str, Figures], kind: str, prefix: str = "") -> Figures | None:
    """The exact peer of a kind that loses the least."""
    peers = [
        f
        for f in found.values()
        if f.kind == kind and f.exact and f.name.startswith(prefix) and "rft" not in f.name
    ]
    return min(peers, key=lambda figures: figures.median("lost")) if peers else None


def ratios_of(found: dict[str, Figures], copy_s: float) -> dict[str, float | None]:
    """All ratios of one case; None where one side is missing or torn."""
    lazy, eager = found.get("rft_lazy"), found.get("rft_eager")
    sync, peer = best(found, "sync"), best(found, "async")
    ratios: dict[str, float | None] = dict.fromkeys([*BARS, "lost_lazy/best_async_peer"])
    if lazy and lazy.exact and sync:
        # Peers that lose nothing measurable would make a ratio of noise: rft's loss counts as one
        # millisecond at least.
        lost = max(lazy.median("lost"), 1e-3)
        ratios["block_lazy/sync"] = lazy.median("block") / sync.median("block")
        ratios["lost_lazy/sync"] = lazy.median("lost") / sync.median("lost")
        ratios["durable_lazy/sync"] = lazy.median("durable") / sync.median("durable")
        blocked = lazy.first.block / max(lazy.median("block"), VISIBLE_S)
        ratios["first_lazy/steady"] = max(blocked, lazy.first.durable / lazy.median("durable"))
        ratios["lost_lazy_p95/sync"] = report.quantile(lazy.values("lost"), 0.95) / sync.median(
            "lost"
        )
        if megatron := best(found, "async", "mcore"):
            ratios["lost_megatron_async/lost_lazy"] = megatron.median("lost") / lost
        if peer:
            ratios["lost_lazy/best_async_peer"] = lost / peer.median("lost")
    if eager and eager.exact and sync:
        ratios["block_eager/copy"] = eager.median("block") / copy_s
        ratios["lost_eager/sync"] = eager.median("lost") / sync.median("lost")
    return {name: None if value is None else round(value, 4) for name, value in ratios.items()}


def within(case: Case, ratios: dict[str, float | None]) -> bool:
    """Whether a case reaches its bars."""
    if (case.world, case.threads) != PRIMARY:
        value = ratios["lost_lazy/best_async_peer"]
        return value is not None and value < 1.0
    for name, bar in BARS.items():
        value = ratios[name]
        if value is None or (value < bar if name in AT_LEAST else value > bar):
            return False
    return True


def cases(arguments: argparse.Namespace, root: Path) -> list[Case]:
    chosen = [
        (world, threads)
        for world, threads in CASES
        if arguments.world in (None, world) and arguments.threads in (None, threads)
    ]
    if not chosen:
        chosen = [(arguments.world or 1, arguments.threads or 1)]
    found = []
    for world, threads in chosen:
        primary = (world, threads) == PRIMARY
        modes = QUICK_MODES if arguments.quick and not primary else tuple(MODES)
        budget = QUICK_S[primary] if arguments.quick else math.inf
        found.append(
            Case(world, threads, arguments.mib, ROUNDS, budget, modes, root / f"w{world}t{threads}")
        )
    return found


def show(case: Case, result: Result, found: dict[str, Figures]) -> None:
    sync = best(found, "sync")
    sync_lost = sync.median("lost") if sync else float("nan")
    rows = [found[name].row(sync_lost) for name in MODES if name in found]
    saves = min(len(figures.steady) for figures in found.values())
    step = report.median([sample.clean for sample in result.samples])
    title = (
        f"{case.name}: {result.state_bytes / 2**20:.0f} MiB, clean step {step * 1e3:.0f} ms, warm "
        "copy "
        f"{result.copy_s * 1e3:.0f} ms, {saves} saves of each after the first, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    report.table(title, HEADER, rows)
    starts = [
        f"{name} {result.start_s[name]:.1f} s" for name in found if result.start_s[name] >= 0.05
    ]
    print(
        f"before the first step: {', '.join(starts) or 'nothing'}; what `none` lost is the noise "
        "of this machine"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="under ten minutes: fewer rounds, fewer peers; never `meets`",
    )
    parser.add_argument(
        "--world", type=int, choices=(1, 2), help="only the cases with so many ranks"
    )
    parser.add_argument("--threads", type=int, help="only the cases with so many compute threads")
    parser.add_argument(
        "--mib", type=int, default=MIB, help="fp32 bytes of the state over all ranks"
    )
    arguments = parser.parse_args()
    ratios: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    meets = []
    with tempfile.TemporaryDirectory(
        prefix="bench_checkpoint_", dir=os.environ.get("TMPDIR", "/var/tmp")
    ) as root:
        chosen = cases(arguments, Path(root))
        for case in chosen:
            result = run(case)
            found = figures_of(result)
            show(case, result, found)
            key = case.root.name
            ratios[key] = ratios_of(found, result.copy_s)
            torn = {name: f"{f.wrong}/{f.saves}" for name, f in found.items() if not f.exact}
            saves = min(len(f.steady) for f in found.values())
            counts[key] = {"saves": saves, "first_saves": 1, "modes": len(found), "torn": torn}
            meets.append(within(case, ratios[key]))
    if arguments.quick:
        print(
            f"--quick: as many saves as fit, {ROUNDS} at most; beside w1t1 only "
            f"{', '.join(QUICK_MODES)}"
        )
    enough = all(
        found["saves"] >= ROUNDS and found["modes"] == len(MODES) for found in counts.values()
    )
    complete = enough and arguments.mib >= MIB and len(chosen) == len(CASES)
    config = {
        "mib": arguments.mib,
        "quick": arguments.quick,
        "cases": [c.root.name for c in chosen],
        "bars": BARS,
        "cores": os.cpu_count(),
    }
    report.last_line(
        "checkpoint",
        ratios,
        counts,
        config,
        report.versions("torch", "megatron-core"),
        complete and all(meets),
    )


if __name__ == "__main__":
    main()
