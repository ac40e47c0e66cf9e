"""Stopped processes, real ones: who is counted, for how long, and what then."""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rft.ground.process import identity
from rft.run import sidecar, standstill
from rft.run.standstill import Looks, Standstill, stopped_parts

PATIENCE_S = 20.0
STARTS = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.argv[1], "-c", "import os; os.kill(os.getpid(), 19)"])
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def stopped() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def test_a_stop_counts_from_look_to_look_and_a_break_of_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch, stopped: psutil.Process
) -> None:
    monkeypatch.setattr(standstill, "STOPPED_S", 3 * standstill.LOOK_S)
    looks = Looks()
    assert [looks.look([stopped]) for _ in range(3)] == [[], [], []]
    assert looks.look([]) == []  # it went on
    assert [looks.look([stopped]) for _ in range(4)] == [[], [], [], [stopped]]


def test_who_stays_stopped_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch, stopped: psutil.Process
) -> None:
    monkeypatch.setattr(standstill, "STOPPED_S", 0.05)
    monkeypatch.setattr(standstill, "LOOK_S", 0.02)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Standstill(said.put)
    try:
        assert f"(process {stopped.pid}) has been stopped" in said.get(timeout=PATIENCE_S)
        psutil.wait_procs([stopped], timeout=PATIENCE_S)
        assert not stopped.is_running()
    finally:
        watch.close()


RANK = """
import os, signal, subprocess, sys
watcher = "from rft.run import standstill; standstill.LOOK_S, standstill.STOPPED_S = 0.02, 0.05; "
watcher += f"standstill.main({os.getppid()}, {os.getpid()})"
print(os.getpid(), subprocess.Popen([sys.executable, "-c", watcher]).pid, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
LAUNCHES = "import subprocess, sys; sys.exit(-subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def test_a_single_rank_of_an_outer_launcher_is_killed_and_its_watcher_ends_with_it() -> None:
    """`beside_ranks` with its own patience: tests/e2e/test_outer.py."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, RANK], stdout=subprocess.PIPE, text=True
    ) as launcher:
        told, _ = launcher.communicate(timeout=2 * PATIENCE_S)
    rank, watcher = map(int, told.split()[:2])
    assert launcher.returncode == signal.SIGKILL
    assert f"(process {rank}) has been stopped for" in told
    while psutil.pid_exists(watcher) and psutil.Process(watcher).status() != "zombie":
        pass


@pytest.mark.parametrize(("title", "counts"), [("ray::Explorer", False), ("ray::Buffer", True)])
def test_what_user_code_stops_is_its_own_business(title: str, counts: bool) -> None:
    with subprocess.Popen(
        [title, "-c", STARTS, sys.executable], executable=sys.executable, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert (child in stopped_parts(os.getpid())) == counts
        finally:
            child.kill()
            parent.kill()


def test_a_sidecar_that_stays_stopped_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: psutil.Process
) -> None:
    """And rank 0 with it."""
    monkeypatch.setattr(standstill, "STOPPED_S", 0.05)
    monkeypatch.setattr(standstill, "LOOK_S", 0.02)
    monkeypatch.setattr(sidecar, "LOOK_S", 0.02)
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(sidecar.os, "_exit", ends.put)
    (tmp_path / sidecar.RECORD).write_text(json.dumps({"process": identity(stopped.pid)}))
    sidecar.Sidecar(tmp_path)
    assert ends.get(timeout=PATIENCE_S) == 1
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
