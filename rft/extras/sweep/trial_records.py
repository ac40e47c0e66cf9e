"""Trials on disk: `trial.json` in the trial's own directory, the lock of whoever runs it, and what
it is worth: one number out of its `metrics.jsonl`.

    <sweep directory>/0/trial.json  trial.lock  [<stage>/]metrics.jsonl ...
                      1/...

In: a sweep directory, a trial's overrides, the section `sweep`. Out: the one directory that belongs
to these overrides, its record, its objective as a finite number. Invariants: a trial is known by
its overrides, in any order, so that the same command, or a wider grid, finds it again; a directory
has its record from the moment that it has its name; a record is replaced as a whole; the objective
is read anew each time, so a finished sweep can be judged by another metric at once.
"""

import difflib
import json
import os
import select
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rft.config import ConfigError, SweepConfig
from rft.ground import durable
from rft.monitor.run_record import RunRecord

RECORD, LOCK, CLAIMING = "trial.json", "trial.lock", ".claim.lock"
CLAIM_S = 30.0  # for another start to find its trial's directory
CHOICES = {"value": ("last", "best"), "direction": ("maximize", "minimize")}  # of the objective
# how trials are chosen and judged does not change what a trial does
NOT_OF_THE_RUN = ("sweep=", "sweep.", "+sweep=")


@dataclass
class Trial:
    """`state`: waiting | running | finished | failed | stopped.

    `code`: exit code of the newest attempt.
    """

    overrides: list[str]
    state: str = "waiting"
    code: int | None = None
    seconds: float = 0.0  # of all attempts together, but those whose sweep was killed
    attempts: int = 0
    # directories with a metrics.jsonl; "" is the trial's own
    stages: list[str] = field(default_factory=list)
    directory: Path = field(default=Path(), compare=False)

    @property
    def number(self) -> int:
        return int(self.directory.name)

    def write(self) -> None:
        content = {key: value for key, value in asdict(self).items() if key != "directory"}
        durable.put(self.directory / RECORD, json.dumps(content, indent=1) + "\n")


def identity(overrides: list[str]) -> list[str]:
    """What two trials must share to be the same."""
    return sorted(line for line in overrides if not line.startswith(NOT_OF_THE_RUN))


def read(directory: Path) -> Trial:
    path = directory / RECORD
    try:
        return Trial(**json.loads(path.read_bytes()), directory=directory)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is not as it was written ({error}): put back what was there, or delete it, "
            "and a trial of these overrides begins anew"
        ) from error


def trials(sweep_dir: Path) -> list[Trial]:
    """All trials of a sweep, by number."""
    directories = [
        path.parent for path in sweep_dir.glob(f"*/{RECORD}") if path.parent.name.isdigit()
    ]
    return [read(directory) for directory in sorted(directories, key=lambda path: int(path.name))]


def claim(sweep_dir: Path, overrides: list[str]) -> Trial:
    """The trial of these overrides; a new one takes the next free number."""
    sweep_dir.mkdir(parents=True, exist_ok=True)
    # two that start at once with the same overrides are one trial
    descriptor = durable.lock(sweep_dir / CLAIMING, wait_s=CLAIM_S)
    if descriptor is None:
        raise ConfigError(
            f"{sweep_dir / CLAIMING} is held by another start of this sweep for {CLAIM_S:g} s: "
            "does it hang?"
        )
    try:
        return _claimed(sweep_dir, overrides)
    finally:
        os.close(descriptor)


def _claimed(sweep_dir: Path, overrides: list[str]) -> Trial:
    known = trials(sweep_dir)
    for trial in known:
        if identity(trial.overrides) == identity(overrides):
            return trial
    number = 1 + max((trial.number for trial in known), default=-1)
    draft = Path(tempfile.mkdtemp(prefix=".new_", dir=sweep_dir))
    draft.chmod(0o755)  # mkdtemp keeps others out; a run directory does not
    Trial(overrides, directory=draft).write()
    while True:
        try:
            # fails where a directory is that has lost its record
            draft.rename(sweep_dir / str(number))
        except OSError:
            if not (sweep_dir / str(number)).exists():
                shutil.rmtree(draft)
                raise
            number += 1
        else:
            return read(sweep_dir / str(number))


def lock(directory: Path, timeout: float) -> int | None:
    """File descriptor of the directory's lock; None when another process still has it after
    `timeout` seconds.

    The lock lives as long as any process has this descriptor open, so it also tells of a trial
    whose sweep was killed. The one that runs the trial writes its process id into it (`hold`).
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT)
    if durable.take(descriptor):
        return descriptor
    if _holder_ended(descriptor, timeout) and durable.take(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _holder_ended(descriptor: int, timeout: float) -> bool:
    """Wait for the process that runs the trial; one of another machine cannot be waited for."""
    written = os.pread(descriptor, 32, 0)
    if timeout <= 0 or not written:
        return False
    try:
        process = os.pidfd_open(int(written))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], timeout)[0])
    finally:
        os.close(process)


def is_running(directory: Path) -> bool:
    """Whether a process runs this trial now, whatever its record says."""
    return durable.is_locked(directory / LOCK)


def state(trial: Trial) -> str:
    """As in the record; `interrupted` for a trial that neither ended
    nor runs: it goes on with the sweep.
    """
    if trial.state == "running" and not is_running(trial.directory):
        return "interrupted"
    return trial.state


def check_objective(sweep: SweepConfig) -> None:
    for key, choices in CHOICES.items():
        if getattr(sweep, key) not in choices:
            raise ConfigError(
                f"sweep.{key}={getattr(sweep, key)} is unknown. Known: {', '.join(choices)}."
            )


def series(trial: Trial, metric: str) -> list[tuple[int, float]]:
    """(step, value) of the last stage that has the metric; values
    that are no finite number are left out.
    """
    return next(filter(None, (stage.series(metric) for stage in reversed(stages(trial)))), [])


def stages(trial: Trial) -> list[RunRecord]:
    return [RunRecord(trial.directory / stage) for stage in trial.stages or [""]]


def steps(trial: Trial) -> int:
    """Training steps of all stages together."""
    return sum(stage.last_step for stage in stages(trial))


def objective_of(trial: Trial, sweep: SweepConfig) -> float | None:
    """The trial's objective; None when none is asked for."""
    if sweep.objective is None:
        return None
    values = [found for _, found in series(trial, sweep.objective)]
    if not values:
        raise ConfigError(
            f"sweep.objective={sweep.objective}: trial {trial.number} has "
            f"{_instead(trial, sweep.objective)}"
        )
    if sweep.value == "last":
        return values[-1]
    return max(values) if sweep.direction == "maximize" else min(values)


def objectives(trials: list[Trial], sweep: SweepConfig) -> dict[int, float]:
    """By number, of the trials that finished and have one. Where some have, those that have not
    diverged before it was told; where none has, it is refused.
    """
    finished = [trial for trial in trials if trial.state == "finished"]
    having = [trial for trial in finished if sweep.objective and series(trial, sweep.objective)]
    judged = ((trial.number, objective_of(trial, sweep)) for trial in having or finished)
    return {number: value for number, value in judged if value is not None}


def _instead(trial: Trial, metric: str) -> str:
    names = set().union(*(stage.names for stage in stages(trial)))
    near = difflib.get_close_matches(metric, names, n=1, cutoff=0.4)
    return "no such number in its metrics.jsonl" + (f"; did you mean `{near[0]}`?" if near else "")
