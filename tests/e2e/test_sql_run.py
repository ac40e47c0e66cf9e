"""Explorers and a trainer as runs of their own that share a database, at the same time; and a
trainer that reads a file.
"""

import sqlite3
from pathlib import Path

import pytest

from rft.buffer import experience_file
from tests.e2e.runs import TASKS, overrides, step_rows, train, write_assets

BUFFER = "buffer.trainer_input.experience_buffer"
STEPS = 3


def asked(database: Path, query: str) -> list[tuple[int, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_explorer_and_trainer_share_a_database_and_the_trainers_weights(
    tmp_path: Path, dies: bool
) -> None:
    """The explorer serves what the trainer saves, so the age of every group that is trained is
    bounded across the two. `dies`: each one's process of the buffer, in the middle of the run.
    """
    assets, database = write_assets(tmp_path / "assets"), tmp_path / "buffer.db"
    shared = [
        f"{BUFFER}.storage_type=sql",
        f"{BUFFER}.path=sqlite:///{database}",
        "synchronizer.max_staleness=1",
        f"trainer.total_steps={STEPS}",
        "trainer.save_interval=1",
        # rows stay that a checkpoint needs: all but those of the step before the first one
        "trainer.max_checkpoints_to_keep=0",
    ]
    both = [
        overrides(tmp_path, "apart", assets, f"mode={mode}", *shared)
        for mode in ("train", "explore")
    ]
    with train(*both[0]) as trainer:
        trainer.wait_for("^trainer: ")
        with train(*both[1]) as explorer:
            if dies:
                trainer.wait_step(1)
                buffers = trainer.find_all("ray::SqlBuffer")
                assert len(buffers) == 2 and explorer.find("ray::SqlBuffer") in buffers
                for buffer in buffers:
                    buffer.kill()
                for run in (trainer, explorer):
                    run.wait_for(r"buffer: .* comes back .*1 of 3 within an hour")
            trainer.wait_step(STEPS)
            assert (explorer.process.wait(180), explorer.errors()) == (0, "")
            assert (trainer.process.wait(120), trainer.errors()) == (0, "")
            explorer.kill_everything()
    job = tmp_path / "rft" / "apart"
    assert [row["step"] for row in step_rows(job)] == [1, 2, 3]
    held = asked(
        database,
        (
            "select step, count(*), min(version) from experience_buffer_groups where trainer is "
            "not "
            "null group by step"
        ),
    )
    assert [row[:2] for row in held] == [(step, TASKS) for step in range(1, STEPS)]
    assert asked(database, "select consumed from experience_buffer_totals") == [(TASKS,)]
    assert all(step - version <= 1 for step, _, version in held) and held[-1][2] >= 1
    assert asked(
        database,
        (
            "select count(*) from experience_buffer_groups where state in ('running', 'left', "
            "'failed')"
        ),
    ) == [(0,)]
    assert asked(database, "select done from experience_buffer_explorers") == [(1,)]


@pytest.mark.verify
def test_rollouts_go_to_a_file_and_a_trainer_reads_it(tmp_path: Path) -> None:
    """Rollout-only, then train-only without Ray or buffer; ids, log-probabilities and versions are
    those that were sampled.
    """
    assets, file = write_assets(tmp_path / "assets"), tmp_path / "experiences.jsonl"
    stored = [f"{BUFFER}.storage_type=file", f"{BUFFER}.path={file}"]
    with train(
        *overrides(tmp_path, "dumped", assets, "mode=explore", "trainer.total_steps=2", *stored)
    ) as run:
        assert (run.end(), run.errors()) == (0, "")
    groups = list(experience_file.read(file))
    assert len(groups) == 2 * TASKS
    assert all(
        len(e.logprobs) == e.response_length and e.versions and e.expert is False
        for group in groups
        for e in group
    )
    with train(
        *overrides(tmp_path, "read", assets, "mode=train", "trainer.total_steps=2", *stored)
    ) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "read"
    assert [row["step"] for row in step_rows(job)][:2] == [1, 2] and not list(
        (job / "logs" / "latest").glob("buffer*")
    )
    assert sum(row["num_tokens"] for row in step_rows(job)[:2]) == sum(
        sum(e.action_mask) for group in groups for e in group
    )
