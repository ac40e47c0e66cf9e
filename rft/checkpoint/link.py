"""The trainer rank's end of its agent: start it, talk to it, notice at once when it is gone, start
it again.

In: requests. Out: reports, handed to `on_report` by a reader thread. Invariants: a save that was
staged and whose slot was not given back is told again to the next agent, so the death of an agent
costs time and nothing else; no request waits for the agent; one that says nothing for `patience_s`,
or whose disk takes `deadline_s` over one operation, is killed, and the next starts when it is gone:
two never write the same draft.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rft.checkpoint.records import (
    Beat,
    Begin,
    CheckpointSettings,
    Close,
    Committed,
    Drop,
    Export,
    Exported,
    Freed,
    NotKept,
    Ready,
    Release,
    Report,
    SaveFailed,
    Window,
)
from rft.checkpoint.wire import Outbox, Wire
from rft.ground.process import NamedThread

log = logging.getLogger(__name__)
AGENT = (sys.executable, "-m", "rft.checkpoint.agent")
SILENT_S = 2.0  # without a beat: stopped, or starved of the processor
STALLED_S = 30.0  # over one operation: a disk that does not answer
START_S = 60.0  # for an agent to say its first word, where patience_s is shorter
LOOK_S = 0.5
BROKEN = "the agent cannot run"
DEAF = "the agent takes no messages"
NO_SLOT = -1  # of a window without bytes: the slot it came in has long been somebody else's
TRIES = 5  # agents for one save, in case that it is what they die of
# agents in a row that ended before they were ready: something is wrong that another start does not
# mend
FRUITLESS = 3


@dataclass
class TrackedSave:
    """What the agent must be told again if it dies: windows not freed yet."""

    begin: Begin
    windows: dict[int, Window] = field(default_factory=dict)  # by start
    freed_any: bool = False
    written: bool = False  # the last window came back: the receipt is durable
    released: bool = False  # what was kept of it in memory is not needed any more
    dropped: str = ""  # why it was given up
    failed: bool = False  # and reported, for it was never staged as a whole
    deaths: int = 0  # of agents that had it


class Link:
    """One agent after another, at most one at a time."""

    def __init__(
        self,
        settings: CheckpointSettings,
        on_report: Callable[[Report], None],
        log_path: Path | None,
        command: tuple[str, ...] = AGENT,
        stalled_s: float = STALLED_S,
        patience_s: float = STALLED_S,
    ):
        self.settings = settings
        self.patience_s = patience_s
        self.stalled_s = stalled_s
        self.deaths = 0
        self.state = "starting"  # starting | ready | silent | stalled | broken | closed
        self._on_report = on_report
        self._log_path = log_path
        self._command = command
        self._saves: dict[str, TrackedSave] = {}
        self._exports: dict[int, Export] = {}  # asked for and not reported
        self._lock = threading.RLock()
        # Since the agent last said something, counted in looks: time in which this process itself
        # was stopped is not the agent's.
        self._quiet_s = 0.0
        self._stalled_for_s = 0.0  # what it was about when it last said something
        self._is_killed = False
        self._fruitless = 0
        self._closing = threading.Event()
        self._ended = threading.Event()
        with self._lock:
            self._adopt(*self._start())
        NamedThread(target=self._watchdog, name="checkpoint-watchdog", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle_s(self) -> float:
        """For how long the agent has said nothing, or its disk not got on with one operation."""
        return max(self._quiet_s, self._stalled_for_s)

    def begin(self, message: Begin, *windows: Window) -> None:
        """`windows`: those that are there already, told with it."""
        with self._lock:
            cause = BROKEN if self.state == "broken" else DEAF if self._outbox.is_full() else ""
            if not cause:
                by_start = {window.start: window for window in windows}
                self._saves[message.id] = TrackedSave(message, by_start)
                self._outbox.send(message, *windows)
        if cause:
            self._on_report(SaveFailed(id=message.id, step=message.step, cause=cause))
            for window in windows:
                self._on_report(Freed(id=message.id, slot=window.slot))

    def window(self, message: Window) -> None:
        """Bytes of a save that has failed meanwhile are nobody's: their slot comes back at once."""
        with self._lock:
            save = self._saves.get(message.id)
            if save is not None:
                save.windows[message.start] = message
                self._outbox.send(message)
        if save is None:
            self._on_report(Freed(id=message.id, slot=message.slot))

    def drop(self, identity: str, why: str) -> None:
        """Give a save up.

        One that was not staged as a whole has failed, whether the agent listens or not.
        """
        with self._lock:
            save = self._saves.get(identity)
            if save is None or save.dropped:  # or it has ended meanwhile
                return
            save.dropped = why
            save.failed = not save.written and not any(
                window.last for window in save.windows.values()
            )
            self._outbox.send(Drop(id=identity, why=why))
        if save.failed:
            self._on_report(SaveFailed(id=identity, step=save.begin.step, cause=why))

    def release(self, identity: str) -> None:
        """The slot of a save that was kept in memory comes back, once it is written."""
        with self._lock:
            save = self._saves.get(identity)
            if save is not None:
                save.released = True
                self._outbox.send(Release(id=identity))

    def export(self, message: Export) -> None:
        with self._lock:
            is_broken = self.state == "broken"
            if not is_broken:
                self._exports[message.step] = message
                self._outbox.send(message)
        if is_broken:
            self._on_report(Exported(step=message.step, target=message.target, cause=BROKEN))

    def close(self, deadline_s: float) -> None:
        """Let the agent finish what it has; it goes on by itself if that takes longer than
        `deadline_s`.
        """
        with self._lock:
            self._closing.set()
            self._outbox.send(Close())
        self._ended.wait(deadline_s)
        self.state = "closed"

    def _start(self) -> "tuple[Wire, subprocess.Popen[bytes]]":
        """Start an agent, in a process group of its own: what ends this rank's group does not end
        it. Not in a session of its own: where Linux shares cores among sessions first (autogroup)
        one thread of the agent's would count as much as all of this rank's, whatever its niceness,
        and keep one from a core that holds the interpreter's lock.

        Without the lock: a program on a disk that hangs takes its time to start.
        """
        ours, theirs = socket.socketpair()
        log_file = open(self._log_path, "ab") if self._log_path else None  # noqa: SIM115 - handed to the child
        try:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *self.settings.inherited],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
            if log_file is not None:
                log_file.close()
        return Wire.of_trainer(ours), process

    def _adopt(self, wire: Wire, process: "subprocess.Popen[bytes]") -> None:
        """Make this the agent that is talked to, and read what it says in a thread of its own.

        Called with the lock.
        """
        self._process, self._outbox = process, Outbox(wire)
        self.state, self._is_killed = "starting", False
        self._quiet_s = self._stalled_for_s = 0.0
        self._outbox.send(self.settings)
        NamedThread(
            target=self._listen,
            args=(wire, process, self._outbox),
            name="checkpoint-reports",
            daemon=True,
        ).start()

    def _listen(self, wire: Wire, process: "subprocess.Popen[bytes]", outbox: Outbox) -> None:
        while (report := wire.receive()) is not None:
            self._quiet_s = 0.0
            if isinstance(report, Ready):
                self._fruitless = 0
                self._enter("ready")
            elif isinstance(report, Beat):
                self._stalled_for_s = 0.0 if report.is_waiting else report.for_s
                self._enter("stalled" if self._stalled_for_s > self.stalled_s else "ready")
            elif not (isinstance(report, Freed) and report.slot == NO_SLOT) and self._note(report):
                self._on_report(report)
        code = process.wait()
        outbox.close()
        wire.close()
        if self._closing.is_set():
            self._ended.set()
        else:
            self._revive(code)

    def _note(self, report: Report) -> bool:
        """Is it news?"""
        with self._lock:
            if isinstance(report, Exported):
                self._exports.pop(report.step, None)
            save = self._saves.get(getattr(report, "id", ""))
            if save is None:
                return True
            if isinstance(report, Freed):
                gone = [
                    start for start, window in save.windows.items() if window.slot == report.slot
                ]
                save.written = save.written or any(save.windows[start].last for start in gone)
                save.freed_any = save.freed_any or bool(gone)
                for start in gone:
                    del save.windows[start]
                if not save.windows and not save.begin.outputs:
                    del self._saves[report.id]
            elif isinstance(report, SaveFailed) or (
                isinstance(report, Committed | NotKept) and not self._is_open(save, report)
            ):
                save.begin.outputs.clear()
                if not save.windows or save.begin.kept is None:  # else it is in memory still
                    del self._saves[report.id]
            return not (save.failed and isinstance(report, SaveFailed))

    @staticmethod
    def _is_open(save: TrackedSave, report: Committed | NotKept) -> bool:
        """Are outputs of this save besides the reported one still to be committed?"""
        save.begin.outputs[:] = [o for o in save.begin.outputs if o.collection != report.collection]
        return bool(save.begin.outputs)

    def _revive(self, code: int) -> None:
        """Called by the thread that has heard the last agent to its
        end, when that one is gone for good.
        """
        with self._lock:
            self.deaths += 1
            self._fruitless += 1
            self.state = "starting"
            log.error("checkpoint agent of rank %d died (exit code %d)", self.settings.rank, code)
        started = self._try_to_start()
        with self._lock:
            lost = self._break() if started is None else self._go_on(*started)
        for report in lost:
            self._on_report(report)

    def _try_to_start(self) -> "tuple[Wire, subprocess.Popen[bytes]] | None":
        while self._fruitless <= FRUITLESS:
            try:
                return self._start()
            # no memory for another process, or no program on a disk that is not there
            except OSError as error:
                self._fruitless += 1
                log.error(
                    "checkpoint agent of rank %d cannot be started: %s", self.settings.rank, error
                )
                self._closing.wait(LOOK_S)
        return None

    def _go_on(self, wire: Wire, process: "subprocess.Popen[bytes]") -> list[Report]:
        """Tell the new agent all that it must know of; what is to be reported of that."""
        self._adopt(wire, process)
        for asked in self._exports.values():
            self._outbox.send(asked)
        lost = [report for save in self._saves.values() for report in self._tell_again(save)]
        if self._closing.is_set():
            self._outbox.send(Close())
        return lost

    def _break(self) -> list[Report]:
        """No agent can run: what is to be reported of all that waits for one."""
        self.state = "broken"
        log.error(
            "it died %d times before it was ready, no further try; see %s",
            FRUITLESS,
            self._log_path,
        )
        lost: list[Report] = [
            Exported(step=e.step, target=e.target, cause=BROKEN) for e in self._exports.values()
        ]
        for save in self._saves.values():
            begin = save.begin
            if begin.outputs and not save.failed:
                lost.append(SaveFailed(id=begin.id, step=begin.step, cause=BROKEN))
            lost += [Freed(id=begin.id, slot=window.slot) for window in save.windows.values()]
        self._exports.clear()
        self._saves.clear()
        self._ended.set()
        return lost

    def _tell_again(self, save: TrackedSave) -> list[Report]:
        """Hand a save to the new agent.

        If a part of it went down with the old one, that one is to say so, and slots are free.
        """
        begin = save.begin
        self._outbox.send(begin)
        save.deaths += 1
        why = save.dropped or (f"{save.deaths} agents died over it" if save.deaths >= TRIES else "")
        if save.freed_any and not save.written:
            why = why or (
                f"the agent of rank {self.settings.rank} died over a save that does not fit "
                "into one slot"
            )
        if why:
            self._outbox.send(Drop(id=begin.id, why=why))
            slots = [window.slot for window in save.windows.values()]
            save.windows.clear()  # given back once: at the next death somebody else may have them
            return [Freed(id=begin.id, slot=slot) for slot in slots]
        if save.written:
            end = max(output.bytes for output in begin.outputs)
            self._outbox.send(Window(id=begin.id, slot=NO_SLOT, start=end, stop=end, last=True))
        for _, window in sorted(save.windows.items()):
            self._outbox.send(window)
        if save.released:
            self._outbox.send(Release(id=begin.id))
        return []

    def _watchdog(self) -> None:
        while not self._closing.wait(LOOK_S):
            with self._lock:
                self._quiet_s += LOOK_S
                is_new = self.state == "starting"
                limit_s = max(self.patience_s, START_S if is_new else SILENT_S)
                if self.state == "broken" or self._process.poll() is not None:
                    continue
                why = "said nothing" if self._quiet_s > limit_s else ""
                if self._stalled_for_s > self.settings.deadline_s:
                    why = "is not done with one operation of its disk"
                if why and not self._is_killed:
                    log.error(
                        "checkpoint agent of rank %d %s for %.0f s, killed",
                        self.settings.rank,
                        why,
                        self.idle_s,
                    )
                    # also a stopped one; the thread that hears it to its end starts the next
                    self._process.kill()
                    self._is_killed = True
                elif self._quiet_s > SILENT_S and not is_new:
                    self._enter("silent")

    def _enter(self, state: str) -> None:
        if state != self.state:
            if state in ("silent", "stalled"):
                log.error(
                    "checkpoint agent of rank %d (pid %d) is %s",
                    self.settings.rank,
                    self.pid,
                    state,
                )
            elif self.state in ("silent", "stalled"):
                log.warning("checkpoint agent of rank %d is back", self.settings.rank)
            self.state = state


@dataclass
class SaveMessages:
    """What the agent is told of one save, by the thread that copies: an agent that does not listen
    must not hold up the training.
    """

    link: Link
    begin: Begin
    staged: Callable[[Begin], None]
    _begun: bool = False

    def window(self, message: Window) -> None:
        if self._begun:
            self.link.window(message)
        else:
            self._begun = True
            self.link.begin(self.begin, message)
        if message.last:
            self.staged(self.begin)

    def drop(self, identity: str, why: str) -> None:
        if not self._begun:
            self._begun = True
            self.link.begin(self.begin)
        self.link.drop(identity, why)
