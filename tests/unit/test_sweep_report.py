"""The report of a sweep: what differs between trials, no number for a trial that has not finished,
and a picture of the rest.
"""

import csv
import json
import math
from pathlib import Path

import pytest

from rft.extras.sweep import trial_records
from rft.tools import sweep_report


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    """Three finished trials, a failed one and one whose sweep was killed; all have metrics."""
    states = ["finished", "failed", "finished", "running", "finished"]
    for number, state in enumerate(states):
        trial = trial_records.claim(
            tmp_path / "sweep",
            ["experiment=sft", f"lr=1e-{number + 2}", f"seed={number % 2}", "sweep=grid"],
        )
        trial.state, trial.code, trial.stages, trial.seconds = (
            state,
            10 if state == "failed" else 0,
            [""],
            61.4,
        )
        trial.attempts = 1
        trial.write()
        accuracy = [1 - math.exp(-step / (10 + 5 * number)) for step in range(1, 31)]
        rows = [
            {"step": step, "loss": 3 - value, "accuracy": value}
            for step, value in enumerate(accuracy, start=1)
        ]
        shown = rows[: 30 if state == "finished" else 12]
        (trial.directory / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in shown)
        )
    return tmp_path / "sweep"


def test_one_table_and_one_picture(sweep_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_report.main([str(sweep_dir), "--objective", "accuracy"]) == 0
    told = capsys.readouterr().out
    assert "experiment=sft" not in told, "what all trials share tells nothing"
    assert "best     trial 0: accuracy=0.950213 with lr=1e-2 seed=0" in told
    rows = list(csv.DictReader((sweep_dir / "sweep.csv").open()))
    assert [row["state"] for row in rows] == [
        "finished",
        "failed (10)",
        "finished",
        "interrupted",
        "finished",
    ]
    assert [row["accuracy"] for row in rows] == ["0.9502", "-", "0.7769", "-", "0.6321"]
    assert [row["steps"] for row in rows] == ["30", "12", "30", "12", "30"] and rows[1][
        "overrides"
    ] == "lr=1e-3 seed=1"
    page = (sweep_dir / "sweep.md").read_text().splitlines()
    assert len(page) == 7 and all(line.count(" | ") == 6 for line in page)
    assert (sweep_dir / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_judged_by_another_metric_another_trial_is_best(
    sweep_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = [
        "--objective",
        "accuracy",
        "--direction",
        "minimize",
        "--value",
        "best",
        "--out",
        str(sweep_dir.parent / "out"),
    ]
    assert sweep_report.main([str(sweep_dir), *smallest]) == 0
    assert "best     trial 4" in capsys.readouterr().out
    assert (sweep_dir.parent / "out" / "sweep.png").exists() and not (
        sweep_dir / "sweep.png"
    ).exists()


def test_without_an_objective_it_still_tells_how_the_sweep_stands(
    sweep_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_report.main([str(sweep_dir)]) == 0
    told = capsys.readouterr().out
    assert "objective" in told and "interrupted" in told and "best " not in told


def test_a_trial_without_the_number_has_none_and_a_number_that_no_trial_has_is_refused(
    sweep_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep_dir / "0" / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0, "accuracy": null}\n')
    assert sweep_report.main([str(sweep_dir), "--objective", "accuracy"]) == 0
    told = capsys.readouterr().out
    assert "best     trial 2" in told
    row = next(line.split() for line in told.splitlines() if line.split()[:1] == ["0"])
    assert row[-4] == "-"
    assert sweep_report.main([str(sweep_dir), "--objective", "accurazy"]) == 2
    assert "trial 0 has no such number" in capsys.readouterr().err


def test_configs_of_another_rft_are_read(
    sweep_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep_dir / "0" / "resolved.yaml").write_text("name: earlier")
    (sweep_dir / "1" / "resolved.yaml").write_text("sweep: {objective: accuracy, later: 1}")
    assert sweep_report.main([str(sweep_dir)]) == 0
    assert "best     trial 0: accuracy=" in capsys.readouterr().out


def test_a_directory_that_is_no_sweep_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_report.main([str(tmp_path)]) == 2
    assert "has no trials: give the directory of a sweep" in capsys.readouterr().err


def test_what_cannot_be_read_or_written_is_named(
    sweep_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert sweep_report.main([str(sweep_dir), "--out", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}: File exists; give another --out" in capsys.readouterr().err
    record = next(sweep_dir.glob("*/trial.json"))
    for text in ("{", '{"unheard": 1}'):
        record.write_text(text)
        assert sweep_report.main([str(sweep_dir)]) == 2
        assert f"{record} is not as it was written" in capsys.readouterr().err
