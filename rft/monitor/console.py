"""What a person sees while the run goes: one line per step, and on a terminal a progress bar below
the lines.

    [ 37/150  25%  eta 1:03]  reward 0.512  loss 0.0213  stale 0.9/1  kl 1.2e-05  len 12.4  ...

In: the metrics of a step. Out: plain lines when the stream is a file (Slurm logs), the same lines
and a bar when it is a terminal. Invariant: only the columns of `COLUMNS` and evaluation results are
shown; everything is in metrics.jsonl.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from rft.monitor import left_out

WINDOW = 20  # steps over which the time per step is averaged: old steps may have had other lengths
# label, metric, form; no label: joined to the column before; an unrecorded metric is left out
COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("stale", "staleness/mean", "{:.1f}"),
    ("", "staleness/max", "/{:.0f}"),
    ("kl", "kl/mismatch", "{:.1e}"),
    ("len", "response_length/mean", "{:.1f}"),
    ("", "response_length/max", "/{:.0f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:,.0f}"),
    ("step", "time/step_s", "{:.2f}s"),
    ("wait", "time/wait_batch_s", "{:.2f}s"),
    ("train", "time/train_s", "{:.2f}s"),
    ("sync", "time/sync_wait_s", "{:.2f}s"),
)
EVALUATION = ("accuracy", "reward/mean")  # what is shown of eval/<set>/...


class Console:
    """The console sink."""

    def __init__(
        self,
        title: str,
        total_steps: int | None,
        step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._total, self._clock = total_steps, clock
        self._marks: deque[tuple[int, float]] = deque([(step, clock())], maxlen=WINDOW + 1)
        self._progress = (
            _progress(title, total_steps, step, self._stream) if self._stream.isatty() else None
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        columns = [*cells(metrics), *evaluations(metrics)]
        if not columns:
            return
        if "time/step_s" in metrics:  # a late evaluation of an earlier step does not move the bar
            self._marks.append((step, self._clock()))
        line = f"{self.position(step)}  {'  '.join(columns)}"
        if self._progress is None:
            print(line, file=self._stream, flush=True)
            return
        self._progress.console.print(line, markup=False, highlight=True, soft_wrap=True)
        self._progress.update(self._progress.task_ids[0], completed=self._marks[-1][0])

    def position(self, step: int) -> str:
        """`[ 37/150  25%  eta 1:03]`; without a known end only the step."""
        if not self._total:
            return f"[step {step}]"
        head = f"{step:>{len(str(self._total))}}/{self._total}  {100 * step // self._total:>3}%"
        remaining = self.remaining_s()
        return f"[{head}]" if remaining is None else f"[{head}  eta {duration(remaining)}]"

    def remaining_s(self) -> float | None:
        (first, begin), (last, end) = self._marks[0], self._marks[-1]
        if not self._total or last <= first:
            return None
        return (end - begin) / (last - first) * max(self._total - last, 0)

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        """Samples are for samples.jsonl."""

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        """Nothing to look at in a line."""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if told := left_out.told():
            print(f"left out of what this run records: {told}", file=self._stream, flush=True)


def cells(metrics: dict[str, float]) -> list[str]:
    """The allowed columns as text."""
    shown: dict[str, str] = {}
    column = ""
    for label, name, form in COLUMNS:
        column = label or column
        if name not in metrics:
            continue
        value = form.format(metrics[name]) if math.isfinite(metrics[name]) else str(metrics[name])
        if label:
            shown[label] = f"{label} {value}"
        elif column in shown:
            shown[column] += value
    return list(shown.values())


def evaluations(metrics: dict[str, float]) -> list[str]:
    """`eval/sums/accuracy` as `eval sums accuracy 0.840`;
    reward only where there is no accuracy.
    """
    shown: dict[str, str] = {}
    for statistic in EVALUATION:
        for name, value in metrics.items():
            taskset = name.removeprefix("eval/").removesuffix(f"/{statistic}")
            if name == f"eval/{taskset}/{statistic}":
                shown.setdefault(taskset, f"eval {taskset} {statistic} {value:.3f}")
    return list(shown.values())


def duration(seconds: float) -> str:
    """63 -> 1:03, 7325 -> 2:02:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _progress(title: str, total: int | None, step: int, stream: TextIO) -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=RichConsole(file=stream),
    )
    progress.add_task(title, total=total, completed=step)
    progress.start()
    return progress
