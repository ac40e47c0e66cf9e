"""Runs that were killed at 8c2d7f2 go on: what lies on disk is read, sealed and continued as it was
then.

What is only read is read in `make test`; the same commands that were killed are started again in
`make verify`.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import History, checkpoints, step_rows
from tests.recorded import entry
from tests.recorded.make_runs import JOBS, LOOP_STEPS, READS, reads, run_steps, train, unpack

TASKS = 2  # of one step


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what only reads."""
    root = tmp_path_factory.mktemp("read")
    unpack(root)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    unpack(tmp_path)
    return tmp_path


def test_checkpoints_and_buffers_hold_what_they_held(read: Path) -> None:
    recorded, now = json.loads((read / READS).read_text(encoding="utf-8")), reads(read)
    assert now["tensors"] == recorded["tensors"]
    for name, groups in recorded["experiences"].items():
        assert len(groups) >= TASKS and len(now["experiences"][name]) == len(groups)
        assert all(
            holds(new, then) for new, then in zip(now["experiences"][name], groups, strict=True)
        )


def holds(now: Any, then: Any) -> bool:
    """Whether it is the same; records may have got more fields."""
    if isinstance(then, dict):
        return all(name in now and holds(now[name], value) for name, value in then.items())
    return now == then


@pytest.mark.parametrize("name", ["journal", "sql", "tp2"])
def test_a_report_is_made_of_it(read: Path, name: str) -> None:
    assert entry.command("report", str(read / JOBS[name])) == 0
    assert (read / JOBS[name] / "report.html").stat().st_size > 10_000


def test_the_sweep_is_told_of(read: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.command("sweep-report", str(read / "runs/rft/grid/sweep")) == 0
    told = capsys.readouterr().out
    assert told.count("finished") == 1 and told.count("interrupted") == 1


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["journal", "sql", "tp2"])
def test_a_killed_run_goes_on(root: Path, name: str) -> None:
    """From its checkpoint, to its end, and every step is one of its history."""
    job = root / JOBS[name]
    (saved,) = checkpoints(job)
    before = {row["step"]: row["loss"] for row in step_rows(job)}
    with train(name, root) as run:
        assert run.wait_step(1) == saved + 1
        assert (run.end(), run.errors()) == (0, "")
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, run_steps(name) + 1))
    assert all(row["loss"] == before[row["step"]] for row in rows[:saved])
    assert checkpoints(job) == [run_steps(name)] and entry.command("ckpt", "verify", str(job)) == 0
    if name == "journal":
        History(job / "buffer" / "experience_buffer").check_exactly_once(LOOP_STEPS)
    if name == "sql":
        check_each_step_had_its_groups(root / "buffer.db")


def check_each_step_had_its_groups(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        query = (
            "select step, count(*) from experience_buffer_groups where trainer is not null "
            "group by step order by step"
        )
        held = connection.execute(query).fetchall()
        totals = "select consumed from experience_buffer_totals"
        ((consumed,),) = connection.execute(totals).fetchall()
    first = held[0][0] if held else LOOP_STEPS  # the last checkpoint may be complete
    assert held == [(step, TASKS) for step in range(first, LOOP_STEPS)]
    assert consumed == first * TASKS, "what is missing is behind all checkpoints"


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on(root: Path) -> None:
    """The finished trial is left alone, the other goes on from its checkpoint."""
    sweep, job = root / "runs/rft/grid/sweep", root / JOBS["grid"]
    (saved,) = checkpoints(job)
    first = (sweep / "0" / "metrics.jsonl").read_bytes()
    with train("grid", root) as run:
        run.wait_for(r"^sweep: trial 0 finished: loss=")
        run.wait_for(r"^sweep: trial 1, attempt 2: ")
        assert run.wait_step(1) == saved + 1
        assert (run.end(), run.errors()) == (0, "")
    trials = [json.loads((sweep / number / "trial.json").read_text()) for number in "01"]
    assert [(trial["state"], trial["attempts"]) for trial in trials] == [
        ("finished", 1),
        ("finished", 2),
    ]
    assert (sweep / "0" / "metrics.jsonl").read_bytes() == first and not (sweep / "2").exists()
    assert [row["step"] for row in step_rows(job)] == list(range(1, run_steps("grid") + 1))
