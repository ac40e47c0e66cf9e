"""A run by events: explorers, engines, trainer and weight pushes with random times, around the real
progress and the real style.

`Simulation(...).run()` returns when all steps are trained; `Standstill` says that nothing can
happen any more. Times are drawn from one seeded generator: rollouts with a long tail (Pareto),
training steps and pushes around their means. As in the loop, a push that was begun after a step is
waited for before the next update changes the weights, and slots are counted from the version that
the engines serve. The simulation keeps its own account: which version sampled which part of a
group, and what was published.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rft.buffer.progress import (
    Consumed,
    GroupFailed,
    Issued,
    Leased,
    Progress,
    Resumed,
    StepSize,
    Stored,
)
from rft.buffer.selection import BatchSelection
from rft.config import SynchronizerConfig
from rft.sync.style import Cadence


class Standstill(AssertionError):
    """Trainer and explorer wait for each other."""


@dataclass(frozen=True)
class Pace:
    """Mean durations, in steps of the trainer when `train` is 1."""

    rollout: float = 1.0
    train: float = 1.0
    push: float = 0.2
    failures: float = 0.02  # share of the groups


@dataclass
class Rollout:
    """One group under way: `versions` are those that its tokens were sampled from."""

    number: int
    versions: set[int]


@dataclass
class Simulation:
    sync: SynchronizerConfig
    seed: int
    pace: Pace = Pace()
    steps: int = 24
    tasks_per_step: int = 3
    runners: int = 6
    now: float = 0.0
    served: int = 0  # by the engines
    # in the order in which pushes were begun
    published: list[int] = field(default_factory=lambda: [0])
    asked: dict[int, tuple[bool, bool]] = field(
        default_factory=dict
    )  # after each step: the answer, and our own account
    trained: dict[int, list[Rollout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.size = StepSize(self.tasks_per_step)
        self.progress = Progress()
        self.progress.apply(Resumed(step=0, run_epoch=1))
        self.selection = BatchSelection(self.progress, self.size, None)  # its slots are ours
        self.cadence = Cadence(self.sync, self._ask)
        self.running: dict[int, Rollout] = {}
        self.done: dict[int, Rollout] = {}
        self.failed: set[int] = set()
        self.stored_before = 0
        self.finished = 0  # groups, since the version that is served came
        self.step = 0
        self.is_training = False
        self.pushing = False
        # the trainer stands before the update, a push is under way
        self.wants_update: Callable[[], None] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> "Simulation":
        while self.step < self.steps:
            self._admit()
            self._begin_step()
            if not self._events:
                raise Standstill(
                    f"step {self.step} with version {self.served} served: {len(self.running)} "
                    "groups run, "
                    f"{len(self.progress.stored())} are stored, {self._slots()} slots"
                )
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self

    # Explorer and engines

    def _slots(self) -> int:
        return self.progress.slots(self.served, self.size, int(self.sync.max_staleness or 0))

    def _admit(self) -> None:
        while (
            self._slots() > 0
            and len(self.running) < self.runners
            and self.selection.may_admit(None, self.steps)
        ):
            number = self.progress.next_group
            self._record(
                Issued, group=number, explorer="e", task=b"", cursor={}, version=self.served
            )
            self.running[number] = Rollout(number, {self.served})
            # mean 1, and one in a hundred takes six times as long
            length = (
                self.pace.rollout
                * (self.chance.paretovariate(1.6) * 0.375)
                * self.runners
                / self.tasks_per_step
            )
            self._after(length, lambda number=number: self._finish(number))

    def _finish(self, number: int) -> None:
        rollout = self.running.pop(number)
        if self.chance.random() < self.pace.failures:
            self._record(GroupFailed, group=number, reason="failed")
            self.failed.add(number)
            return
        self._record(Stored, group=number, experiences=b"")
        self.done[number] = rollout
        self.finished += 1

    def _ask(self, interval: int) -> bool:
        staleness = int(self.sync.max_staleness or 0)
        answer = self.progress.asks(self.served, self.stored_before, interval, self.size, staleness)
        admitted = self.progress.next_group - len(self.failed)
        is_idle = (
            not self.running and admitted >= (self.served + staleness + 1) * self.tasks_per_step
        )
        self.asked[self.step] = (answer, is_idle or self.finished >= interval * self.tasks_per_step)
        return answer

    # Trainer

    def _begin_step(self) -> None:
        if self.is_training or self.step >= self.steps:
            return
        groups = self.progress.wanted(self.step, self.size, self.sync.max_staleness)
        if len(groups) < self.tasks_per_step or not all(group.stored for group in groups):
            return
        numbers = [group.number for group in groups]
        self._record(Leased, step=self.step, trainer="t", run_epoch=1, groups=numbers)
        self.trained[self.step] = [self.done.pop(number) for number in numbers]
        self.is_training = True
        self._after(self.pace.train * self.chance.uniform(0.5, 1.5), self._before_update)

    def _before_update(self) -> None:
        if self.pushing:
            self.wants_update = self._update
        else:
            self._update()

    def _update(self) -> None:
        self.wants_update = None
        self.step += 1
        if self.cadence.is_due(self.step):
            self._push(self.step)
        self._record(Consumed, step=self.step - 1)
        self.is_training = False

    def _push(self, version: int) -> None:
        self.pushing = True
        self.cadence.published = version
        self.published.append(version)
        self._after(self.pace.push * self.chance.uniform(0.5, 1.5), lambda: self._served(version))

    def _served(self, version: int) -> None:
        self.pushing = False
        self.served, self.stored_before, self.finished = version, self.progress.num_stored, 0
        for rollout in self.running.values():  # their next token is of the new version
            rollout.versions.add(version)
        if self.wants_update is not None:
            self.wants_update()

    def _record(self, kind: Any, **fields: Any) -> None:
        self.progress.apply(kind(**fields))

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))
