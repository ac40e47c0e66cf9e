"""Logs that stay small and in their place, and what a process says that hangs or is stopped."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rft.config import LogConfig
from rft.monitor import logs
from rft.tools import timeline
from rft.trainer.reporting import SkippedSteps

UNABLE = """
import sys
from pathlib import Path
from rft.config import LogConfig
from rft.monitor import logs
logs.redirect(Path(sys.argv[1]), LogConfig(), keep_stdout=True)
print("trains")
"""
SIBLING = """
import os, sys, signal
from pathlib import Path
from rft.config import LogConfig
from rft.monitor import logs
logs.redirect(Path(sys.argv[1]), LogConfig(), keep_stdout=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
logs.show_stacks_when_stopped()
def hangs_here():
    print("hanging", flush=True)
    while sys.stdin.read(1):
        pass
hangs_here()
"""
ASKS = """
import subprocess, sys
from rft.monitor import logs
logs.ask_stacks_of_siblings()
"""
PARENT = """
import subprocess, sys
pipe = subprocess.PIPE
sibling = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
sibling = subprocess.Popen(sibling, stdin=pipe, stdout=pipe)
listens = "import sys; print('here', flush=True); sys.stdin.read()"
deaf = subprocess.Popen([sys.executable, "-c", listens],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
sibling.stdout.readline(), deaf.stdout.readline()
subprocess.run([sys.executable, "-c", sys.argv[3]], check=True)
assert deaf.poll() is None and sibling.poll() is None, "the signal ends one that does not listen"
deaf.stdin.close(), sibling.stdin.close()
deaf.wait(), sibling.wait()
"""


def test_a_log_that_is_too_long_turns_over_and_its_writers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "engine_0.log"
    assert not logs.turn_over(path, limit=400), "nobody has written yet"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"old " * 100)
    assert not logs.turn_over(path, limit=400)
    os.write(file, b"more")
    assert logs.turn_over(path, limit=400)
    os.write(file, b"new")
    os.close(file)
    assert (
        path.read_bytes() == b"new"
        and (tmp_path / "engine_0.log.1").read_bytes() == b"old " * 100 + b"more"
    )


def test_a_full_disk_costs_lines_of_a_log_and_nobody_who_prints(lost: Counter[str]) -> None:
    with pytest.raises(OSError, match="No space"), open("/dev/full", "w", buffering=1) as full:
        print("a step", file=logs.Redacted(full), flush=True)
        logging.StreamHandler(logs.Redacted(full)).emit(logging.makeLogRecord({"msg": "a step"}))
    assert lost["lines of logs"] >= 2, "and only whoever closed the file itself heard of it"


def test_a_log_that_cannot_begin_leaves_its_process_where_it_prints(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no directory")
    told = subprocess.run(
        [sys.executable, "-c", UNABLE, str(tmp_path / "logs" / "rank_0.log")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a process's log file" in told.stderr and "the run goes on" in told.stderr
    assert told.stdout == "trains\n"


def test_logs_can_lie_in_a_directory_per_node(tmp_path: Path) -> None:
    code = f"""
import logging
from pathlib import Path
from rft.config import LogConfig
from rft.monitor import logs
config = LogConfig(group_by_node=True, level="WARNING")
logs.redirect(Path({str(tmp_path / "rank_0.log")!r}), config)
logging.getLogger("x").warning("said")
logging.getLogger("x").info("kept back")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    text = (tmp_path / socket.gethostname() / "rank_0.log").read_text()
    assert "said" in text and "kept back" not in text
    assert logs.where(tmp_path, LogConfig()) == tmp_path


def test_attempts_are_numbered_and_the_latest_is_linked(tmp_path: Path) -> None:
    assert [logs.new_attempt(tmp_path).name for _ in range(3)] == [
        "attempt_1",
        "attempt_2",
        "attempt_3",
    ]
    assert (tmp_path / "logs" / "latest").resolve().name == "attempt_3"


def test_what_an_operator_keeps_beside_the_attempts_is_none(tmp_path: Path) -> None:
    kept = logs.new_attempt(tmp_path).with_name("attempt_1_bad")
    kept.mkdir()
    for name in ("attempt_7.tar.gz", "attempt_", "attempt_x", "attempt_\u00b2"):
        kept.with_name(name).touch()
    assert logs.new_attempt(tmp_path).name == "attempt_2"
    assert [number for number, _ in logs.attempts(tmp_path)] == [1, 2]
    assert timeline.load(tmp_path) == [] and not list(kept.iterdir())


def test_a_rank_that_fails_asks_its_siblings_for_their_stacks(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    subprocess.run([sys.executable, "-c", PARENT, str(log), SIBLING, ASKS], check=True)
    assert "in hangs_here" in log.read_text()


def test_a_rank_that_is_stopped_says_where_it_was_and_then_does_what_it_does(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rank_1.log"
    with subprocess.Popen(
        [sys.executable, "-c", SIBLING, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"hanging\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7
    assert "in hangs_here" in log.read_text()


def test_the_batch_of_a_step_that_fails_is_kept(tmp_path: Path) -> None:
    from rft.ground.experience import Batch, Experience, decode

    skips = SkippedSteps(tmp_path, 0, lead=True, barrier=lambda what: None)
    batch = Batch(step=4, experiences=[Experience(tokens=[1, 2], prompt_length=1, action_mask=[1])])
    path = skips.keep(batch)
    assert path == tmp_path / "step_00000005.msgpack", "named like its metrics would have been"
    assert (
        json.dumps([e.tokens.tolist() for e in decode(path.read_bytes(), Batch).experiences])
        == "[[1, 2]]"
    )
