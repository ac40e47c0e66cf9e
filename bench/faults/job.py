"""A job in forked processes: one trainer that plays every rank, and a real `Agent` per rank on the
disk that a case asks for.

    Job(...).run() ─► what the trainer got to: staged, acknowledged, failed;
                      and whether anybody had to be ended by force

No torch and no exec: a case takes tens of milliseconds. Invariant: when `run` returns, none of its
processes is left.
"""

import contextlib
import logging
import mmap
import os
import select
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults.disks import TRAINER, Board
from bench.faults.toy import Cut, begin, plan, settings
from rft.checkpoint import fence, sharding
from rft.checkpoint.agent import Agent
from rft.checkpoint.commit import Committer
from rft.checkpoint.records import (
    CheckpointSettings,
    Close,
    Committed,
    Freed,
    Report,
    SaveFailed,
    Window,
)
from rft.checkpoint.storage import Disk, LocalStorage, Storage
from rft.checkpoint.wire import Wire
from rft.checkpoint.writer import Writer

PAGE = 2**12
PATIENCE_S = 60.0  # then a case counts as a hang


@dataclass
class Outcome:
    """What the trainer told before its end. `failed`: cause by step."""

    staged: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    failed: dict[int, list[str]] = field(default_factory=dict)
    hung: bool = False

    def hear(self, text: str) -> None:
        for line in text.splitlines():
            kind, step, words = line.split(" ", 2)
            if kind == "staged":
                self.staged.append(int(step))
            elif kind == "committed":
                self.acknowledged.append(int(step))
            else:
                self.failed.setdefault(int(step), []).append(words)


@dataclass
class Job:
    """One attempt of a toy job.

    `disks[rank]`: that agent's; `messages`: the trainer kills itself after that many messages.
    """

    root: Path
    world: int
    cuts: list[Cut]
    disks: list[Disk]
    board: Board
    windows: int = 1
    keep: int = 0
    weights: bool = False
    messages: int = 0
    lease_s: float = 0.1
    deadline_s: float = 20.0
    swept: Callable[[], object] = lambda: None  # between taking the run epoch and the first agent
    watch: Callable[["Job"], None] = lambda job: None
    pids: dict[str, int] = field(default_factory=dict)

    def storage(self, rank: int) -> Storage:
        """What that rank's agent writes to."""
        return LocalStorage(self.root, self.disks[rank])

    def names(self) -> Storage:
        """What the trainer takes names of drafts from."""
        return LocalStorage(self.root, Disk())

    def run(self) -> Outcome:
        control = self.root / "control"
        epoch = fence.take_epoch(control)
        self.swept()
        size = max(
            sharding.extent(regions) for cut in self.cuts for regions in plan(cut.scale, self.world)
        )
        size = -(-size // PAGE) * PAGE
        slots = [[os.memfd_create("slot") for _ in range(2)] for _ in range(self.world)]
        for descriptor in [d for pair in slots for d in pair]:
            os.ftruncate(descriptor, size)
        told = [
            settings(
                str(self.root),
                str(control),
                rank,
                self.world,
                epoch,
                slots[rank],
                size,
                self.deadline_s,
                self.lease_s,
            )
            for rank in range(self.world)
        ]
        pairs = [socket.socketpair() for _ in range(self.world)]
        news, say = os.pipe()
        ends = [end for pair in pairs for end in pair]
        for rank in range(self.world):
            keep = pairs[rank][1]
            self.pids[f"agent{rank}"] = fork(
                lambda rank=rank, keep=keep: self._agent(told[rank], keep, ends, news, say)
            )
        trainer = Trainer(self, told, [pair[0] for pair in pairs], say)
        self.pids["trainer"] = fork(lambda: trainer.run([pair[1] for pair in pairs], news))
        for end in ends:
            end.close()
        for descriptor in [say, *(d for pair in slots for d in pair)]:
            os.close(descriptor)
        try:
            self.watch(self)
            return self._collect(news)
        finally:
            os.close(news)

    def _agent(
        self, told: CheckpointSettings, keep: socket.socket, ends: list[socket.socket], *pipe: int
    ) -> None:
        for end in ends:
            if end is not keep:
                end.close()
        for descriptor in pipe:
            os.close(descriptor)
        fence.hold(fence.lock_path(Path(told.control), told.epoch, told.rank))
        Agent(Wire.of_agent(keep), told, self.storage(told.rank)).run()

    def _collect(self, news: int) -> Outcome:
        """Read until the trainer is gone, then wait for everybody."""
        outcome, heard = Outcome(), b""
        end = time.monotonic() + PATIENCE_S
        while select.select([news], [], [], max(0.0, end - time.monotonic()))[0]:
            part = os.read(news, 65536)
            if not part:
                break
            heard += part
        outcome.hear(heard.decode())
        for pid in self.pids.values():
            outcome.hung |= not ended(pid, max(0.1, end - time.monotonic()))
        return outcome


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child that ends with it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        logging.disable(logging.CRITICAL)
        work()
        code = 0
    except BaseException:  # nobody above would say it
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, patience_s: float) -> bool:
    """Wait for a child; one that does not end in time is killed, and that is False."""
    watched = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([watched], [], [], patience_s)[0])
    finally:
        os.close(watched)
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return in_time


class Trainer:
    """All ranks' ends.

    Fills slots, says Begin and Windows, waits for each save's outcome before the next.
    """

    def __init__(
        self, job: Job, told: list[CheckpointSettings], ends: list[socket.socket], say: int
    ):
        self.job, self.told, self.ends, self.say = job, told, ends, say
        self.wires = [Wire.of_trainer(end) for end in ends]
        self.sent = 0

    def run(self, others: list[socket.socket], news: int) -> None:
        for end in others:
            end.close()
        os.close(news)
        self.job.board.set(TRAINER, os.getpid())
        self.storage = self.job.names()
        self.living = selectors.DefaultSelector()
        for rank, end in enumerate(self.ends):
            self.living.register(end, selectors.EVENT_READ, rank)
        for number, cut in enumerate(self.job.cuts):
            self._save(cut, f"e{self.told[0].epoch:04d}n{number:04d}")
        for rank in range(self.job.world):
            self._send(rank, Close())
        while self.living.get_map():
            self._next()

    def _send(self, rank: int, message: object) -> None:
        self.wires[rank].send(message)  # type: ignore[arg-type]
        self.sent += 1
        if self.sent == self.job.messages:
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, kind: str, step: int, words: str = "") -> None:
        os.write(self.say, f"{kind} {step} {words}".replace("\n", " ").encode() + b"\n")

    def _save(self, cut: Cut, identity: str) -> None:
        asked = [
            begin(
                self.storage, cut, rank, self.job.world, identity, self.job.keep, self.job.weights
            )
            for rank in range(self.job.world)
        ]
        for rank in range(self.job.world):
            self._send(rank, asked[rank])
            self._stage(rank, cut, identity)
        self._tell("staged", cut.step)
        waiting = {
            rank: {output.collection for output in asked[rank].outputs}
            for rank in range(self.job.world)
        }
        slots = {(rank, slot) for rank in range(self.job.world) for slot in range(self.job.windows)}
        while any(waiting.values()) or slots:
            rank, report = self._next()
            # an agent died, and nobody here starts another: no later save can be whole
            if report is None:
                return
            if isinstance(report, Committed) and report.id == identity:
                waiting[rank].discard(report.collection)
                if not any(waiting.values()) or not report.collection:
                    self._tell("committed", cut.step)
            elif isinstance(report, SaveFailed) and report.id == identity:
                waiting[rank] = set()
                self._tell("failed", cut.step, report.cause)
            elif isinstance(report, Freed) and report.id == identity:
                slots.discard((rank, report.slot))

    def _stage(self, rank: int, cut: Cut, identity: str) -> None:
        regions = plan(cut.scale, self.job.world)[rank]
        data = cut.file(regions)
        inner = [region.at for region in regions[1:] if region.at][: self.job.windows - 1]
        bounds = [0, *inner, len(data)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            with mmap.mmap(self.told[rank].slots[number], self.told[rank].slot_bytes) as slot:
                slot[: stop - start] = data[start:stop]
            self._send(
                rank,
                Window(id=identity, slot=number, start=start, stop=stop, last=stop == len(data)),
            )

    def _next(self) -> tuple[int, Report | None]:
        """One report of any agent, (rank, None) at the end of its stream.

        If one dies, the others hear Close: the job is over.
        """
        key, _ = self.living.select()[0]
        report = self.wires[key.data].receive()
        if report is None:
            self.living.unregister(key.fileobj)
            for rank in range(self.job.world):
                self.wires[rank].send(Close())
        return key.data, report


def save_here(
    root: Path,
    cut: Cut,
    world: int,
    disk: Disk | None = None,
    keep: int = 0,
    epoch: int = 0,
    on_commit: Callable[[], object] = lambda: None,
) -> list[Report]:
    """A save without processes: every rank's writer, then one commit; a new attempt unless `epoch`
    says which. Its reports.
    """
    control = root / "control"
    epoch = epoch or fence.take_epoch(control)
    storage = LocalStorage(root, disk or Disk())
    for rank in reversed(range(world)):
        told = settings(str(root), str(control), rank, world, epoch, [], 0)
        asked = begin(storage, cut, rank, world, f"e{epoch:04d}n0000", keep)
        writer = Writer(asked, told, storage, lambda count: None)
        data = memoryview(cut.file(asked.outputs[0].regions))
        writer.window(data[: len(data) // 2], 0)
        writer.window(data[len(data) // 2 :], len(data) // 2)
        writer.finish()
    reports: list[Report] = []

    def hear(report: Report) -> None:
        reports.append(report)
        if isinstance(report, Committed):
            on_commit()

    committer = Committer(storage, told, hear)
    committer.watch(asked, asked.outputs[0], time.monotonic())
    committer.look()
    return reports
