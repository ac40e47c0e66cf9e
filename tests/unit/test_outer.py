"""A sidecar that hangs, at its start or at its end, is killed with its family; rank 0 waits for
neither without a deadline, and dies while one starts without harm to the next rank 0.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft import config as configs
from rft.config import Config
from rft.ground.process import identity
from rft.run import sidecar
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
    (tmp_path / "sidecar.json").write_text(json.dumps({"process": identity(holder.pid)}))
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


# as `python -m rft.run.sidecar`, with actors that say when they load and wait for a word
SLOW_SIDECAR = """
import os, sys
from pathlib import Path
from rft.run import sidecar

class Slow:
    def __init__(self, config, events, say):
        self.events, self.log_dir = events, Path(sys.argv[1]).parent
    def guard(self, *launchers): ...
    def start(self):
        with open(self.log_dir / "loads", "w") as said, open(self.log_dir / "word") as word:
            print("loads", file=said, flush=True)
            return bool(word.readline())
    def environment(self):
        return {"RFT_RAY_ADDRESS": f"of {os.getpid()}"}
    def first_event(self):
        return self.events.get()
    def close(self, grace_s): ...

sidecar.Supervisor = Slow
sys.exit(sidecar.main(sys.argv[1], int(sys.argv[2])))
"""
RANK_0 = """
import sys
from pathlib import Path
from rft.run import sidecar
sidecar.sys.executable, resolved = sys.argv[1], Path(sys.argv[2])
print(sidecar.start(resolved, float(sys.argv[3]))["RFT_RAY_ADDRESS"], flush=True)
hold = sidecar.Sidecar(resolved.parent)
print(hold.pid, flush=True)
sys.stdin.read()
hold.end(float(sys.argv[3]))
"""


def test_a_rank_0_that_dies_while_its_sidecar_starts_leaves_it_to_the_next(tmp_path: Path) -> None:
    """Which is told nothing of an attempt before, whose number somebody else may have by now."""
    resolved, config = tmp_path / "resolved.yaml", Config(name="a")
    config.model.model_path = "model"
    configs.save(config, resolved)
    for name in ("loads", "word"):
        os.mkfifo(tmp_path / name)
    loads, word = (os.open(tmp_path / name, os.O_RDWR) for name in ("loads", "word"))
    stranger = subprocess.Popen(["sleep", "1000"])  # with the number of an earlier sidecar
    stale: dict[str, Any] = {"process": f"{stranger.pid}-1", "launcher": identity(os.getpid())}
    stale["environment"] = {"RFT_RAY_ADDRESS": "of the attempt before"}
    (tmp_path / "sidecar.json").write_text(json.dumps(stale))
    (tmp_path / "slow.py").write_text(SLOW_SIDECAR)
    python = tmp_path / "python"  # start: python -m rft.run.sidecar RESOLVED LAUNCHER
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "slow.py"} "$3" "$4"\n')
    python.chmod(0o755)
    command = [sys.executable, "-c", RANK_0, str(python), str(resolved), str(PATIENCE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

    with subprocess.Popen(command, **pipes) as first:  # type: ignore[call-overload]
        assert first_line(loads, PATIENCE) == b"loads"
        first.kill()
    with subprocess.Popen(command, **pipes) as second:  # type: ignore[call-overload]
        os.write(word, b"go on\n")
        told = [second.stdout.readline().decode().strip() for _ in range(2)]
        serves = sidecar.serving(tmp_path)
        assert serves is not None and told == [f"of {serves.pid}", str(serves.pid)]
        assert serves.launcher == identity(os.getpid())
        second.communicate(timeout=PATIENCE)
    assert second.returncode == 0 and sidecar.serving(tmp_path) is None
    assert gone(serves.pid) and is_free(tmp_path / "sidecar.lock")
    assert stranger.poll() is None, "not ended in its place"
    stranger.kill()
    stranger.wait()
    os.close(loads)
    os.close(word)


def test_a_sidecar_of_another_launcher_is_nobodys_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, as its launcher has; who begins meanwhile waits for that, and has one of its own."""

    def begins(*_: object, **__: object) -> None:
        raise ChildProcessError("one of its own")

    monkeypatch.setattr(subprocess, "Popen", begins)
    environment = {"RFT_RAY_ADDRESS": "of the one that lives"}
    record = {"process": identity(os.getpid()), "environment": environment}
    (tmp_path / "sidecar.json").write_text(
        json.dumps(record | {"launcher": identity(os.getppid())})
    )
    assert start(tmp_path / "resolved.yaml", PATIENCE) == environment
    (tmp_path / "sidecar.json").write_text(json.dumps(record | {"launcher": identity(os.getpid())}))
    with pytest.raises(ChildProcessError):
        start(tmp_path / "resolved.yaml", PATIENCE)
