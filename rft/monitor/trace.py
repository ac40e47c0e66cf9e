"""The run's timeline: what each of its processes does when, as events of Chrome's trace format.

    with trace.span("train"): ...    with trace.overlapping("round", version=7): ...
            trace.instant("died", cause="...")

In: names and small arguments, from any thread of any process of the run. Out:
`<job>/logs/attempt_<n>/trace/<part>-<pid>.json`, one event per line; `rft trace` joins them
(`rft.tools.timeline`). Recording is on where the supervisor has said so (`turn_on`), for everything
that it starts. Invariants: an event is one append, so a process that is killed leaves all that it
did, and what it was doing; a file never grows over LIMIT_BYTES, and the one before it is kept;
where recording is off a span costs nothing; what cannot be written is counted (`left_out`), and
nobody who records hears of it. Of a span's thread both ends also tell the processor time ("tts", in
microseconds, as the format has it), so that what waits can be told from what computes.
"""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft.ground import durable, redact
from rft.monitor import left_out

# of the environment: where the processes of this attempt record; absent: they do not
DIRECTORY = "RFT_TRACE_DIR"
LIMIT_BYTES = 64 * 2**20  # of one file: about 25,000 steps of a trainer rank
COUNT_S = 0.1  # a counter that changes with every request is recorded no more often than this


class Recorder:
    """This process's file. The array in it is never closed, which the format allows."""

    def __init__(self, directory: Path, part: str, limit: int = LIMIT_BYTES):
        directory.mkdir(parents=True, exist_ok=True)
        self.pid = os.getpid()
        self.part = part
        self.path = directory / f"{part}-{self.pid}.json"
        self.limit = limit
        self.ids = itertools.count(1)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # one clock for all processes, steps of it only here
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._size = 0
        self._torn = False
        self._turning = threading.Lock()
        self._counted: dict[str, float] = {}
        self._head()

    def event(
        self, phase: str, name: str, args: dict[str, Any] | None = None, more: str = ""
    ) -> None:
        """One line. `more`: further members, already as JSON."""
        at = (time.perf_counter_ns() + self._offset) / 1000
        told = f',"args":{_plain(args)}' if args else ""
        who = f'"pid":{self.pid},"tid":{threading.get_native_id()}'
        line = f'{{"name":"{name}","ph":"{phase}","ts":{at:.1f},{who}{more}{told}}},\n'
        self._append(line.encode())

    def may_count(self, name: str) -> bool:
        now = time.monotonic()
        if now < self._counted.get(name, 0.0) + COUNT_S:
            return False
        self._counted[name] = now
        return True

    def close(self) -> None:
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        try:
            # what a full disk took of the event before it is a line of its own
            durable.write_all(self._file, b"\n" + data if self._torn else data)
            self._torn = False
            self._size += len(data)
            if self._size > self.limit:
                self._turn_over()
        except OSError as error:
            self._torn = True
            left_out.note("events of the timeline", error)

    def _head(self) -> None:
        self._append(b"[\n")
        self.event("M", "process_name", {"name": self.part})

    def _turn_over(self) -> None:
        with self._turning:
            if self._size <= self.limit:  # another thread has done it
                return
            self.path.replace(self.path.with_suffix(".before.json"))
            new = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(new, self._file)  # under the same number: other threads may be about to write
            os.close(new)
            self._size = 0
        self._head()


def _plain(args: dict[str, Any]) -> str:
    """As JSON; only texts can hold a secret."""
    text = json.dumps(args, default=str)
    has_text = any(not isinstance(value, int | float) for value in args.values())
    return redact.text(text) if has_text else text


_recorder: Recorder | None = None  # of this process


def turn_on(log_dir: Path, wanted: bool = True) -> None:
    """Processes that this one starts from now on record beside
    their logs; `wanted=False`: they do not.
    """
    os.environ.pop(DIRECTORY, None)
    if wanted:
        os.environ[DIRECTORY] = str(log_dir / "trace")


def environment() -> dict[str, str]:
    """What a process must be given that does not inherit this one's environment."""
    return {DIRECTORY: os.environ[DIRECTORY]} if DIRECTORY in os.environ else {}


def start(part: str) -> None:
    """Record what this process does, as `part`, if that is wanted."""
    stop()
    global _recorder
    if DIRECTORY in os.environ:
        try:
            _recorder = Recorder(Path(os.environ[DIRECTORY]), part)
        except OSError as error:
            left_out.note("a process's timeline", error)


def stop() -> None:
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


@contextlib.contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """A part of what this thread does; spans of one thread lie in each other."""
    recorder = _recorder
    if recorder is None:
        yield
        return
    recorder.event("B", name, args, _thread_time())
    try:
        yield
    finally:
        recorder.event("E", name, more=_thread_time())


@contextlib.contextmanager
def overlapping(name: str, **args: Any) -> Iterator[None]:
    """Something that takes time beside others of its kind, like a coroutine."""
    recorder = _recorder
    if recorder is None:
        yield
        return
    known = f',"cat":"rft","id":"{recorder.pid}.{next(recorder.ids)}"'
    recorder.event("b", name, args, known)
    try:
        yield
    finally:
        recorder.event("e", name, None, known)


def _thread_time() -> str:
    return f',"tts":{time.thread_time_ns() / 1000:.1f}'


def instant(name: str, **args: Any) -> None:
    """Something that happened, in the whole process."""
    if _recorder is not None:
        _recorder.event("i", name, args, ',"s":"p"')


def count(name: str, value: float) -> None:
    """A number over time; most changes of a busy one are left
    out, but not that it came down to 0.
    """
    if _recorder is not None and (value == 0 or _recorder.may_count(name)):
        _recorder.event("C", name, {name: value})
