"""`launch/slurm.sh` and `launch/slurm_sweep.sh` on a real Slurm of three nodes: a job finishes;
another is preempted, requeued, and ends as if it had not been; so does one whose ranks are tasks of
Slurm's; an array runs one trial per line.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exact import assert_same, curve, deterministic
from slurm_cluster import Slurm, read, running

from runs import REPOSITORY, History, checkpoints, overrides, step_rows, write_assets

STEPS = 8
GATED = 3  # version whose groups wait until the job was preempted: the checkpoint is of this step
JOB_S = 500.0
PACKAGE = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
AGAIN = "goes back into the queue"

pytestmark = [pytest.mark.verify, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("jobs")
    write_assets(directory / "assets")
    return directory


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running(tmp_path_factory.mktemp("slurm")) as found:
        yield found
    for job in found.jobs:
        shutil.rmtree(f"/tmp/rft-ray-{job}", ignore_errors=True)


def arguments(root: Path, name: str, *more: str) -> list[str]:
    workflow = REPOSITORY / "tests" / "e2e" / "two_turns.py"
    return deterministic(
        root,
        name,
        root / "assets",
        f"trainer.total_steps={STEPS}",
        f"buffer.explorer_input.taskset.default_workflow_type={workflow}:run",
        f"+buffer.explorer_input.taskset.workflow_args.gate={root / 'gate'}",
        *more,
    )


def submit(
    slurm: Slurm, root: Path, command: list[str], *options: str, **environment: str
) -> tuple[int, Path]:
    """The job's number and its log."""
    job = slurm.submit(
        root, *options, str(REPOSITORY / "launch" / "slurm.sh"), *command, **PACKAGE, **environment
    )
    return job, root / f"rft-{job}.log"


def preempted(
    slurm: Slurm, root: Path, command: list[str], *options: str, **environment: str
) -> int:
    """Submit, let it come to GATED, send what Slurm sends before it takes the nodes away, and see
    it finish after all.
    """
    gate = root / "gate"
    gate.write_text(str(GATED))
    job, log = submit(slurm, root, command, *options, **environment)
    slurm.await_line(job, log, f"[{GATED}/{STEPS}", JOB_S)
    slurm.ask("scancel", "--batch", "--signal=USR1", str(job))
    slurm.await_line(job, log, AGAIN, JOB_S)
    gate.unlink()
    assert slurm.await_end(job, log, JOB_S) == "COMPLETED", read(log)
    assert slurm.field(job, "Restarts") == "1" and read(log).count(AGAIN) == 1
    return job


def test_preempted_and_requeued_it_is_the_same_run(root: Path, slurm: Slurm) -> None:
    """The trainer on one node, the engine on another."""
    job, log = submit(slurm, root, arguments(root, "whole"), "--nodes=2")
    assert slurm.await_end(job, log, JOB_S) == "COMPLETED", read(log)
    job = preempted(slurm, root, arguments(root, "preempted"), "--nodes=2")
    again = read(root / f"rft-{job}.log").partition(AGAIN)[2]
    assert f"[{GATED + 1}/{STEPS}" in again and f"[{GATED}/{STEPS}" not in again
    assert len(curve(root / "rft" / "whole")) > STEPS
    assert_same(root / "rft" / "preempted", root / "rft" / "whole", STEPS)


def test_ranks_of_srun_on_two_nodes(root: Path, slurm: Slurm) -> None:
    """Every process of a step may get the signal, and only the ranks may act on it."""
    command = arguments(
        root, "ranks", "trainer.megatron.tensor_model_parallel_size=2", "trainer.max_restarts=0"
    )
    preempted(slurm, root, command, "--nodes=3", TRAINER_NODES="2", RANKS_PER_NODE="1")
    job = root / "rft" / "ranks"
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1))
    History(job / "buffer" / "experience_buffer").check_exactly_once(STEPS)
    assert GATED in checkpoints(job) or STEPS in checkpoints(job)


def test_an_array_is_a_sweep(root: Path, slurm: Slurm) -> None:
    (root / "trials.txt").write_text(
        "algorithm.optimizer.lr=1e-4\nalgorithm.optimizer.lr=1e-3 seed=1\n", encoding="utf-8"
    )
    common = overrides(root, "sweep", root / "assets", "trainer.total_steps=2")
    script = str(REPOSITORY / "launch" / "slurm_sweep.sh")
    job = slurm.submit(root, "--array=0-1%1", "--nodes=1", script, "trials.txt", *common, **PACKAGE)
    for trial in (f"{job}_0", f"{job}_1"):
        log = root / f"rft-sweep-{trial}.log"
        assert slurm.await_end(trial, log, JOB_S) == "COMPLETED", read(log)
    for trial in range(2):
        assert [row["step"] for row in step_rows(root / "rft" / f"sweep_{trial}")] == [1, 2]
