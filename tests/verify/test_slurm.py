"""`launch/slurm.sh` on a real Slurm with two nodes: a job finishes; another is preempted, requeued, and ends as if it had not been."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exact import assert_same, curve, deterministic
from slurm_cluster import Slurm, read, running

from runs import REPOSITORY, write_assets

TEMPLATE = str(REPOSITORY / "launch" / "slurm.sh")
STEPS = 8
SIGNAL_AT = 3  # told while this step is on the terminal: a checkpoint of it or of the next one is made
JOB_S = 400.0
PACKAGE = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(root: Path, slurm: Slurm) -> Path:
    """A run that nobody interrupts: its trainer on one node, its engine on the other."""
    write_assets(root / "assets")
    job, log = start(slurm, root, "whole", "--nodes=2")
    assert slurm.await_end(job, log, JOB_S) == "COMPLETED", read(log)
    return root / "rft" / "whole"


def start(slurm: Slurm, root: Path, name: str, *options: str, settings: tuple[str, ...] = (), **environment: str) -> tuple[int, Path]:
    """Submit a deterministic run; returns the job's number and its log."""
    arguments = deterministic(root, name, root / "assets", f"trainer.total_steps={STEPS}", *settings)
    job = slurm.submit(root, *options, TEMPLATE, *arguments, **PACKAGE, **environment)
    return job, root / f"rft-{job}.log"


def preempt(slurm: Slurm, job: int, log: Path) -> None:
    slurm.await_line(job, log, f"[{SIGNAL_AT}/{STEPS}", JOB_S)
    slurm.ask("scancel", "--batch", "--signal=USR1", str(job))
    slurm.await_line(job, log, "back into the queue", JOB_S)


def test_engines_were_on_their_own_node(slurm: Slurm, whole: Path) -> None:
    assert len(curve(whole)) >= STEPS


def test_preempted_and_requeued_it_is_the_same_run(root: Path, slurm: Slurm, whole: Path) -> None:
    job, log = start(slurm, root, "preempted", "--nodes=2")
    preempt(slurm, job, log)
    assert slurm.await_end(job, log, JOB_S) == "COMPLETED", read(log)
    assert slurm.field(job, "Restarts") == "1"
    assert_same(root / "rft" / "preempted", whole, STEPS)
