"""`rft trace RUN_DIR`: one timeline of a whole run out of what each of its processes has recorded.

In: `logs/attempt_*/trace/*.json` of a run, or of every stage below it (see `rft.monitor.trace`).
Out: `<run>/timeline.json`, for Perfetto or chrome://tracing: all attempts after each other, a track
per process, trainer ranks first; and for `rft report` the last moments, and what happened when.
Invariants: what a killed process was doing ends with its last word and is marked unfinished; a torn
last line is left out; the run is only read.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rft.monitor.logs import attempts

ORDER = ("supervisor", "rank", "checkpoint_agent", "synchronizer", "explorer", "buffer", "engine")
Event = dict[str, Any]
NEEDED = {"name", "ph", "ts", "tid"}  # of an event; what has them not is not a line of rft's
# of the end that the report draws: so many steps, if they take no longer, and so many spans at most
LAST_STEPS, WINDOW_US, SPANS = 12, 20e6, 4000
# of the end of what a process has recorded, in the newest attempt and in those before: all that the
# report reads of its spans, for a long run of many processes has recorded more than fits in memory
TAIL, TAIL_BEFORE = 2 * 2**20, 2**16
HAPPENED = (b'"ph":"i"', b'"ph":"M"')  # what is read before that


@dataclass
class Track:
    """What one process recorded.

    `number`: its own, for process ids come again from attempt to attempt.
    """

    stage: str
    attempt: int
    part: str
    number: int
    events: list[Event] = field(default_factory=list)

    @property
    def title(self) -> str:
        return " ".join(filter(None, [self.stage, self.part, f"(attempt {self.attempt})"]))

    @property
    def order(self) -> tuple[int, int, str]:
        kind = next((i for i, name in enumerate(ORDER) if self.part.startswith(name)), len(ORDER))
        return self.attempt, kind, self.part

    @property
    def last(self) -> float:
        return max((event["ts"] for event in self.events), default=0.0)

    def spans(self) -> Iterator[tuple[str, float, float, dict[str, Any], bool]]:
        """(name, begin, end in microseconds, arguments, whether it was finished) of every span,
        nested ones too.
        """
        for begun, ended in self.pairs():
            yield (
                begun["name"],
                begun["ts"],
                ended["ts"] if ended else self.last,
                begun.get("args", {}),
                ended is not None,
            )

    def pairs(self) -> Iterator[tuple[Event, Event | None]]:
        """The events that begin and end each span; those without an end come last, outer ones
        before inner ones.
        """
        running: dict[tuple[Any, ...], list[Event]] = {}
        for event in self.events:
            key = (event["tid"],) if event["ph"] in "BE" else (event.get("id"), event["name"])
            if event["ph"] in ("B", "b"):
                running.setdefault(key, []).append(event)
            elif event["ph"] in ("E", "e") and running.get(key):
                yield running[key].pop(), event
        for stack in running.values():
            yield from ((begun, None) for begun in stack)


def stage_dirs(run: Path) -> list[Path]:
    """The directories with logs: the run's own, or those of its stages, the oldest first.

    Raises ValueError if there is none.
    """
    stages = [path.parent for path in run.glob("*/logs") if path.is_dir()]
    found = [run] if (run / "logs").is_dir() else stages
    if not found:
        raise ValueError(
            f"{run} is no run directory: there are no logs in it, and none one level below"
        )
    return sorted(found, key=begun)


def begun(job: Path) -> float:
    """When its first attempt began, of those that are there."""
    first = next((attempt for _, attempt in attempts(job)), job / "logs")
    return first.stat().st_mtime


def load(run: Path, ends_only: bool = False) -> list[Track]:
    """All tracks of a run, in the order of the page; `ends_only`: of their spans, the last ones."""
    found = _found(run)
    newest = {track.stage: track.attempt for track, _ in found}
    for track, files in found:
        of_end = TAIL if track.attempt == newest[track.stage] else TAIL_BEFORE
        track.events = _events(files, of_end) if ends_only else list(_all(files))
    return [track for track, _ in found]


def _found(run: Path) -> list[tuple[Track, list[Path]]]:
    """Tracks, not yet read, in the order of the page, with their files, the older one first."""
    found: list[tuple[Track, list[Path]]] = []
    directories = stage_dirs(run)
    for directory in directories:
        stage = directory.name if directory != run else ""
        for number, attempt in attempts(directory):
            for files in _processes(attempt / "trace"):
                part = re.sub(r"-\d+$", "", files[-1].name.removesuffix(".json"))
                found.append((Track(stage, number, part, 0), files))
    places = {directory.name: place for place, directory in enumerate(directories)}
    found.sort(key=lambda one: (places.get(one[0].stage, 0), *one[0].order))
    for number, (track, _) in enumerate(found, start=1):
        track.number = number
    return found


def _processes(directory: Path) -> list[list[Path]]:
    """Files of each process, the older one of two first."""
    grouped: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*.json")):  # "x.before.json" comes before "x.json"
        grouped.setdefault(path.name.removesuffix(".json").removesuffix(".before"), []).append(path)
    return list(grouped.values())


def _all(files: Sequence[Path]) -> Iterator[Event]:
    return (event for path in files for event in events_of(path))


def _events(files: Sequence[Path], of_end: int) -> list[Event]:
    """What happened, and all of the last `of_end` bytes."""
    found: list[Event] = []
    for path in reversed(files):
        size = path.stat().st_size
        found = [*events_of(path, max(0, size - of_end)), *found]
        of_end = max(0, of_end - size)
    return found


def events_of(path: Path, begin: int = 0) -> Iterator[Event]:
    """Every whole event of one file from `begin` on; before that, what happened."""
    at = 0
    with path.open("rb") as lines:
        for line in lines:
            at += len(line)
            if at <= begin and not any(kind in line for kind in HAPPENED):
                continue
            text = line.rstrip(b",\n")
            if not text.startswith(b"{") or not text.endswith(b"}"):
                continue
            try:
                event = msgspec.json.decode(text)
            except msgspec.DecodeError:  # torn: its process was killed within the write
                continue
            if event.keys() >= NEEDED and isinstance(event["ts"], int | float):
                yield event


def joined(track: Track, start: float) -> Iterator[Event]:
    """The events of one; time begins at `start`."""
    yield _about(track, "process_name", name=track.title)
    yield _about(track, "process_sort_index", sort_index=track.number)
    for event in track.events:
        if event["ph"] != "M":
            yield event | {"pid": track.number, "ts": round(event["ts"] - start, 1)}
    yield from _endings(track, start)


def _about(track: Track, what: str, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": track.number, "tid": 0, "ts": 0, "args": args}


def _endings(track: Track, start: float) -> Iterator[Event]:
    """Ends for what had none, so that viewers do not draw it to the end of the run."""
    at = round(track.last - start, 1)
    open_ = [begun for begun, ended in track.pairs() if ended is None]
    for begun in reversed(open_):
        same = {key: begun[key] for key in ("name", "tid", "cat", "id") if key in begun}
        phase = "E" if begun["ph"] == "B" else "e"
        yield same | {"ph": phase, "ts": at, "pid": track.number, "args": {"unfinished": True}}


# What the report tells


def last_moments(tracks: Sequence[Track]) -> dict[str, Any] | None:
    """The end of the newest attempt, span by span, in microseconds from its begin."""
    newest = max((track.attempt for track in tracks if track.events), default=None)
    shown = [track for track in tracks if track.attempt == newest]
    trained = (event for track in shown if track.part == "rank_0" for event in track.events)
    steps = [event["ts"] for event in trained if event["name"].startswith("version ")]
    end = max(steps or [event["ts"] for track in shown for event in track.events], default=0.0)
    begin = max([end - WINDOW_US, *sorted(set(steps))[-LAST_STEPS - 1 : -LAST_STEPS]])
    most = SPANS // max(1, len(shown))
    drawn = [(track.part, _drawn(track, begin, end, most)) for track in shown]
    lanes = [{"name": part, "spans": spans} for part, spans in drawn if spans]
    if not lanes:
        return None
    first = min(span[1] for _, spans in drawn for span in spans)
    marks = sorted({round(at - begin) for at in steps if at >= begin})
    return {"lanes": lanes, "from": first, "to": round(end - begin), "marks": marks}


def _drawn(track: Track, begin: float, end: float, most: int) -> list[list[Any]]:
    """The longest spans between `begin` and `end`: name, begin, end, version or step, finished."""
    spans = [span for span in track.spans() if span[2] > begin and span[1] < end]
    longest = sorted(spans, key=lambda span: span[1] - span[2])[:most]
    return [
        [
            name,
            round(max(at, begin) - begin),
            round(min(to, end) - begin),
            args.get("version", args.get("step")),
            done,
        ]
        for name, at, to, args, done in sorted(longest, key=lambda span: (span[1], -span[2]))
    ]


def happened(tracks: Sequence[Track]) -> list[dict[str, Any]]:
    """Starts, ends, failures and deaths in order of time."""
    found = [
        _happening(track, event, *told)
        for track in tracks
        for event in track.events
        if event["ph"] == "i" and (told := _told(track, event))
    ]
    found += [_restart(before, track) for before, track in _successors(tracks)]
    return sorted(found, key=lambda row: row["at"])


def _happening(track: Track, event: Event, kind: str, what: str, cause: str) -> dict[str, Any]:
    at = {"at": event["ts"] / 1e6, "attempt": track.attempt, "part": track.part}
    return at | {"kind": kind, "what": what, "cause": cause}


def _told(track: Track, event: Event) -> tuple[str, str, str] | None:
    """(kind, what, cause) of an event that a reader wants to know of."""
    name, args = event["name"], event.get("args", {})
    if name == "ranks start":
        return "start", f"attempt {track.attempt} starts its trainer ranks", ""
    if name == "ending" and args.get("cause"):
        return "failed", f"{args['part']} failed while {args['phase']}", args["cause"]
    if name == "ending" and args.get("signal"):
        return "stopped", "stopped by a signal", f"signal {args['signal']}"
    if name == "failed" or name.endswith((" leaves", " failed")):
        said = f"{track.part} failed" if name == "failed" else name
        step = f" (step {args['step']})" if "step" in args else ""
        return "trouble", said + step, str(args.get("cause", args.get("reason", "")))
    return None


def _successors(tracks: Sequence[Track]) -> list[tuple[Track, Track]]:
    """Processes of one attempt that took the place of one that ended: (that one, its successor)."""
    found, last = [], {}
    for track in sorted((t for t in tracks if t.events), key=lambda t: t.events[0]["ts"]):
        if (track.attempt, track.part) in last:
            found.append((last[track.attempt, track.part], track))
        last[track.attempt, track.part] = track
    return found


def _restart(before: Track, track: Track) -> dict[str, Any]:
    open_ = [name for name, *_, done in before.spans() if not done]
    cause = f"ended while it did: {', '.join(open_)}" if open_ else "had ended"
    what = f"{track.part} was started again"
    return _happening(track, track.events[0], "restart", what, f"the one before {cause}")


def write(run: Path, out: Path | None = None) -> Path:
    """Join what `run` has recorded; returns the timeline's path.

    Raises ValueError where nothing was.
    """
    found = _found(run)
    firsts = [event["ts"] for _, files in found for event in islice(_all(files), 1)]
    if not firsts:
        raise ValueError(
            f"{run} has recorded no timeline: "
            "it ran with monitor.trace=false, or before rft had one"
        )
    path = out or run / "timeline.json"
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for track, files in found:
            track.events = list(_all(files))
            for event in joined(track, min(firsts)):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
            track.events = []  # a long run's do not fit into memory together
        file.write(b"\n]}\n")
    return path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft trace", description="Join a run's timelines into one file."
    )
    parser.add_argument("run", type=Path, help="the run's directory, also while it is under way")
    parser.add_argument(
        "--out", type=Path, help="where to write it; default: RUN_DIR/timeline.json"
    )
    asked = parser.parse_args(arguments)
    try:
        path = write(asked.run, asked.out)
    except (ValueError, OSError) as error:
        print(f"rft trace: {error}", file=sys.stderr)
        return 2
    print(
        f"{path} ({path.stat().st_size / 1e6:.1f} MB): "
        "open it in ui.perfetto.dev or chrome://tracing"
    )
    return 0
