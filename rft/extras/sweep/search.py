"""A search by Optuna whose whole memory is the directories of its trials.

In: the space as Hydra overrides (`lr=interval(1e-6,1e-4)`), and the trials on disk. Out: what to
run next. The study is made anew from the directories for every batch and lives in memory; there is
no database to lose or to lock. Invariant: what is asked for is a function of seed and finished
trials, so a search that was killed goes on as if nothing had happened.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from rft.config import ConfigError, SweepConfig
from rft.extras.sweep import trial_records
from rft.extras.sweep.trial_records import Trial

SAMPLERS = ("tpe", "random")
MOST_REPEATS = 200  # suggestions in a row that were tried before; then the space counts as searched


@dataclass(frozen=True)
class Space:
    """`fixed`: overrides that all trials share.

    `distributions`: of every key that is searched, in Optuna's classes.
    """

    fixed: list[str]
    distributions: dict[str, Any]

    def overrides(self, params: dict[str, Any]) -> list[str]:
        return [*self.fixed, *(f"{key}={params[key]}" for key in self.distributions)]

    def params(self, trial: Trial) -> dict[str, Any] | None:
        """What was chosen for this trial; None when it is not one of this search."""
        rest, chosen = [], {}
        for line in trial.overrides:
            key, _, text = line.partition("=")
            if key in self.distributions:
                chosen[key] = _value(self.distributions[key], text)
            else:
                rest.append(line)
        same = trial_records.identity(rest) == trial_records.identity(self.fixed) and len(
            chosen
        ) == len(self.distributions)
        return chosen if same and None not in chosen.values() else None


def optuna() -> Any:
    try:
        import optuna as module
    except ImportError as error:
        raise ConfigError("sweep=optuna needs Optuna: pip install 'rft[sweep]'") from error
    module.logging.set_verbosity(module.logging.WARNING)
    return module


def space_of(overrides: list[Override]) -> Space:
    """Split the command's overrides into what all trials share and what is searched."""
    fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
    searched, problems = dict[str, Any](), list[str]()
    for override in overrides:
        if override.is_sweep_override():
            try:
                searched[override.get_key_element()] = _distribution(override)
            except (ValueError, IndexError) as error:  # Optuna's; a range in which nothing is
                problems.append(
                    f"{override.input_line}: there is nothing to search in this ({error}); give "
                    "the smaller end first, and with tag(log, ...) one above 0"
                )
    if problems:
        raise ConfigError(*problems)
    if not searched:
        raise ConfigError(
            "sweep=optuna has nothing to search: give at least one range, like "
            "'algorithm.optimizer.lr=tag(log, interval(1e-6, 1e-4))' or algorithm.repeat_times=4,8"
        )
    return Space(fixed, searched)


def _distribution(override: Override) -> Any:
    kinds, found = optuna().distributions, override.value()
    if isinstance(found, IntervalSweep):
        start, end = found.start, found.end
        made = (
            kinds.IntDistribution
            if isinstance(start, int) and isinstance(end, int)
            else kinds.FloatDistribution
        )
        return made(start, end, log="log" in found.tags)
    if isinstance(found, RangeSweep):
        values = list(found.range())
        made = (
            kinds.IntDistribution
            if all(isinstance(v, int) for v in values)
            else kinds.FloatDistribution
        )
        return made(values[0], values[-1], step=found.step)
    return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))


def _value(distribution: Any, text: str) -> Any:
    """`text` as a value of the distribution; None when it is not one."""
    if hasattr(distribution, "choices"):
        return text if text in distribution.choices else None
    value = int(text) if type(distribution).__name__ == "IntDistribution" else float(text)
    return value if distribution.low <= value <= distribution.high else None


def study_of(space: Space, trials: list[Trial], sweep: SweepConfig, sampler: str, seed: int) -> Any:
    """A study that knows all finished and failed trials; one without a number, like one that
    diverged at once, has failed, unless no trial has one.

    Its sampler's dice depend on how many trials there are.
    """
    module = optuna()
    known = [(trial, params) for trial in trials if (params := space.params(trial)) is not None]
    if sampler not in SAMPLERS:
        raise ConfigError(
            f"hydra.sweeper.sampler={sampler} is unknown. Known: {', '.join(SAMPLERS)}."
        )
    dice = seed + len(known)
    made = (
        module.samplers.RandomSampler(dice)
        if sampler == "random"
        else module.samplers.TPESampler(seed=dice)
    )
    study = module.create_study(direction=sweep.direction, sampler=made)
    values = trial_records.objectives([trial for trial, _ in known], sweep)
    states = module.trial.TrialState
    for trial, params in known:
        value = values.get(trial.number)
        study.add_trial(
            module.trial.create_trial(
                state=states.FAIL if value is None else states.COMPLETE,
                params=params,
                distributions=space.distributions,
                value=value,
            )
        )
    return study


def ask(study: Any, space: Space, count: int) -> list[dict[str, Any]]:
    """At most `count` sets of values that no trial has had; fewer
    when the space seems to have no more.
    """
    tried = [trial.params for trial in study.get_trials(deepcopy=False)]
    suggestions: list[dict[str, Any]] = []
    for _ in range(MOST_REPEATS + count):
        if len(suggestions) == count:
            break
        params = study.ask(space.distributions).params
        if params not in tried:
            suggestions.append(params)
            tried.append(params)
    return suggestions
