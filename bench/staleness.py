"""Corrections for old rollouts beside each other: the quickstart's GRPO from one warm model, with
rollouts that are up to n versions old.

    python -m bench.staleness [--quick] [--out DIRECTORY]

In: nothing. Out: `staleness.png` (reward and mean difference of log-probabilities over the steps, a
column per staleness), a table, and one last line of JSON. The warm-up of the quickstart is made
once; every run begins from its export. A staleness of n is made by publishing every (n + 1)-th
version only, so that it does not depend on how quick the machine is: rollouts are n versions old at
most, n / 2 on average. What is compared is the mean reward of the last fifth of the steps.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import report
from rft.monitor.run_record import RunRecord
from rft.tools import curves

STALENESS, QUICK_STALENESS = (0, 1, 4, 16), (0, 4)
STEPS, QUICK_STEPS = 100, 10
KEY = "algorithm.rollout_correction"
TOKEN = f"{KEY}.rollout_is=token"
CORRECTIONS = {  # as published: docs/algorithms.md
    "clip": [],
    "TIS": [TOKEN],
    "IcePop": [f"{KEY}.rollout_rs=token", f"{KEY}.rollout_rs_threshold=5"],
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
QUICK = ("clip", "KPop")
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
    run = root / "rft" / "quickstart"
    [export] = sorted((run / "sft_warmup" / "huggingface").iterdir())[-1:]
    return export, run / "assets" / "train.jsonl"


def trained(
    root: Path, model: Path, tasks: Path, staleness: int, correction: str, steps: int
) -> RunRecord:
    name = f"{correction.lower()}-{staleness}"
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
            *LEARNING,
            *CORRECTIONS[correction],
        ]
    )
    return RunRecord(root / "rft" / name)


def reached(record: RunRecord) -> float:
    rewards = [value for _, value in record.series("reward/mean")]
    last = rewards[-max(1, len(rewards) // 5) :]
    return sum(last) / len(last)


def draw(found: dict[tuple[int, str], RunRecord], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = sorted({staleness for staleness, _ in found})
    figure = Figure(figsize=(4 * len(columns), 7), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(columns), squeeze=False)
    for column, staleness in enumerate(columns):
        for row, (metric, title) in enumerate(
            (("reward/mean", "reward"), ("logprob_diff/mean", "trainer vs. engine, nats"))
        ):
            axes = grid[row][column]
            curves.style(axes, title, f"staleness up to {staleness}")
            for (at, name), record in found.items():
                if at == staleness and record.series(metric):
                    steps, values = zip(*record.series(metric), strict=True)
                    axes.plot(steps, curves.smooth(values), label=name, linewidth=1.6)
            axes.legend(frameon=False, fontsize=8)
    figure.tight_layout(h_pad=4)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, two of each")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="of the picture")
    given = parser.parse_args()
    names = QUICK if given.quick else tuple(CORRECTIONS)
    ages = QUICK_STALENESS if given.quick else STALENESS
    steps = QUICK_STEPS if given.quick else STEPS
    with tempfile.TemporaryDirectory(prefix="rft-staleness-") as directory:
        root = Path(directory)
        model, tasks = warmed(root)
        found = {}
        for staleness in ages:
            for name in names:
                found[staleness, name] = trained(root, model, tasks, staleness, name, steps)
                print(f"  {name}, staleness {staleness}: {reached(found[staleness, name]):.3f}")
        draw(found, given.out / "staleness.png")
        rewards = {name: {age: reached(found[age, name]) for age in ages} for name in names}
        rows = [[name, *(f"{rewards[name][age]:.3f}" for age in ages)] for name in names]
        oldest = {
            age: max(value for _, value in found[age, names[0]].series("staleness/max"))
            for age in ages
        }
    report.table("mean reward of the last fifth", ["", *map(str, ages)], rows)
    report.last_line(
        "staleness",
        {
            name: {str(age): round(value, 4) for age, value in of.items()}
            for name, of in rewards.items()
        },
        {"steps": steps, "oldest": oldest},
        {"learning": LEARNING},
        report.versions("torch", "megatron-core", "ray"),
        all(oldest[age] == age for age in ages if age < steps),
    )


if __name__ == "__main__":
    main()
