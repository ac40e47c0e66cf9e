"""`rft report RUN_DIR`: one page about a run, in one file that a browser opens without a network.

In: a run directory, finished or under way. Out: `<run>/report.html`: curves, where the time went,
the last steps process by process, checkpoints, failures and restarts, rollouts, and what the config
changes. Invariants: the run is only read; what is not there is left out, nothing is made up for it;
no secret is in the page. It loads nothing (its own security policy forbids it), and what comes out
of the run, such as a rollout's text, is data in it and never markup.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft.checkpoint import catalog
from rft.checkpoint.storage import open_storage
from rft.config import Config
from rft.ground import redact
from rft.monitor.run_record import Row, RunRecord, flat
from rft.tools import config as config_tool
from rft.tools import timeline
from rft.tools.curves import OTHER, TIMES, time_shares
from rft.tools.timeline import Track

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*DATA*/"
POINTS = 1200  # of one curve; of longer runs every n-th step is drawn, and the last
SAMPLED_STEPS = 12  # whose rollouts are shown, from first to last
EVALUATIONS = ("Evaluation", "on held-out tasks", "percent")
CHARTS = (  # title, subtitle, metrics with their labels, how it is drawn
    ("Reward", "mean of each batch, and smoothed", {"reward/mean": "reward"}, "smooth"),
    ("Loss", "of the policy", {"loss": "loss"}, "smooth"),
    (
        "Trainer vs. engine",
        "KL of their log-probabilities (k3)",
        {"kl/mismatch": "mismatch"},
        "log smooth",
    ),
    ("KL to the reference", "of the trained tokens", {"kl/reference": "reference"}, "smooth"),
    (
        "Staleness",
        "policy versions behind",
        {"staleness/mean": "mean", "staleness/max": "largest"},
        "zero",
    ),
    (
        "Response length",
        "tokens",
        {"response_length/mean": "mean", "response_length/max": "longest"},
        "zero",
    ),
    ("Entropy", "of the policy, per token", {"entropy/mean": "entropy"}, "smooth"),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}, "smooth"),
    (
        "Groups without a signal",
        "all rewards equal",
        {"reward/zero_signal_groups": "share"},
        "percent smooth",
    ),
    ("Clipped tokens", "share of the trained ones", {"clip_frac": "clipped"}, "percent smooth"),
    ("Throughput", "tokens per second", {"tokens_per_s": "tokens/s"}, "zero smooth"),
    ("Critic loss", "of the value model", {"critic/loss": "loss"}, "smooth"),
    ("Weight sync", "seconds", {"sync/round_s": "round", "sync/pause_s": "engines pause"}, "zero"),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rft report", description="Write one page about a run.")
    parser.add_argument("run", type=Path, help="the run's directory, also while it is under way")
    parser.add_argument("--out", type=Path, help="where to write it; default: RUN_DIR/report.html")
    asked = parser.parse_args(arguments)
    try:
        path = write(asked.run, asked.out)
    except (ValueError, OSError) as error:
        print(f"rft report: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0


def write(run: Path, out: Path | None = None) -> Path:
    """Raises ValueError for a directory without a run in it."""
    path = out or run / "report.html"
    path.write_text(page(gather(run)), encoding="utf-8")
    return path


def page(found: dict[str, Any]) -> str:
    """The template with the data in it.

    `<` is written as an escape: no text of the run can end the script element.
    """
    return TEMPLATE.read_text(encoding="utf-8").replace(
        PLACE, json.dumps(found, allow_nan=False).replace("<", "\\u003c")
    )


def gather(run: Path) -> dict[str, Any]:
    """Everything that the page shows. Raises ValueError for a directory without a run in it."""
    run = run.resolve()
    tracks = timeline.load(run, ends_only=True)
    stages = [stage(RunRecord(directory), run, tracks) for directory in timeline.stage_dirs(run)]
    found = {"name": run.name, "directory": str(run), "stages": stages}
    return redact.record(found)  # type: ignore[no-any-return]


def stage(record: RunRecord, run: Path, all_tracks: Sequence[Track]) -> dict[str, Any]:
    name = record.directory.name if record.directory != run else ""
    tracks = [track for track in all_tracks if track.stage == name]
    happened = timeline.happened(tracks)
    return {
        "name": name or run.name,
        "state": state(record, happened),
        "facts": facts(record),
        "charts": charts(record),
        "time": time_spent(record),
        "timeline": timeline.last_moments(tracks),
        "samples": samples(record),
        "checkpoints": checkpoints(record, tracks),
        "happened": happened,
        "config": changed(record.config),
    }


def state(record: RunRecord, happened: Sequence[Row]) -> str:
    """finished | stopped | failed | open: nobody has written down an end, so it goes on, or was
    killed as a whole.
    """
    if record.is_complete:
        return "finished"
    endings = [row for row in happened if row["kind"] in ("failed", "stopped", "start")]
    return endings[-1]["kind"].replace("start", "open") if endings else "open"


def facts(record: RunRecord) -> list[list[str]]:
    """The numbers at the head of a stage."""
    steps, total = len(record.timed), _at(record.config, "trainer.total_steps")
    last = record.timed[-1]["step"] if steps else 0
    found = [["steps", f"{last}" + (f" of {total}" if total else "")]]
    if steps:
        found.append(["time in steps", _duration(record.seconds)])
        found.append(["seconds per step", f"{record.seconds / steps:.2f}"])
    for metric, label, form in (
        ("reward/mean", "recent reward", "{:.3f}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ):
        if values := [row[metric] for row in record.timed if row.get(metric) is not None][-10:]:
            found.append([label, form.format(sum(values) / len(values))])
    for metric, taskset in record.accuracies().items():
        values = [100 * value for _, value in record.series(metric)]
        found.append([f"{taskset} accuracy", f"{values[0]:.1f}% → {values[-1]:.1f}%"])
    for key, label in (
        ("algorithm.algorithm_type", "algorithm"),
        ("trainer.num_ranks", "trainer ranks"),
        ("mode", "mode"),
    ):
        if _at(record.config, key) is not None:
            found.append([label, str(_at(record.config, key))])
    if model := _at(record.config, "model.model_path"):
        found.append(["model", Path(str(model)).name])
    return found


def charts(record: RunRecord) -> list[dict[str, Any]]:
    """Those of which something was recorded."""
    title, subtitle, drawn = EVALUATIONS
    wanted = ((title, subtitle, record.accuracies(), drawn), *CHARTS)
    return [found for chart in wanted if (found := curve(record, *chart))["lines"]]


def curve(
    record: RunRecord, title: str, subtitle: str, metrics: dict[str, str], drawn: str
) -> dict[str, Any]:
    """One chart; `drawn`: words out of smooth, log, zero and percent, for the page."""
    lines = [
        {"label": label, "points": thinned(points)}
        for metric, label in metrics.items()
        if (points := record.series(metric))
        and ("log" not in drawn.split() or any(value > 0 for _, value in points))
    ]
    options = dict.fromkeys(drawn.split(), True)
    return {"title": title, "subtitle": subtitle, "lines": lines, **options}


def thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """At most POINTS of them, and the last one."""
    every = math.ceil(len(points) / POINTS)
    kept = list(points[::every]) if every > 1 else list(points)
    if kept and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return [[step, float(f"{value:.6g}")] for step, value in kept]


def time_spent(record: RunRecord) -> dict[str, Any] | None:
    """Seconds per step of each part, averaged into bars."""
    centers, parts = time_shares(record.timed)
    if not centers:
        return None
    named = [(name, color) for name, _, color in TIMES] + [OTHER]
    bars = [[round(value, 5) for value in part] for part in parts]
    return {
        "parts": [{"name": name, "color": color} for name, color in named],
        "steps": centers,
        "bars": bars,
    }


def samples(record: RunRecord) -> list[Row]:
    """Rollouts of a few steps from first to last, and those of the evaluations of these steps."""
    steps = record.sampled_steps
    if len(steps) > SAMPLED_STEPS:
        steps = sorted(
            {steps[round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)}
        )
    by_step: dict[int, list[Row]] = {step: [] for step in steps}
    for line in record.samples_at(by_step):
        told = {name: value for name, value in line.items() if value is not None}
        by_step[line["step"]].append(told)
    return [{"step": step, "rows": rows} for step, rows in by_step.items()]


def checkpoints(record: RunRecord, tracks: Sequence[Track]) -> list[Row]:
    """What became of every save: committed (and still there, or retired), failed, skipped."""
    local = open_storage(record.directory / "checkpoints")
    kept, damaged = {}, {}
    for name in catalog.committed(local):
        step = int(catalog.step_of(name) or 0)
        try:
            kept[step] = catalog.read_manifest(local, name).bytes
        except (ValueError, OSError) as error:
            damaged[step] = str(error)
    found: dict[int, Row] = {}
    for track in tracks:
        for event in track.events if track.part == "rank_0" else []:
            what = event["name"].removeprefix("checkpoint ")
            if event["name"].startswith("checkpoint ") and event["ph"] == "i":
                args = event["args"]
                found[args["step"]] = {
                    "step": args["step"],
                    "state": what,
                    "seconds": args.get("seconds"),
                    "cause": args.get("cause", ""),
                }
    for step, size in kept.items():
        found.setdefault(step, {"step": step, "state": "committed", "seconds": None, "cause": ""})[
            "bytes"
        ] = size
    for step, said in damaged.items():
        found[step] = {"step": step, "state": "failed", "seconds": None, "cause": said}
    return [found[step] | {"kept": step in kept} for step in sorted(found)]


def changed(config: Row) -> list[list[str]]:
    """Keys that differ from their defaults: key, value, default."""
    default = asdict(Config(name="?"))
    different = flat(config_tool.changed(config, default))
    found = [(key, value, _at(default, key)) for key, value in different.items()]
    return [
        [key, _plain(ours), _plain(there)] for key, ours, there in found if ours not in (there, {})
    ]


def _plain(value: Any) -> str:
    if value is None or value == "???":
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _at(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
