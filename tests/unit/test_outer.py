"""A sidecar that hangs, at its start or at its end, is killed with its family; rank 0 waits for
neither without a deadline.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rft.run.outer import have_config
from rft.run.sidecar import Sidecar, first_line, start
from rft.run.stages import StageFailed

PATIENCE = 20.0
HOLDER = """
import fcntl, os, subprocess, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
child.wait()
"""


def gone(*pids: int) -> bool:
    """Ended, if not yet collected."""
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def is_free(lock: Path) -> bool:
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_node_with_a_disk_of_its_own_has_the_config_too(tmp_path: Path) -> None:
    place = tmp_path / "run" / "resolved.yaml"
    have_config(place, "a: 1")
    assert place.read_text() == "a: 1"
    before = place.stat().st_ino
    have_config(place, "a: 1")
    assert place.stat().st_ino == before  # as on a disk that nodes share
    have_config(place, "a: 2")
    assert place.read_text() == "a: 2"


def test_a_stopped_sidecar_does_not_hold_the_end_of_the_run(tmp_path: Path) -> None:
    lock = tmp_path / "sidecar.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        child = int(first_line(said.fileno(), PATIENCE))
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)  # or SIGTERM might be earlier
    (tmp_path / "sidecar.json").write_text(json.dumps({"pid": holder.pid}))
    Sidecar(tmp_path).end(deadline_s=0.1)
    assert gone(holder.pid, child) and is_free(lock)
    holder.wait(PATIENCE)


def test_a_sidecar_that_does_not_come_up_is_an_error_that_says_where_to_look(
    tmp_path: Path,
) -> None:
    resolved = tmp_path / "resolved.yaml"
    os.mkfifo(resolved)  # and nobody writes: the sidecar stands before its config
    before = set(psutil.Process().children())
    with pytest.raises(
        StageFailed,
        match=r"the sidecar was not ready within 1 s and was killed; see .*sidecar\.log",
    ):
        start(resolved, deadline_s=1.0)
    assert gone(*(child.pid for child in set(psutil.Process().children()) - before)) and is_free(
        tmp_path / "sidecar.lock"
    )


def test_the_first_line_is_taken_alone_and_an_end_before_it_is_no_line() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    assert first_line(reader, PATIENCE) == b"one"
    os.close(writer)
    assert first_line(reader, PATIENCE) == b""
    os.close(reader)
