"""Exact resume of the whole loop: killed with -9 again and again, a deterministic run ends as if nothing had happened.

One run without interruption is the reference; another of the same config is killed, its trainer rank alone and as a whole,
between checkpoints, and continued. Loss, gradient norm and every other number of every step, and every experience that was
trained on, must be the same to the last bit. `tests/verify/test_resume_every_step.py` kills after each of 20 steps.
"""

from pathlib import Path

import pytest
from exact import EVERYTHING, RANK, assert_same, curve, deterministic, run_killed, run_whole

from runs import step_rows, write_assets

STEPS = 6
KILLS = [(1, RANK), (3, EVERYTHING), (5, RANK)]  # before the first checkpoint, and one step after two others

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def reference(root: Path) -> Path:
    run_whole(deterministic(root, "whole", write_assets(root / "assets"), f"trainer.total_steps={STEPS}"))
    return root / "rft" / "whole"


def test_the_reference_learns_something(reference: Path) -> None:
    """Otherwise equal curves would say nothing."""
    rows = step_rows(reference)
    assert len({row["loss"] for row in rows}) == STEPS and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["staleness/max"] for row in rows) == 0
    assert [row["step"] for row in curve(reference) if "eval/held_out/accuracy" in row] == [0, 3, 6]


def test_killed_and_continued_it_is_the_same_run(root: Path, reference: Path) -> None:
    arguments = deterministic(
        root, "killed", root / "assets", f"trainer.total_steps={STEPS}", "trainer.save_interval=2"
    )
    run_killed(arguments, KILLS)
    assert_same(root / "rft" / "killed", reference, STEPS)
