"""What the report of a run tells, gathered from its directory: plain lists and dictionaries, ready
to be put into the page.

In: a run directory, finished or not: metrics.jsonl, samples.jsonl, resolved.yaml, result.json,
checkpoints, logs with their timelines. Out: one dictionary per stage. Invariants: the run is only
read; what is not there is left out, nothing is made up for it; no secret is in it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from rft.config import Config
from rft.ground import redact
from rft.monitor.records import read_lines, read_metrics
from rft.tools import timeline
from rft.tools.curves import OTHER, TIMES, time_shares
from rft.tools.timeline import Track

POINTS = 1200  # of one curve; of longer runs every n-th step is drawn, and the last
SAMPLED_STEPS = 12  # whose rollouts are shown, from first to last
# of the timeline's end that the page draws: so many steps, if they take no longer
LAST_STEPS, WINDOW_US = 12, 20e6
SPANS = 4000  # that it draws at most
Row = dict[str, Any]
CHARTS = (  # title, subtitle, metrics with their labels, options
    ("Evaluation", "on held-out tasks", (), {"percent": True, "evaluations": "accuracy"}),
    ("Reward", "mean of each batch, and smoothed", (("reward/mean", "reward"),), {"smooth": True}),
    ("Loss", "of the policy", (("loss", "loss"),), {"smooth": True}),
    (
        "Trainer vs. engine",
        "KL of their log-probabilities (k3)",
        (("kl/mismatch", "mismatch"),),
        {"log": True, "smooth": True},
    ),
    (
        "KL to the reference",
        "of the trained tokens",
        (("kl/reference", "reference"),),
        {"smooth": True},
    ),
    (
        "Staleness",
        "policy versions behind",
        (("staleness/mean", "mean"), ("staleness/max", "largest")),
        {"zero": True},
    ),
    (
        "Response length",
        "tokens",
        (("response_length/mean", "mean"), ("response_length/max", "longest")),
        {"zero": True},
    ),
    ("Entropy", "of the policy, per token", (("entropy/mean", "entropy"),), {"smooth": True}),
    ("Gradient norm", "before clipping", (("grad_norm", "norm"),), {"smooth": True}),
    (
        "Groups without a signal",
        "all rewards equal",
        (("reward/zero_signal_groups", "share"),),
        {"percent": True, "smooth": True},
    ),
    (
        "Clipped tokens",
        "share of the trained ones",
        (("clip_frac", "clipped"),),
        {"percent": True, "smooth": True},
    ),
    (
        "Throughput",
        "tokens per second",
        (("tokens_per_s", "tokens/s"),),
        {"zero": True, "smooth": True},
    ),
    ("Critic loss", "of the value model", (("critic/loss", "loss"),), {"smooth": True}),
    (
        "Weight sync",
        "seconds",
        (("sync/round_s", "round"), ("sync/pause_s", "engines pause")),
        {"zero": True},
    ),
)


def gather(run: Path) -> dict[str, Any]:
    """Everything that the page shows. Raises ValueError for a directory without a run in it."""
    run = run.resolve()
    tracks = timeline.load(run)
    stages = [stage(directory, run, tracks) for directory in timeline.stage_dirs(run)]
    found = {"name": run.name, "directory": str(run), "stages": stages}
    return redact.record(found)  # type: ignore[no-any-return]


def stage(directory: Path, run: Path, all_tracks: Sequence[Track]) -> dict[str, Any]:
    name = directory.name if directory != run else ""
    tracks = [track for track in all_tracks if track.stage == name]
    rows = read_metrics(directory / "metrics.jsonl")
    config = _config(directory / "resolved.yaml")
    happened = events(directory, tracks)
    return {
        "name": name or run.name,
        "state": state(directory, config, happened),
        "facts": facts(config, rows, directory),
        "charts": [made for chart in CHARTS if (made := curve(rows, *chart))],
        "time": time_spent(rows),
        "timeline": last_moments(tracks),
        "samples": samples(directory / "samples.jsonl"),
        "checkpoints": checkpoints(directory, tracks),
        "happened": happened,
        "config": changed(config),
    }


def state(directory: Path, config: dict[str, Any], happened: Sequence[Row]) -> str:
    """finished | stopped | failed | open: nobody has written down an end, so it goes on, or was
    killed as a whole.
    """
    path = directory / "result.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["complete"]:
        return "finished"
    endings = [row for row in happened if row["kind"] in ("failed", "stopped", "start")]
    return endings[-1]["kind"].replace("start", "open") if endings else "open"


def facts(config: dict[str, Any], rows: Sequence[Row], directory: Path) -> list[list[str]]:
    """The numbers at the head of a stage."""
    steps = [row for row in rows if row.get("time/step_s") is not None]
    total = _at(config, "trainer.total_steps")
    found = [["steps", f"{steps[-1]['step'] if steps else 0}" + (f" of {total}" if total else "")]]
    if steps:
        found.append(["time in steps", _duration(sum(row["time/step_s"] for row in steps))])
        found.append(
            ["seconds per step", f"{sum(row['time/step_s'] for row in steps) / len(steps):.2f}"]
        )
    for metric, label, form in (
        ("reward/mean", "recent reward", "{:.3f}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ):
        values = [row[metric] for row in steps if row.get(metric) is not None]
        if values:
            mean = sum(values[-10:]) / len(values[-10:])
            found.append([label, form.format(mean)])
    for name in evaluations(rows, "accuracy"):
        values = [row[name] for row in rows if row.get(name) is not None]
        found.append(
            [f"{name.split('/')[1]} accuracy", f"{100 * values[0]:.1f}% → {100 * values[-1]:.1f}%"]
        )
    for key, label in (
        ("algorithm.algorithm_type", "algorithm"),
        ("trainer.num_ranks", "trainer ranks"),
        ("mode", "mode"),
    ):
        if _at(config, key) is not None:
            found.append([label, str(_at(config, key))])
    if _at(config, "model.model_path"):
        found.append(["model", Path(str(_at(config, "model.model_path"))).name])
    return found


def evaluations(rows: Sequence[Row], statistic: str) -> list[str]:
    return sorted(
        {
            name
            for row in rows
            for name in row
            if name.startswith("eval/") and name.endswith(f"/{statistic}")
        }
    )


def curve(
    rows: Sequence[Row], title: str, subtitle: str, metrics: Any, options: Row
) -> dict[str, Any] | None:
    """One chart; None when nothing of it was recorded."""
    if "evaluations" in options:
        metrics = [(name, name.split("/")[1]) for name in evaluations(rows, options["evaluations"])]
    lines = []
    for metric, label in metrics:
        points = [
            [row["step"], row[metric]] for row in rows if isinstance(row.get(metric), int | float)
        ]
        points = [point for point in points if math.isfinite(point[1])]
        if points and (not options.get("log") or any(value > 0 for _, value in points)):
            lines.append({"label": label, "points": thinned(points)})
    return {"title": title, "subtitle": subtitle, "lines": lines, **options} if lines else None


def thinned(points: list[list[float]]) -> list[list[float]]:
    every = math.ceil(len(points) / POINTS)
    kept = points[::every] if every > 1 else points
    if kept and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return [[step, float(f"{value:.6g}")] for step, value in kept]


def time_spent(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Seconds per step of each part, averaged into bars."""
    centers, parts = time_shares(rows)
    if not centers:
        return None
    named = [(name, color) for name, _, color in TIMES] + [OTHER]
    bars = [[round(value, 5) for value in part] for part in parts]
    return {
        "parts": [{"name": name, "color": color} for name, color in named],
        "steps": centers,
        "bars": bars,
    }


def last_moments(tracks: Sequence[Track]) -> dict[str, Any] | None:
    """The end of the newest attempt, span by span."""
    newest = max((track.attempt for track in tracks if track.events), default=None)
    shown = [track for track in tracks if track.attempt == newest]
    steps = [
        e["ts"]
        for t in shown
        if t.part == "rank_0"
        for e in t.events
        if e["name"].startswith("version ")
    ]
    end = max(steps or [event["ts"] for track in shown for event in track.events], default=0.0)
    begin, lanes = max([end - WINDOW_US, *sorted(set(steps))[-LAST_STEPS - 1 : -LAST_STEPS]]), []
    for track in shown:
        spans = [s for s in track.spans() if s[2] > begin and s[1] < end]
        if spans:
            longest = sorted(spans, key=lambda span: span[1] - span[2])[
                : SPANS // max(1, len(shown))
            ]
            drawn = [
                [
                    span,
                    round(max(at, begin) - begin),
                    round(min(to, end) - begin),
                    args.get("version", args.get("step")),
                    done,
                ]
                for span, at, to, args, done in sorted(
                    longest, key=lambda span: (span[1], -span[2])
                )
            ]
            lanes.append({"name": track.part, "spans": drawn})
    first = min((span[1] for lane in lanes for span in lane["spans"]), default=0)
    marks = [round(at - begin) for at in steps if at >= begin]
    return (
        {"lanes": lanes, "from": first, "to": round(end - begin), "marks": sorted(set(marks))}
        if lanes
        else None
    )


def samples(path: Path) -> list[Row]:
    """Rollouts of a few steps from first to last, and those of the evaluations of these steps."""
    by_step: dict[int, list[Row]] = {}
    for line in read_lines(path):
        by_step.setdefault(line["step"], []).append(line)
    steps = sorted(by_step)
    if len(steps) > SAMPLED_STEPS:
        steps = sorted(
            {steps[round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)}
        )
    return [{"step": step, "rows": by_step[step]} for step in steps]


def checkpoints(directory: Path, tracks: Sequence[Track]) -> list[Row]:
    """What became of every save: committed (and still there, or retired), failed, skipped."""
    kept = {}
    for manifest in directory.glob("checkpoints/step_*/MANIFEST.json"):
        about = json.loads(manifest.read_text(encoding="utf-8"))
        kept[about["step"]] = about["bytes"]
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
    return [found[step] | {"kept": step in kept} for step in sorted(found)]


def events(directory: Path, tracks: Sequence[Track]) -> list[Row]:
    """Starts, ends, failures and deaths in order of time."""
    found = []
    for track in tracks:
        for event in track.events:
            if event["ph"] == "i" and (row := _event(track, event)):
                found.append(
                    {"at": event["ts"] / 1e6, "attempt": track.attempt, "part": track.part, **row}
                )
    found += [_restart(track, before) for before, track in _successors(tracks)]
    return sorted(found, key=lambda row: row["at"])


def _event(track: Track, event: Row) -> Row | None:
    name, args = event["name"], event.get("args", {})
    if name == "ranks start":
        return {
            "kind": "start",
            "what": f"attempt {track.attempt} starts its trainer ranks",
            "cause": "",
        }
    if name == "ending" and args.get("cause"):
        return {
            "kind": "failed",
            "what": f"{args['part']} failed while {args['phase']}",
            "cause": args["cause"],
        }
    if name == "ending" and args.get("signal"):
        return {
            "kind": "stopped",
            "what": "stopped by a signal",
            "cause": f"signal {args['signal']}",
        }
    if name == "failed" or name.endswith((" leaves", " failed")):
        said = f"{track.part} failed" if name == "failed" else name
        step = f" (step {args['step']})" if "step" in args else ""
        return {
            "kind": "trouble",
            "what": said + step,
            "cause": str(args.get("cause", args.get("reason", ""))),
        }
    return None


def _successors(tracks: Sequence[Track]) -> list[tuple[Track, Track]]:
    """Processes of one attempt that took the place of one that
    ended: (the one before, the one after).
    """
    found, last = [], {}
    for track in sorted((t for t in tracks if t.events), key=lambda t: t.events[0]["ts"]):
        if (track.attempt, track.part) in last:
            found.append((last[track.attempt, track.part], track))
        last[track.attempt, track.part] = track
    return found


def _restart(track: Track, before: Track) -> Row:
    open_ = [name for name, *_, done in before.spans() if not done]
    doing = (
        f"the one before ended while it did: {', '.join(open_)}"
        if open_
        else "the one before had ended"
    )
    return {
        "at": track.events[0]["ts"] / 1e6,
        "attempt": track.attempt,
        "part": track.part,
        "kind": "restart",
        "what": f"{track.part} was started again",
        "cause": doing,
    }


def changed(config: dict[str, Any]) -> list[list[str]]:
    """Keys that differ from their defaults: key, value, default."""
    found: list[list[str]] = []
    _compare(config, asdict(Config(name="?")), "", found)
    return found


def _compare(ours: Any, default: Any, path: str, found: list[list[str]]) -> None:
    if isinstance(ours, dict) and (isinstance(default, dict) or not path):
        for key in ours:
            _compare(ours[key], default.get(key), f"{path}{key}.", found)
    elif ours != (asdict(default) if is_dataclass(default) else default):  # type: ignore[arg-type]
        if isinstance(ours, dict):
            for key, value in ours.items():
                _compare(value, None, f"{path}{key}.", found)
        else:
            found.append([path.rstrip("."), _plain(ours), _plain(default)])


def _plain(value: Any) -> str:
    return (
        ""
        if value is None or value == "???"
        else json.dumps(value)
        if isinstance(value, list | dict)
        else str(value)
    )


def _config(path: Path) -> dict[str, Any]:
    """As written: interpolations, which stand for secrets, stay what they are."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def _at(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
