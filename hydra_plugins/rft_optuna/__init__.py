"""Hydra's sweeper `rft_optuna`: batches of trials that Optuna chooses, run by whatever launcher is
configured.

In: the command's overrides, those with ranges being the space. Out: the best trial, printed; an
exception when a trial failed. What is known of trials is read from their directories before every
batch (`rft.extras.sweep.search`); unfinished trials of an earlier start of the same command come
first. Hydra finds plug-ins by this package's name and imports it at every start, so nothing heavy
is imported here.
"""

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class OptunaSweeper(Sweeper):
    """`num_trials` in all, over every start of the command; `num_parallel` of them are given to the
    launcher at a time.
    """

    def __init__(
        self,
        num_trials: int,
        num_parallel: int,
        sampler: str,
        seed: int,
        params: dict[str, Any] | None = None,
    ):
        self.num_trials, self.num_parallel, self.sampler, self.seed = (
            num_trials,
            num_parallel,
            sampler,
            seed,
        )
        self.params = params or {}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config, self.context = config, hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from rft.config import ConfigError

        try:
            return self._search(arguments)
        except ConfigError as error:
            from rft.ground.errors import refuse

            sys.exit(refuse(error))

    def _search(self, arguments: list[str]) -> Any:
        from rft.config import ConfigError, SweepConfig
        from rft.extras.sweep import search, trial_records
        from rft.extras.sweep.job import TrialFailed

        judged_by = SweepConfig(**OmegaConf.to_container(self.config.sweep))  # type: ignore[arg-type]
        trial_records.check_objective(judged_by)
        if judged_by.objective is None:
            raise ConfigError(
                "sweep=optuna needs sweep.objective, a metric of metrics.jsonl like "
                "eval/held_out/accuracy"
            )
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        space = search.space_of(
            parser.parse_overrides([*(f"{k}={v}" for k, v in self.params.items()), *arguments])
        )
        sweep_dir, tried = Path(str(self.config.hydra.sweep.dir)), set[int]()
        while True:
            known = [
                trial
                for trial in trial_records.trials(sweep_dir)
                if space.params(trial) is not None
            ]
            waiting = [
                t.overrides for t in known if t.state != "finished" and t.number not in tried
            ][: self.num_parallel]
            if not waiting:
                count = min(self.num_parallel, self.num_trials - len(known))
                study = search.study_of(space, known, judged_by, self.sampler, self.seed)
                waiting = [
                    space.overrides(params) for params in search.ask(study, space, max(count, 0))
                ]
            if not waiting:
                break
            self.launcher.launch(waiting, initial_job_idx=len(known))
            now = [t for t in trial_records.trials(sweep_dir) if space.params(t) is not None]
            tried |= {t.number for t in now if t.overrides in waiting}
        worth = trial_records.objectives(known, judged_by)
        failed = [str(trial.number) for trial in known if trial.number not in worth]
        if len(failed) < len(known):
            best = study.best_trial
            print(
                (
                    f"sweep: best of {len(known)} trials: {judged_by.objective}={best.value:g} "
                    "with "
                    f"{best.params}"
                ),
                flush=True,
            )
        if failed:
            raise TrialFailed(
                f"rft: trial(s) {', '.join(failed)} did not finish, or have no "
                f"{judged_by.objective}; see rft sweep-report {sweep_dir}"
            )
        return study.best_trial.params if known else None
