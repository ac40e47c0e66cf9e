"""How a stage ends: which of several failures is the cause, what a killed rank's peers do not hide,
and that nobody is left.
"""

import json
import os
import queue
import signal
from pathlib import Path

import pytest

from rft.run import elastic, launch, supervisor
from rft.run.cluster import start_patiently
from rft.run.supervisor import EXIT_CODES, Event, kind, root_cause


def failed(part: str) -> Event:
    return Event(part, "working", "something")


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (["trainer rank 0", "engine_1"], "engine_1"),  # a round failed because the engine was gone
        (["explorer", "trainer rank 0", "engine_0"], "engine_0"),
        (["engine_0", "trainer rank 0"], "engine_0"),
        (["explorer", "buffer"], "buffer"),
        (["trainer rank 0", "explorer"], "explorer"),  # an evaluation that all tasks failed in
        (["trainer rank 3"], "trainer rank 3"),
        (["synchronizer", "trainer launcher"], "synchronizer"),
    ],
)
def test_the_part_that_died_first_is_named(
    monkeypatch: pytest.MonkeyPatch, order: list[str], cause: str
) -> None:
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.05)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    first, *rest = map(failed, order)
    for event in (*rest, Event("ranks"), Event("user", signal=signal.SIGTERM)):
        events.put(event)
    found = root_cause(first, events)
    assert found.part == cause and kind(found) in EXIT_CODES


def record(directory: Path, number: int, cause: str, time: int) -> None:
    path = directory / f"failure_rank_{number}.json"
    path.write_text(
        json.dumps({"part": f"trainer rank {number}", "phase": "train", "cause": cause})
    )
    os.utime(path, (time, time))


def test_a_killed_rank_is_the_cause_whatever_its_peers_met(tmp_path: Path) -> None:
    record(tmp_path, 0, "Connection closed by peer", time=1)
    (tmp_path / "phase_rank_1").write_text("wait_batch".ljust(64))
    ended = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    expected = {"part": "trainer rank 1", "phase": "wait_batch", "cause": "killed by SIGKILL"}
    assert elastic.root_cause(tmp_path, ended) == expected


def test_of_ranks_that_raised_the_first_is_the_cause(tmp_path: Path) -> None:
    record(tmp_path, 0, "Connection closed by peer", time=2)
    record(tmp_path, 1, "KeyError: 'x'", time=1)
    assert (
        elastic.root_cause(tmp_path, {0: 1, 1: 1, 2: -signal.SIGABRT})["cause"] == "KeyError: 'x'"
    )


def test_a_rank_that_says_nothing_is_still_named(tmp_path: Path) -> None:
    expected = {"part": "trainer rank 2", "phase": "starting", "cause": "ended with exit code 3"}
    assert elastic.root_cause(tmp_path, {2: 3, 3: 1}) == expected


def test_ray_gets_more_time_than_it_gives_itself_and_other_errors_end_at_once() -> None:
    tries: list[str] = []

    def start(**settings: object) -> None:
        tries.append("tried")
        if len(tries) < 3:
            raise Exception(
                "The current node timed out during startup. This could happen because ..."
            )

    start_patiently(start, num_cpus=1)
    assert len(tries) == 3

    def broken(**settings: object) -> None:
        tries.append("tried")
        raise ConnectionError("no such address")

    with pytest.raises(ConnectionError):
        start_patiently(broken)
    assert len(tries) == 4


def test_the_last_metrics_of_a_run_are_its_last_line(tmp_path: Path) -> None:
    assert launch.last_line(tmp_path / "metrics.jsonl") == "none"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert launch.last_line(tmp_path / "metrics.jsonl") == '{"step": 2}'
