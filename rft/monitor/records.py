"""The files that every run leaves: `metrics.jsonl` and `samples.jsonl`, one JSON object per line.

In: metrics and rows with their step. Out: lines `{"step": 37, "time_s": 12.3, ...}`; `time_s` is
time spent in this job, going on where the resumed run stood. Invariants: a line is written whole by
one append and never changed; after a resume at step T nothing of a later step is left, so no step
appears twice however often the run was killed.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rft.ground import durable, redact


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


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Lines merged by step, in order of steps (an evaluation may be logged after its step): what
    plots start from.
    """
    merged: dict[int, dict[str, Any]] = {}
    for line in read_lines(Path(path)):
        merged.setdefault(line["step"], {}).update(line)
    return [merged[step] for step in sorted(merged)]


def flattened_config(path: Path) -> dict[str, str]:
    """resolved.yaml by dotted keys, as text, for services that keep a run's parameters.

    Secrets are names of variables there.
    """
    import yaml

    found: dict[str, str] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = "" if node is None else redact.text(str(node))

    if path.exists():
        walk(yaml.safe_load(path.read_text(encoding="utf-8")), "")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the torn end of a file whose writer was killed is not one."""
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
