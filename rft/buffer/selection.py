"""Which groups a step takes: a decision about `Progress`, without any I/O; and when it goes on
without its slowest groups (`explorer.over_rollout`), which ones those are, without a clock either.

    step's groups ── minimum of them stored ──► wait_s seconds
            ──► the others are cut: their explorers cancel them, and put what is finished of them
                or abandon them; the step takes the rest

In: the progress, what fills a step, how stale they may become, and a replay buffer where
there is one. Out: the groups of a step, or that it has to wait; what has to leave the queue;
whether enough of the wanted groups are there, and what each explorer has to cancel. Invariants:
without a replay buffer groups are taken in the order of their admission, so none becomes staler
than `max_staleness`, and none is left behind; a group leaves the step only by a journal record of
its own (failed, or stored), so that a restart finds the same batch.

With a replay buffer a group may be trained on more than once: which come first, and which stay for
another time, is a pure function of what is known of a group (the version that sampled it, how often
it was trained on, when last), the time and a seed, so a resumed run decides as the one before did;
what was decided is in the journal anyway.

    linear_decay                                    priority = version - decay * uses; always stays
    linear_decay_use_count_control_randomization    the same + N(0, sigma); stays while uses <
                                                    use_count_limit (0: always)
    decay_limit_randomization                       another name of the second

A group cools down for `reuse_cooldown_time` seconds after each use; without that time nothing is
used again, and only the order is another than that of admission.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from rft.buffer.groups import Goal
from rft.buffer.progress import Evicted, Group, Lease, Leased, Progress, StepSize
from rft.config.arguments import Options, options
from rft.config.buffer import ReplayBufferConfig
from rft.config.explorer import OverRolloutConfig

DECAY, SIGMA, USE_COUNT_LIMIT = 2.0, 0.0, 3
CONTROLLED = "linear_decay_use_count_control_randomization"


class Priority(Protocol):
    """Which groups come first, and for how long they stay."""

    def priority(self, version: float, uses: int, seed: str) -> float:
        """Of a group that was sampled by `version` and trained on so often: a function of these
        alone, for a resumed run asks again. `seed` is the group's.
        """

    def stays(self, uses: int) -> bool:
        """Whether a group that was used so often may be used again."""


@dataclass(frozen=True)
class LinearDecay:
    decay: float = DECAY

    def priority(self, version: float, uses: int, seed: str) -> float:
        return version - self.decay * uses

    def stays(self, uses: int) -> bool:
        return True


@dataclass(frozen=True)
class LinearDecayUseCountControl(LinearDecay):
    use_count_limit: int = USE_COUNT_LIMIT
    sigma: float = SIGMA

    def priority(self, version: float, uses: int, seed: str) -> float:
        """The same seed gives the same noise, in every process."""
        noise = random.Random(seed).gauss(0.0, self.sigma) if self.sigma > 0 else 0.0
        return version - self.decay * uses + noise

    def stays(self, uses: int) -> bool:
        return self.use_count_limit <= 0 or uses < self.use_count_limit


PRIORITIES: dict[str, Callable[..., Priority]] = {
    "linear_decay": LinearDecay,
    CONTROLLED: LinearDecayUseCountControl,
    "decay_limit_randomization": LinearDecayUseCountControl,
}


class Replay:
    """The order and the life of groups under one config."""

    def __init__(self, config: ReplayBufferConfig, seed: int) -> None:
        make = PRIORITIES[config.priority_fn]
        self.function = make(**numbers(config.priority_fn_args, options(make)))
        self.cooldown = config.reuse_cooldown_time
        self.capacity = config.capacity
        self.seed = seed

    def priority(self, group: Group) -> float:
        return self.function.priority(
            group.model_version or 0, group.uses, f"{self.seed}/{group.number}/{group.uses}"
        )

    def stays(self, group: Group) -> bool:
        """After its next use."""
        return self.cooldown is not None and self.function.stays(group.uses + 1)

    def free_at(self, group: Group) -> float:
        """When a group may be taken: at once if it never was."""
        return group.leased_at + (self.cooldown or 0.0) if group.uses else 0.0

    def rests(self, group: Group, now: float) -> bool:
        """Whether it cools down. The time of day outlives the process, and may be set back: what
        was used in the future rests no longer.
        """
        return group.leased_at <= now < self.free_at(group)

    def order(self, groups: Iterable[Group], now: float) -> list[Group]:
        """Those that may be taken, the highest priority first, of equal ones the oldest."""
        free = [group for group in groups if not self.rests(group, now)]
        return sorted(free, key=lambda group: (-self.priority(group), group.number))

    def wake(self, groups: Iterable[Group], now: float) -> float | None:
        """Seconds until the next one has cooled down."""
        return min(
            (self.free_at(group) - now for group in groups if self.rests(group, now)), default=None
        )

    def surplus(self, groups: list[Group]) -> list[Group]:
        """Those that must go while there are more than `capacity`:
        of the lowest priority, the oldest.
        """
        over = len(groups) - self.capacity
        if over <= 0:
            return []
        return sorted(groups, key=lambda group: (self.priority(group), group.number))[:over]


def numbers(given: dict[str, Any], known: Options) -> dict[str, Any]:
    """Names are checked before the run; numbers may have come as text."""
    kinds = {name: type(one.default) for name, one in known.items()}
    return {
        name: kinds[name](value) if kinds.get(name) in (int, float) else value
        for name, value in given.items()
    }


class BatchSelection:
    """`clock`: seconds since 1970; what it says goes into the journal with each lease.

    `trainer`: whose steps bound what explorers may begin, where several trainers share the groups.
    `in_order`: False, a step does not wait for unfinished groups, and takes the oldest stored ones.
    """

    def __init__(
        self,
        progress: Progress,
        size: StepSize,
        max_staleness: int | None,
        replay: Replay | None = None,
        clock: Callable[[], float] = time.time,
        trainer: str = "",
        in_order: bool = True,
    ) -> None:
        self.progress = progress
        self.size = size
        self.max_staleness = max_staleness
        self.replay = replay
        self.clock = clock
        self.trainer = trainer
        self.in_order = in_order

    def may_admit(
        self, published: int | None, total_steps: int | None, away: Collection[str] = ()
    ) -> bool:
        """Whether a new group may begin. `away`: of trainers and explorers, who is silent."""
        if total_steps is not None and self._missing(total_steps, away) <= 0:
            return False
        return self._is_soon(published)

    def may_restart(self, group: int, published: int | None) -> bool:
        """Whether an unfinished group may begin anew."""
        return group not in self.progress.waiting or self._is_soon(published, before=group)

    def _is_soon(self, published: int | None, before: int | None = None) -> bool:
        """Whether a group that begins now, there, is trained within `max_staleness`."""
        if self.max_staleness is None:
            return True
        if published is None:
            return False
        ahead = self.progress.steps_ahead(published, self.size, before, self.trainer)
        return ahead <= self.max_staleness

    def _missing(self, total_steps: int, away: Collection[str]) -> int:
        """How many of the steps before `total_steps`, and of those that other trainers are to take,
        are not filled yet, if none of the groups that wait fails or holds fewer than it may.
        """
        groups, others = self.progress.awaited(), 0
        for goal, begin in self.others(away):
            open_steps, groups = goal.rest(list(groups), begin)
            others += open_steps
        mine = total_steps - self.progress.course(self.trainer).next_step - self.size.formed(groups)
        return others + max(mine, 0)

    def others(self, away: Collection[str] = ()) -> list[tuple[Goal, int]]:
        """Of all trainers but this one: what each is to take, and its next step. Not of one that is
        `away`; nor of one that has to come yet, where all explorers of its run are, or know of no
        end, as a service, which may never have a trainer.
        """
        explorers, courses = self.progress.explorers, self.progress.courses
        known = [one for name, one in explorers.items() if name not in away]
        coming = {one.trainer: one.goal for one in known if one.goal and one.goal.steps is not None}
        goals = coming | {name: one.goal or coming.get(name) for name, one in courses.items()}
        return [
            (goal, self.progress.course(name).next_step)
            for name, goal in goals.items()
            if goal is not None and name != self.trainer and name not in away
        ]

    def is_supplied(self, total_steps: int | None, away: Collection[str] = ()) -> bool:
        """Whether all steps that are left have their experiences, so that no failure can ask for
        one more group.
        """
        return (
            total_steps is not None
            and not self.progress.has_running()
            and self._missing(total_steps, away) <= 0
        )

    def groups(self, step: int, input_done: bool, abandoned: bool) -> list[Group] | None:
        """What `step` takes, once all of it is there; empty when nothing will ever come. None: wait
        on.

        `abandoned`: there is no explorer, so what an earlier one left unfinished stays so.
        """
        if self.replay is not None:
            return self._by_priority(self.replay, input_done, abandoned)
        if abandoned:
            return self.size.first(self.progress.stored())
        groups = (
            self.progress.wanted(step, self.size, self.max_staleness)
            if self.in_order
            else self.size.first(self.progress.stored())
        )
        if not all(group.stored for group in groups):
            return None
        return groups if self.size.are(groups) >= self.size.units or input_done else None

    def _by_priority(self, replay: Replay, input_done: bool, abandoned: bool) -> list[Group] | None:
        """What was used before never makes a run longer than its input."""
        fresh = self.progress.stored()
        comes = not abandoned and (not input_done or self.progress.has_running())
        if not fresh and not comes:
            return []
        found = self.here()
        return found if self.size.are(found) >= self.size.units or not comes else None

    def here(self) -> list[Group]:
        """What a step could take at once: what fills it, maybe less."""
        if self.replay is None:
            return self.size.first(self.progress.stored())
        groups = [*self.progress.stored(), *self.progress.pool.values()]
        return self.size.first(self.replay.order(groups, self.clock()))

    def wake(self) -> float | None:
        """In how many seconds a group has cooled down, which nobody tells."""
        return self.replay.wake(self.progress.pool.values(), self.clock()) if self.replay else None

    def lease(self, step: int, trainer: str, groups: list[Group]) -> Leased:
        record = Leased(
            step=step,
            trainer=trainer,
            run_epoch=self.progress.course(trainer).run_epoch,
            groups=[group.number for group in groups],
        )
        if self.replay is not None:
            record.at = self.clock()
            record.uses = [group.uses + 1 for group in groups]
            record.kept = [group.number for group in groups if self.replay.stays(group)]
        return record

    def foreseen(self, step: int, groups: list[Group]) -> Lease:
        """The lease that `step` would have of these groups."""
        told = self.lease(step, "", groups)
        return Lease("", told.run_epoch, groups, told.at, told.uses)

    def too_old(self, min_model_version: int) -> Evicted | None:
        """Stored groups with a token from before this version: they
        are dropped when a step is taken.
        """
        groups = [*self.progress.stored(), *self.progress.pool.values()]
        old = [
            g.number
            for g in groups
            if g.model_version is not None and g.model_version < min_model_version
        ]
        return (
            Evicted(groups=old, reason=f"older than version {min_model_version}") if old else None
        )

    def surplus(self) -> Evicted | None:
        """What a full replay buffer has no room for."""
        if self.replay is None:
            return None
        over = self.replay.surplus([*self.progress.stored(), *self.progress.pool.values()])
        reason = f"more than replay_buffer.capacity={self.replay.capacity}"
        return Evicted(groups=[group.number for group in over], reason=reason) if over else None

    def late(self, step: int, groups: list[Group]) -> list[int]:
        """Those that `step` trains later than `max_staleness` allows."""
        limit = self.max_staleness
        if limit is None or self.replay is not None:
            return []
        return [
            group.number
            for group in groups
            if group.version is not None and step - group.version > limit
        ]


class OverRollout:
    def __init__(self, config: OverRolloutConfig, size: StepSize):
        self.is_on = config.ratio > 0
        self.size = size
        self.minimum = ceil(round((1 - config.ratio) * size.units, 9))  # 0.7 x 10 is 7
        self.wait_s = config.wait_after_min
        self._untold: dict[str, list[Group]] = {}  # by explorer
        self._cut = set[int]()  # of the last step that went on: no other waits for its cut ones

    def has_enough(self, wanted: list[Group]) -> bool:
        there = (group for group in wanted if group.stored)
        return self.is_on and self.size.are(there) >= self.minimum

    def cut(self, wanted: list[Group]) -> list[Group]:
        """Those that are not there; their explorers are told next."""
        late = [group for group in wanted if not group.stored]
        self._cut = {group.number for group in late}
        for group in late:
            self._untold.setdefault(group.explorer, []).append(group)
        return late

    def begin(self, explorer: str, unfinished: list[Group]) -> None:
        """A new process is `explorer`: what the last one was told of these, and has not ended, this
        one has to hear.
        """
        self._untold[explorer] = [group for group in unfinished if group.number in self._cut]

    def is_told(self, explorer: str) -> bool:
        return not self._untold.get(explorer)

    def tell(self, explorer: str) -> list[int]:
        """Numbers of the groups that `explorer` has to end, each told once to each process."""
        return [group.number for group in self._untold.pop(explorer, [])]
