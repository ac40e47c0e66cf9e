"""The checkpoint agent: one small process per trainer rank that writes what is staged, and goes on
when the trainer dies.

    python -m rft.checkpoint.agent SOCKET_FD       (started by `rft.checkpoint.link` before the
                                                   first step)

    reader thread: messages ─► queue ─► main thread: write, receipt
            ─► watcher thread: commit, export
    beat thread: says twice a second what the main thread does, so that a disk that hangs is told
    from an agent that is gone

In: `CheckpointSettings`, then `Begin`/`Window` messages; the bytes lie in shared memory (memfd)
inherited by descriptor. Out: files, reports. No torch, no process group, no import of the training
side. Invariants: what was staged (its last `Window` received) is written and committed also when
the trainer is gone, within `deadline_s`; then this process ends, or rests, where it keeps a state
in memory (`rft.checkpoint.memory`). A slot that is kept has its bytes until it is released.
"""

import contextlib
import logging
import mmap
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rft.checkpoint import fence, memory
from rft.checkpoint.commit import Committer, abandon, clear
from rft.checkpoint.left import Lying
from rft.checkpoint.records import (
    Beat,
    Begin,
    CheckpointSettings,
    Close,
    Drop,
    Export,
    Exported,
    Exporting,
    Freed,
    NotKept,
    Output,
    Ready,
    Receipt,
    Release,
    SaveFailed,
    Window,
)
from rft.checkpoint.replicas import Replicas
from rft.checkpoint.storage import VERSIONS, Sink, Storage, open_storage
from rft.checkpoint.wire import Wire
from rft.checkpoint.writer import ChunkHasher, Gate, Pacer, Stream, Writer, receipt_of
from rft.ground.process import end_family
from rft.monitor import logs, trace

if TYPE_CHECKING:
    from rft.checkpoint.versions import VersionKeeper

log = logging.getLogger(__name__)
BEAT_S = 0.5


class Agent:
    """State shared by the four threads. Each attribute has one writer."""

    def __init__(self, wire: Wire, settings: CheckpointSettings, storage: Storage):
        self.wire = wire
        self.settings = settings
        self.storage = storage
        self.slots = [
            mmap.mmap(fd, settings.slot_bytes, prot=mmap.PROT_READ) for fd in settings.slots
        ]
        self.gate = Gate(Path(settings.control), settings.strategy, settings.deadline_s)
        self.pacer = Pacer(settings.rate_limit)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.to_watch: queue.SimpleQueue[Writer | None] = queue.SimpleQueue()
        self._queued: set[Window] = set()  # received, and not begun to be read by the main thread
        self._lock = threading.Lock()
        self.orphaned_at: float | None = None
        # what, since when, whether it waits for something: one tuple, for it is read meanwhile
        self.doing = ("waiting", time.monotonic(), True)
        self._writers: dict[str, Writer] = {}
        self._kept: VersionKeeper | None = None  # from the first version on
        self._states: dict[str, tuple[Receipt, int]] = {}  # kept, by save: what, in which slot
        self._released: set[str] = set()  # saves that were, before they could be kept
        self._replicas = (
            Replicas(settings, wire.send, self._let_go) if settings.replicas is not None else None
        )
        self._lying: dict[int, Lying] = {}  # by slot: what was written of it last
        self._is_closed = False
        self._exports: dict[str, threading.Thread] = {}  # by name of the checkpoint that is read
        self._exporters: set[subprocess.Popen[bytes]] = set()

    def run(self) -> None:
        """Until the trainer says Close or is gone, and all that was staged is committed."""
        watcher = threading.Thread(target=self._watch, name="watcher")
        watcher.start()
        for loop in (self._read, self._beat):
            threading.Thread(target=loop, daemon=True).start()
        if self._replicas is not None:
            self._replicas.start()
        self.wire.send(Ready(pid=os.getpid()))
        while isinstance(message := self.inbox.get(), Begin | Window | Drop):
            self._handle(message)
            self._now("waiting", True)
        for writer in self._writers.values():  # begun and never staged as a whole
            self._drop(writer, f"rank {self.settings.rank} ended before this save was staged")
        self.to_watch.put(None)
        watcher.join()
        if not self._is_closed and self._has_any():
            self._now("keeping a state in memory", True)
            self.orphaned_at = None  # from here on it has a deadline of its own
            self._kept = None  # the next attempt's first version is a full one
            states, lying = list(self._states.values()), list(self._lying.values())
            memory.Resting(self.settings, states, lying, self._replicas).serve()

    def _has_any(self) -> bool:
        """Something that a rank may come back for."""
        if self._states or (self._replicas is not None and self._replicas.others()):
            return True
        return bool(self._lying) and memory.may_come(self.settings)

    def _read(self) -> None:
        while (message := self.wire.receive()) is not None and not isinstance(message, Close):
            with self._lock:
                if isinstance(message, Window):
                    self._queued.add(message)
            if isinstance(message, Export):
                self._exports[message.name] = threading.Thread(target=self._export, args=(message,))
                self._exports[message.name].start()
                continue
            if isinstance(message, Release):
                self._release(message.id)
                continue
            if isinstance(message, Drop):
                self._free_dropped(message.id)
            self.inbox.put(message)
        self._is_closed = isinstance(message, Close)
        self.orphaned_at = time.monotonic()
        self.inbox.put(None)

    def _beat(self) -> None:
        while True:
            doing, since, is_waiting = self.doing
            for_s = time.monotonic() - since
            self.wire.send(Beat(doing=doing, for_s=for_s, is_waiting=is_waiting))
            if (
                self.orphaned_at is not None
                and time.monotonic() > self.orphaned_at + self.settings.deadline_s
            ):
                log.error(
                    "the trainer is gone for %g s, still %s: giving up",
                    self.settings.deadline_s,
                    doing,
                )
                for exporter in list(self._exporters):
                    end_family(exporter)
                os._exit(1)
            time.sleep(BEAT_S)

    def _now(self, doing: str, is_waiting: bool = False) -> None:
        self.doing = (doing, time.monotonic(), is_waiting)

    def _wrote(self, count: int) -> None:
        """A piece is written: whoever waits knows that the disk gets on."""
        doing = self.doing[0]
        self._now("waiting, for the rate is limited", True)
        self.pacer(count)
        self._now(doing)

    def _free_dropped(self, identity: str) -> None:
        """Windows that were not begun are given back at once: somebody waits for their slots."""
        with self._lock:
            dropped = {window for window in self._queued if window.id == identity}
            self._queued -= dropped
        for window in dropped:
            self.wire.send(Freed(id=identity, slot=window.slot))

    def _release(self, identity: str) -> None:
        """The trainer is done with this state."""
        if self._replicas is not None:
            self._replicas.release(identity)
        else:
            self._let_go(identity)

    def _let_go(self, identity: str) -> None:
        with self._lock:
            kept = self._states.pop(identity, None)
            if kept is None:
                self._released.add(identity)
        if kept is not None:
            self.wire.send(Freed(id=identity, slot=kept[1]))

    def _keep_state(self, writer: Writer, window: Window) -> bool:
        """Whether its slot stays taken: it is this rank's part of a state."""
        kept = writer.begin.kept
        if kept is None or kept.bytes != window.stop or window.slot < 0:
            return False
        data = memoryview(self.slots[window.slot])[: kept.bytes]
        self._now(f"hashing step {writer.begin.step}")
        chunks = writer.chunks or kept.chunks or ChunkHasher.of(data)
        receipt = receipt_of(self.settings, writer.begin, kept, chunks)
        with self._lock:
            if writer.begin.id in self._released:
                self._released.remove(writer.begin.id)
                return False
            self._states[writer.begin.id] = receipt, window.slot
            if self._replicas is not None:
                self._replicas.keep(receipt, data)
            return True

    def _take(self, window: Window) -> bool:
        """May the main thread read this window's slot? From then on it is not given back until it
        was written.
        """
        with self._lock:
            is_queued = window in self._queued
            self._queued.discard(window)
            return is_queued

    def _handle(self, message: Begin | Window | Drop) -> None:
        writer = self._writers.get(message.id)
        if isinstance(message, Begin):
            self._writers[message.id] = Writer(
                message, self.settings, self.storage, self._wrote, self._keep, self._lose
            )
        elif isinstance(message, Drop):
            if writer is not None:
                self._drop(writer, message.why)
        elif self._take(message):
            if writer is not None:
                self._write(writer, message)
            if writer is None or not self._keep_state(writer, message):
                self.wire.send(Freed(id=message.id, slot=message.slot))

    def _write(self, writer: Writer, message: Window) -> None:
        if not writer.begin.outputs:
            del self._writers[message.id]
            return
        self._now("waiting for other ranks to write", True)
        try:
            with self.gate.passed(), trace.span("write", step=writer.begin.step):
                self._now(f"writing step {writer.begin.step}")
                writer.window(
                    memoryview(self.slots[message.slot])[: message.stop - message.start],
                    message.start,
                )
                writer.windows.append(message)
                if message.last:
                    writer.finish()
        # whatever is wrong with one save, the agent is still there for the next
        except Exception as error:
            log.exception("step %d cannot be written", writer.begin.step)
            self._give_up(writer, f"rank {self.settings.rank}: {error}")
        else:
            if message.last:
                self.to_watch.put(self._writers.pop(message.id))
                for window in writer.windows if writer.chunks else ():
                    self._lying[window.slot] = Lying.of(window, writer.chunks)
            elif not writer.outputs:  # no more of it will come
                del self._writers[message.id]

    def _drop(self, writer: Writer, cause: str) -> None:
        """It was not staged as a whole."""
        if self._replicas is not None and writer.begin.kept is not None:
            self._replicas.lose(writer.begin.id)
        self._give_up(writer, cause)

    def _give_up(self, writer: Writer, cause: str) -> None:
        """This rank's part will not come: tell the trainer, and
        the other agents through the drafts.
        """
        begin = writer.begin
        self._writers = {key: value for key, value in self._writers.items() if value is not writer}
        writer.abort()
        log.error("save of step %d failed: %s", begin.step, cause)
        trace.instant("save failed", step=begin.step, cause=cause)
        self.wire.send(SaveFailed(id=begin.id, step=begin.step, cause=cause))
        for output in begin.outputs:
            self._abandon(output, cause)

    def _abandon(self, output: Output, cause: str) -> None:
        try:
            abandon(self.storage, output, self.settings.rank, cause)
            if output.collection == VERSIONS:
                clear(self.storage, output, self.settings.world)
        except OSError as error:  # the same full disk, perhaps; the others meet their deadline
            log.error("cannot leave word in %s: %s", output.draft, error)

    def _keep(self, output: Output, create: Callable[[int], Sink]) -> Stream:
        if self._kept is None:
            from rft.checkpoint.versions import VersionKeeper  # with numpy

            self._kept = VersionKeeper()
        return self._kept.stream(output, create)

    def _lose(self, begin: Begin, output: Output, cause: str) -> None:
        """A version will not be kept; the save that it is a part of goes on."""
        log.error("version %d is not kept: %s", begin.step, cause)
        self.wire.send(
            NotKept(id=begin.id, step=begin.step, collection=output.collection, cause=cause)
        )
        self._abandon(output, cause)

    def _watch(self) -> None:
        """Commit what is written; ends when the main thread has ended and nothing is open."""
        committer = Committer(
            self.storage,
            self.settings,
            report=self.wire.send,
            orphaned=lambda: self.orphaned_at is not None,
            in_use=lambda: set(self._exports),
            lose=lambda: self._kept.lose() if self._kept else None,
        )
        ended = False
        while not ended or committer.drafts:
            try:
                writer = self.to_watch.get(
                    timeout=self.storage.look_s if committer.drafts else None
                )
                ended = ended or writer is None
                for output in writer.outputs if writer else []:
                    committer.watch(writer.begin, output, writer.started)
            except queue.Empty:
                pass
            committer.look()
        for thread in list(self._exports.values()):
            thread.join()

    def _export(self, asked: Export) -> None:
        """Hugging Face export of a committed checkpoint, in a process beside everything else."""
        command = [
            sys.executable,
            "-m",
            "rft.checkpoint.export",
            f"{self.storage.where}/{asked.name}",
        ]
        with trace.overlapping("export", step=asked.step):
            exporter = subprocess.Popen(
                [*command, asked.source, asked.target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            self._exporters.add(exporter)
            cause = self._follow(exporter, asked.target)
            self._exporters.discard(exporter)
        self.wire.send(Exported(step=asked.step, target=asked.target, cause=cause))
        self._exports.pop(asked.name, None)  # until it is told, who ends waits for this thread

    def _follow(self, exporter: "subprocess.Popen[bytes]", target: str) -> str:
        """Until it has ended; one that says nothing for `deadline_s` is killed.

        Returns why it failed, or nothing.
        """
        deadline_s, said = self.settings.deadline_s, b""
        assert exporter.stdout is not None
        with exporter.stdout as output, contextlib.suppress(subprocess.TimeoutExpired):
            while select.select([output], [], [], deadline_s)[0]:
                if not (news := os.read(output.fileno(), 2**16)):
                    code = exporter.wait(deadline_s)
                    words = said.decode(errors="replace").split("\n")
                    return (
                        next(
                            (line for line in reversed(words) if line.strip()), f"exit code {code}"
                        )
                        if code
                        else ""
                    )
                said = (said + news)[-(2**12) :]
                self.wire.send(Exporting(target=target))
        end_family(exporter)
        return (
            f"nothing was written to {target} for {deadline_s:g} s; make it later with rft ckpt "
            "export"
        )


def main(descriptor: int, make_storage: Callable[[str], Storage] = open_storage) -> None:
    """Serve the trainer at the other end of socket `descriptor` until it is done or gone."""
    # a stop is the trainer's business; it says Close
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    logs.hide_secrets()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    wire = Wire.of_agent(socket.socket(fileno=descriptor))
    settings = wire.receive()
    if settings is None:
        return  # the trainer died before it had said anything
    trace.start(f"checkpoint_agent_{settings.rank}")
    os.nice(5)
    if hasattr(psutil.Process, "ionice"):  # last of those that want the disk
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    threading.excepthook = _end
    lock = fence.hold(fence.lock_path(Path(settings.control), settings.epoch, settings.rank))
    try:
        Agent(wire, settings, make_storage(settings.root)).run()
    except Exception:
        log.exception("the agent ends")
        os._exit(1)
    os.close(lock)


def _end(broken: threading.ExceptHookArgs) -> None:
    """A thread that fails takes the process with it: half an agent looks alive and does nothing."""
    log.error("the agent ends", exc_info=broken.exc_value)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
