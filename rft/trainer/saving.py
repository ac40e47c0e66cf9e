"""When a checkpoint is due: every so many steps, or minutes, or when somebody asks for one; and
what failed is tried again.

In: steps, what became of the saves before, a clock (rank 0's alone). Out: whether to save now, the
same on every rank. Invariant: every rank asks once per step, in step order; what only rank 0 can
know is shared before any rank goes by it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rft.checkpoint.asking import SaveRequests
from rft.checkpoint.records import Report, SaveFailed
from rft.config import Config

AGAIN_S = 60.0  # from a save that failed to the next try: a disk that is full stays so for a while


@dataclass
class SaveTimes:
    """`minutes`: 0: time alone makes none due. `share`: hands rank 0's word to every rank."""

    interval: int
    minutes: float
    share: Callable[[Any], Any]
    clock: Callable[[], float] = time.monotonic
    memory_interval: int = 0
    requests: SaveRequests | None = None  # rank 0's
    _since: float = field(init=False)  # when the last one was begun
    _step: int | None = None  # of that
    _has_failed: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    def is_due(self, step: int) -> bool:
        """A collective where the step's number does not say it."""
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

    def begun(self, step: int) -> None:
        self._since, self._step, self._has_failed = self.clock(), step, False
        if self.requests is not None:
            self.requests.begun(step)

    def hear(self, report: Report) -> None:
        """Only the last one is tried again: an older one that failed was given up for it."""
        if self.requests is not None:
            self.requests.hear(report)
        if isinstance(report, SaveFailed) and report.step == self._step:
            self._has_failed = True


def save_times(
    config: Config, share: Callable[[Any], Any], requests: SaveRequests | None = None
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
    )
