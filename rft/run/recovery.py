"""How long ranks that died take to be back, and who sees to it that it is not longer.

    launcher (`rft.run.elastic`)   RankWatch: a rank dies ──► the moment, in `recovery.json` of the
                                   attempt's logs ──PEERS_S──► peers that hang in it are killed;
                                   KILLED_S where it was killed: they have nothing to tell
                                   the launcher has noticed, starts them again ──► written there too
    rank 0                         Recovery: marks while it starts ──► metrics `recovery/*` of its
                                   first step, one line, one event of the trace

In: deaths, as the kernel tells them; marks. Out: seconds of each part of a recovery, on the clock
that all processes of a machine share; how many finished steps are made again. Invariants: only the
death of a rank that failed is one; ranks of a first start have nothing to tell.
"""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft.ground import durable
from rft.ground.process import NamedThread
from rft.monitor import trace

RECORD = "recovery.json"
LOOK_S = 0.1  # for ranks that the launcher has begun since
PEERS_S = 2.0  # for the peers of a rank that failed to end by themselves, and say what they met
KILLED_S = 0.3  # the same of one that was killed: that is the cause, whatever they meet
# marks, in their order: what was done by then
MARKS = ("detect", "spawn", "imports", "groups", "build", "load", "begin", "first_step")


class RankWatch:
    """Around what starts `count` ranks as children of this process. `apart`: children that are no
    ranks, but may become some.
    """

    def __init__(
        self,
        log_dir: Path,
        count: int,
        peers_s: float = PEERS_S,
        killed_s: float = KILLED_S,
        apart: Callable[[], set[int]] = set,
    ):
        self.log_dir = log_dir
        self.count = count
        self.apart = apart
        self.peers_s = peers_s
        self.killed_s = killed_s
        self._died_at: float | None = None
        self._taken_at: float | None = None  # an end that the parent saw first, of any kind
        self._is_over = threading.Event()
        self._ranks: dict[int, int] = {}  # process numbers and what is held of each
        self._others = {child.pid for child in psutil.Process().children()} - apart()  # no ranks
        self._thread = NamedThread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> "RankWatch":
        self._thread.start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """They have all ended; `failed`: one not well."""
        self._is_over.set()
        self._thread.join()
        for descriptor in self._ranks.values():
            os.close(descriptor)
        if self._died_at is None and failed is not None:
            self._died_at = self._taken_at or time.monotonic()
        if self._died_at is not None:
            note(self.log_dir, self._died_at)

    def _run(self) -> None:
        ends, grace_s = select.poll(), self.peers_s
        while not self._is_over.is_set():
            # a look costs as much as there are processes on this machine
            is_whole = len(self._ranks) >= self.count
            children = [] if is_whole else [child.pid for child in psutil.Process().children()]
            for pid in set(children) - self._ranks.keys() - self._others - self.apart():
                with contextlib.suppress(ProcessLookupError):
                    self._ranks[pid] = os.pidfd_open(pid)
                    ends.register(self._ranks[pid], select.POLLIN)
            for descriptor, _ in ends.poll(1000 * LOOK_S):
                ends.unregister(descriptor)
                try:
                    how = failure_of(descriptor)
                except ChildProcessError:
                    self._taken_at = self._taken_at or time.monotonic()
                    continue
                if self._died_at is None and how is not None:
                    self._died_at = time.monotonic()
                    grace_s = self.killed_s if how == -signal.SIGKILL else self.peers_s
            died_at = self._died_at
            if died_at is not None and time.monotonic() > died_at + grace_s:
                for descriptor in self._ranks.values():  # also one that is seen only now
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def failure_of(descriptor: int) -> int | None:
    """Exit code of this child, which has ended, or less the signal that it died of; None: it ended
    well. That stays with its parent; ChildProcessError: the parent has it already.
    """
    ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is None or (ended.si_code == os.CLD_EXITED and ended.si_status == 0):
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def note(log_dir: Path, died_at: float) -> None:
    """That ranks have died, and this process knows it; on a full disk nothing is told."""
    record = {"died_at": died_at, "noticed_at": time.monotonic()}
    with contextlib.suppress(OSError):
        durable.put(log_dir / RECORD, json.dumps(record))


@dataclass
class Recovery:
    """Rank 0's, from its first line on. `clock`: of this boot of the machine."""

    died_at: float | None = None
    clock: Callable[[], float] = time.monotonic
    at: dict[str, float] = field(default_factory=dict)
    step: int = 0  # that was gone on from
    steps_again: int = 0
    source: str = ""
    read: tuple[int, float] = (0, 0.0)
    _is_told: bool = False

    @classmethod
    def of(cls, log_dir: Path) -> "Recovery":
        """What the launcher has written; takes it away, so that it is told once."""
        path = log_dir / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        except (OSError, ValueError):
            return cls()
        found = cls(record["died_at"])
        found.at["detect"] = record["noticed_at"]
        found.mark("spawn")
        return found

    def mark(self, name: str) -> None:
        """That is done now, for the first time."""
        self.at.setdefault(name, self.clock())

    def enter(self, phase: str) -> None:
        """Hears what the trainer does."""
        if phase == "wait_batch":
            self.mark("begin")
        elif phase == "judging the step":
            self.mark("first_step")

    def resumed(
        self, step: int, reached: int, source: str, read: tuple[int, float] = (0, 0.0)
    ) -> None:
        """`reached`: the last step that anybody knows of; `source`: of the state; `read`: bytes
        that this rank took from memory, and seconds, which are a part of the load.
        """
        self.mark("load")
        self.step, self.steps_again = step, max(0, reached - step)
        self.source, self.read = source, read

    def again(self) -> str:
        """Which steps are made again, in words; empty where none is, and a disk has said so."""
        first, last = self.step + 1, self.step + self.steps_again
        if not self.steps_again and self.source != "memory":
            return ""
        steps = f"steps {first} to {last} are" if first < last else f"step {first} is"
        steps = steps if self.steps_again else "no step is"
        where = f"{self.source or 'the start'} behind step {self.step}"
        return f"goes on from {where}: {steps} made again"

    def seconds(self) -> dict[str, float]:
        """Of each part, in order, since the one before; `total` up to the begin of the step."""
        if self.died_at is None:
            return {}
        found, before = {}, self.died_at
        for name in MARKS:
            if name in self.at:
                found[name], before = self.at[name] - before, self.at[name]
        if "begin" in self.at:
            found["total"] = self.at["begin"] - self.died_at
        return found

    def pop(self) -> dict[str, float]:
        """Metrics of the first step after a recovery; says them too. Then nothing."""
        if self.died_at is None or self._is_told or "first_step" not in self.at:
            return {}
        self._is_told = True
        seconds = self.seconds()
        print(f"trainer: {self.told(seconds)}", flush=True)
        metrics = {f"recovery/{name}_s": value for name, value in seconds.items()}
        metrics["recovery/steps_again"] = float(self.steps_again)
        metrics |= {"recovery/read_gb": self.read[0] / 1e9, "recovery/read_s": self.read[1]}
        trace.instant("recovered", **{name: round(value, 3) for name, value in metrics.items()})
        return metrics

    def told(self, seconds: dict[str, float]) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        return (
            f"back from {self.source or 'the start'}, {self.steps_again} step(s) made again; "
            f"seconds: {parts}"
        )
