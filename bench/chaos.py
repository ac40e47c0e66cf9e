"""The quickstart under faults: does it come to its end alone, and is what it trained worth as much?

    python -m bench.chaos [--quick] [--seed N] [--parts rank,engine,...]

In: nothing. Out: a line per fault, tables, and one last line of JSON. The warm-up runs once; every
run is the GRPO stage from there on, as a user starts it (real Ray, vLLM and Megatron), with restart
budgets that never end. Undisturbed runs come first. Then runs under one fault per 20 s, and runs
under one a minute, as many steps of each as should last so long that the first ten faults fit into
the former, which have every part and every kind among them, and several into the latter. Which
fault hits which part is drawn from a seed that is printed (`bench.chaos_faults` has the kinds).

    end          exit code 0, without a human
    accuracy     of the last evaluation: not below the undisturbed runs' worst by more than two
                 standard errors of the held-out tasks
    exactly once no group lost, none in two steps, every step consumed in order (the run's journal)
    noticed      kills in 5 s, stops of 45 s in 35 s: the part is named in a line, gone, or there
                 again; stops of 10 s never
    covered      every part and every kind was hit in each run under one fault per 20 s
    effective    steps kept x seconds of an undisturbed step / seconds between the first step's line
                 and the last one's; judged at one fault a minute; by part: of the seconds between a
                 fault and the next
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import report
from bench.chaos_faults import CUT, OF_DISK, OF_PARTS, PARTS, RESET, Card, Fault, RunDisk, deck
from bench.chaos_run import (
    RESTARTS,
    STAGE,
    Chaos,
    ChaosRun,
    Outcome,
    accuracy,
    exactly_once,
    late,
)

OFTEN_S, SELDOM_S = 20.0, 60.0  # between two faults
SHARE = {OFTEN_S: 0.55, SELDOM_S: 0.80}  # of the time that faults leave: measured, to plan with
EVALUATED = 256  # held-out tasks
BAR = 0.60
WARM_S = 600.0
GIVEN_UP = 6.0  # times as long as an undisturbed run may take, a run under faults has not ended
LEAST_S = 300.0


class Sizes(NamedTuple):
    """How many runs of each; `lasts`: seconds that one under faults is planned to take."""

    steps: int  # of an undisturbed run, and the fewest of any
    undisturbed: int
    often: int
    seldom: int
    lasts: dict[float, float]


FULL = Sizes(300, 3, 10, 3, {OFTEN_S: 600.0, SELDOM_S: 600.0})
QUICK = Sizes(120, 1, 1, 1, {OFTEN_S: 230.0, SELDOM_S: 260.0})


class Ground:
    """Where all runs are: each has the same path, since the warm-up names its own."""

    def __init__(self, top: Path, steps: int):
        self.top = top
        self.steps = steps  # of the next run
        self.place = top / "run"
        self.warm = top / "warm"
        self.number = 0

    def arguments(self, steps: int) -> list[str]:
        return [
            "experiment=quickstart",
            "device=cpu",
            "monitor=none",
            f"checkpoint_root_dir={self.place}",
            f"stages.1.trainer.total_steps={steps}",
            "stages.1.trainer.save_interval=10",
            # the same reward, as only a worker may compute it: one that faults can hit
            "stages.1.buffer.explorer_input.taskset.reward_fn_args={pattern:'^(.*)$'}",
            f"trainer.max_restarts={RESTARTS}",
            f"explorer.rollout_model.max_restarts={RESTARTS}",
            f"cluster.max_restarts={RESTARTS}",
        ]

    @contextlib.contextmanager
    def disk(self) -> Iterator[RunDisk]:
        with RunDisk(self.place, self.top / "disk.img") as disk:
            yield disk
        shutil.rmtree(self.place)

    def warm_up(self) -> None:
        """The first stage, and the one step of the second that a run cannot do without."""
        run = ChaosRun(self.arguments(1), self.top / "warm.log")
        try:
            if run.process.wait(WARM_S):
                raise RuntimeError(f"the warm-up failed, see {self.top / 'warm.log'}")
        finally:
            run.close()
        shutil.rmtree(self.place / STAGE)
        for name in ("quickstart.json", "curves.png"):
            (self.place / STAGE.parent / name).unlink(missing_ok=True)
        self.place.rename(self.warm)

    def run(self, every: float, cards: Iterator[Card], seed: int, give_up: float) -> Outcome:
        """`every`: seconds between two faults; infinite: undisturbed."""
        self.number += 1
        with self.disk() as disk:
            shutil.copytree(self.warm, self.place, dirs_exist_ok=True)
            log = self.top / f"run_{self.number}.log"
            run = ChaosRun(self.arguments(self.steps), log)
            chaos = Chaos(run, disk, cards, every, seed)
            try:
                chaos.until_its_end(time.monotonic() + give_up)
            finally:
                code, ended = run.process.poll(), time.monotonic()
                run.close()
            outcome = Outcome(code, steps=run.steps(), faults=chaos.faults)
            self._judge(outcome, ended)
            if outcome.problems:
                kept = self.top / f"kept_{self.number}"
                shutil.copytree(self.place / STAGE / "logs", kept, dirs_exist_ok=True)
                shutil.copytree(self.place / STAGE / "buffer", kept / "buffer", dirs_exist_ok=True)
        return outcome

    def _judge(self, outcome: Outcome, ended: float) -> None:
        job = self.place / STAGE
        if outcome.code != 0:
            last = (self.top / f"run_{self.number}.log").read_text().strip().splitlines()[-1:]
            words = "it did not end" if outcome.code is None else f"exit code {outcome.code}"
            outcome.problems.append(f"{words}: {' '.join(last)}")
        else:
            outcome.accuracy = accuracy(job)
            outcome.problems += exactly_once(job, self.steps)
        outcome.problems += late(outcome.faults, ended)


def effective(outcome: Outcome, step_s: float) -> float:
    """Share of the wall clock that an undisturbed run would have needed for the steps kept."""
    if not outcome.wall:
        return 0.0
    return (outcome.kept - outcome.steps[0][1]) * step_s / outcome.wall


def by_part(outcomes: list[Outcome], step_s: float) -> dict[str, list[float]]:
    """The same between each fault and the next."""
    found: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.steps:
            continue
        ends = [fault.began for fault in outcome.faults[1:]] + [outcome.steps[-1][0]]
        for fault, end in zip(outcome.faults, ends, strict=True):
            if end > fault.began:
                kept = outcome.kept_at(end) - outcome.kept_at(fault.began)
                found[fault.part].append(kept * step_s / (end - fault.began))
    return found


def step_seconds(calm: list[Outcome]) -> float:
    if any(one.code != 0 or one.wall == 0 or one.accuracy is None for one in calm):
        raise RuntimeError(f"an undisturbed run failed: {[one.problems for one in calm]}")
    return report.median([one.wall / (one.kept - one.steps[0][1]) for one in calm])


def uncovered(outcome: Outcome, disk: bool, parts: list[str]) -> list[str]:
    """What no fault was of, or hit."""
    wanted = {*parts, *OF_PARTS, *(OF_DISK if disk else ())}
    hit = [one for one in outcome.faults if one.kind != RESET or CUT in one.words]
    there = {one.kind for one in hit} | {one.part for one in outcome.faults}
    return sorted(wanted - there)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--quick", action="store_true", help="one run of each pace, about 4 minutes"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--parts", default=",".join(PARTS), help="that faults may hit")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or what is mounted and stopped stays so
    sizes, parts = QUICK if given.quick else FULL, given.parts.split(",")
    top = Path(tempfile.mkdtemp(prefix="rft-chaos-"))
    ground = Ground(top, sizes.steps)
    print(f"seed {given.seed}; load {os.getloadavg()[0]:.1f}; logs in {top}", flush=True)
    ground.warm_up()
    with ground.disk() as probe:
        disk = probe.real
    if not disk:
        print("no file system can be mounted here: no full disk, no slow disk", flush=True)
    calm, often, seldom = list[Outcome](), list[Outcome](), list[Outcome]()
    for number in range(sizes.undisturbed):
        print(f"  undisturbed {number}", flush=True)
        calm.append(ground.run(float("inf"), iter(()), given.seed, WARM_S * 3))
    step_s = step_seconds(calm)
    for found, every, count in ((often, OFTEN_S, sizes.often), (seldom, SELDOM_S, sizes.seldom)):
        ground.steps = max(sizes.steps, round(sizes.lasts[every] * SHARE[every] / step_s))
        give_up = max(LEAST_S, GIVEN_UP * ground.steps * step_s)
        for number in range(count):
            print(f"  one fault per {every:g} s, {ground.steps} steps, {number}", flush=True)
            cards = deck(given.seed + int(every), disk, number, parts)
            found.append(ground.run(every, cards, given.seed, give_up))
    tell(calm, often, seldom, given.seed, disk, parts)
    if not any(one.problems for one in calm + often + seldom):
        shutil.rmtree(top)


def tell(
    calm: list[Outcome],
    often: list[Outcome],
    seldom: list[Outcome],
    seed: int,
    disk: bool,
    parts: list[str],
) -> None:
    step_s = step_seconds(calm)
    scores = [float(one.accuracy) for one in calm if one.accuracy is not None]
    worst = min(scores)
    floor = worst - 2 * (worst * (1 - worst) / EVALUATED) ** 0.5
    for one in often + seldom:
        if one.accuracy is not None and one.accuracy < floor:
            one.problems.append(f"accuracy {one.accuracy:.3f} is below {floor:.3f}")
    rows = []
    for name, outcomes in (("undisturbed", calm), ("per 20 s", often), ("a minute", seldom)):
        for one in outcomes:
            score = "-" if one.accuracy is None else f"{one.accuracy:.3f}"
            share = f"{effective(one, step_s):.2f}"
            told = f"{len(one.problems)} problems" if one.problems else "good"
            cells = [f"{one.wall:.0f}", str(one.kept), str(len(one.faults)), score, share, told]
            rows.append([name, *cells])
    report.table(
        f"runs, {step_s:.2f} s an undisturbed step",
        ["faults", "s", "steps", "faults", "accuracy", "effective", "verdict"],
        rows,
    )
    for one in calm + often + seldom:
        for problem in one.problems:
            print(f"  {problem}")
    missing = sorted({word for one in often for word in uncovered(one, disk, parts)})
    if missing:
        print(f"  not hit in each run under one fault per 20 s: {', '.join(missing)}")
    report.table(
        "faults in their order",
        ["every", "fault", "of", "noticed after, s"],
        [
            [every, fault.kind, fault.part, noticed(fault)]
            for every, outcomes in (("20 s", often), ("minute", seldom))
            for one in outcomes
            for fault in one.faults
        ],
    )
    shares = by_part(seldom, step_s), by_part(often, step_s)
    report.table(
        "effective training time behind a fault of a part",
        ["part", "a minute", "faults", "per 20 s", "faults"],
        [
            [part, *(cell for found in shares for cell in _mean(found.get(part, [])))]
            for part in (*PARTS, "disk")
        ],
    )
    least = min((effective(one, step_s) for one in seldom), default=0.0)
    good = sum(not one.problems for one in often + seldom)
    report.last_line(
        "chaos",
        {"effective_a_minute": round(least, 3), "good": good / max(1, len(often + seldom))},
        {
            "runs": len(often + seldom),
            "faults": sum(len(one.faults) for one in often + seldom),
            "problems": sum(len(one.problems) for one in often + seldom),
        },
        {
            "seed": seed,
            "disk": disk,
            "parts": parts,
            "bar": BAR,
            "not_hit": missing,
            "effective_by_part": [
                {part: round(sum(values) / len(values), 3) for part, values in found.items()}
                for found in shares
            ],
        },
        report.versions("torch", "ray", "megatron-core"),
        good == len(often + seldom)
        and least >= BAR
        and disk
        and set(parts) == set(PARTS)
        and not missing,
    )


def noticed(fault: Fault) -> str:
    return "-" if fault.noticed is None else f"{fault.noticed - fault.began:.1f}"


def _mean(values: list[float]) -> list[str]:
    if not values:
        return ["-", "0"]
    return [f"{sum(values) / len(values):.2f}", str(len(values))]


if __name__ == "__main__":
    main()
