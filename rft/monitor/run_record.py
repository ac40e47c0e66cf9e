"""The files that every run leaves: `metrics.jsonl` and `samples.jsonl`, one JSON object per line;
and `RunRecord`, through which everybody reads a run's directory.

In: metrics and rows with their step. Out: lines `{"step": 37, "time_s": 12.3, ...}`; `time_s` is
time spent in this job, going on where the resumed run stood. Invariants: a line is written whole by
one append and never changed; after a resume at step T nothing of a later step is left, so no step
appears twice however often the run was killed. A line that a full disk does not take is counted
(`left_out`); a file with lines that cannot be read (a start looks for them in its last 64 MB) is
set aside, and what can be goes on. Who reads writes nothing, also beside a run that is under way.
"""

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rft.ground import durable, redact
from rft.monitor import left_out

log = logging.getLogger(__name__)
Row = dict[str, Any]
# of a file's end, which a start looks at: a run of 100,000 steps has gigabytes before it
LOOK = 64 * 2**20
METRICS_OF_STEP, SAMPLES_OF_STEP = b'"time/step_s":', b'"table": "samples"'


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
        """Found without reading what the lines tell: a start asks for it."""
        path = self.directory / "metrics.jsonl"
        return max((step for step, _ in _ending(path, METRICS_OF_STEP).found), default=0)

    def having(self, names: Sequence[str]) -> list[Row]:
        """Rows that have all these metrics, of lines with one of them; no other line is read."""
        wanted = [msgspec.json.encode(name) for name in names]
        lines = _whole_lines(self.directory / "metrics.jsonl")
        about = [line for line in lines if any(name in line for name in wanted)]
        told = [line for line in about if _step(line) is not None]
        return [row for row in _merged(told) if all(name in row for name in names)]

    def newest(self, metric: str) -> Row:
        """The last line that has the metric, looked for from the end; empty where none has."""
        name = msgspec.json.encode(metric)
        lines = _ending(self.directory / "metrics.jsonl", name).found
        return next((json.loads(line) for _, line in reversed(lines) if name in line), {})

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
            name: name.removeprefix("eval/").removesuffix("/accuracy")
            for name in sorted(self.names)
            if name.startswith("eval/") and name.endswith("/accuracy")
        }

    @cached_property
    def config(self) -> Row:
        """resolved.yaml as written: interpolations, which stand for secrets, stay what they are."""
        path = self.directory / "resolved.yaml"
        return _whole(path, yaml.safe_load) if path.exists() else {}

    @cached_property
    def samples(self) -> list[Row]:
        return read_lines(self.directory / "samples.jsonl")

    @property
    def sampled_steps(self) -> list[int]:
        """Found without keeping what the lines tell, gigabytes in a long run."""
        steps = map(_step, _whole_lines(self.directory / "samples.jsonl"))
        return sorted({step for step in steps if step is not None})

    def samples_at(self, steps: Collection[int]) -> list[Row]:
        lines = _whole_lines(self.directory / "samples.jsonl")
        return [json.loads(line) for line in lines if _step(line) in steps]

    @property
    def is_complete(self) -> bool:
        """Whether the job has written down that it has done all that it was asked for."""
        path = self.directory / "result.json"
        return path.exists() and bool(_whole(path, json.loads).get("complete"))

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
    """One append-only file, of this process alone.

    `resume_step` below 1: nothing was resumed, all that is there will be made again. `of_step`:
    what lines of training steps have, and others, which may come late, have not.
    """

    def __init__(self, path: Path, resume_step: int, of_step: bytes = METRICS_OF_STEP) -> None:
        self.path, self.resume_step, self.of_step = path, resume_step, of_step
        self.last: dict[str, Any] = {}
        self._file: int | None = None  # not yet: the disk was full when it was to begin
        self._torn = False
        self._guarded(self._begin)

    def append(self, line: dict[str, Any]) -> None:
        """One line, or none: what cannot be written is counted."""
        data = _encode(line).encode()
        self._guarded(lambda: self._write(data))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            left_out.note(f"lines of {self.path.name}", error)

    def _begin(self) -> None:
        """Keep the lines up to `resume_step`, and open behind them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = _ending(self.path, self.of_step, self.resume_step)
        kept = [line for step, line in end.found if 0 < self.resume_step >= step]
        data = b"".join(line + b"\n" for line in kept)
        if end.damaged:
            self._set_aside(end.damaged, data)
        else:
            self._cut(end.start, data)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.last = json.loads(kept[-1]) if kept else {}

    def _cut(self, start: int, data: bytes) -> None:
        """Let the file end, from `start` on, with `data`. What is dropped is its end, or there are
        evaluations behind it, which move up.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(start)
            is_there = file.read(len(data)) == data
            if not is_there:
                with durable.replacing(self.path) as anew:
                    file.seek(0)
                    while (left := start - file.tell()) > 0:
                        anew.write(file.read(min(left, LOOK)))
                    anew.write(data)
        if is_there and self.path.stat().st_size > start + len(data):
            os.truncate(self.path, start + len(data))

    def _set_aside(self, damaged: int, data: bytes) -> None:
        """`data`, what could be read, takes the place of the file, which keeps all it has."""
        aside = _free_name(self.path)
        self.path.replace(aside)
        try:
            durable.put(self.path, data)
        except OSError:
            aside.replace(self.path)  # for the next try
            raise
        log.warning(
            "%s: %d line(s) cannot be read: it is kept as %s, and what can be read goes on",
            self.path,
            damaged,
            aside.name,
        )

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._begin()
        assert self._file is not None
        before = os.fstat(self._file).st_size
        try:
            # a part of a line that could not be taken back is a line of its own
            durable.write_all(self._file, b"\n" + data if self._torn else data)
            self._torn = False
        except OSError:
            self._torn = True
            os.ftruncate(self._file, before)
            self._torn = False
            raise


class RunFiles:
    """The sink of both files."""

    def __init__(
        self, job_dir: Path, resume_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = JsonLines(job_dir / "metrics.jsonl", resume_step)
        self._samples = JsonLines(job_dir / "samples.jsonl", resume_step, SAMPLES_OF_STEP)
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


def _whole(path: Path, read: Callable[[str], Any]) -> Row:
    """The mapping that a file is; raises ValueError for one that is none, naming the file."""
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {said}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: it is no mapping")
    return found


def read_metrics(path: Path) -> list[Row]:
    """Read lines merged by step, in order of steps: an evaluation may be logged after its step."""
    return _merged(line for _, line in _lines(path).found)


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
    return [json.loads(line) for _, line in _lines(path).found]


def _merged(lines: Iterable[bytes]) -> list[Row]:
    merged: dict[int, Row] = {}
    for line in lines:
        row: Row = json.loads(line)
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


class _Line(msgspec.Struct):
    """What a line is looked at for before anybody reads the rest of it."""

    step: int


_LINE = msgspec.json.Decoder(_Line)


@dataclass(frozen=True)
class _Lines:
    """Lines of a file from `start` on that can be read, with their steps, and how many cannot: a
    page of zeros, a torn line inside, a bit that has changed.
    """

    found: list[tuple[int, bytes]]
    damaged: int
    start: int = 0


def _lines(path: Path, start: int = 0) -> _Lines:
    lines = [(_step(line), line) for line in _whole_lines(path, start)]
    found = [(step, line) for step, line in lines if step is not None]
    return _Lines(found, len(lines) - len(found), start)


def _ending(path: Path, of_step: bytes, step: int | None = None) -> _Lines:
    """The last ones, all before which are of earlier steps than a training step (one up to `step`)
    among them; all lines, where there is none, or damage.
    """
    start = _begin_of_line(path, path.stat().st_size - LOOK if path.exists() else 0)
    end = _lines(path, start)
    is_enough = any(
        of_step in line and (step is None or number <= step) for number, line in end.found
    )
    return end if not start or (is_enough and not end.damaged) else _lines(path)


def _begin_of_line(path: Path, at: int) -> int:
    """The first one behind `at`."""
    if at <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(at)
        file.readline()
        return file.tell()


def _whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Without their ends; what a killed writer has torn is none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n") and line != b"\n":
                yield line[:-1]


def _step(line: bytes) -> int | None:
    try:
        line.decode()  # what is skipped is not looked at for it
        return _LINE.decode(line).step
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None


def _free_name(path: Path) -> Path:
    """For a damaged file; one that was set aside before stays."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _encode(line: dict[str, Any]) -> str:
    finite = {key: _finite(value) for key, value in line.items()}
    return redact.text(json.dumps(finite, ensure_ascii=False, allow_nan=False, default=str)) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: null says that there was a value and it was not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
