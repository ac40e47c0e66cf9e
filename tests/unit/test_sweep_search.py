"""Searches by Optuna, and launchers of other packages: a search that was killed goes on as if it
had not been.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_sweep import Sweep, assets, sweep  # noqa: F401  fixtures

from rft.config import ConfigError, SweepConfig
from rft.config.compose import CONFIG_DIR, register_schema
from rft.extras.sweep import search, trial_records

pytest.importorskip("optuna", reason="optional: pip install 'rft[sweep]'")
RANGES = [
    "lr=tag(log, interval(1e-6, 1e-2))",
    "repeat=range(2, 9, 2)",
    "clip=interval(0.5, 2)",
    "loss=ppo,gspo",
    "name=run",
]


def space(lines: list[str] = RANGES) -> search.Space:
    return search.space_of(OverridesParser.create().parse_overrides(lines))


def run(
    directory: Path, trial_overrides: list[str], state: str = "finished"
) -> trial_records.Trial:
    """What a trial leaves: the objective has its best value at lr=1e-4."""
    trial = trial_records.claim(directory, trial_overrides)
    trial.state = state
    trial.write()
    params = space().params(trial)
    assert params is not None
    (trial.directory / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "score": -abs(params["lr"] - 1e-4)}) + "\n"
    )
    return trial


def next_params(directory: Path, count: int = 1) -> list[dict[str, Any]]:
    study = search.study_of(
        space(), trial_records.trials(directory), SweepConfig("score"), "tpe", 0
    )
    return search.ask(study, space(), count)


def test_ranges_are_kept_and_trials_are_read_back_exactly(tmp_path: Path) -> None:
    for number in range(15):
        (params,) = next_params(tmp_path)
        trial = run(
            tmp_path, space().overrides(params), "failed" if number % 5 == 4 else "finished"
        )
        assert space().params(trial) == params, "as text and back"
        assert (
            1e-6 <= params["lr"] <= 1e-2
            and params["repeat"] in (2, 4, 6, 8)
            and params["loss"] in ("ppo", "gspo")
        )
        assert 0.5 <= params["clip"] <= 2 and "name=run" in trial.overrides


def test_a_search_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    """Each call makes its study from the directories alone, so
    asking twice is being killed in between.
    """
    for _ in range(14):
        assert next_params(tmp_path) == next_params(tmp_path)
        run(tmp_path, space().overrides(next_params(tmp_path)[0]))
    suggested = [space().params(trial) for trial in trial_records.trials(tmp_path)]
    assert len({json.dumps(params) for params in suggested}) == 14, (
        "no start repeats what another one tried"
    )


def test_trials_of_another_command_are_none_of_this_search(tmp_path: Path) -> None:
    run(tmp_path, space().overrides(next_params(tmp_path)[0]))
    trial_records.claim(tmp_path, ["lr=0.001", "repeat=2", "clip=1.0", "loss=ppo", "name=other"])
    # outside the range
    trial_records.claim(tmp_path, ["lr=0.5", "repeat=2", "clip=1.0", "loss=ppo", "name=run"])
    assert [space().params(trial) is not None for trial in trial_records.trials(tmp_path)] == [
        True,
        False,
        False,
    ]


def test_a_trial_that_diverged_at_once_does_not_end_the_search(tmp_path: Path) -> None:
    diverged = run(tmp_path, space().overrides(next_params(tmp_path)[0]))
    (diverged.directory / "metrics.jsonl").write_text('{"step": 1, "score": null}\n')
    with pytest.raises(ConfigError, match="sweep.objective=score: trial 0 has no such number"):
        next_params(tmp_path)  # nobody has it: the metric's name may be wrong
    other = {"lr": 1e-3, "repeat": 2, "clip": 1.0, "loss": "ppo"}
    run(tmp_path, space().overrides(other))
    trials = trial_records.trials(tmp_path)
    assert trial_records.objectives(trials, SweepConfig("score")) == {1: -abs(1e-3 - 1e-4)}
    study = search.study_of(space(), trials, SweepConfig("score"), "tpe", 0)
    assert study.best_trial.number == 1 and len(search.ask(study, space(), 1)) == 1


def test_a_small_space_ends(tmp_path: Path) -> None:
    small = space(["loss=ppo,gspo", "name=run"])
    study = search.study_of(small, [], SweepConfig("score"), "random", 0)
    assert sorted(params["loss"] for params in search.ask(study, small, 5)) == ["gspo", "ppo"]


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to search: give at least one range"):
        space(["name=run"])
    with pytest.raises(ConfigError) as refused:
        space(
            ["a=tag(log, interval(0, 1))", "b=interval(2, 1)", "c=range(5, 1, -1)", "d=range(4, 4)"]
        )
    told = [one.split(":")[0] for one in refused.value.problems]
    assert told == [
        "a=tag(log, interval(0, 1))",
        "b=interval(2, 1)",
        "c=range(5, 1, -1)",
        "d=range(4, 4)",
    ]
    with pytest.raises(ConfigError, match="sampler=tpee is unknown. Known: tpe, random"):
        search.study_of(space(), [], SweepConfig("score"), "tpee", 0)


# --- whole sweeps, with the runs of test_sweep ----------------------------------------------------


@pytest.mark.verify
def test_optuna_runs_what_it_was_asked_for_once(sweep: Sweep) -> None:  # noqa: F811
    ask = [
        "sweep=optuna",
        "sweep.objective=loss",
        "seed=1,2",
        "trainer.grad_clip=interval(0.5, 2)",
        "hydra.sweeper.num_parallel=2",
    ]
    code, told, errors = sweep.run(*ask, "hydra.sweeper.num_trials=3")
    assert (code, errors) == (0, "") and "sweep: best of 3 trials: loss=" in told
    assert len(sweep.attempts()) == 3 and sweep.states() == ["finished"] * 3
    code, told, errors = sweep.run(*ask, "hydra.sweeper.num_trials=4")
    assert (code, errors) == (0, "") and "best of 4 trials" in told
    assert len(sweep.attempts()) == 4


@pytest.mark.verify
def test_trials_side_by_side_by_joblib(sweep: Sweep) -> None:  # noqa: F811
    pytest.importorskip("joblib", reason="optional: pip install 'rft[sweep]'")
    code, told, errors = sweep.run("hydra/launcher=parallel", "seed=1,13,2")
    assert code == 1 and "rft: trial" in errors and "failed with exit code 2" in errors
    assert sorted(sweep.states()) == ["failed", "finished", "finished"]
    code, _, errors = sweep.run("hydra/launcher=parallel", "seed=1,2")
    assert code == 0 and sorted(sweep.attempts()) == ["1 1", "13 1", "2 1"]


@pytest.mark.verify
def test_trials_as_jobs_by_submitit(sweep: Sweep) -> None:  # noqa: F811
    """submitit's own executor on this machine: the same launcher as for Slurm, with another way to
    start a process.
    """
    pytest.importorskip("submitit", reason="optional: pip install 'rft[sweep]'")
    code, _, errors = sweep.run("hydra/launcher=slurm_here", "seed=1,2")
    assert code == 0, errors
    assert sweep.states() == ["finished"] * 2 and sorted(sweep.attempts()) == ["1 1", "2 1"]


@pytest.mark.parametrize(
    ("choice", "target"),
    [
        (
            "hydra/launcher=parallel",
            "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        ),
        (
            "hydra/launcher=slurm",
            "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        ),
        (
            "hydra/launcher=slurm_here",
            "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        ),
        ("sweep=optuna", "hydra_plugins.rft_optuna.OptunaSweeper"),
        ("sweep=grid", "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"),
    ],
)
def test_every_preset_composes(choice: str, target: str) -> None:
    register_schema()
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        found = compose("train", ["experiment=quickstart", choice], return_hydra_config=True)
    assert target in (found.hydra.launcher._target_, found.hydra.sweeper._target_)
    if "sweep=" in choice:
        assert found.sweep.objective == "reward/mean"
    elif "slurm" in choice:
        assert (
            found.hydra.launcher.name == "quickstart"
            and found.hydra.launcher.submitit_folder.startswith("runs/rft/quickstart/sweep/")
        )
