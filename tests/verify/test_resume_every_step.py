"""Exact resume at full size: 20 steps, a kill -9 after every one, with a checkpoint at each step
and at every third.
"""

from pathlib import Path

import pytest
from exact import EVERYTHING, RANK, assert_same, deterministic, run_healing, run_killed, run_whole

from runs import write_assets

STEPS = 20
KILLS = [(step, RANK if step % 2 else EVERYTHING) for step in range(1, STEPS + 1)]

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every_step")


@pytest.fixture(scope="module")
def reference(root: Path) -> Path:
    run_whole(
        deterministic(root, "whole", write_assets(root / "assets"), f"trainer.total_steps={STEPS}")
    )
    return root / "rft" / "whole"


def test_an_uninterrupted_run_repeats_itself(root: Path, reference: Path) -> None:
    run_whole(deterministic(root, "again", root / "assets", f"trainer.total_steps={STEPS}"))
    assert_same(root / "rft" / "again", reference, STEPS)


@pytest.mark.parametrize("save_interval", [1, 3])
def test_killed_after_every_step_it_is_the_same_run(
    root: Path, reference: Path, save_interval: int
) -> None:
    name = f"killed_{save_interval}"
    settings = [f"trainer.total_steps={STEPS}", f"trainer.save_interval={save_interval}"]
    run_killed(deterministic(root, name, root / "assets", *settings), KILLS)
    assert_same(root / "rft" / name, reference, STEPS)


@pytest.mark.parametrize("actor", ["ExperienceBuffer", "Explorer", "Synchronizer"])
def test_an_actor_killed_at_every_step_it_is_the_same_run(
    root: Path, reference: Path, actor: str
) -> None:
    """It ends by itself."""
    name = f"healed_{actor}"
    run_healing(
        deterministic(root, name, root / "assets", f"trainer.total_steps={STEPS}"),
        [(step, actor) for step in range(1, STEPS)],
    )
    assert_same(root / "rft" / name, reference, STEPS)
