"""What it costs to save at every step: the trainer as it runs, saving to disk, in memory, or not.

    python -m bench.every_step [--quick] [--only quickstart 135M both] [--saves N]

    round    none, memory, disk in an order that is drawn, each for a step, or for so many on
             end; of these the first, which pay for what was before, are not counted
    lost     mean step while each is saved - mean step of the same round while none is
    judged   upper end of the 95 % interval of lost / step over the rounds (bootstrap)
    told     the same by medians, as `bench.checkpoint` takes them: what a save costs as a rule,
             without the few steps that last much longer, of whatever kind they are

In: nothing; random weights in the shapes of the quickstart's model and of SmolLM2-135M, a
supervised stage (mode=train) of one rank with one thread, through `rft.run.assembly`; only who says
when a save is due is this bench's own. `memory`: as with `trainer.memory_interval=1`; `disk`: as
with `save_interval=1`. `both`: the quickstart's model in mode=both as a user starts it (GRPO, Ray,
vLLM, explorer), saved to disk or not; which steps is planted into it (`tests/verify/planted`).
Out: a table per case and one last line of JSON. Bars: at most 1 % for both models, 135M with steps
of at least 5 s, 5 % for `both`, 200 saves of each kind; with fewer they are not claimed.
"""

import argparse
import contextlib
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

from bench import effective, report
from bench.chaos_run import REPOSITORY, ChaosRun
from rft.ground.process import adopt_orphans, end_descendants
from rft.monitor.run_record import RunRecord
from rft.tools.toy import write_arithmetic, write_model
from rft.trainer.saving import SaveTimes

NONE, MEMORY, DISK = KINDS = ("none", "memory", "disk")
SMOLLM = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536}
CLAIMED, BAR, STEP_S = 200, 0.01, 5.0
DRAWS = 4000  # of the bootstrap
T = TypeVar("T")
CALM = ("trainer.memory_interval=0", "trainer.spares=false", "trainer.save_hf_checkpoint=never")


@dataclass(frozen=True)
class Case:
    """`rows` of a step; of each block `steps` are counted, after `left` that are not. `quick_s`:
    seconds of training; rounds end when another one would not fit.
    """

    name: str
    shapes: dict[str, int]
    rows: int
    steps: int
    left: int
    quick_s: float
    least_s: float = 0.0  # of a step, for the bar
    bar: float = BAR


BOTH = "both"
CASES = {
    # a machine that others share drifts within seconds, and a save is over within its step: each
    # step by itself, with its neighbours
    "quickstart": Case("quickstart", {}, 128, steps=1, left=0, quick_s=120.0),
    "135M": Case(
        "135M", {**SMOLLM, "vocab": 49152}, 56, steps=1, left=0, quick_s=240.0, least_s=STEP_S
    ),
    # steps of two kinds, a short and a long one, may go in turn: blocks are of both
    BOTH: Case(BOTH, {}, 32, steps=20, left=4, quick_s=120.0, bar=0.05),
}


@dataclass
class Blocks(SaveTimes):
    """Which steps are saved, and how; hears when each was over."""

    case: Case | None = None
    rounds: int = 1
    budget_s: float = math.inf
    plan: list[tuple[int, str, bool]] = field(default_factory=list)  # round, kind, is counted
    ends: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # processor seconds of this process and agents

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.case is not None
        self.plan = planned(self.case, self.rounds, KINDS)

    def is_due(self, step: int) -> bool:
        return self._is(step, DISK)

    def is_kept(self, step: int, is_first: bool) -> bool:
        return self._is(step, MEMORY)

    def _is(self, step: int, kind: str) -> bool:
        """What is said at the end of `step` is paid for by the step behind it."""
        return step < len(self.plan) and self.plan[step][1] == kind

    def is_over(self) -> bool:
        """Whether there is no time for another round."""
        step = len(self.ends)
        if not 1 < step < len(self.plan) or self.plan[step][0] in (0, self.plan[step - 1][0]):
            return False
        done = self.plan[step][0]
        return (time.monotonic() - self.ends[0]) * (done + 1) / done > self.budget_s

    def told(self, step: int, metrics: dict[str, float], experiences: list[Any]) -> None:
        self.ends.append(time.monotonic())
        own = psutil.Process()
        self.busy.append(sum(sum(one.cpu_times()[:2]) for one in [own, *own.children()]))
        self.skipped = metrics["checkpoint/memory_skipped"] + metrics["checkpoint/skipped"]

    def found(self) -> dict[str, dict[int, list[tuple[float, float]]]]:
        """(seconds, processor seconds) of the counted steps, by kind and round."""
        steps: dict[str, dict[int, list[tuple[float, float]]]] = {kind: {} for kind in KINDS}
        for step in range(1, len(self.ends)):
            number, kind, is_counted = self.plan[step]
            if is_counted:
                wall = self.ends[step] - self.ends[step - 1]
                busy = self.busy[step] - self.busy[step - 1]
                steps[kind].setdefault(number, []).append((wall, busy))
        return steps


def planned(case: Case, rounds: int, kinds: Sequence[str]) -> list[tuple[int, str, bool]]:
    """Of each step its round, what it pays for, and whether it is counted."""
    chance, turn = random.Random(5), list(kinds)
    plan = [(-1, NONE, False)]  # the first step, which makes the optimizer's state
    for number in range(rounds):
        chance.shuffle(turn)
        for kind in turn:
            plan += [(number, kind, False)] * case.left
            plan += [(number, kind, True)] * case.steps
    return plan


def train(top: Path, case: Case, rounds: int, budget_s: float, results: Any) -> None:
    """The rank's process."""
    from rft import config as configs
    from rft import train as product
    from rft.checkpoint import fence
    from rft.ground import device as devices
    from rft.run import assembly
    from rft.run.backends import backend_of
    from rft.run.recovery import Recovery

    os.environ["RFT_LOG_DIR"] = str(top)
    [config] = product.prepared_stages(configs.compose(arguments(top, case)))
    device = devices.choose("cpu", 0, 1)
    backend = backend_of(config, device)
    mesh = backend.open_mesh()
    models = backend.build_models(mesh)
    epoch = fence.take_epoch(fence.control_dir(backend.job))
    blocks = Blocks(0, 0.0, mesh.broadcast, case=case, rounds=rounds, budget_s=budget_s)
    built = assembly.assemble(backend, mesh, models, epoch, blocks.is_over, Recovery())
    trainer = replace(
        built.trainer,
        config=replace(config.trainer, total_steps=len(blocks.plan)),
        save_times=blocks,
        log_step=blocks.told,
    )
    devices.freeze_loaded()  # as a rank does
    trainer.fit(built.start)
    size = sum(one.tensor.nbytes for one in models.snapshot().pieces)
    trainer.checkpoints.close()
    models.close()
    mesh.close()
    results.put((blocks.found(), size, blocks.skipped))


def arguments(top: Path, case: Case) -> list[str]:
    return [
        "experiment=sft",
        f"name={case.name}",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={top}",
        "trainer.memory_interval=1",
        "trainer.save_hf_checkpoint=never",
        "trainer.save_minutes=0",
        f"model.model_path={top / case.name}",
        f"buffer.train_batch_size={case.rows}",
        "buffer.total_epochs=1000000",
        f"buffer.trainer_input.experience_buffer.path={top / 'train.jsonl'}",
        "cluster.threads_per_rank=1",
    ]


def measured(case: Case, rounds: int, budget_s: float) -> tuple[Any, int, float]:
    with tempfile.TemporaryDirectory(
        prefix="every_step_", dir=os.environ.get("TMPDIR", "/var/tmp")
    ) as top:
        write_model(Path(top) / case.name, **case.shapes)
        write_arithmetic(Path(top), num_eval=16)
        context = get_context("spawn")
        results = context.Queue()
        rank = context.Process(target=train, args=(Path(top), case, rounds, budget_s, results))
        rank.start()
        of_python = [one.pid for one in psutil.Process().children() if one.pid != rank.pid]
        try:
            while results.empty():
                rank.join(0.5)
                if rank.exitcode not in (None, 0):
                    raise SystemExit(f"the rank ended with {rank.exitcode}")
            return results.get()
        finally:
            rank.join(30)
            end_descendants(5.0, spare=of_python)


def in_a_run(case: Case, rounds: int, budget_s: float) -> tuple[Any, int, float]:
    """As `measured`, of a whole run in mode=both, and without saves in memory alone."""
    plan = planned(case, rounds, (NONE, DISK))
    due = tuple(step for step in range(1, len(plan)) if plan[step][1] == DISK)
    with tempfile.TemporaryDirectory(
        prefix="every_step_", dir=os.environ.get("TMPDIR", "/var/tmp")
    ) as top:
        write_model(Path(top) / "model", **case.shapes)
        write_arithmetic(Path(top), num_eval=16)
        run = ChaosRun(
            [*effective.arguments(Path(top), "quickstart", len(plan), case.rows), *CALM],
            Path(top) / "run.log",
            {
                "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests/verify/planted'}",
                "RFT_PLANTED": f"rft.trainer.saving:SaveTimes.is_due=step in {due}",
            },
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if run.process.wait(None if budget_s == math.inf else budget_s):
                    raise SystemExit(f"the run ended with {run.process.returncode}")
        finally:
            run.close()
        rows = RunRecord(Path(top) / "rft" / "run").rows
    ends = {step: when for when, step in run.steps()}
    steps: dict[str, dict[int, list[tuple[float, float]]]] = {NONE: {}, DISK: {}}
    for step in range(2, len(ends) + 1):
        number, kind, is_counted = plan[step - 1]
        if is_counted:
            steps[kind].setdefault(number, []).append((ends[step] - ends[step - 1], math.nan))
    whole = [n for n, some in steps[NONE].items() if n in steps[DISK] and len(some) == case.steps]
    size = max(int(row.get("checkpoint/bytes", 0)) for row in rows)
    skipped = sum(rows[-1].get(f"checkpoint/{name}", 0.0) for name in ("skipped", "failed"))
    return {kind: {n: some[n] for n in whole} for kind, some in steps.items()}, size, skipped


def interval(rounds: list[T], value: Callable[[list[T]], float]) -> tuple[float, float]:
    """95 % of a value of the rounds."""
    chance = random.Random(11)
    drawn = [value(chance.choices(rounds, k=len(rounds))) for _ in range(DRAWS)]
    return report.quantile(drawn, 0.025), report.quantile(drawn, 0.975)


def apart(rounds: list[tuple[list[float], list[float]]]) -> float:
    """Of each round the steps that are saved and those that are not: how far medians of all lie
    apart, as a share of a step that is not.
    """
    saved, clean = (
        report.median(list(chain.from_iterable(one))) for one in zip(*rounds, strict=True)
    )
    return saved / clean - 1


def judged(case: Case, steps: Any, size: int) -> dict[str, dict[str, float]]:
    """By kind of save."""
    found = {}
    kinds = [kind for kind in (MEMORY, DISK) if kind in steps]
    clean = {number: statistics.fmean(w for w, _ in some) for number, some in steps[NONE].items()}
    quiet = {number: statistics.fmean(b for _, b in some) for number, some in steps[NONE].items()}
    for kind in kinds:
        lost, busy = [], []
        for number, some in steps[kind].items():
            lost.append(statistics.fmean(w for w, _ in some) - clean[number])
            busy.append(statistics.fmean(b for _, b in some) - quiet[number])
        step = statistics.fmean(clean.values())
        low, high = interval([one / step for one in lost], statistics.fmean)
        pairs = [
            ([w for w, _ in some], [w for w, _ in steps[NONE][n]])
            for n, some in steps[kind].items()
        ]
        typical = interval(pairs, apart)
        found[kind] = {
            "saves": sum(map(len, steps[kind].values())),
            "step": step,
            "lost": statistics.fmean(lost),
            "low": low,
            "high": high,
            "median": apart(pairs),
            "median low": typical[0],
            "median high": typical[1],
            "ms/GiB": 1e3 * statistics.fmean(lost) / (size / 2**30),
            "processor ms/GiB": 1e3 * statistics.fmean(busy) / (size / 2**30),
        }
    return found


def say(case: Case, found: dict[str, dict[str, float]], size: int, skipped: float) -> None:
    rows = [
        [
            kind,
            f"{one['saves']:.0f}",
            f"{1e3 * one['lost']:.1f}",
            f"{one['lost'] / one['step']:.2%}",
            f"{one['low']:.2%}..{one['high']:.2%}",
            f"{one['median']:.2%}",
            f"{one['median low']:.2%}..{one['median high']:.2%}",
            f"{one['ms/GiB']:.0f}",
            f"{one['processor ms/GiB']:.0f}",
        ]
        for kind, one in found.items()
    ]
    step = next(iter(found.values()))["step"]
    title = (
        f"{case.name}: {size / 2**20:.0f} MiB at every step, clean step {step:.3f} s, "
        f"{skipped:.0f} left out; load {os.getloadavg()[0]:.1f}"
    )
    header = ["saved", "saves", "lost ms", "/ step", "95 %", "by medians", "95 %", "ms/GiB"]
    header += ["processor ms/GiB"]
    report.table(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.every_step")
    parser.add_argument("--quick", action="store_true", help="a few rounds; never `meets`")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="models")
    parser.add_argument("--saves", type=int, default=CLAIMED, help="of each kind, at least")
    options = parser.parse_args()
    adopt_orphans()
    ratios: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    is_met = len(options.only) == len(CASES)
    for name in options.only:
        case = CASES[name]
        rounds, budget_s = -(-options.saves // case.steps), math.inf
        if options.quick:
            budget_s = case.quick_s
        measure = in_a_run if name == BOTH else measured
        steps, size, skipped = measure(case, rounds, budget_s)
        found = judged(case, steps, size)
        say(case, found, size, skipped)
        ratios[name] = {kind: round(one["high"], 4) for kind, one in found.items()}
        counts[name] = {kind: int(one["saves"]) for kind, one in found.items()}
        for one in found.values():
            is_long = one["step"] >= case.least_s
            is_met = is_met and one["high"] <= case.bar and one["saves"] >= CLAIMED and is_long
    report.last_line(
        "every_step",
        ratios,
        counts,
        {
            "bars": {name: CASES[name].bar for name in options.only},
            "threads": 1,
            "cores": os.cpu_count(),
        },
        report.versions("torch", "megatron-core"),
        is_met,
    )


if __name__ == "__main__":
    main()
