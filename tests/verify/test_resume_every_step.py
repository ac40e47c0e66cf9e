"""Exact resume at full size: 20 steps, a kill -9 after every one, with a checkpoint at each step
and at every third.
"""

import re
from pathlib import Path

import pytest
from exact import EVERYTHING, RANK, assert_same, deterministic, lose_actor, run_killed, run_whole

from runs import START_S, train, write_assets

STEPS = 20
TOLD = re.compile(r"^\[ *(\d+)/\d+ .*loss")
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


def killed_at(arguments: list[str], actor: str, wanted: set[int]) -> set[int]:
    """Run to a good end by itself, though the actor is killed when steps of `wanted` were told.
    Returns at which: while it comes back others may go by.
    """
    done = set[int]()
    with train(*arguments, f"cluster.max_restarts={STEPS}") as run:
        told = 0
        while later := [step for step in wanted if step > told]:
            done.add(run.wait_step(min(later)))
            lose_actor(run, actor, START_S)  # how soon it is said is another test's
            told = max(int(found[1]) for line in run.lines if (found := TOLD.match(line)))
        assert (run.end(), run.errors()) == (0, "")
    return done


@pytest.mark.parametrize("actor", ["ExperienceBuffer", "Explorer", "Synchronizer"])
def test_an_actor_killed_at_every_step_it_is_the_same_run(
    root: Path, reference: Path, actor: str
) -> None:
    left = set(range(1, STEPS))
    for number in range(STEPS):
        name = f"healed_{actor}_{number}"
        arguments = deterministic(root, name, root / "assets", f"trainer.total_steps={STEPS}")
        done = killed_at(arguments, actor, left)
        print(f"{actor}, run {number}: killed at {sorted(done)}")
        assert_same(root / "rft" / name, reference, STEPS)
        left -= done
        if not left:
            return
    raise AssertionError(f"never killed at {sorted(left)}")
