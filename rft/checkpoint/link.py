"""The trainer rank's end of its agent: start it, talk to it, notice at once when it is gone, start it again.

In: requests. Out: reports, handed to `on_report` by a reader thread. Invariant: a save that was staged and whose slot was not given
back is told again to the next agent, so the death of an agent costs time and nothing else.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rft.checkpoint.records import (
    Beat,
    Begin,
    Close,
    Committed,
    Drop,
    Export,
    Exported,
    Failed,
    Freed,
    Ready,
    Report,
    Settings,
    Window,
)
from rft.checkpoint.wire import Wire

log = logging.getLogger(__name__)
AGENT = (sys.executable, "-m", "rft.checkpoint.agent")
SILENT_S = 2.0  # without a beat: stopped, or starved of the processor
STALLED_S = 30.0  # over one operation: a disk that does not answer
LOOK_S = 0.5
NO_SLOT = -1  # of a window without bytes: the slot it came in has long been somebody else's
TRIES = 5  # agents for one save, in case that it is what they die of
FRUITLESS = 3  # agents in a row that ended before they were ready: something is wrong that another start does not mend


@dataclass
class Told:
    """What the agent must be told again if it dies: windows not freed yet."""

    begin: Begin
    windows: dict[int, Window] = field(default_factory=dict)  # by start
    freed_any: bool = False
    written: bool = False  # the last window came back: the receipt is durable
    dropped: str = ""  # why it was given up
    deaths: int = 0  # of agents that had it


class Link:
    """One agent after another, at most one at a time."""

    def __init__(
        self, settings: Settings, on_report: Callable[[Report], None], log_path: Path | None,
        command: tuple[str, ...] = AGENT, stalled_s: float = STALLED_S,
    ):  # fmt: skip
        self.settings = settings
        self.stalled_s = stalled_s
        self.deaths = 0
        self.state = "starting"  # starting | ready | silent | stalled | broken | closed
        self._on_report = on_report
        self._log_path = log_path
        self._command = command
        self._told: dict[str, Told] = {}
        self._exports: dict[int, Export] = {}  # asked for and not reported
        self._lock = threading.RLock()
        self._heard = time.monotonic()
        self._fruitless = 0
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._wire = self._start()
        threading.Thread(target=self._watchdog, name="checkpoint-watchdog", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, message: Begin) -> None:
        with self._lock:
            is_broken = self.state == "broken"
            if not is_broken:
                self._told[message.id] = Told(message)
                self._wire.send(message)
        if is_broken:
            self._on_report(Failed(id=message.id, step=message.step, cause="the agent cannot run"))

    def window(self, message: Window) -> None:
        """Bytes of a save that has failed meanwhile are nobody's: their slot comes back at once."""
        with self._lock:
            told = self._told.get(message.id)
            if told is not None:
                told.windows[message.start] = message
                self._wire.send(message)
        if told is None:
            self._on_report(Freed(id=message.id, slot=message.slot))

    def drop(self, identity: str, why: str) -> None:
        with self._lock:
            if identity in self._told:  # or it has ended meanwhile
                self._told[identity].dropped = why
                self._wire.send(Drop(id=identity, why=why))

    def export(self, message: Export) -> None:
        with self._lock:
            self._exports[message.step] = message
            self._wire.send(message)

    def close(self, deadline_s: float) -> None:
        """Let the agent finish what it has; it goes on by itself if that takes longer than `deadline_s`."""
        with self._lock:
            self._closing.set()
            self._wire.send(Close())
        self._ended.wait(deadline_s)
        self.state = "closed"

    def _start(self) -> Wire:
        """Start an agent in a session of its own and read what it says in a thread of its own."""
        ours, theirs = socket.socketpair()
        log_file = open(self._log_path, "ab") if self._log_path else None  # noqa: SIM115 - handed to the child
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], pass_fds=[theirs.fileno(), *self.settings.slots],
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        finally:
            theirs.close()
            if log_file is not None:
                log_file.close()
        wire = Wire.of_trainer(ours)
        wire.send(self.settings)
        self._heard = time.monotonic()
        threading.Thread(
            target=self._listen, args=(wire, self._process), name="checkpoint-reports", daemon=True
        ).start()
        return wire

    def _listen(self, wire: Wire, process: "subprocess.Popen[bytes]") -> None:
        while (report := wire.receive()) is not None:
            self._heard = time.monotonic()
            if isinstance(report, Ready):
                self._fruitless = 0
                self._enter("ready")
            elif isinstance(report, Beat):
                self._enter("stalled" if report.doing != "waiting" and report.for_s > self.stalled_s else "ready")
            elif not (isinstance(report, Freed) and report.slot == NO_SLOT):
                self._note(report)
                self._on_report(report)
        code = process.wait()
        wire.close()
        if self._closing.is_set():
            self._ended.set()
        else:
            self._revive(code)

    def _note(self, report: Report) -> None:
        with self._lock:
            if isinstance(report, Exported):
                self._exports.pop(report.step, None)
            told = self._told.get(getattr(report, "id", ""))
            if told is None:
                return
            if isinstance(report, Freed):
                gone = [start for start, window in told.windows.items() if window.slot == report.slot]
                told.written = told.written or any(told.windows[start].last for start in gone)
                told.freed_any = told.freed_any or bool(gone)
                for start in gone:
                    del told.windows[start]
            elif isinstance(report, Failed) or (isinstance(report, Committed) and not self._is_open(told, report)):
                del self._told[report.id]

    @staticmethod
    def _is_open(told: Told, report: Committed) -> bool:
        """Are outputs of this save besides the reported one still to be committed?"""
        told.begin.outputs[:] = [o for o in told.begin.outputs if o.collection != report.collection]
        return bool(told.begin.outputs)

    def _revive(self, code: int) -> None:
        with self._lock:
            self.deaths += 1
            self._fruitless += 1
            log.error("checkpoint agent of rank %d died (exit code %d)", self.settings.rank, code)
            if self._fruitless > FRUITLESS:
                self.state = "broken"
                log.error("it died %d times before it was ready, no further try; see %s", FRUITLESS, self._log_path)
                lost: list[Report] = [
                    Failed(id=t.begin.id, step=t.begin.step, cause="the agent cannot run") for t in self._told.values()
                ]
                self._told.clear()
                self._ended.set()
            else:
                self._wire = self._start()
                for asked in self._exports.values():
                    self._wire.send(asked)
                lost = [report for told in self._told.values() for report in self._tell_again(told)]
        for report in lost:
            self._on_report(report)

    def _tell_again(self, told: Told) -> list[Report]:
        """Hand a save to the new agent. If a part of it went down with the old one, that one is to say so, and slots are free."""
        begin = told.begin
        self._wire.send(begin)
        told.deaths += 1
        why = told.dropped or (f"{told.deaths} agents died over it" if told.deaths >= TRIES else "")
        if told.freed_any and not told.written:
            why = why or f"the agent of rank {self.settings.rank} died over a save that does not fit into one slot"
        if why:
            self._wire.send(Drop(id=begin.id, why=why))
            slots = [window.slot for window in told.windows.values()]
            told.windows.clear()  # given back once: at the next death somebody else may have them
            return [Freed(id=begin.id, slot=slot) for slot in slots]
        if told.written:
            end = max(output.bytes for output in begin.outputs)
            self._wire.send(Window(id=begin.id, slot=NO_SLOT, start=end, stop=end, last=True))
        for _, window in sorted(told.windows.items()):
            self._wire.send(window)
        return []

    def _watchdog(self) -> None:
        while not self._closing.wait(LOOK_S):
            if self.state != "broken" and time.monotonic() > self._heard + SILENT_S:
                self._enter("silent" if self.state != "starting" else "starting")

    def _enter(self, state: str) -> None:
        if state != self.state:
            if state in ("silent", "stalled"):
                log.error("checkpoint agent of rank %d (pid %d) is %s", self.settings.rank, self.pid, state)
            elif self.state in ("silent", "stalled"):
                log.warning("checkpoint agent of rank %d is back", self.settings.rank)
            self.state = state
