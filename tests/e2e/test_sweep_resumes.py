"""A 2x2 sweep of real runs, killed half way with everything that it had started, and given again.

Finished trials are not run again, the one that was under way goes on from its checkpoint, the rest
start.
"""

from pathlib import Path

import pytest

from rft.extras.sweep import trial_records
from rft.tools.sweep_report import main as sweep_report

from runs import Run, checkpoints, step_rows, train, write_assets

STEPS, SAVE_INTERVAL = 240, 10
UNDER_WAY = 1  # the trial that is killed

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def kill_behind_a_checkpoint(run: Run, job: Path) -> int:
    """Step of the newest checkpoint that the killed trial has."""
    run.wait_for(rf"^sweep: trial {UNDER_WAY}, attempt 1: ")
    while not checkpoints(job):
        assert run.wait_step(1) < STEPS
    run.kill_everything()
    return checkpoints(job)[-1]


def test_a_sweep_killed_half_way_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assets = write_assets(tmp_path / "assets")
    arguments = [
        "-m",
        "experiment=sft",
        "name=grid",
        f"checkpoint_root_dir={tmp_path}",
        "device=cpu",
        "monitor=none",
        f"model.model_path={assets / 'model'}",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
        "buffer.train_batch_size=32",
        "buffer.total_epochs=1000",
        f"trainer.total_steps={STEPS}",
        f"trainer.save_interval={SAVE_INTERVAL}",
        "sweep.objective=loss",
        "sweep.direction=minimize",
        "algorithm.optimizer.lr=1e-3,1e-4",
        "seed=0,1",
    ]
    sweep_dir = tmp_path / "rft" / "grid" / "sweep"
    with train(*arguments) as run:
        saved = kill_behind_a_checkpoint(run, sweep_dir / str(UNDER_WAY))
    assert [trial_records.state(trial) for trial in trial_records.trials(sweep_dir)] == [
        "finished",
        "interrupted",
    ]
    with train(*arguments) as run:
        run.wait_for(r"^sweep: trial 0 finished: loss=")
        run.wait_for(rf"^sweep: trial {UNDER_WAY}, attempt 2: ")
        assert run.wait_step(1) == saved + 1, "from its last checkpoint"
        assert (run.end(), run.errors()) == (0, "")
    trials = trial_records.trials(sweep_dir)
    assert [trial.state for trial in trials] == ["finished"] * 4
    assert [trial.attempts for trial in trials] == [1, 2, 1, 1]
    for trial in trials:
        assert [row["step"] for row in step_rows(trial.directory)] == list(range(1, STEPS + 1))
    assert sweep_report([str(sweep_dir)]) == 0
    assert capsys.readouterr().out.count("finished") == 4
    assert (sweep_dir / "sweep.png").stat().st_size > 10_000
