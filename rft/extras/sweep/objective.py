"""What a trial is worth: one number out of its `metrics.jsonl`.

In: a trial's record and the section `sweep`. Out: a finite number, or a `ConfigError` that names
the metrics there are. Invariant: the number is read anew each time, never kept, so a finished sweep
can be judged by another metric at once.
"""

import difflib

from rft.config import ConfigError, SweepConfig
from rft.extras.sweep.records import Trial
from rft.monitor.records import RunRecord

CHOICES = {"value": ("last", "best"), "direction": ("maximize", "minimize")}


def check(sweep: SweepConfig) -> None:
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


def value(trial: Trial, sweep: SweepConfig) -> float | None:
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


def _instead(trial: Trial, metric: str) -> str:
    names = set().union(*(stage.names for stage in stages(trial)))
    near = difflib.get_close_matches(metric, names, n=1, cutoff=0.4)
    return "no such number in its metrics.jsonl" + (f"; did you mean `{near[0]}`?" if near else "")
