"""`rft sweep-report SWEEP_DIR`: one table and one picture of a sweep, also while it runs.

In: the directories of the trials. Out: the table on the terminal, `sweep.md` and `sweep.csv`, and
`sweep.png` with the objective over the trials and the curves of all trials. Exit code 0, or 2 for a
directory that is no sweep, or cannot be written. Invariant: a trial that did not finish has a
state and no objective.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft import config as configs
from rft.config import ConfigError, SweepConfig
from rft.extras.sweep import trial_records
from rft.extras.sweep.trial_records import Trial, state
from rft.ground import durable
from rft.monitor.sinks import markdown
from rft.tools.curves import INK, MUTED, style
from rft.tools.tables import table

BEST, OTHERS, BAD = "#3b5bdb", "#91a7ff", "#e8590c"
MOST_NAMED = 8  # curves in the legend; of more trials, the best ones


@dataclass(frozen=True)
class TrialRow:
    """A trial as the report tells of it.

    `chosen`: the overrides in which trials of the sweep differ.
    """

    trial: Trial
    state: str
    chosen: str
    value: float | None
    steps: int


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    sweep_dir = Path(options.sweep_dir)
    try:
        judged_by = judge(sweep_dir, options)
        rows = read(sweep_dir, judged_by)
    except ConfigError as error:
        print(f"rft sweep-report: {error}", file=sys.stderr)
        return 2
    cells = [cells_of(row, judged_by) for row in rows]
    print(table(cells, ruled=True))
    best = best_of(rows, judged_by)
    if best is not None:
        print(
            f"best     trial {best.trial.number}: "
            f"{judged_by.objective}={best.value:g} with {best.chosen or 'what all share'}"
        )
    out = Path(options.out or sweep_dir)
    try:
        write(out, rows, cells, judged_by)
    except OSError as error:
        print(f"rft sweep-report: {out}: {error.strerror}; give another --out", file=sys.stderr)
        return 2
    print(f"written  {out / 'sweep.md'}, sweep.csv, sweep.png")
    return 0


def write(
    out: Path, rows: list[TrialRow], cells: list[dict[str, str]], judged_by: SweepConfig
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    durable.put(out / "sweep.md", markdown(cells) + "\n")
    with (out / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(cells[0]))
        writer.writeheader()
        writer.writerows(cells)
    draw(rows, judged_by, out / "sweep.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft sweep-report", description="One table and one picture of a sweep."
    )
    parser.add_argument(
        "sweep_dir",
        metavar="SWEEP_DIR",
        help="the directory with the trials: <root>/<project>/<name>/sweep",
    )
    parser.add_argument("--objective", help="another metric of metrics.jsonl than sweep.objective")
    parser.add_argument(
        "--value", choices=trial_records.CHOICES["value"], help="which of its values"
    )
    parser.add_argument("--direction", choices=trial_records.CHOICES["direction"])
    parser.add_argument("--out", metavar="DIR", help="where to write; default: SWEEP_DIR")
    return parser


def judge(sweep_dir: Path, options: argparse.Namespace) -> SweepConfig:
    """As the newest trial was judged, unless the command says otherwise."""
    found = SweepConfig()
    for trial in trial_records.trials(sweep_dir):
        for path in (trial.directory / stage / "resolved.yaml" for stage in trial.stages):
            found = SweepConfig(**configs.as_written(path).sweep) if path.exists() else found
    for key in ("objective", "value", "direction"):
        if given := getattr(options, key):
            setattr(found, key, given)
    return found


def read(sweep_dir: Path, judged_by: SweepConfig) -> list[TrialRow]:
    trials = trial_records.trials(sweep_dir)
    if not trials:
        raise ConfigError(
            f"{sweep_dir} has no trials: "
            "give the directory of a sweep, <root>/<project>/<name>/sweep"
        )
    shared = set.intersection(*(set(trial.overrides) for trial in trials))
    worth = trial_records.objectives(trials, judged_by)
    rows = []
    for trial in trials:
        chosen = " ".join(
            line for line in trial.overrides if line not in shared and not line.startswith("sweep.")
        )
        value, steps = worth.get(trial.number), trial_records.steps(trial)
        rows.append(TrialRow(trial, state(trial), chosen, value, steps))
    return rows


def best_of(rows: list[TrialRow], judged_by: SweepConfig) -> TrialRow | None:
    judged = [row for row in rows if row.value is not None]
    sign = 1 if judged_by.direction == "maximize" else -1
    return max(judged, key=lambda row: sign * (row.value or 0.0), default=None)


def cells_of(row: TrialRow, judged_by: SweepConfig) -> dict[str, str]:
    return {
        "trial": str(row.trial.number),
        "overrides": row.chosen or "-",
        "state": row.state + (f" ({row.trial.code})" if row.state == "failed" else ""),
        judged_by.objective or "objective": "-" if row.value is None else f"{row.value:.4g}",
        "steps": str(row.steps),
        "seconds": f"{row.trial.seconds:.0f}",
        "attempts": str(row.trial.attempts),
    }


# The picture


def draw(rows: list[TrialRow], judged_by: SweepConfig, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5.6), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    figure.subplots_adjust(left=0.06, right=0.98, top=0.83, bottom=0.11, wspace=0.16)
    best = best_of(rows, judged_by)
    _over_trials(left, rows, best, judged_by)
    _curves(right, rows, best, judged_by)
    figure.savefig(path)


def _over_trials(
    axes: Any, rows: list[TrialRow], best: TrialRow | None, judged_by: SweepConfig
) -> None:
    counts = {
        kind: sum(row.state == kind for row in rows)
        for kind in dict.fromkeys(row.state for row in rows)
    }
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    style(
        axes,
        f"Objective: {judged_by.objective or 'none'}",
        f"{judged_by.value} value of each trial; {told}",
        "trial",
    )
    judged = [row for row in rows if row.value is not None]
    axes.plot(
        [r.trial.number for r in judged], [r.value for r in judged], "o", color=OTHERS, markersize=8
    )
    sofar = [best_of(judged[: index + 1], judged_by) for index in range(len(judged))]
    heights = [row.value for row in sofar if row is not None]
    axes.step(
        [r.trial.number for r in judged],
        heights,
        where="post",
        color=MUTED,
        linewidth=1,
        label="best so far",
    )
    if best is not None:
        axes.plot(
            [best.trial.number],
            [best.value],
            "o",
            color=BEST,
            markersize=11,
            label=f"best: trial {best.trial.number}",
        )
    if others := [row.trial.number for row in rows if row.value is None]:
        at_the_edge = axes.get_xaxis_transform()  # below all values: these trials have none
        axes.plot(
            others,
            [0.0] * len(others),
            "x",
            color=BAD,
            markersize=9,
            transform=at_the_edge,
            clip_on=False,
            label="no result",
        )
    axes.set_xlim(-0.5, max(row.trial.number for row in rows) + 0.5)
    _legend(axes)


def _curves(axes: Any, rows: list[TrialRow], best: TrialRow | None, judged_by: SweepConfig) -> None:
    from matplotlib import colormaps

    style(axes, "Curves of all trials", f"{judged_by.objective or 'no objective'} over steps")
    sign = 1 if judged_by.direction == "maximize" else -1
    ordered = sorted(
        rows, key=lambda row: -sign * row.value if row.value is not None else float("inf")
    )
    colors = colormaps["viridis"]
    for place, row in enumerate(ordered):
        series = trial_records.series(row.trial, judged_by.objective) if judged_by.objective else []
        if not series:
            continue
        color = BEST if row is best else colors(0.25 + 0.6 * place / max(len(ordered) - 1, 1))
        color = MUTED if row.value is None else color
        label = (
            f"{row.trial.number}: "
            f"{row.chosen or 'as given'}{'' if row.state == 'finished' else f' ({row.state})'}"
        )
        axes.plot(
            *zip(*series, strict=True),
            color=color,
            linewidth=2.4 if row is best else 1.3,
            linestyle="-" if row.state == "finished" else "--",
            marker="o" if len(series) == 1 else "",
            label=label if place < MOST_NAMED else None,
            zorder=3 if row is best else 2,
        )
    _legend(axes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
