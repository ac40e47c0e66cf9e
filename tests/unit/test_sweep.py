"""Sweeps: every trial once, a failed one as failed, a killed sweep going on.

Real processes, runs that take no time.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rft.config import ConfigError, SweepConfig
from rft.extras import sweep as sweeps
from rft.extras.sweep import job, trial_records
from rft.ground import durable
from rft.tools.toy import write_arithmetic, write_model

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("assets")
    write_model(root / "model", hidden=64, layers=2, heads=2, kv_heads=2, ffn=128)
    write_arithmetic(root, digits=1, num_eval=16)
    return root


class Sweep:
    """`python -m rft.train -m ...` on `root`, and what it left there."""

    def __init__(self, root: Path, assets: Path):
        self.root, self.directory = root, root / "rft" / "wide" / "sweep"
        rows = assets / "train.jsonl"
        self.command = [
            sys.executable,
            "-m",
            "rft.train",
            "-m",
            "experiment=sft",
            "name=wide",
            f"checkpoint_root_dir={root}",
            "device=cpu",
            "monitor=none",
            f"model.model_path={assets / 'model'}",
            f"buffer.trainer_input.experience_buffer.path={rows}",
            "prepare=sweep_trial:prepare",
            "sweep.objective=loss",
            "trainer.total_steps=2",
        ]

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        paths = os.pathsep.join([HERE, str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [*self.command, *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": paths} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*arguments, **environment)
        told, errors = process.communicate(timeout=120)
        return process.returncode, told, errors

    def attempts(self) -> list[str]:
        return (self.root / "attempts").read_text().splitlines()

    def states(self) -> list[str]:
        return [trial_records.state(trial) for trial in trial_records.trials(self.directory)]


@pytest.fixture
def sweep(tmp_path: Path, assets: Path) -> Sweep:
    return Sweep(tmp_path, assets)


@pytest.mark.verify
def test_a_failed_trial_fails_and_the_others_run_once(sweep: Sweep) -> None:
    code, told, errors = sweep.run("seed=1,13,2", "sweep.value=best")
    assert code == 1 and "trial 1 failed with exit code 2" in errors and "Traceback" not in errors
    assert (
        "sweep: trial 0 finished: loss=0.5\n" in told
        and "sweep: trial 2 finished: loss=0.5\n" in told
    )
    assert sweep.states() == ["finished", "failed", "finished"]
    code, told, _ = sweep.run("seed=1,13,2", "sweep.value=last")
    assert code == 1 and "sweep: trial 0 finished: loss=-0.75\n" in told, (
        "judged anew, not run anew"
    )
    assert sweep.attempts() == ["1 1", "13 1", "2 1", "13 1"]
    code, told, _ = sweep.run("seed=0,1,2")
    assert code == 0 and "sweep: trial 3 finished" in told, (
        "a wider grid takes up the trials there are"
    )
    assert sweep.attempts()[4:] == ["0 1"]


def hold(sweep: Sweep, seed: int) -> Path:
    """A trial of this seed waits here until it is killed, for the test never closes its end of the
    pipe before that.
    """
    pipe = sweep.root / f"hold_{seed}"
    os.mkfifo(pipe)
    return pipe


def test_a_killed_sweep_goes_on_where_it_stood(sweep: Sweep) -> None:
    pipe = hold(sweep, 2)
    killed = sweep.start("seed=1,2", "trainer.grad_clip=0.5,1")
    writer = os.open(pipe, os.O_WRONLY)  # returns when the first trial of seed 2 reads
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    pipe.unlink()
    code, told, errors = sweep.run("seed=1,2", "trainer.grad_clip=0.5,1")
    os.close(writer)  # until now a trial that had not been ended would have waited
    assert (code, errors) == (0, "")
    assert sweep.attempts() == ["1 0.5", "1 1", "2 0.5", "2 0.5", "2 1"]
    assert sweep.states() == ["finished"] * 4
    assert [trial.attempts for trial in trial_records.trials(sweep.directory)] == [1, 1, 2, 1]


def test_a_signal_is_passed_on_and_ends_the_sweep_with_its_code(sweep: Sweep) -> None:
    pipe = hold(sweep, 1)
    process = sweep.start("seed=1,2")
    writer = os.open(pipe, os.O_WRONLY)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    os.close(writer)
    assert (
        process.returncode == 128 + signal.SIGTERM
        and "sweep stopped by SIGTERM in trial 0" in errors
    )
    assert sweep.states() == ["stopped"] and sweep.attempts() == ["1 1"], (
        "the next trial has not begun"
    )


@pytest.mark.parametrize(
    ("argument", "environment", "words"),
    [
        ("seed=1,2", {"RANK": "0", "WORLD_SIZE": "2"}, "-m cannot run under torchrun"),
        (
            "seed=1,2",
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "-m cannot run under slurm",
        ),
        ("name=a,b", {}, "name is where the whole sweep is kept"),
        ("+monitor.monitor_args.api_key=planted", {}, "put this secret into the environment"),
        ("seeed=1,2", {}, "did you mean `seed`"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused_in_one_line(
    sweep: Sweep, argument: str, environment: dict[str, str], words: str
) -> None:
    code, _, errors = sweep.run(argument, **environment)
    assert (
        code == 2
        and errors.startswith("rft: config refused: ")
        and errors.count("\n") == 1
        and words in errors
    )
    assert not sweep.directory.exists() and "planted" not in errors


def test_a_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweeps.LAUNCHERS, "parallel", "hydra_no_such_launcher")
    with pytest.raises(
        ConfigError,
        match=r"hydra/launcher=parallel needs hydra-no-such-launcher: pip install 'rft\[sweep\]'",
    ):
        sweeps.check_arguments(["-m", "hydra/launcher=parallel"], None)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "checkpoint_root_dir",
            "elsewhere",
            "hydra.sweep.dir must lie in .*set checkpoint_root_dir, project or name instead",
        ),
        ("continue_from_checkpoint", False, "to begin anew give it another name"),
    ],
)
def test_a_trial_lives_under_the_sweeps_own_name(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    raw = OmegaConf.create(
        {
            "checkpoint_root_dir": str(tmp_path),
            "project": "rft",
            "name": "wide",
            "continue_from_checkpoint": True,
        }
    )
    directory = tmp_path / "rft" / "wide" / "sweep" / "3"
    assert job.of_trial(raw, directory).name == "wide/sweep/3" and raw.name == "wide"
    raw[key] = value
    with pytest.raises(ConfigError, match=words):
        job.of_trial(raw, directory)


# --- records --------------------------------------------------------------------------------------


def test_a_trial_is_known_by_its_overrides_in_any_order(tmp_path: Path) -> None:
    first = trial_records.claim(tmp_path, ["a=1", "b=2", "sweep=optuna", "sweep.objective=x"])
    assert (
        trial_records.claim(tmp_path, ["b=2", "a=1"]).directory == first.directory == tmp_path / "0"
    )
    assert trial_records.claim(tmp_path, ["a=1", "b=3"]).number == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [trial_records.CLAIMING, "0", "1"], "no draft is left"


@pytest.mark.parametrize("damage", ["", "[]", '{"state": "finished"}', '{"overrides": [], "x": 1}'])
def test_a_record_that_was_damaged_is_named_and_one_that_is_deleted_begins_anew(
    tmp_path: Path, damage: str
) -> None:
    record = trial_records.claim(tmp_path, ["seed=1"]).directory / trial_records.RECORD
    record.write_text(damage)
    (record.parent / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=f"{record} is not as it was written .*delete it"):
        trial_records.claim(tmp_path, ["seed=1"])
    record.unlink()
    assert trial_records.claim(tmp_path, ["seed=1"]).number == 1


def test_trials_that_start_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def claim(number: int) -> int:
        barrier.wait()
        return trial_records.claim(tmp_path, [f"a={number}"]).number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(8))


def test_starts_at_once_with_the_same_overrides_are_one_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(8)

    def claim(number: int) -> int:
        barrier.wait()
        return trial_records.claim(tmp_path, ["a=1", "b=2"][:: 1 if number % 2 else -1]).number

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(claim, range(8))) == {0}
    held = durable.lock(tmp_path / trial_records.CLAIMING)
    monkeypatch.setattr(trial_records, "CLAIM_S", 0.0)
    with pytest.raises(ConfigError, match="claim.lock is held by another start"):
        trial_records.claim(tmp_path, ["a=2"])
    os.close(held)  # type: ignore[arg-type]


def test_a_trial_that_nobody_runs_is_interrupted(tmp_path: Path) -> None:
    trial = trial_records.claim(tmp_path, ["a=1"])
    lock = trial_records.lock(trial.directory, 0.0)
    trial.state = "running"
    trial.write()
    assert (
        lock is not None and trial_records.state(trial_records.read(trial.directory)) == "running"
    )
    assert trial_records.lock(trial.directory, 0.05) is None, "it has one owner"
    os.close(lock)
    assert trial_records.state(trial_records.read(trial.directory)) == "interrupted"


def test_a_trial_that_an_earlier_sweep_left_is_waited_for(tmp_path: Path) -> None:
    trial = trial_records.claim(tmp_path, ["a=1"])
    lock = trial_records.lock(trial.directory, 0.0)
    assert lock is not None
    left = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,))
    durable.sign(lock, str(left.pid))
    os.close(lock)
    assert trial_records.is_running(trial.directory)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial_records.lock, trial.directory, 60.0)
        left.communicate()
        assert waiting.result() is not None


# --- objective ------------------------------------------------------------------------------------


def trial_with(directory: Path, **stages: list[dict[str, float | None]]) -> trial_records.Trial:
    trial = trial_records.claim(directory, ["a=1"])
    trial.stages = list(stages)
    for stage, rows in stages.items():
        (trial.directory / stage).mkdir()
        (trial.directory / stage / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return trial


def test_the_objective_is_of_the_last_stage_that_has_it(tmp_path: Path) -> None:
    warmup = [{"step": 1, "loss": 3.0, "entropy": 9.0}, {"step": 2, "loss": 2.0}]
    tuned = [
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 0.4},
        {"step": 3, "loss": 0.2},
        {"step": 4, "loss": None},
    ]
    trial = trial_with(tmp_path, warmup=warmup, tuned=tuned)
    assert trial_records.objective_of(trial, SweepConfig("loss")) == 0.2, (
        "a value that is no number is not the last"
    )
    assert trial_records.objective_of(trial, SweepConfig("loss", "best")) == 0.4
    assert trial_records.objective_of(trial, SweepConfig("loss", "best", "minimize")) == 0.1
    assert trial_records.objective_of(trial, SweepConfig("entropy")) == 9.0
    assert trial_records.objective_of(trial, SweepConfig()) is None
    assert trial_records.steps(trial) == 6


def test_a_metric_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    trial = trial_with(tmp_path, run=[{"step": 1, "eval/held_out/accuracy": 0.5}])
    with pytest.raises(
        ConfigError,
        match="sweep.objective=eval/accuracy: trial 0 .*did you mean `eval/held_out/accuracy`",
    ):
        trial_records.objective_of(trial, SweepConfig("eval/accuracy"))
    with pytest.raises(ConfigError, match="sweep.value=first is unknown. Known: last, best"):
        trial_records.check_objective(SweepConfig("loss", "first"))
