"""The report of a run: what it tells of a recorded one, and that nothing of a run can become markup
or load anything.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from rft.tools import report, timeline

# 30 steps on a CPU; rank 0 was killed at step 14 and came back
RECORDED = Path(__file__).with_name("recorded_run")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(RECORDED, tmp_path / "run")


def data_of(page: Path) -> dict:  # type: ignore[type-arg]
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))  # type: ignore[no-any-return]


def test_the_page_tells_of_curves_time_checkpoints_failures_and_config(run: Path) -> None:
    (stage,) = data_of(report.write(run))["stages"]
    charts = {chart["title"]: chart for chart in stage["charts"]}
    assert {
        "Evaluation",
        "Reward",
        "Loss",
        "Trainer vs. engine",
        "Staleness",
        "Response length",
        "Entropy",
    } <= set(charts)
    assert [step for step, _ in charts["Reward"]["lines"][0]["points"]] == list(range(1, 31))
    assert [step for step, _ in charts["Evaluation"]["lines"][0]["points"]] == [
        0,
        5,
        10,
        15,
        20,
        25,
        30,
    ]
    assert stage["state"] == "finished" and ["steps", "30 of 30"] in stage["facts"]
    assert len(stage["time"]["bars"]) == 30 and all(
        len(bar) == len(stage["time"]["parts"]) for bar in stage["time"]["bars"]
    )
    assert [save["step"] for save in stage["checkpoints"]] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert all(
        save["state"] == "committed" and save["seconds"] > 0 for save in stage["checkpoints"]
    )
    restarts = [
        event
        for event in stage["happened"]
        if event["kind"] == "restart" and event["part"] == "rank_0"
    ]
    assert len(restarts) == 1 and restarts[0]["cause"].startswith(
        "the one before ended while it did: "
    )
    assert ["trainer.save_interval", "4", "0"] in stage["config"]
    assert stage["samples"][-1]["step"] == 30 and stage["samples"][-1]["rows"][0]["prompt"]
    lanes = {lane["name"] for lane in stage["timeline"]["lanes"]}
    assert {"rank_0", "synchronizer", "engine_0"} <= lanes


def test_the_page_needs_nothing_from_outside(run: Path) -> None:
    text = report.write(run).read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(", text)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG, which nobody loads"


def test_text_of_a_rollout_stays_data(run: Path) -> None:
    with (run / "samples.jsonl").open("a") as file:
        row = {
            "step": 30,
            "table": "samples",
            "prompt": "</script><script>alert(1)</script>",
            "response": "<!--",
            "reward": 1.0,
        }
        file.write(json.dumps(row) + "\n")
    page = report.write(run)
    assert "alert(1)</script>" not in page.read_text(encoding="utf-8")
    assert data_of(page)["stages"][0]["samples"][-1]["rows"][-1]["prompt"].startswith("</script>")


def test_a_run_without_a_timeline_or_rollouts_has_a_page_of_what_it_has(run: Path) -> None:
    shutil.rmtree(run / "logs" / "attempt_1" / "trace")
    for name in ("samples.jsonl", "result.json"):
        (run / name).unlink()
    (stage,) = data_of(report.write(run))["stages"]
    assert (
        stage["timeline"] is None
        and stage["samples"] == []
        and stage["happened"] == []
        and stage["state"] == "open"
    )
    assert stage["charts"]


def test_a_failed_run_says_who_when_and_why(run: Path) -> None:
    (run / "result.json").unlink()
    (supervisor,) = (run / "logs" / "attempt_1" / "trace").glob("supervisor-*.json")
    args = {"part": "engine_0", "phase": "serving", "cause": "out of memory", "signal": 0}
    event = {"name": "ending", "ph": "i", "ts": 1e16, "pid": 1, "tid": 1, "s": "p", "args": args}
    supervisor.write_text(supervisor.read_text() + json.dumps(event) + ",\n")
    (stage,) = data_of(report.write(run))["stages"]
    assert stage["state"] == "failed"
    last = stage["happened"][-1]
    assert (last["what"], last["cause"]) == ("engine_0 failed while serving", "out of memory")


def test_what_is_damaged_costs_itself_only(run: Path) -> None:
    """A manifest, lines that are no events, a rollout whose reward was no number; the first attempt
    was cleared away.
    """
    manifest = run / "checkpoints" / "step_00000030" / "MANIFEST.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"step": 30')
    (rank,) = (run / "logs" / "attempt_1" / "trace").glob("rank_0-13802.json")
    lines = ("[1, 2]", '{"a": 1}', '{"name": "x", "ph": "B", "ts": "soon", "tid": 1}')
    rank.write_text(rank.read_text() + "".join(f"{line},\n" for line in lines))
    with (run / "samples.jsonl").open("a") as file:
        row = {"step": 30, "table": "samples", "prompt": "1+1=", "response": "2", "reward": None}
        file.write(json.dumps(row) + "\n")
    (run / "logs" / "attempt_1").rename(run / "logs" / "attempt_3")
    (stage,) = data_of(report.write(run))["stages"]
    last = stage["checkpoints"][-1]
    assert (last["step"], last["state"], last["kept"]) == (30, "failed", False)
    assert "MANIFEST.json is damaged" in last["cause"]
    assert stage["timeline"]["lanes"] and "reward" not in stage["samples"][-1]["rows"][-1]
    assert timeline.write(run).exists()


@pytest.mark.parametrize("name", ["resolved.yaml", "result.json"])
@pytest.mark.parametrize("text", ["- 1", "[{", ""])
def test_a_file_that_is_none_is_named(
    run: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(text)
    assert report.main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"rft report: {run / name} cannot be read: ")


def test_stages_come_in_order_each_with_its_own(run: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    for number, name in enumerate(("warm_up", "tuned")):
        directory = shutil.copytree(run, both / name)
        log_dir = directory / "logs" / "attempt_1"
        import os

        os.utime(log_dir, (number, number))
    assert [stage["name"] for stage in data_of(report.write(both))["stages"]] == [
        "warm_up",
        "tuned",
    ]
    assert {track.title.split()[0] for track in timeline.load(both)} == {"warm_up", "tuned"}


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    points = [[float(step), step / 7] for step in range(10_001)]
    thin = report.thinned(points)
    assert len(thin) <= report.POINTS + 1 and thin[0][0] == 0 and thin[-1][0] == 10_000


def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
