"""The picture at the end of a run: what one would show to a colleague.

In: the stages of a run in order, each with its record. Out: one PNG: evaluation accuracy,
warm-up loss, training reward, staleness, how far trainer and engines disagree, and where the time
went. Stages that share a panel follow each other on its axis. Invariant: a metric that was not
recorded leaves its panel saying so; nothing is invented for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.monitor.run_record import RunRecord

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
STAGE_COLORS = ("#3b5bdb", "#f59f00", "#0ca678", "#ae3ec9")  # from the last stage back
SMOOTHING = 0.12  # weight of the newest step in a smoothed line: about the last 15 steps
LOSS_SMOOTHING = 0.4  # a supervised loss is little noise and much slope
MAX_BARS = 48  # of the time panel; longer runs are averaged into this many
TIMES = (  # part of a step, metric, color
    ("train", "time/train_s", "#3b5bdb"),
    ("wait for batch", "time/wait_batch_s", "#f59f00"),
    ("wait for weight sync", "time/sync_wait_s", "#e8590c"),
    ("checkpoint", "time/checkpoint_s", "#0ca678"),
    ("evaluation", "time/eval_s", "#ae3ec9"),
)
OTHER = ("other", "#ced4da")


@dataclass(frozen=True)
class Stage:
    """The record of one stage, its color, and where its step 0 lies on the axis."""

    name: str
    record: RunRecord
    start: int
    color: str

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        found = self.record.series(metric)
        return [self.start + step for step, _ in found], [value for _, value in found]

    def has(self, metric: str) -> bool:
        return metric in self.record.names


def colored(records: Sequence[tuple[str, RunRecord]]) -> list[Stage]:
    """The stages, each with its color."""
    count = len(records)
    colors = [STAGE_COLORS[(count - 1 - number) % len(STAGE_COLORS)] for number in range(count)]
    return [
        Stage(name, record, 0, color) for (name, record), color in zip(records, colors, strict=True)
    ]


def in_a_row(stages: Sequence[Stage]) -> list[Stage]:
    """The same stages, each starting on the axis where the one before ended."""
    placed, start = [], 0
    for stage in stages:
        placed.append(replace(stage, start=start))
        start += stage.record.last_step
    return placed


def draw(records: Sequence[tuple[str, RunRecord]], out_png: Path) -> Path:
    """Draw the stages `(name, record)` into `out_png`; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = colored(records)
    supervised = [stage for stage in stages if stage.has("loss") and not stage.has("reward/mean")]
    rollouts = [stage for stage in stages if stage.has("reward/mean")]
    figure = Figure(figsize=(15, 8.4), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 12, left=0.05, right=0.98, top=0.86, bottom=0.075, hspace=0.42, wspace=1.6
    )
    _accuracy(figure.add_subplot(grid[0, :6]), stages)
    if supervised:
        _loss(figure.add_subplot(grid[0, 6:9]), supervised)
    _reward(figure.add_subplot(grid[0, 9 if supervised else 6 :]), rollouts)
    _staleness(figure.add_subplot(grid[1, :3]), rollouts)
    _mismatch(figure.add_subplot(grid[1, 3:6]), rollouts)
    _time(figure.add_subplot(grid[1, 6:]), stages)
    _heading(figure, stages)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)
    return out_png


def smooth(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential moving average without the pull towards the first value."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        total, norm = total * (1 - weight) + value * weight, norm * (1 - weight) + weight
        smoothed.append(total / norm)
    return smoothed


def time_shares(timed: Sequence[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    """Put rows of training steps in at most `MAX_BARS` bins: the middle of each, and seconds per
    step of `TIMES` and then of the rest.
    """
    size = max(1, math.ceil(len(timed) / MAX_BARS))
    bins = [timed[begin : begin + size] for begin in range(0, len(timed), size)]
    centers, parts = [], []
    for rows_of_bin in bins:
        named = [
            sum(row.get(metric) or 0.0 for row in rows_of_bin) / len(rows_of_bin)
            for _, metric, _ in TIMES
        ]
        whole = sum(row["time/step_s"] for row in rows_of_bin) / len(rows_of_bin)
        centers.append((rows_of_bin[0]["step"] + rows_of_bin[-1]["step"]) / 2)
        parts.append([*named, max(0.0, whole - sum(named))])
    return centers, parts


# Panels: each takes its axes and the stages that have something for it.


def _accuracy(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Evaluation accuracy", "share of right answers on held-out tasks")
    sets = {name: one for stage in stages for name, one in stage.record.accuracies().items()}
    names = sorted(sets)
    stages = in_a_row([stage for stage in stages if any(stage.has(name) for name in names)])
    found = [(stage, name) for stage in stages for name in names if stage.has(name)]
    if not found:
        return _absent(axes, "no evaluation was run")
    for stage, name in found:
        steps, values = stage.series(name)
        dashes = ("-", "--", ":", "-.")[names.index(name) % 4]
        label = stage.name if len(names) == 1 else f"{stage.name}: {sets[name]}"
        axes.plot(
            steps,
            values,
            dashes,
            color=stage.color,
            linewidth=2.2,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=1.2,
            label=label,
            clip_on=False,
            zorder=3,
        )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    _before_after(
        axes,
        [stage.series(names[0]) for stage in stages if stage.has(names[0])],
        found[-1][0].color,
    )
    if len(found) > 1:
        axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    return None


def _before_after(axes: Any, series: Sequence[tuple[list[int], list[float]]], color: str) -> None:
    """Write the value before the first step, if there is one, and the last."""
    steps = [step for part, _ in series for step in part]
    values = [value for _, part in series for value in part]
    marks = []
    if steps[0] == 0:
        marks.append((0, values[0], "before", INK))
        axes.axhline(values[0], color=MUTED, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    if steps[-1] > 0:
        marks.append((steps[-1], values[-1], "after", color))
    axes.set_xlim(-0.02 * max(steps[-1], 1), 1.02 * max(steps[-1], 1))
    for step, value, word, ink in marks:
        below = value > 0.85 or (word == "before" and values[-1] > value)
        axes.annotate(
            f"{word}  {100 * value:.1f}%",
            (step, value),
            xytext=(0, -13 if below else 13),
            textcoords="offset points",
            ha="left" if word == "before" else "right",
            va="top" if below else "bottom",
            fontsize=12,
            weight="bold",
            color=ink,
        )


def _loss(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Warm-up loss", "per token, supervised")
    _faint_and_smooth(axes, in_a_row(stages), "loss", LOSS_SMOOTHING)
    axes.set_ylim(bottom=0)


def _reward(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Training reward", "mean of the batch, and smoothed")
    if not stages:
        return _absent(axes, "no rollouts")
    _faint_and_smooth(axes, in_a_row(stages), "reward/mean", SMOOTHING)
    found = [value for stage in stages for value in stage.series("reward/mean")[1]]
    if min(found) == max(found):  # of itself the axis would be a hair's breadth around it
        axes.set_ylim(min(0.0, found[0]), max(1.0, found[0]))
    return None


def _staleness(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Staleness", "policy versions behind: largest, and mean")
    stages = in_a_row([stage for stage in stages if stage.has("staleness/mean")])
    if not stages:
        return _absent(axes)
    for stage in stages:
        steps, largest = stage.series("staleness/max")
        axes.fill_between(steps, largest, step="mid", color=stage.color, alpha=0.15, linewidth=0)
    _faint_and_smooth(axes, stages, "staleness/mean", SMOOTHING)
    axes.set_ylim(
        0,
        max([1.0, *(value for stage in stages for value in stage.series("staleness/max")[1])])
        * 1.15,
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    return None


def _mismatch(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Trainer vs. engine", "KL (k3) between their log-probabilities")
    stages = in_a_row([stage for stage in stages if stage.has("kl/mismatch")])
    if not stages:
        return _absent(axes)
    lowest = min(
        (value for stage in stages for value in stage.series("kl/mismatch")[1] if value > 0),
        default=None,
    )
    if lowest is None:
        return _absent(axes, "0 in every step")
    for stage in stages:
        steps, values = stage.series("kl/mismatch")
        shown = [max(value, lowest) for value in values]  # 0 has no logarithm
        axes.plot(steps, shown, color=stage.color, linewidth=1, alpha=0.3)
        logarithms = smooth([math.log(value) for value in shown])
        axes.plot(
            steps, [math.exp(value) for value in logarithms], color=stage.color, linewidth=2.2
        )
    _log_scale(axes)
    return None


def _time(axes: Any, stages: Sequence[Stage]) -> None:
    style(axes, "Where the time went", "seconds per step")
    binned = [
        (stage, *time_shares(stage.record.timed))
        for stage in in_a_row([stage for stage in stages if stage.has("time/step_s")])
    ]
    if not binned:
        return _absent(axes)
    names = [(name, color) for name, _, color in TIMES] + [OTHER]
    totals = [0.0] * len(names)
    for stage, centers, parts in binned:
        width = (centers[1] - centers[0] if len(centers) > 1 else 1.0) * 0.86
        bottom = [0.0] * len(centers)
        for index, (_, color) in enumerate(names):
            heights = [part[index] for part in parts]
            axes.bar(
                [stage.start + c for c in centers], heights, width, bottom, color=color, linewidth=0
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        steps_per_bin = len(stage.record.timed) / len(centers)
        totals = [t + steps_per_bin * sum(part[i] for part in parts) for i, t in enumerate(totals)]
    for stage, _, _ in binned[1:]:
        axes.axvline(stage.start + 0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
    _time_legend(axes, names, totals)
    return None


def _time_legend(axes: Any, names: Sequence[tuple[str, str]], totals: Sequence[float]) -> None:
    from matplotlib.patches import Patch

    whole = sum(totals) or 1.0
    handles = [
        Patch(color=color, label=f"{name}  {100 * total / whole:.0f}%")
        for (name, color), total in zip(names, totals, strict=True)
        if total / whole >= 0.005
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.01, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.6,
        columnspacing=1.1,
    )


# Looks


def style(axes: Any, title: str, subtitle: str, x: str = "step") -> None:
    """A quiet panel with its title and subtitle above it; `x` counts in whole numbers."""
    above = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(title, xytext=(0, 26), fontsize=13, weight="bold", color=INK, **above)
    axes.annotate(subtitle, xytext=(0, 9), fontsize=9.5, color=MUTED, **above)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.02)


def _absent(axes: Any, reason: str = "not recorded") -> None:
    axes.text(
        0.5,
        0.5,
        reason,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=MUTED,
        fontsize=11,
    )
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_xlabel("")


def _faint_and_smooth(axes: Any, stages: Sequence[Stage], metric: str, weight: float) -> None:
    for stage in stages:
        steps, values = stage.series(metric)
        axes.plot(steps, values, color=stage.color, linewidth=1, alpha=0.3)
        axes.plot(steps, smooth(values, weight), color=stage.color, linewidth=2.2)


def _log_scale(axes: Any) -> None:
    """A logarithmic axis with a handful of plain labels: 2e-5, 1e-4."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = [value for line in axes.lines for value in line.get_ydata()]
    low, high = min(values), max(values)
    axes.set_ylim(low / 1.3, high * 1.3)  # first: of one value a scale has no limits of its own
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 1000 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")
    )


def _heading(figure: Any, stages: Sequence[Stage]) -> None:
    """Stage names with their colors, steps and time."""
    left = 0.05
    for stage in stages:
        seconds = stage.record.seconds
        figure.text(left, 0.955, "●", color=stage.color, fontsize=15, va="center")
        words = figure.text(
            left + 0.015, 0.956, stage.name, color=INK, fontsize=14, weight="bold", va="center"
        )
        right = words.get_window_extent(figure.canvas.get_renderer()).x1 / figure.bbox.width
        spent = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
        facts = figure.text(
            right + 0.006,
            0.955,
            f"{stage.record.last_step} steps" + (f", {spent}" if seconds else ""),
            color=MUTED,
            fontsize=10.5,
            va="center",
        )
        left = facts.get_window_extent(figure.canvas.get_renderer()).x1 / figure.bbox.width + 0.03
