"""Ranks that are killed: how soon they are noticed, back at work, and with how much of it lost.

    python -m bench.recovery [--kills N] [--quick] [--spares]

In: nothing; random weights of SmolLM2-135M's shapes, a supervised stage of two ranks with a thread
each, as a user starts it, every step kept in memory (`trainer.memory_interval=1`), the disk far
away. Now a rank is killed (SIGKILL), now both, each after a step that was drawn; the next kill
comes when a step after the last was told. `--spares`: with `trainer.spares`, and a kill comes when
there is a spare for each rank again. Out: a table of what the run itself has measured, and one
last line of JSON. Bars:

    detect     at most 1 s from the death to the launcher's knowing it
    begin      at most 3 s from the death to the begin of the first step, less `imports` and `spawn`
               (process start)
    read       at least 0.6 of the rate at which one thread per rank, as many at a time as there
               are ranks, copies the same bytes into memory that was just allocated, measured when
               the run is over in new processes: by their later copies, for which the kernel has
               memory at hand. Told beside it: the first copy of each, which pays for first touches
               as a rank does, and that of one thread by itself
    again      at most 1 step made again, by every kill

The first two by the median, and the worst is told. 50 kills of each kind; with fewer the bars are
not claimed (`meets` is false).
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench import report
from rft.ground.process import adopt_orphans, end_descendants, end_family
from rft.monitor.run_record import read_lines
from rft.tools.toy import write_arithmetic, write_model

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536}
VOCABULARY = 49152
RANKS, CLAIMED = 2, 50
DETECT_S, BEGIN_S, READ, AGAIN = 1.0, 3.0, 0.6, 1
RANK, SPARE = "rft.run.rank", "rft.run.spare"
COPIERS = 5
BACK_S = 300.0  # for a step to be told again
STEP = re.compile(r"^\[ *(\d+)/\d+ .*loss")
BACK = re.compile(r"^trainer: back from .*")
KINDS = ("rank", "all ranks")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery")
    parser.add_argument("--kills", type=int, default=CLAIMED, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="2 of each kind")
    parser.add_argument("--spares", action="store_true", help="with trainer.spares")
    options = parser.parse_args()
    count = 2 if options.quick else options.kills
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="recovery_") as top:
        kinds = [KINDS[number % 2] for number in range(2 * count)]
        rows = killed(Path(top), kinds, options.spares)
    told = [told_of(row) for row in rows]
    rates = copy_rates(int(1e9 * max(row["recovery/read_gb"] for row in rows)))
    say(told, [row["kind"] for row in rows], rates, count, options.spares)


def killed(top: Path, kinds: list[str], spares: bool) -> list[dict[str, Any]]:
    """What the run told of each recovery."""
    write_model(top / "model", vocab=VOCABULARY, **SHAPES)
    write_arithmetic(top, digits=1, num_eval=16)
    chance, found = random.Random(7), []
    with subprocess.Popen(
        [sys.executable, "-m", "rft.train", *arguments(top), f"trainer.spares={spares}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            step = await_step(run, 0)
            for kind in kinds:
                step = await_step(run, step + chance.randrange(1, 3))
                while spares and sum(map(sleeps, of(run.pid, SPARE))) < RANKS:
                    step = await_step(run, step + 1)
                ranks = of(run.pid, RANK)
                for rank in ranks if kind == KINDS[1] else [chance.choice(ranks)]:
                    rank.kill()
                begun = time.monotonic()
                print(f"{kind} killed behind step {step}; {await_line(run, BACK)[0]}", flush=True)
                step = await_step(run, 0)
                told_s = time.monotonic() - begun
                row = row_of(top / "rft" / "run" / "metrics.jsonl", step)
                found.append(row | {"kind": kind, "told_s": told_s})
        finally:
            end_family(run)
            end_descendants(5.0)
    return found


def arguments(top: Path) -> list[str]:
    return [
        "experiment=sft",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={top}",
        f"trainer.num_ranks={RANKS}",
        f"trainer.total_steps={10**6}",
        "trainer.memory_interval=1",
        f"trainer.save_interval={10**6}",
        f"trainer.max_restarts={10**6}",
        f"model.model_path={top / 'model'}",
        "buffer.train_batch_size=4",
        "buffer.total_epochs=1000000",
        f"buffer.trainer_input.experience_buffer.path={top / 'train.jsonl'}",
        "cluster.threads_per_rank=1",
    ]


def await_step(run: "subprocess.Popen[str]", least: int) -> int:
    """The number of the first step told from now on that is at least that."""
    while (step := int(await_line(run, STEP)[1])) < least:
        pass
    return step


def await_line(run: "subprocess.Popen[str]", form: re.Pattern[str]) -> re.Match[str]:
    """The first line from now on that is of that form."""
    assert run.stdout is not None
    end, lines = time.monotonic() + BACK_S, []
    for line in run.stdout:
        lines.append(line)
        if found := form.match(line):
            return found
        if time.monotonic() > end:
            break
    raise SystemExit(f"no line like {form.pattern!r} came:\n{''.join(lines[-40:])}")


def row_of(path: Path, step: int) -> dict[str, Any]:
    """Of that step, which was told."""
    return next(row for row in reversed(read_lines(path)) if row["step"] == step)


def of(supervisor: int, module: str) -> list[psutil.Process]:
    """Those that live: one that has just died is its launcher's to wait for."""
    found = []
    for one in psutil.Process(supervisor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in one.cmdline():
                found.append(one)
    return found


def sleeps(spare: psutil.Process) -> bool:
    """Whether it has imported everything, and says so."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "ready" in spare.cmdline()
    return False


def told_of(row: dict[str, Any]) -> dict[str, float]:
    """A recovery in the bars' terms."""
    parts = ("detect", "spawn", "imports", "groups", "build", "load", "total")
    seconds = {name: row[f"recovery/{name}_s"] for name in parts}
    return {
        **seconds,
        "begin": seconds["total"] - seconds["spawn"] - seconds["imports"],
        "read": row["recovery/read_s"],
        "GB/s": row["recovery/read_gb"] / max(row["recovery/read_s"], 1e-9),
        "first step told": row["told_s"],
        "again": row["recovery/steps_again"],
    }


def copy_rates(count: int) -> dict[str, float]:
    """GB/s at which one thread copies that many bytes into new memory; medians."""
    first, later, alone = [], [], []
    for _ in range(COPIERS):
        for seconds in copiers(count, RANKS):
            first.append(seconds[0])
            later += seconds[1:]
        [seconds] = copiers(count, 1)
        alone += seconds[1:]
    found = {"read/copy": later, "read/first copy": first, "read/copy alone": alone}
    return {name: count / 1e9 / statistics.median(seconds) for name, seconds in found.items()}


def copiers(count: int, at_once: int) -> list[list[float]]:
    """The seconds of each copy that each of so many new processes makes beside the others."""
    spawn = multiprocessing.get_context("spawn")
    ready, told = spawn.Barrier(at_once), spawn.SimpleQueue()
    running = [spawn.Process(target=copies, args=(count, ready, told)) for _ in range(at_once)]
    for one in running:
        one.start()
    found = [told.get() for _ in running]
    for one in running:
        one.join()
    return found


def copies(count: int, ready: Any, told: Any, rounds: int = 5) -> None:
    source, seconds = np.ones(count, np.uint8), []
    ready.wait()
    for _ in range(rounds):
        begun = time.monotonic()
        copied = np.empty(count, np.uint8)
        copied[:] = source
        seconds.append(time.monotonic() - begun)
        del copied
    told.put(seconds)


def say(
    told: list[dict[str, float]],
    kinds: list[str],
    rates: dict[str, float],
    count: int,
    spares: bool,
) -> None:
    table = []
    for name in told[0]:
        row = [name]
        for kind in KINDS:
            values = [one[name] for one, which in zip(told, kinds, strict=True) if which == kind]
            row += [f"{report.median(values):.2f}", f"{max(values):.2f}"]
        table.append(row)
    header = ["", "rank", "worst", "all ranks", "worst"]
    beside = ", with spares" if spares else ""
    copy = f"{rates['read/copy']:.2f} GB/s by each of {RANKS}"
    report.table(
        f"seconds after a kill{beside}, {count} of each kind; a copy: {copy}",
        header,
        table,
    )
    middle = {name: report.median([one[name] for one in told]) for name in told[0]}
    ratios = {
        "detect/bar": round(middle["detect"] / DETECT_S, 3),
        "begin/bar": round(middle["begin"] / BEGIN_S, 3),
        **{name: round(middle["GB/s"] / rate, 3) for name, rate in rates.items()},
        "again": max(one["again"] for one in told),
    }
    is_met = ratios["detect/bar"] <= 1 and ratios["begin/bar"] <= 1
    is_met = is_met and ratios["read/copy"] >= READ and ratios["again"] <= AGAIN
    report.last_line(
        "recovery",
        ratios,
        {"kills of a rank": count, "kills of all ranks": count},
        {
            "model": "SmolLM2-135M's shapes",
            "ranks": RANKS,
            "spares": spares,
            "load": round(os.getloadavg()[0], 1),
        },
        report.versions("torch", "megatron-core"),
        is_met and count >= CLAIMED,
    )


if __name__ == "__main__":
    main()
