"""The timeline: what processes record survives their death, joins into one file, and costs nothing
where it is off.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rft.monitor import left_out, trace
from rft.sync.decoding_time import DecodingTime
from rft.tools import timeline

KILLED = """
import os, sys
from rft.monitor import trace
trace.start("rank_1")
trace.instant("version 3")
with trace.span("train"):
    with trace.span("sync_wait"):
        pass
    print("inside", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Recording is on; the run directory."""
    monkeypatch.setenv(trace.DIRECTORY, str(tmp_path / "logs" / "attempt_1" / "trace"))
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    yield tmp_path
    trace.stop()


def names(run: Path) -> list[tuple[str, str]]:
    return [(event["ph"], event["name"]) for track in timeline.load(run) for event in track.events]


def test_spans_of_a_process_come_out_in_order_with_their_arguments(recording: Path) -> None:
    trace.start("rank_0")
    with pytest.raises(KeyError), trace.span("train", step=3), trace.span("inner"):
        raise KeyError
    trace.instant("version 4")
    (track,) = timeline.load(recording)
    spans = {name: (begin, end, args, done) for name, begin, end, args, done in track.spans()}
    assert (track.part, track.attempt) == ("rank_0", 1)
    assert spans["train"][2] == {"step": 3} and spans["train"][3] and spans["inner"][3]
    assert spans["train"][0] <= spans["inner"][0] <= spans["inner"][1] <= spans["train"][1]
    assert ("i", "version 4") in names(recording)


def test_a_span_tells_what_its_thread_computed(recording: Path) -> None:
    trace.start("rank_0")
    with trace.span("train"):
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass
    (track,) = timeline.load(recording)
    ((begun, ended),) = track.pairs()
    assert ended is not None and ended["tts"] - begun["tts"] >= 20_000


def test_the_file_of_a_process_opens_in_a_viewer_although_its_array_is_open(
    recording: Path,
) -> None:
    trace.start("rank_0")
    with trace.span("train"):
        text = trace._recorder.path.read_text()  # type: ignore[union-attr]
    assert text.startswith("[\n") and [e["name"] for e in json.loads(text.rstrip(",\n") + "]")] == [
        "process_name",
        "train",
    ]


def test_a_process_that_is_killed_leaves_what_it_did_and_was_doing(recording: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"inside\n"
        process.send_signal(signal.SIGKILL)
    (track,) = timeline.load(recording)
    assert {name: done for name, *_, done in track.spans()} == {"train": False, "sync_wait": True}
    events = json.loads(timeline.write(recording).read_text())["traceEvents"]
    ends = [event for event in events if event["ph"] == "E" and event["name"] == "train"]
    assert [event["args"] for event in ends] == [{"unfinished": True}]


def test_a_full_disk_costs_events_and_nobody_who_records_hears_of_it(
    recording: Path, lost: Counter[str]
) -> None:
    trace.start("rank_0")
    trace.instant("before")
    recorder = trace._recorder
    assert recorder is not None
    taken = os.dup(recorder._file)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file)
    with trace.span("train"):
        trace.instant("checkpoint failed", step=1)
    os.write(taken, b'{"name":"half')  # of what the disk took before it was full
    os.dup2(taken, recorder._file)
    trace.instant("after")
    os.close(taken), os.close(full)
    assert names(recording) == [("M", "process_name"), ("i", "before"), ("i", "after")]
    assert lost == {"events of the timeline": 3}


def test_a_process_whose_timeline_cannot_begin_works_without_one(recording: Path) -> None:
    (recording / "logs" / "attempt_1" / "trace").write_text("no directory")
    trace.start("rank_0")
    trace.instant("unheard")
    assert left_out.count() == 1


def test_a_torn_line_costs_itself_only(recording: Path) -> None:
    trace.start("rank_0")
    trace.instant("whole")
    with trace._recorder.path.open("a") as file:  # type: ignore[union-attr]
        file.write('{"name":"torn","ph":"i","ts":1')
    assert names(recording) == [("M", "process_name"), ("i", "whole")]


def test_overlapping_things_of_one_thread_keep_apart(recording: Path) -> None:
    trace.start("synchronizer")
    first, second = trace.overlapping("round", version=1), trace.overlapping("round", version=2)
    for step in (first.__enter__, second.__enter__):
        step()
    for context in (first, second):
        context.__exit__(None, None, None)
    (track,) = timeline.load(recording)
    assert [(args["version"], done) for _, _, _, args, done in track.spans()] == [
        (1, True),
        (2, True),
    ]


def test_threads_write_whole_lines(recording: Path) -> None:
    trace.start("rank_0")

    def work() -> None:
        for _ in range(200):
            with trace.span("copy"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (track,) = timeline.load(recording)
    assert len(track.events) == 1 + 4 * 200 * 2 and len(list(track.spans())) == 800


def test_a_file_turns_over_and_the_one_before_is_kept(recording: Path) -> None:
    recorder = trace.Recorder(recording / "logs" / "attempt_1" / "trace", "rank_0", limit=2000)
    for number in range(30):
        recorder.event("i", f"event {number}")
    recorder.close()
    assert all(path.stat().st_size < 2200 for path in recorder.path.parent.iterdir())
    (track,) = timeline.load(recording)
    told = [event["name"] for event in track.events if event["ph"] == "i"]
    assert (
        told[-1] == "event 29"
        and told == [f"event {number}" for number in range(30)][-len(told) :]
        and len(told) > 10
    )


def test_a_busy_counter_is_thinned_out_but_its_end_is_told(recording: Path) -> None:
    trace.start("engine_0")
    for value in (1, 2, 3, 2, 1, 0):
        trace.count("requests", value)
    (track,) = timeline.load(recording)
    assert [event["args"]["requests"] for event in track.events if event["ph"] == "C"] == [1, 0]


def test_where_nobody_turned_it_on_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace.DIRECTORY, "x")
    trace.turn_on(tmp_path, wanted=False)
    trace.start("rank_0")
    with trace.span("train"), trace.overlapping("round"):
        trace.instant("version 1")
    assert trace.environment() == {} and list(tmp_path.iterdir()) == []
    trace.turn_on(tmp_path)
    assert (
        os.environ[trace.DIRECTORY]
        == trace.environment()[trace.DIRECTORY]
        == str(tmp_path / "trace")
    )


def test_attempts_and_processes_become_tracks_of_their_own_in_a_readable_order(
    tmp_path: Path,
) -> None:
    for attempt, part in (
        (1, "engine_0-77"),
        (1, "rank_0-77"),
        (2, "rank_0-77"),
        (2, "checkpoint_agent_0-9"),
    ):
        path = tmp_path / "logs" / f"attempt_{attempt}" / "trace" / f"{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'[\n{{"name":"x","ph":"i","ts":{1e6 * attempt},"pid":77,"tid":1,"s":"p"}},\n'
        )
    titles = [
        "rank_0 (attempt 1)",
        "engine_0 (attempt 1)",
        "rank_0 (attempt 2)",
        "checkpoint_agent_0 (attempt 2)",
    ]
    assert [track.title for track in timeline.load(tmp_path)] == titles
    assert timeline.main([str(tmp_path), "--out", str(tmp_path / "elsewhere.json")]) == 0
    assert not (tmp_path / "timeline.json").exists()
    events = json.loads((tmp_path / "elsewhere.json").read_text())["traceEvents"]
    happened = [(event["pid"], event["ts"]) for event in events if event["ph"] == "i"]
    assert happened == [(1, 0.0), (2, 0.0), (3, 1e6), (4, 1e6)], (
        "one clock, from the first event on"
    )


def test_of_a_long_run_a_report_reads_what_happened_and_the_last_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files of a process as of one, and little of an attempt that is over."""

    def line(name: str, phase: str, at: float) -> str:
        return f'{{"name":"{name}","ph":"{phase}","ts":{at},"pid":7,"tid":1}},\n'

    def spans(first: int, last: int) -> str:
        pairs = (line("train", "B", at) + line("train", "E", at + 0.5) for at in range(first, last))
        return "".join(pairs)

    for attempt in (1, 2):
        directory = tmp_path / "logs" / f"attempt_{attempt}" / "trace"
        directory.mkdir(parents=True)
        older = line("process_name", "M", 0) + line("version 1", "i", 1) + spans(2, 500)
        newer = line("process_name", "M", 500) + spans(501, 600) + line("failed", "i", 600)
        (directory / "rank_0-7.before.json").write_text(older)
        (directory / "rank_0-7.json").write_text(newer)
    monkeypatch.setattr(timeline, "TAIL", len(newer) + 1000)
    monkeypatch.setattr(timeline, "TAIL_BEFORE", 1000)
    over, newest = timeline.load(tmp_path, ends_only=True)
    for track, begin in ((over, 590), (newest, 491)):
        told = [event["name"] for event in track.events if event["ph"] == "i"]
        assert told == ["version 1", "failed"] and track.events[0]["ph"] == "M"
        begun = [at for _, at, *_ in track.spans()]
        assert begin <= begun[0] <= begin + 10 and begun == [
            at for at in range(begun[0], 600) if at != 500
        ]
    assert len(timeline.load(tmp_path)[0].events) > 1000


def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timeline.main([str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    assert timeline.main([str(tmp_path)]) == 2
    assert "monitor.trace=false" in capsys.readouterr().err


class Burns(torch.nn.Module):
    """Computes for `seconds` of its thread, with what is inside it."""

    def __init__(self, seconds: float, inner: torch.nn.Module | None = None):
        super().__init__()
        self.seconds, self.logits_processor = seconds, inner

    def forward(self) -> None:
        began = time.thread_time()
        if self.logits_processor is not None:
            self.logits_processor()
        while time.thread_time() < began + self.seconds:
            pass


def test_an_engine_counts_what_its_model_and_its_sampler_compute(recording: Path) -> None:
    """A part of the model that is called from within it counts once, called alone for itself."""
    trace.start("engine_0_worker_0")
    head = Burns(0.02)
    model, sampler = Burns(0.05, head), Burns(0.01)
    counts = DecodingTime(SimpleNamespace(get_model=lambda: model, sampler=sampler))
    model(), sampler(), head()
    assert 0.07 <= counts.seconds["model"] < 0.09 and counts.seconds["sampler"] >= 0.01
    (track,) = timeline.load(recording)
    told = {e["name"]: e["args"][e["name"]] for e in track.events if e["ph"] == "C"}
    assert set(told) == {"model", "sampler"} and told["model"] == pytest.approx(0.05, abs=0.02)
