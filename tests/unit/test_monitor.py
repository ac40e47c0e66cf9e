"""Metrics, timer, console, files and services: what a person and a plot get to see of a run."""

import contextlib
import io
import json
import math
import os
import resource
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.config import ConfigError, MonitorConfig
from rft.monitor import run_record, sinks
from rft.monitor.console import Console, cells, duration, evaluations
from rft.monitor.metrics import Timer

NO_SERVICE = MonitorConfig(monitor_type="none")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Metrics


def test_the_timer_adds_spans_of_a_step_and_starts_anew() -> None:
    clock = Clock()
    timer = Timer(clock)
    for _ in range(2):
        with timer.span("train"):
            clock.now += 3
    with pytest.raises(KeyError), timer.span("eval"):
        clock.now += 1
        raise KeyError
    clock.now += 4
    assert timer.pop() == {"time/train_s": 6.0, "time/eval_s": 1.0, "time/step_s": 11.0}
    assert timer.pop() == {"time/step_s": 0.0}


def test_a_span_inside_a_span_counts_once() -> None:
    clock = Clock()
    timer = Timer(clock)
    with timer.span("train"):
        clock.now += 3
        for _ in range(2):
            with timer.span("sync_wait"):
                clock.now += 1
        clock.now += 4
    assert timer.pop() == {"time/train_s": 7.0, "time/sync_wait_s": 2.0, "time/step_s": 9.0}


# Console


def test_a_plain_line_has_progress_and_only_allowed_columns() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console("run", 150, 36, stream, clock)
    clock.now += 2
    metrics = {
        "reward/mean": 0.5124,
        "loss": 0.02134,
        "staleness/mean": 0.9,
        "staleness/max": 1.0,
        "time/step_s": 2.0,
    }
    console.log({**metrics, "reward/secret": 1.0}, 37)
    assert stream.getvalue() == (
        "[ 37/150   24%  eta 3:46]  reward 0.512  loss 0.0213  stale 0.9/1  step 2.00s\n"
    )  # 113 steps at 2 s


def test_the_eta_follows_the_recent_steps_and_ignores_late_evaluations() -> None:
    clock = Clock()
    console = Console("run", 100, 0, io.StringIO(), clock)
    for step in range(1, 41):
        clock.now += 10 if step <= 20 else 1
        console.log({"loss": 1.0, "time/step_s": 1.0}, step)
    console.log({"eval/sums/accuracy": 0.5}, 30)
    assert console.remaining_s() == pytest.approx(60.0)


def test_without_a_known_end_the_line_shows_the_step_alone() -> None:
    stream = io.StringIO()
    Console("run", None, 0, stream).log({"loss": math.nan}, 3)
    assert stream.getvalue() == "[step 3]  loss nan\n"


def test_nothing_worth_showing_prints_nothing() -> None:
    stream = io.StringIO()
    Console("run", 10, 0, stream).log({"internal": 1.0}, 3)
    assert stream.getvalue() == ""


def test_an_evaluation_shows_accuracy_and_reward_only_without_it() -> None:
    metrics = {
        "eval/sums/reward/mean": 0.4,
        "eval/sums/accuracy": 0.84,
        "eval/chat/reward/mean": 0.1,
        "eval/sums/x": 1.0,
    }
    assert evaluations(metrics) == ["eval sums accuracy 0.840", "eval chat reward/mean 0.100"]


def test_a_maximum_without_its_mean_is_not_shown_as_something_else() -> None:
    assert cells({"staleness/max": 3.0, "loss": 1.0}) == ["loss 1.0000"]
    assert cells({"reward/mean": 0.5, "staleness/max": 3.0}) == ["reward 0.500"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (63, "1:03"), (59.6, "1:00"), (7325, "2:02:05")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console("my run", 10, 0, stream)
    console.log({"loss": 0.25, "time/step_s": 1.0}, 4)
    console.close()
    assert (
        "my run" in stream.getvalue()
        and "4/10" in stream.getvalue()
        and "0.2500" in stream.getvalue()
    )


# Files


def test_metrics_and_samples_are_one_object_per_line_with_step_and_time(tmp_path: Path) -> None:
    clock = Clock()
    files = run_record.RunFiles(tmp_path, 0, clock)
    clock.now += 1.5
    files.log({"loss": 0.5, "bad": math.nan}, 1)
    files.table("rollouts", [{"prompt": "a\nb\u2028c", "reward": 1.0}], 1)
    files.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "time_s": 1.5, "loss": 0.5, "bad": None}
    ]
    assert run_record.read_metrics(tmp_path / "samples.jsonl") == [
        {"step": 1, "table": "rollouts", "prompt": "a\nb\u2028c", "reward": 1.0}
    ]


def test_after_a_resume_no_step_appears_twice_and_time_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    files = run_record.RunFiles(tmp_path, 0, clock)
    for step in range(1, 6):
        clock.now += 1
        files.log({"loss": float(step)}, step)
    files.table("rollouts", [{"x": 1}], 2)
    files.table("rollouts", [{"x": 1}], 5)
    files.close()
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 6, "time_s"')  # killed in the middle of a line
    again = run_record.RunFiles(tmp_path, 3, clock)
    clock.now += 1
    again.log({"loss": 40.0}, 4)
    again.close()
    found = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["time_s"], line["loss"]) for line in found] == [
        (1, 1.0, 1.0),
        (2, 2.0, 2.0),
        (3, 3.0, 3.0),
        (4, 4.0, 40.0),
    ]
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [2]


def test_a_start_without_anything_to_resume_logs_step_zero_once(tmp_path: Path) -> None:
    for _attempt in range(2):  # the first was killed before its first checkpoint
        files = run_record.RunFiles(tmp_path, 0)
        files.log({"eval/sums/accuracy": 0.1}, 0)
        files.log({"loss": 1.0}, 1)
        files.close()
        assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]
    run_record.RunFiles(tmp_path, 1).close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_resume_keeps_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    early, late = b'{"step":1,"x": 1e-7}\n{"step": 2}\n', b'{"eval/a/accuracy":1, "step": 2}\n'
    path.write_bytes(early + b'{"step": 3}\n' + late + b'{"step": 4}\n')
    assert run_record.RunRecord(tmp_path).last_step == 4
    run_record.JsonLines(path, 2).close()
    assert path.read_bytes() == early + late, "an evaluation is told behind later steps"


@pytest.mark.parametrize(
    ("resume", "evaluation", "looked_at", "is_moved"),
    [
        (40, "", 4, False),  # nothing is dropped
        (39, "", 4, False),  # the end is cut off
        (39, '{"step": 30, "eval/a/accuracy": 1}\n', 4, True),
        (12, '{"step": 12, "eval/a/accuracy": 1}\n', 41, True),  # what is to stay lies further up
    ],
)
def test_of_a_long_file_a_resume_reads_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: int,
    evaluation: str,
    looked_at: int,
    is_moved: bool,
) -> None:
    path, seen = tmp_path / "metrics.jsonl", set[bytes]()
    told = [f'{{"step": {step:2d}, "time/step_s": 1.5}}\n' for step in range(1, 41)]
    path.write_text("".join(told) + evaluation + '{"step": 41, "ti')
    before, real = path.stat().st_ino, run_record._step
    monkeypatch.setattr(run_record, "LOOK", 5 * len(told[0]))
    monkeypatch.setattr(run_record, "_step", lambda line: seen.add(line) or real(line))
    assert run_record.RunRecord(tmp_path).last_step == 40 and len(seen) <= 5
    assert run_record.RunRecord(tmp_path).newest("time/step_s")["step"] == 40 and len(seen) <= 5
    assert run_record.RunRecord(tmp_path).newest("loss") == {}
    seen.clear()
    run_record.JsonLines(path, resume).close()
    assert path.read_text() == "".join(told[:resume]) + evaluation
    assert looked_at <= len(seen) <= looked_at + 1 and (path.stat().st_ino != before) is is_moved


def test_rows_with_some_metrics_are_found_without_reading_the_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1}\n{"step": 2, "eval/a/accuracy": 0.5}\n'
        '{"step": 3, "text": "\\"eval/a/accuracy\\""}\n{"step": 2, "eval/b/accuracy": 1}\n'
        '{"step": 4, "eval/a/accuracy": 1}\n'
    )
    found = run_record.RunRecord(tmp_path).having(["eval/a/accuracy", "eval/b/accuracy"])
    assert found == [{"step": 2, "eval/a/accuracy": 0.5, "eval/b/accuracy": 1}]


def test_a_resume_that_dies_while_dropping_lines_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    before = '{"step": 1}\n{"step": 2}\n{"step": 1, "eval": 1}\n'
    path.write_text(before)

    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_record.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        run_record.JsonLines(path, 1)
    assert path.read_text() == before


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    files = run_record.RunFiles(tmp_path, 0)
    files.log({"loss": 1.0}, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    files.close()


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """A disk that takes a part of a write and then nothing, by the kernel's own limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("hurt", ["zeros inside", "torn inside", "flipped bit", "no object"])
def test_a_damaged_file_is_set_aside_and_the_resume_goes_on(
    tmp_path: Path, hurt: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b"".join(b'{"step": %d, "time_s": 1.0, "loss": 0.5}\n' % step for step in range(1, 200))
    bad = {
        "zeros inside": good[:1024] + bytes(2048) + good[3072:],
        "torn inside": good[:-30] + b'{"step": 199, "x": 1}\n',
        "flipped bit": good[:2012] + bytes([good[2012] ^ 0x80]) + good[2013:],
        "no object": good + b"[1]\n",
    }[hurt]
    path.write_bytes(bad)
    files = run_record.RunFiles(tmp_path, 150)
    files.log({"loss": 1.0}, 151)
    files.close()
    steps = [line["step"] for line in lines(path)]
    assert steps[0] == 1 and steps[-2:] == [150, 151] and len(steps) == len(set(steps))
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == bad
    assert len(caplog.messages) == 1 and "metrics.jsonl.damaged-1" in caplog.text
    again = run_record.RunFiles(tmp_path, 151)
    again.close()
    assert len(caplog.messages) == 1, "what was set aside is not found again"


def test_a_full_disk_costs_lines_and_tears_none(tmp_path: Path, lost: Counter[str]) -> None:
    out = io.StringIO()
    monitor = sinks.build(NO_SERVICE, tmp_path, "p", "run", resume_step=0, stream=out)
    monitor.log({"loss": 1.0}, 1)
    with no_file_beyond((tmp_path / "metrics.jsonl").stat().st_size + 10):
        monitor.log({"loss": 2.0}, 2)
        monitor.log({"loss": 3.0}, 3)
    monitor.log({"loss": 4.0}, 4)
    monitor.close()
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 4] and found[1]["monitor/left_out"] == 2
    assert out.getvalue().endswith("left out of what this run records: lines of metrics.jsonl 2\n")


def test_a_resume_on_a_full_disk_goes_on_when_there_is_room(
    tmp_path: Path, lost: Counter[str]
) -> None:
    before = '{"step": 1}\n{"step": 2}\n{"step": 1, "eval": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(before)
    with no_file_beyond(5):
        files = run_record.JsonLines(tmp_path / "metrics.jsonl", 1)
        files.append({"step": 2, "loss": 1.0})
        assert (tmp_path / "metrics.jsonl").read_text() == before
    files.append({"step": 3})
    files.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 1, 3]
    assert lost["lines of metrics.jsonl"] == 2


def test_a_service_that_fails_costs_nobody_else_anything(
    tmp_path: Path, lost: Counter[str]
) -> None:
    class Broken(sinks.Nowhere):
        def log(self, metrics: dict[str, float], step: int) -> None:
            raise ConnectionError("gone")

    files = run_record.RunFiles(tmp_path, 0)
    monitor = sinks.Monitor([Broken(tmp_path, "p", "run", 0), files])
    monitor.log({"loss": 1.0}, 1)
    monitor.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1 and lost == {"calls of Broken": 1}


def test_tensorboard_goes_on_in_a_new_file_after_a_full_disk(
    tmp_path: Path, lost: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "AGAIN_S", 0.0)
    board = sinks.TensorBoard(tmp_path, "p", "run", 0)
    monitor = sinks.Monitor([board])
    broken = board._writer.file_writer.event_writer._async_writer._worker
    broken.exception = OSError(28, "No space left on device")  # as its thread leaves it
    monitor.log({"loss": 1.0}, 1)
    monitor.log({"loss": 2.0}, 2)
    monitor.close()
    assert lost == {"calls of TensorBoard": 1}
    found = b"".join(path.read_bytes() for path in (tmp_path / "monitor").rglob("events*"))
    assert b"loss" in found


def test_reading_merges_a_late_evaluation_into_its_step(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(
        '{"step": 2, "loss": 1}\n{"step": 3, "loss": 2}\n{"step": 2, "eval": 5}\n'
    )
    assert run_record.read_metrics(tmp_path / "m.jsonl") == [
        {"step": 2, "loss": 1, "eval": 5},
        {"step": 3, "loss": 2},
    ]


def test_whatever_counts_as_a_line_can_be_read(tmp_path: Path) -> None:
    """A damaged digit has made a number that no float holds."""
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 5e408}\n')
    assert run_record.read_lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": float("inf")}]


def test_the_record_of_a_run_tells_what_was_recorded_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "time_s": 0, "eval/openai/sums/accuracy": 0.25}\n'
        '{"step": 1, "time_s": 2, "loss": 1, "bad": null, "time/step_s": 1.5}\n'
        '{"step": 2, "time_s": 4, "loss": null, "time/step_s": 2.5}\n{"step": 3, "lo'
    )
    record = run_record.RunRecord(tmp_path)
    assert record.last_step == 2 and record.seconds == 4.0
    assert [row["step"] for row in record.timed] == [1, 2]
    assert record.series("loss") == [(1, 1.0)] and record.series("bad") == []
    assert record.names == {"eval/openai/sums/accuracy", "loss", "time/step_s"}
    assert record.accuracies() == {"eval/openai/sums/accuracy": "openai/sums"}
    assert not record.is_complete and record.config == {} and record.samples == []


# Building, services


def test_the_console_and_the_files_are_always_on(tmp_path: Path) -> None:
    stream = io.StringIO()
    with sinks.build(NO_SERVICE, tmp_path, "p", "run", 10, 0, stream) as monitor:
        monitor.log({"loss": 0.5, "time/step_s": 1.0}, 1)
        monitor.table("rollouts", iter([{"a": 1}]), 1)
    assert "1/10" in stream.getvalue()
    assert lines(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "table": "rollouts", "a": 1}]


def test_a_step_that_the_console_tells_is_on_record(tmp_path: Path) -> None:
    """A process may be killed behind any line, and its successor asks what was reached."""
    recorded: list[int] = []

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "1/10" in text:
                recorded.append(run_record.RunRecord(tmp_path).last_step)
            return super().write(text)

    with sinks.build(NO_SERVICE, tmp_path, "p", "run", 10, 0, Watched()) as monitor:
        monitor.log({"loss": 0.5, "time/step_s": 1.0}, 1)
    assert recorded == [1]


def test_an_unknown_monitor_type_names_the_nearest_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="monitor_type=tensorbord: did you mean 'tensorboard'"):
        sinks.build(MonitorConfig(monitor_type="tensorbord"), tmp_path, "p", "run")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("wandb", {"api_kee": "x"}, "monitor_args.api_kee is unknown: did you mean 'api_key'"),
        ("wandb", {"mode": "onlin"}, "monitor_args.mode=onlin: use offline"),
        ("tensorboard", {"mode": "x"}, "monitor_args.mode is unknown"),
    ],
)
def test_wrong_monitor_args_are_refused(
    kind: str, args: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        sinks.build(MonitorConfig(monitor_type=kind, monitor_args=args), tmp_path, "p", "run")


@pytest.mark.parametrize(
    ("kind", "module", "install"),
    [
        ("wandb", "wandb", r"rft\[monitor\]"),
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    kind: str, module: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install '{install}'"):
        sinks.build(MonitorConfig(monitor_type=kind), tmp_path, "p", "run")


def test_tensorboard_gets_scalars_and_purges_what_a_resume_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = MonitorConfig(monitor_type="tensorboard")
    for resume_step, steps in ((0, (1, 2, 3)), (1, (2,))):
        with sinks.build(config, tmp_path, "p", "run", 5, resume_step, io.StringIO()) as monitor:
            for step in steps:
                monitor.log({"reward/mean": step * (10.0 if resume_step else 1.0)}, step)
            monitor.table("rollouts", [{"prompt": "a|b", "reward": 1.0}], steps[0])
    events = EventAccumulator(str(tmp_path / "monitor" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 20.0),
    ]
    assert "rollouts/text_summary" in events.Tags()["tensors"]


def test_wandb_runs_offline_inside_the_job_and_writes_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    key = "0123456789abcdef" * 3  # longer than the 40 characters that W&B asks for
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["train", f"monitor.monitor_args.api_key={key}"])
    job = tmp_path / "job"
    config = MonitorConfig(
        monitor_type="wandb", monitor_args={"api_key": key, "base_url": "http://127.0.0.1:9"}
    )
    with sinks.build(config, job, "p", "run", 5, 0, io.StringIO()) as monitor:
        monitor.log({"reward/mean": 0.5}, 2)
        monitor.log({"eval/sums/accuracy": 0.5}, 1)
        monitor.table(
            "rollouts", [{"prompt": "a", "reward": 1.0}, {"prompt": "b", "reward": "none"}], 2
        )
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" and job in path.parents for path in written)
    assert not [path for path in written if key.encode() in path.read_bytes()]
    assert key not in "".join(os.environ.values())


def test_wandb_without_a_key_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = MonitorConfig(monitor_type="wandb", monitor_args={"mode": "online"})
    with pytest.raises(ConfigError, match="monitor_args.mode=online: .*No API key.*mode=offline"):
        sinks.build(config, tmp_path / "job", "p", "run", 5, 0, io.StringIO())


def runs_told(path: Path) -> list[Any]:
    """What W&B's file, LevelDB's log behind a header of 7 bytes, says of its run."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, made, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # the end of a block
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        made, at = made + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or its last part
            record, made = Record.FromString(made), b""
            found += [record.run] if record.HasField("run") else []
    return found


def test_wandb_lets_a_sync_append_what_a_resumed_run_has_told_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent as runs of their own, the second would be written over the first's lines."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for resume_step in (0, 2):
        job, config = tmp_path / f"from_{resume_step}", MonitorConfig(monitor_type="wandb")
        with sinks.build(config, job, "p", "run", 5, resume_step, io.StringIO()) as monitor:
            monitor.log({"reward/mean": 0.5}, resume_step + 1)
        (path,) = (job / "wandb").glob("offline-run-*/*.wandb")
        (run,) = runs_told(path)
        assert run.resume is (resume_step > 0)


def test_a_markdown_table_escapes_what_breaks_it() -> None:
    assert sinks.markdown([{"a": "x|y", "b": 1}, {"a": "p\nq"}]).splitlines()[2:] == [
        "| x\\|y | 1 |",
        "| p<br>q |  |",
    ]
