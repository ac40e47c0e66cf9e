"""Corrections for old rollouts beside each other: the quickstart's GRPO from one warm model, with
rollouts that are up to n versions old.

    python -m bench.staleness [--quick] [--root DIRECTORY] [--out FILE]

In: nothing. Out: a picture (reward and mean difference of log-probabilities over the steps, a
column per staleness), a table, and one last line of JSON. The warm-up of the quickstart is made
once; every run begins from its export, and one that is finished under `--root` is not made again. A
staleness of n is made by publishing every (n + 1)-th version only, so that it does not depend on
how quick the machine is: rollouts are n versions old at most, n / 2 on average. What is compared is
the mean reward of the last fifth of the steps.

Where nothing is old every correction is the identity, but for arithmetic; so of staleness 0 there
is one run, and another by a second seed, which says how far two runs are apart that differ in
nothing else.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench import report
from rft.monitor.run_record import RunRecord
from rft.tools import curves

STEPS, QUICK_STEPS = 68, 10  # four times the oldest
KEY = "algorithm.rollout_correction"
TOKEN = f"{KEY}.rollout_is=token"
CORRECTIONS = {  # as published: docs/algorithms.md
    "clip": [],
    "TIS": [TOKEN],
    "IcePop": [
        f"{KEY}.rollout_rs=token",
        f"{KEY}.rollout_rs_threshold_lower=0.5",
        f"{KEY}.rollout_rs_threshold=5",
    ],
    "MIS": [f"{KEY}.rollout_rs=geometric"],
    "KPop": [TOKEN, f"{KEY}.rollout_rs=binary_kl"],
    "M2PO": [
        TOKEN,
        f"{KEY}.rollout_is_threshold=1e6",
        f"{KEY}.rollout_rs=second_moment",
        "algorithm.policy_loss_fn=importance_sampling",
    ],
    "DPPO": ["algorithm.policy_loss_fn=dppo_tv"],
}
PLAIN, FRESH, AGAIN = "clip", "fresh", "fresh, seed 1"
RUNS = {  # by staleness
    1: (PLAIN, "TIS"),
    4: (PLAIN, "TIS", "IcePop", "MIS"),
    16: (PLAIN, "TIS", "IcePop", "MIS", "DPPO", "M2PO", "KPop"),
}
QUICK_RUNS = {4: (PLAIN, "KPop")}
LEARNING = [
    "algorithm.optimizer.lr=1e-4",
    "algorithm.optimizer.lr_scheduler_type=linear",
    "algorithm.optimizer.lr_warmup_steps=5",
    "algorithm.optimizer.min_lr_ratio=0.2",
    "buffer.explorer_input.default_reward_fn_type=exact_match",
    "explorer.runner_per_model=64",
    "model.max_prompt_tokens=16",
    "model.max_response_tokens=8",
    "trainer.max_token_len_per_gpu=8192",
    "trainer.save_hf_checkpoint=never",
    "monitor=none",
]


def started(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rft.train", *arguments], stdout=subprocess.DEVNULL
    )
    if ended.returncode:
        raise RuntimeError(f"rft.train {' '.join(arguments)}: exit code {ended.returncode}")


def warmed(root: Path) -> tuple[Path, Path]:
    """The quickstart's model after its warm-up, and its tasks."""
    run = root / "rft" / "quickstart"
    exports = run / "sft_warmup" / "huggingface"
    if not exports.exists():
        started(
            [
                "experiment=quickstart",
                f"checkpoint_root_dir={root}",
                "stages.1.trainer.total_steps=1",
                "stages.1.explorer.eval_interval=0",
                "stages.1.explorer.eval_on_startup=false",
                "monitor=none",
            ]
        )
    [export] = sorted(exports.iterdir())[-1:]
    return export, run / "assets" / "train.jsonl"


def trained(
    root: Path, model: Path, tasks: Path, staleness: int, correction: str, steps: int, seed: int = 0
) -> RunRecord:
    """A finished run is only read; one that was cut off begins anew."""
    name = f"{correction.lower()}-{staleness}-{steps}-{seed}"
    directory = root / "rft" / name
    if not directory.exists() or RunRecord(directory).last_step < steps:
        shutil.rmtree(directory, ignore_errors=True)
        started(
            [
                "experiment=grpo",
                f"name={name}",
                f"checkpoint_root_dir={root}",
                f"model.model_path={model}",
                f"buffer.explorer_input.taskset.path={tasks}",
                f"buffer.total_epochs={steps}",
                f"trainer.total_steps={steps}",
                f"synchronizer.max_staleness={staleness}",
                f"synchronizer.sync_interval={staleness + 1}",
                f"seed={seed}",
                *LEARNING,
                *CORRECTIONS[correction],
            ]
        )
    return RunRecord(directory)


def reached(record: RunRecord) -> float:
    rewards = [value for _, value in record.series("reward/mean")]
    last = rewards[-max(1, len(rewards) // 5) :]
    return sum(last) / len(last)


def oldest(record: RunRecord) -> float:
    return max(value for _, value in record.series("staleness/max"))


def draw(found: dict[int, dict[str, RunRecord]], out: Path) -> None:
    """A column per staleness; what the run on fresh rollouts reached is grey in all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 7), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(found), squeeze=False, sharey="row")
    for column, (staleness, records) in enumerate(found.items()):
        for row, (metric, title) in enumerate(
            (("reward/mean", "reward"), ("logprob_diff/mean", "trainer vs. engine, nats"))
        ):
            axes = grid[row][column]
            curves.style(axes, title, f"staleness up to {staleness}")
            for name, record in {FRESH: found[0][FRESH], **records}.items():
                steps, values = zip(*record.series(metric), strict=True)
                grey = {"color": curves.MUTED, "linestyle": "--"} if name == FRESH else {}
                axes.plot(steps, curves.smooth(values), label=name, linewidth=1.6, **grey)
            axes.legend(frameon=False, fontsize=8, ncols=2 if len(records) > 4 else 1)
    figure.tight_layout(h_pad=4)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, two of each")
    parser.add_argument("--root", type=Path, default=Path("runs/staleness"), help="of the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness.png"))
    given = parser.parse_args()
    runs = QUICK_RUNS if given.quick else RUNS
    steps = QUICK_STEPS if given.quick else STEPS
    root = given.root.resolve()
    model, tasks = warmed(root)

    def run(staleness: int, correction: str, seed: int = 0) -> RunRecord:
        began = time.monotonic()
        record = trained(root, model, tasks, staleness, correction, steps, seed)
        seconds = time.monotonic() - began
        print(
            f"  {correction}, staleness {staleness}: {reached(record):.3f} ({seconds:.0f} s)",
            flush=True,
        )
        return record

    found = {0: {FRESH: run(0, PLAIN), AGAIN: run(0, PLAIN, seed=1)}}
    for staleness, names in runs.items():
        found[staleness] = {name: run(staleness, name) for name in names}
    draw(found, given.out)
    rewards = {
        age: {name: round(reached(record), 4) for name, record in records.items()}
        for age, records in found.items()
    }
    rows = [
        [name, *(f"{rewards[age][name]:.3f}" if name in rewards[age] else "" for age in runs)]
        for name in CORRECTIONS
        if any(name in names for names in runs.values())
    ]
    report.table("mean reward of the last fifth", ["", *map(str, runs)], rows)
    print(f"on fresh rollouts: {rewards[0][FRESH]:.3f}, by another seed {rewards[0][AGAIN]:.3f}")
    ages_seen = {age: oldest(records[PLAIN]) for age, records in found.items() if age}
    report.last_line(
        "staleness",
        {str(age): of for age, of in rewards.items()},
        {"steps": steps, "oldest": ages_seen},
        {"learning": LEARNING},
        report.versions("torch", "megatron-core", "ray"),
        all(ages_seen[age] == age for age in runs if age < steps),
    )


if __name__ == "__main__":
    main()
