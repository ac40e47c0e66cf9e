"""The picture of a run and its table, from metrics like those of a real run."""

import json
import math
import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.config import compose, job_dir
from rft.monitor.run_record import RunRecord
from rft.run.stages import write_result
from rft.tools import curves
from rft.tools.quickstart import close
from rft.tools.tables import table


def write(job: Path, rows: list[dict[str, Any]]) -> RunRecord:
    job.mkdir(parents=True, exist_ok=True)
    (job / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunRecord(job)


def warm_up(steps: int = 300) -> list[dict[str, Any]]:
    noise = random.Random(0)
    return [
        {
            "step": i,
            "loss": 3.2 * math.exp(-i / 60) + 0.55 + noise.gauss(0, 0.04),
            "time/step_s": 0.24,
            "time/train_s": 0.22,
            "time/wait_batch_s": 0.004,
        }
        for i in range(1, steps + 1)
    ]


def rollouts(steps: int = 150) -> list[dict[str, Any]]:
    noise = random.Random(1)
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/held_out/accuracy": 0.508, "eval/held_out/reward/mean": 0.508}
    ]
    for i in range(1, steps + 1):
        times = {
            "time/wait_batch_s": abs(noise.gauss(0.25, 0.08)),
            "time/train_s": noise.gauss(0.52, 0.03),
            "time/sync_wait_s": abs(noise.gauss(0.02, 0.01)),
            "time/checkpoint_s": 0.31 if i % 25 == 0 else 0.0,
            "time/eval_s": 0.002,
        }
        row = {
            "step": i,
            "reward/mean": 0.87 - 0.36 * math.exp(-i / 45) + noise.gauss(0, 0.035),
            "loss": noise.gauss(0, 0.02),
            "staleness/mean": min(1.0, abs(noise.gauss(0.85, 0.2))),
            "staleness/max": float(noise.random() < 0.9),
            "kl/mismatch": 10 ** noise.gauss(-4.3 + i / 300, 0.25),
            **times,
            "time/step_s": sum(times.values()) + 0.05,
        }
        if i % 25 == 0:
            row["eval/held_out/accuracy"] = 0.85 - 0.34 * math.exp(-i / 45)
        rows.append(row)
    return rows


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def panel_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written into the figures drawn from now on."""
    from matplotlib.axes import Axes

    written: list[str] = []
    for method, position in (("text", 2), ("annotate", 0)):
        original = getattr(Axes, method)

        def record(
            self: Any,
            *args: Any,
            _original: Any = original,
            _position: int = position,
            **kwargs: Any,
        ) -> Any:
            written.append(str(args[_position]))
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Axes, method, record)
    return written


def test_a_run_of_two_stages_is_drawn_with_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = panel_texts(monkeypatch)
    stages = [
        ("sft_warmup", write(tmp_path / "a", warm_up())),
        ("grpo", write(tmp_path / "b", rollouts())),
    ]
    picture = curves.draw(stages, tmp_path / "out" / "curves.png")
    assert size(picture)[0] > 1500
    assert {"before  50.8%", "after  83.8%", "Warm-up loss", "Training reward"} <= set(written)
    assert "not recorded" not in written


def test_missing_metrics_leave_their_panels_saying_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = panel_texts(monkeypatch)
    rows = [{"step": i, "reward/mean": 0.5, "loss": None} for i in (1, 2)]
    curves.draw([("grpo", write(tmp_path, rows))], tmp_path / "curves.png")
    assert written.count("not recorded") == 3 and "no evaluation was run" in written
    assert "Warm-up loss" not in written


def test_a_short_run_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, evaluated only behind the last, without a reward:
    as `debug=fast` leaves the quickstart.
    """
    written = panel_texts(monkeypatch)
    rows: list[dict[str, Any]] = [
        {"step": i, "reward/mean": 0.0, "kl/mismatch": 0.0, "time/step_s": 1.0} for i in (1, 2, 3)
    ]
    rows.append({"step": 3, "eval/held_out/accuracy": 0.25})
    curves.draw([("rft", write(tmp_path, rows))], tmp_path / "curves.png")
    assert "after  25.0%" in written and not any(text.startswith("before") for text in written)
    assert "0 in every step" in written


@pytest.mark.parametrize(
    "rows", [[], [{"step": 1, "reward/mean": 1.0, "kl/mismatch": 0.0, "time/step_s": 1.0}]]
)
def test_an_empty_or_tiny_run_is_drawn(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    size(curves.draw([("only", write(tmp_path, rows))], tmp_path / "curves.png"))


def test_stages_follow_each_other_on_the_axis(tmp_path: Path) -> None:
    records = [
        write(tmp_path / f"{i}", [{"step": 1, "loss": 1.0}, {"step": 5, "loss": 2.0}])
        for i in range(2)
    ]
    first, second = curves.in_a_row(curves.colored([("a", records[0]), ("b", records[1])]))
    assert first.series("loss") == ([1, 5], [1.0, 2.0])
    assert second.series("loss") == ([6, 10], [1.0, 2.0])


@pytest.mark.parametrize("low, high", [(2e-5, 1.1e-4), (1.8e-3, 4.2e-3), (1e-9, 1e-2), (2, 5)])
def test_no_two_labels_of_a_logarithmic_axis_are_the_same(low: float, high: float) -> None:
    """Within a decade its ticks are those of a linear one."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], [low, high])
    curves._log_scale(axes)
    figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) > 1
    assert len(set(labels)) == len(labels), labels


def test_smoothing_does_not_start_at_zero_and_follows() -> None:
    assert curves.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    stepped = curves.smooth([0.0] * 10 + [1.0] * 60)
    assert stepped[9] == 0.0 and 0 < stepped[10] < 0.5 and stepped[-1] > 0.99


def test_time_parts_add_up_to_the_step_and_long_runs_are_binned() -> None:
    rows = [
        {"step": i, "time/step_s": 2.0, "time/train_s": 1.0, "time/wait_batch_s": 0.25}
        for i in range(1, 101)
    ]
    centers, parts = curves.time_shares(rows)
    assert len(centers) == 34 and centers[0] == 2.0
    assert all(part == [1.0, 0.25, 0, 0, 0, 0.75] for part in parts)
    assert curves.time_shares([{"step": 1, "time/step_s": 1.0, "time/train_s": 1.5}])[1] == [
        [1.5, 0, 0, 0, 0, 0.0]
    ]


def test_the_table_is_aligned_with_numbers_to_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    text = table(
        [{"stage": "sft", "steps": 300, "accuracy": 0.5}, {"stage": "grpo_long", "steps": 1500}],
        ruled=True,
    )
    assert text.splitlines() == [
        "stage      steps  accuracy",
        "---------  -----  --------",
        "sft          300       0.5",
        "grpo_long   1500         -",
    ]


def test_on_a_terminal_the_table_has_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = table([{"stage": "sft", "steps": 300}])
    assert "╭" in text and "sft" in text


def test_in_a_pipe_nothing_is_cut_off_and_no_cell_is_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = "/runs/" + "deep/" * 100
    assert (
        table([{"what": path, "said": "[red] :smile:"}], headed=False) == f"{path}  [red] :smile:"
    )


def test_on_a_terminal_a_long_cell_is_folded_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert table([{"path": "x" * 100}]).count("x") == 100


@pytest.mark.parametrize("full", [False, True], ids=["room", "no room"])
def test_a_full_disk_costs_the_end_of_a_run_its_files_alone(
    full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(["experiment=quickstart", f"checkpoint_root_dir={tmp_path}"])
    root = tmp_path / "recipe"
    record = write(root / "job", rollouts())
    (root / "assets").mkdir()
    (root / "assets" / "started").write_text("0")
    job_dir(config).mkdir(parents=True)
    write_result(config, 3, complete=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for _ in range(2):
            close(root, "recipe", {"after": 0.5}, [("grpo", record)], config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().out
    told = [json.loads(line)["recipe"] for line in said.splitlines() if line.startswith("{")]
    assert [one["after"] for one in told] == [0.5, 0.5]
    assert full or told[0] == told[1], "as it was told at the first end"
    assert ("not drawn" in said) is full and ("is not written" in said) is full
    assert (root / "curves.png").exists() >= (not full)
    assert (root / "recipe.json").exists() is not full
