"""Exact resume of the whole loop: killed with -9 again and again, a deterministic run ends as if
nothing had happened.

One run without interruption is the reference; another of the same config loses every part once,
its supervisor last, and is continued. Loss, gradient norm and every other number of every
step, and every experience that was trained on, must be the same to the last bit.
`tests/verify/test_resume_every_step.py` kills after each of 20 steps; `test_failures` has all other
deaths.
"""

from pathlib import Path

import psutil
import pytest
from exact import (
    DETECTED_S,
    assert_same,
    await_file,
    await_process,
    curve,
    deterministic,
    kill_rank,
    lose_actor,
    run_whole,
)

from runs import REPOSITORY, checkpoints, step_rows, train, write_assets

STEPS = 7
SAVE_INTERVAL = 4
MEMORY_INTERVAL = 6  # and the first state of each start
GATED = 2  # policy version whose groups stop half-way when the rank is killed for the first time
LOST = SAVE_INTERVAL - 1  # step behind which the explorer is killed
DIES_ALONE_S = 5.0  # time for the rest of a run to end when its supervisor was killed

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def settings(root: Path) -> list[str]:
    workflow = REPOSITORY / "tests" / "e2e" / "two_turns.py"
    return [
        f"trainer.total_steps={STEPS}",
        f"buffer.explorer_input.taskset.default_workflow_type={workflow}:run",
        f"+buffer.explorer_input.taskset.workflow_args.gate={root / 'gate'}",
    ]


@pytest.fixture(scope="module")
def reference(root: Path, settings: list[str]) -> Path:
    run_whole(deterministic(root, "whole", write_assets(root / "assets"), *settings))
    return root / "rft" / "whole"


def test_the_reference_learns_something(reference: Path) -> None:
    """Otherwise equal curves would say nothing."""
    rows = step_rows(reference)
    assert len({row["loss"] for row in rows}) == STEPS and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["staleness/max"] for row in rows) == 0
    assert [row["step"] for row in curve(reference) if "eval/held_out/accuracy" in row] == [
        0,
        3,
        6,
        7,
    ]


def gate(root: Path, version: int) -> None:
    """The run goes on to step `version` and waits there. The file is put there whole: it is read
    all the time.
    """
    (root / "next").write_text(str(version))
    (root / "next").replace(root / "gate")


def check_alive(processes: list[psutil.Process]) -> None:
    assert all(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    )


def test_killed_and_continued_it_is_the_same_run(
    root: Path, reference: Path, settings: list[str]
) -> None:
    """All parts die, each once, the buffer twice: those that come back in place do. The run waits
    where the next one is to die, and goes on while it comes back.
    """
    save, budget = f"trainer.save_interval={SAVE_INTERVAL}", "cluster.max_restarts=4"
    memory = f"trainer.memory_interval={MEMORY_INTERVAL}"
    more = [save, memory, budget, "trainer.spares=true", *settings]
    arguments = deterministic(root, "killed", root / "assets", *more)
    job = root / "rft" / "killed"
    gate(root, GATED)
    with train(*arguments) as run:
        run.wait_step(1)
        assert lose_actor(run, "ExperienceBuffer").startswith("buffer: its process died")

        run.wait_step(GATED)
        await_file(run, root / "gate.reached")
        # groups are half-way, and there is no checkpoint: the trainer starts over
        survivors = [run.find("VLLM::EngineCore"), run.find("ray::Explorer")]
        spare = await_process(run, "rft.run.spare")
        killed = kill_rank(run)
        run.wait_for(r"^\[ *1/")
        # they must not go on with what they had: the engine serves an older version now
        gate(root, LOST)
        check_alive(survivors)

        survivors = [run.find("ray::Explorer"), run.find("rft.run.rank ")]
        assert survivors[1] == spare
        run.find("VLLM::EngineCore").kill()
        run.wait_for(r"^engine_0: .*; started again \(1 of 3\)$", keep=True)
        run.wait_for("^engine_0: serves$", keep=True)
        check_alive(survivors)

        run.wait_step(LOST)
        gate(root, SAVE_INTERVAL)
        assert lose_actor(run, "Explorer").startswith("explorer: ")

        run.wait_step(SAVE_INTERVAL)
        gate(root, SAVE_INTERVAL + 1)
        assert "(2 of 4 within an hour)" in lose_actor(run, "ExperienceBuffer")

        run.wait_step(SAVE_INTERVAL + 1)
        run.process.kill()  # behind a checkpoint: a batch that was trained on is replayed
        run.process.wait()
        run.await_extinction(DIES_ALONE_S)
    assert checkpoints(job) == [SAVE_INTERVAL]
    gate(root, SAVE_INTERVAL + 2)
    with train(*arguments) as run:
        run.wait_step(SAVE_INTERVAL + 1)
        assert lose_actor(run, "Synchronizer").startswith("synchronizer: ")
        run.wait_step(SAVE_INTERVAL + 2)
        kill_rank(run, killed)  # a state newer than the checkpoint is in its agent's memory
        (root / "gate").unlink()
        run.wait_for(r"^trainer: back from memory, \d step.s. made again; seconds: detect ")
        assert (run.end(), run.errors()) == (0, "")
    row = [row for row in step_rows(job) if "recovery/total_s" in row][-1]
    again = SAVE_INTERVAL + 3 - row["step"]  # it may have died before that step was staged
    assert row["recovery/steps_again"] == again and row["recovery/detect_s"] < DETECTED_S
    assert_same(job, reference, STEPS)
