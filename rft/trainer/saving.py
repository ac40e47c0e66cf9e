"""When a checkpoint is due: every so many steps, or minutes, or when somebody asks for one; and
what failed is tried again. And whether the disk follows.

In: steps, what became of the saves before, a clock (rank 0's alone). Out: whether to save now, the
same on every rank; of an interval that is too short one line, with the one that the disk sustains.
Invariant: every rank asks once per step, in step order; what only rank 0 can know is shared before
any rank goes by it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from rft.checkpoint.asking import SaveRequests
from rft.checkpoint.records import Report, SaveFailed
from rft.config import Config

AGAIN_S = 60.0  # from a save that failed to the next try: a disk that is full stays so for a while
# saves in a row that were begun while an older one was not on the disk; the first ones only fill
# the slots, and those behind them come as the disk gives slots back
FILLING, QUEUED = 2, 5
WAITED = 0.05  # of the time between them, by training: less is not worth a word


@dataclass
class DiskPace:
    """Rank 0's: whether saves reach the disk as often as they are begun. `say` hears it, once."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    steps: int = 0
    waited_s: float = 0.0  # by training, for slots and copies
    lost: int = 0  # saves that were skipped, or given up for a newer one
    _queued: int = 0
    _since: tuple[float, int, float, int] = (0.0, 0, 0.0, 0)  # the slots were filled
    _is_said: bool = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what training waits in, if a disk has no slot for it."""
        before = self.clock()
        yield
        self.waited_s += self.clock() - before

    def begun(self, interval: int, is_behind: bool) -> None:
        """A save by `interval`, 0: by minutes. `is_behind`: an older one is not on the disk yet."""
        now = (self.clock(), self.steps, self.waited_s, self.lost)
        self._queued = self._queued + 1 if is_behind else 0
        if self._queued <= FILLING:
            self._since = now
        if self._queued < QUEUED or self._is_said:
            return
        wall_s, steps, waited_s, lost = (
            after - before for after, before in zip(now, self._since, strict=True)
        )
        if steps and (lost or waited_s > WAITED * wall_s):
            self._is_said = True
            self.say(
                self._told(interval, wall_s / (self._queued - FILLING), (wall_s - waited_s) / steps)
            )

    def _told(self, interval: int, save_s: float, step_s: float) -> str:
        steps = max(interval, int(save_s / max(step_s, 1e-9))) + 1
        what = f"trainer.save_interval={steps}"
        if not interval:
            what = f"trainer.save_minutes={ceil(save_s / 6) / 10:g}"
        return (
            f"the disk does not follow: a checkpoint takes {save_s:.2f} s, a step {step_s:.2f} s "
            f"without waiting for it; {what} is what it sustains (trainer.memory_interval=1 keeps "
            "every state in memory beside)"
        )


@dataclass
class SaveTimes:
    """`minutes`: 0: time alone makes none due. `share`: hands rank 0's word to every rank. `pace`:
    rank 0's.
    """

    interval: int
    minutes: float
    share: Callable[[Any], Any]
    clock: Callable[[], float] = time.monotonic
    memory_interval: int = 0
    requests: SaveRequests | None = None  # rank 0's
    pace: DiskPace = field(default_factory=lambda: DiskPace(lambda line: None))
    _since: float = field(init=False)  # when the last one was begun
    _step: int | None = None  # of that
    _has_failed: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    def is_due(self, step: int) -> bool:
        """A collective where the step's number does not say it."""
        self.pace.steps += 1
        if self.interval and step % self.interval == 0:
            return True
        waited = self.clock() - self._since
        by_time = self.minutes > 0 and waited >= 60 * self.minutes
        is_asked = self.requests is not None and self.requests.is_asked()
        again = self._has_failed and waited >= AGAIN_S
        shared: bool = self.share(by_time or again or is_asked)
        return shared

    def is_kept(self, step: int, is_first: bool) -> bool:
        """Whether the state of this step is kept in memory; the first one is, whichever it is."""
        return self.memory_interval > 0 and (is_first or step % self.memory_interval == 0)

    def begun(self, step: int, newest: int) -> None:
        """`newest`: step of the newest that is on the disk."""
        self.pace.begun(self.interval, is_behind=self._step is not None and newest < self._step)
        self._since, self._step, self._has_failed = self.clock(), step, False
        if self.requests is not None:
            self.requests.begun(step)

    def hear(self, report: Report) -> None:
        """Only the last one is tried again: an older one that failed was given up for it."""
        if self.requests is not None:
            self.requests.hear(report)
        if isinstance(report, SaveFailed) and report.step == self._step:
            self._has_failed = True
        elif isinstance(report, SaveFailed):
            self.pace.lost += 1


def save_times(
    config: Config,
    share: Callable[[Any], Any],
    requests: SaveRequests | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> SaveTimes:
    """Minutes are for whoever has set no interval; what is to be repeated bit by bit goes by steps
    alone.
    """
    trainer = config.trainer
    by_steps = trainer.save_interval > 0 or config.deterministic
    minutes = 0.0 if by_steps else trainer.save_minutes
    return SaveTimes(
        trainer.save_interval,
        minutes,
        share,
        memory_interval=trainer.memory_interval,
        requests=requests,
        pace=DiskPace(say),
    )
