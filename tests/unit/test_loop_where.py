"""The rows of `bench.loop`: what the kernel counted is what they sum to, and a span's own time goes
to its own row.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.loop_where import ROWS, Counts, counted, counter, own_times, row_of, where
from rft.tools.timeline import Track

PID = 7


def event(phase: str, name: str, at: float, spent: float | None = None, **args: float) -> dict:
    """`at`, `spent`: seconds."""
    told = {"ph": phase, "name": name, "ts": at * 1e6, "pid": PID, "tid": PID}
    return told | ({} if spent is None else {"tts": spent * 1e6}) | ({"args": args} if args else {})


STEP = [
    event("B", "wait_batch", 10, 1.0),
    event("E", "wait_batch", 20, 1.5),
    event("B", "train", 20, 1.5),
    event("B", "forward", 20, 1.5),
    event("E", "forward", 22, 3.5),
    event("B", "optimizer", 25, 6.5),
    event("E", "optimizer", 26, 7.0),
    event("E", "train", 27, 8.0),
]
COUNTED = [event("C", "model", at, model=at / 2) for at in (9, 19, 26, 40)]


def test_a_span_counts_what_it_computed_without_those_inside_it() -> None:
    found = own_times(Track("", 1, "rank_0", 0, STEP), 0, 100)
    assert found == {"pack": 0.5, "forward": 2.0, "optimizer": 0.5, "backward": 4.0}
    assert own_times(Track("", 1, "rank_0", 0, STEP), 0, 24) == {"pack": 0.5, "forward": 2.0}


def test_a_counter_counts_between_two_looks() -> None:
    track = Track("", 1, "engine_0", 0, COUNTED)
    assert (counter(track, "model", 10, 30), counter(track, "sampler", 10, 30)) == (8.5, 0.0)


def test_rows_sum_to_what_the_kernel_counted(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "attempt_1" / "trace"
    folder.mkdir(parents=True)
    for part, events in (("rank_0-7", STEP), ("engine_0-8", COUNTED)):
        (folder / f"{part}.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + ",\n")
    begin = Counts(10.0, 50.0, {(7, 7): ("trainer", 3.0), (8, 8): ("engine", 4.0)})
    threads = {(7, 7): ("trainer", 11.0), (8, 8): ("engine", 14.0), (9, 1): ("front", 2.0)}
    found = where(begin, Counts(30.0, 75.0, threads), tmp_path)
    assert list(found) == list(ROWS) and sum(found.values()) == pytest.approx(25.0)
    assert (found["backward"], found["loop"], found["decode"]) == (4.0, 1.0, 8.5)
    assert (found["steps"], found["front"], found["rest"]) == (1.5, 2.0, 5.0)


def test_threads_of_weights_count_as_sync_in_trainer_and_engine() -> None:
    assert row_of("trainer", "weights-out", False) == row_of("engine", "stage", False) == "sync"
    assert (row_of("trainer", "python", True), row_of("trainer", "grpc", False)) == (
        "trainer",
        "rest",
    )


def test_time_of_a_child_that_ended_is_counted() -> None:
    me = [psutil.Process(os.getpid())]
    before = counted(me, 0.0).whole
    burn = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert counted(me, 0.0).whole >= before + 0.09
