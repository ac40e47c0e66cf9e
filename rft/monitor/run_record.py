"""The files that every run leaves: `metrics.jsonl` and `samples.jsonl`, one JSON object per line;
and `RunRecord`, through which everybody reads a run's directory.

In: metrics and rows with their step. Out: lines `{"step": 37, "time_s": 12.3, ...}`; `time_s` is
time spent in this job, going on where the resumed run stood. Invariants: a line is written whole by
one append and never changed; after a resume at step T nothing of a later step is left, so no step
appears twice however often the run was killed. Who reads writes nothing, also beside a run that is
under way.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rft.ground import durable, redact

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What the directory of a job (a run, or one stage of it) tells, read when it is asked for.

    What was not recorded is in no answer; null, which stands for NaN, was not.
    """

    directory: Path

    @cached_property
    def rows(self) -> list[Row]:
        """Metrics by name, a row per step, in order of steps."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def timed(self) -> list[Row]:
        """Rows of training steps; an evaluation of step 0 is none."""
        return [row for row in self.rows if row.get("time/step_s") is not None]

    @property
    def seconds(self) -> float:
        """Time in training steps."""
        return float(sum(row["time/step_s"] for row in self.timed))

    @cached_property
    def names(self) -> set[str]:
        """Metrics that were a finite number at least once."""
        found = {name for row in self.rows for name, value in row.items() if is_number(value)}
        return found - {"step", "time_s"}

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the value is a finite number."""
        return [
            (int(row["step"]), float(row[metric]))
            for row in self.rows
            if is_number(row.get(metric))
        ]

    def accuracies(self) -> dict[str, str]:
        """Metrics of evaluations, `eval/<set>/accuracy`, with the name of the set."""
        return {
            name: name.split("/")[1]
            for name in sorted(self.names)
            if name.startswith("eval/") and name.endswith("/accuracy")
        }

    @cached_property
    def config(self) -> Row:
        """resolved.yaml as written: interpolations, which stand for secrets, stay what they are."""
        path = self.directory / "resolved.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}

    @cached_property
    def samples(self) -> list[Row]:
        return read_lines(self.directory / "samples.jsonl")

    @property
    def is_complete(self) -> bool:
        """Whether the job has written down that it has done all that it was asked for."""
        path = self.directory / "result.json"
        return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["complete"])

    def flattened_config(self) -> dict[str, str]:
        """Return the config by dotted keys, as text, for services that keep a run's parameters.

        Secrets are names of variables there.
        """
        return {
            key: "" if value is None else redact.text(str(value))
            for key, value in flat(self.config).items()
            if key
        }


class JsonLines:
    """One append-only file.

    `resume_step` below 1: nothing was resumed, all that is there will be made again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if 0 < resume_step >= line["step"]]
        self.last: dict[str, Any] = kept[-1] if kept else {}
        durable.put(path, "".join(_encode(line) for line in kept))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, line: dict[str, Any]) -> None:
        data = _encode(line).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


class RunFiles:
    """The sink of both files."""

    def __init__(
        self, job_dir: Path, resume_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = JsonLines(job_dir / "metrics.jsonl", resume_step)
        self._samples = JsonLines(job_dir / "samples.jsonl", resume_step)
        self._clock = clock
        self._begin = clock() - float(self._metrics.last.get("time_s", 0.0))

    def log(self, metrics: dict[str, float], step: int) -> None:
        time_s = round(self._clock() - self._begin, 3)
        self._metrics.append(
            {
                "step": step,
                "time_s": time_s,
                **{key: float(value) for key, value in metrics.items()},
            }
        )

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        for row in rows:
            self._samples.append({"step": step, "table": name, **row})

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        """Their quantiles are metrics; the values themselves would be most of the file."""

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def read_metrics(path: Path) -> list[Row]:
    """Read lines merged by step, in order of steps: an evaluation may be logged after its step."""
    merged: dict[int, Row] = {}
    for line in read_lines(path):
        merged.setdefault(line["step"], {}).update(line)
    return [merged[step] for step in sorted(merged)]


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys; an empty dictionary is a value."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def is_number(value: object) -> bool:
    """Whether a metric's value is one that can be drawn and compared."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_lines(path: Path) -> list[Row]:
    """Read all whole lines; the torn end of a file whose writer was killed is not one."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


def _encode(line: dict[str, Any]) -> str:
    finite = {key: _finite(value) for key, value in line.items()}
    return redact.text(json.dumps(finite, ensure_ascii=False, allow_nan=False, default=str)) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: null says that there was a value and it was not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
