"""What is measured of ranks that come back, and peers of a dead rank that hang."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from states import PATIENCE

from rft.run import recovery
from rft.run.recovery import RankWatch, Recovery

HANGS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def test_peers_of_a_rank_that_died_are_killed_when_they_hang(tmp_path: Path) -> None:
    with RankWatch(tmp_path, 2, peers_s=0.0):
        peer = subprocess.Popen([sys.executable, "-c", HANGS])
        dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        assert peer.wait(PATIENCE) == -9
        assert dead.wait() == 3  # its exit code is still there to be taken
    record = json.loads((tmp_path / recovery.RECORD).read_text())
    assert record["died_at"] <= record["noticed_at"] <= time.monotonic()


def test_peers_of_a_rank_that_was_killed_have_nothing_to_tell(tmp_path: Path) -> None:
    with RankWatch(tmp_path, 2, peers_s=1000 * PATIENCE, killed_s=0.0):
        peer = subprocess.Popen([sys.executable, "-c", HANGS])
        dead = subprocess.Popen([sys.executable, "-c", HANGS])
        dead.kill()
        assert peer.wait(PATIENCE) == dead.wait() == -9


def test_a_death_that_the_launcher_met_first_is_noted_too(tmp_path: Path) -> None:
    """Torch looks ten times a second, and takes the exit code: the watch may come later."""
    with pytest.raises(ChildProcessError), RankWatch(tmp_path, 1):
        dead = subprocess.Popen([sys.executable, "-c", HANGS])
        dead.kill()
        dead.wait()
        raise ChildProcessError
    assert Recovery.of(tmp_path).died_at is not None


def test_ranks_that_end_well_are_left_alone_and_nothing_is_noted(tmp_path: Path) -> None:
    with RankWatch(tmp_path, 2, peers_s=0.0):
        done = subprocess.Popen([sys.executable, "-c", ""])
        slow = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert done.wait(PATIENCE) == 0
        slow.communicate(b"\n", PATIENCE)
        assert slow.returncode == 0
    assert not (tmp_path / recovery.RECORD).exists()


def test_which_steps_are_made_again_is_said_by_number() -> None:
    found = Recovery()
    found.resumed(step=4, reached=4, source="disk")
    assert found.again() == ""
    found.resumed(step=4, reached=4, source="memory")
    assert found.again() == "goes on from memory behind step 4: no step is made again"
    found.resumed(step=4, reached=5, source="memory")
    assert found.again() == "goes on from memory behind step 4: step 5 is made again"
    found.resumed(step=0, reached=2, source="")
    assert found.again() == "goes on from the start behind step 0: steps 1 to 2 are made again"


def test_a_recovery_is_told_once_part_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Recovery.of(tmp_path).pop() == {}
    recovery.note(tmp_path, time.monotonic() - 2)
    found = Recovery.of(tmp_path)
    assert Recovery.of(tmp_path).died_at is None  # another start is no recovery
    ticks = iter(range(10, 20))
    found.died_at, found.at["detect"], found.at["spawn"] = 7.0, 7.5, 9.0
    found.clock = lambda: float(next(ticks))
    found.mark("imports")
    found.mark("groups")
    found.mark("build")
    found.resumed(step=4, reached=6, source="memory", read=(5 * 10**8, 0.25))
    found.enter("wait_batch")
    assert found.pop() == {}  # the step is not over
    found.enter("judging the step")
    found.enter("wait_batch")
    assert found.pop() == {
        "recovery/detect_s": 0.5,
        "recovery/spawn_s": 1.5,
        "recovery/imports_s": 1.0,
        "recovery/groups_s": 1.0,
        "recovery/build_s": 1.0,
        "recovery/load_s": 1.0,
        "recovery/begin_s": 1.0,
        "recovery/first_step_s": 1.0,
        "recovery/total_s": 7.0,
        "recovery/steps_again": 2.0,
        "recovery/read_gb": 0.5,
        "recovery/read_s": 0.25,
    }
    assert "back from memory, 2 step(s) made again; seconds: detect 0.50" in capsys.readouterr().out
    assert found.pop() == {}
