"""What `Progress` counts: groups, what fills a step, whose batch it is, how far a trainer is.

No I/O, no clock. Invariant: a group is never parted, so it is in one step at most.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from rft.ground.experience import Record


def oldest(*versions: int | None) -> int | None:
    """Of those that are known."""
    return min((version for version in versions if version is not None), default=None)


@dataclass
class Group:
    """One admitted task.

    `task` is dropped once it is stored; `version` is None while it waits for a restart, and then
    the oldest that a token of it may be of.
    """

    number: int
    explorer: str
    task: bytes
    version: int | None
    run_epoch: int
    stored: bool = False
    model_version: int | None = None  # the oldest that sampled any token of it
    uses: int = 0
    leased_at: float = 0.0
    most: int | None = None
    size: int = 0
    rows: int = 0
    # until it is stored: whether answers of engines to it are kept, and the oldest version of them
    kept: bool = False
    kept_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """Of those that sampled a token of it, or may yet; None where nobody knows."""
        if self.stored:
            return self.model_version
        return oldest(self.version, self.kept_version)


@dataclass(frozen=True)
class StepSize:
    """What fills a step: so many groups, whatever they hold; or, with `experiences`, the first
    groups that have as many together.

    A group is never parted, so it fills one step at most: it counts no more than a whole one, and
    as that where nobody knows how many experiences it may have.
    """

    groups: int
    experiences: int | None = None

    @property
    def units(self) -> int:
        return self.groups if self.experiences is None else self.experiences

    def of(self, group: Group) -> int:
        """What it counts: a finished group what it has, another the most that it may have."""
        if self.experiences is None:
            return 1
        known = max(group.size, 1) if group.stored else group.most
        return self.experiences if known is None else min(known, self.experiences)

    def are(self, groups: Iterable[Group]) -> int:
        return sum(map(self.of, groups))

    def first(self, groups: Iterable[Group]) -> list[Group]:
        """The fewest of them, in their order, that may fill a step; all, if they do not."""
        found, units = [], 0
        for group in groups:
            if units >= self.units:
                break
            found.append(group)
            units += self.of(group)
        return found

    def formed(self, groups: Collection[Group]) -> int:
        """How many steps these fill, one after the other, at most."""
        if self.experiences is None:
            return len(groups) // self.groups
        steps = units = 0
        for group in groups:
            units += self.of(group)
            if units >= self.units:
                steps, units = steps + 1, 0
        return steps

    def rest(self, groups: list[Group], steps: int) -> tuple[int, list[Group]]:
        """Of `steps` steps those that these do not fill, and the groups that are left over."""
        filled = units = end = 0
        for number, group in enumerate(groups, 1):
            if filled == steps:
                break
            units += self.of(group)
            if units >= self.units:
                filled, units, end = filled + 1, 0, number
        return steps - filled, groups[end:]


class Goal(Record, kw_only=True):
    """What a trainer is to take, for the others that share its groups.

    `steps`: counted from 0 on; None: it goes on as long as there are groups.
    """

    steps: int | None = None
    size: StepSize

    def rest(self, groups: list[Group], begin: int) -> tuple[int, list[Group]]:
        """As `StepSize.rest`, from step `begin` on."""
        steps = len(groups) + 1 if self.steps is None else max(self.steps - begin, 0)
        return self.size.rest(groups, steps)


def remember(told: list[list[Any]], lesson: list[Any]) -> None:
    """Keep a lesson, [taskset, draw, row, value]. One with a belief, [..., draw, belief], takes the
    place of all before that draw, so that what is kept does not grow with the run.
    """
    if len(lesson) > 4:
        name, before = lesson[0], lesson[4]
        told[:] = [
            old[:4] if old[0] == name else old for old in told if old[0] != name or old[1] >= before
        ]
    told.append(lesson)


def is_due(group: Group, step: int, max_staleness: int | None) -> bool:
    """Whether any step after `step` would train the group later than `max_staleness` allows."""
    return (
        max_staleness is not None
        and group.version is not None
        and step - group.version >= max_staleness
    )


def due(
    groups: Iterable[Group], step: int, size: StepSize, max_staleness: int | None
) -> list[Group]:
    """What `step` has to take of groups that wait, in admission order."""
    found, units = [], 0
    for group in groups:
        if units < size.units or is_due(group, step, max_staleness):
            found.append(group)
            units += size.of(group)
    return found


@dataclass
class Lease:
    """The batch of one step, and the run epoch that took it first.

    `uses`: of each group, where a replay buffer is on.
    """

    trainer: str
    run_epoch: int
    groups: list[Group]
    at: float = 0.0
    uses: list[int] = field(default_factory=list)

    @property
    def first(self) -> list[Group]:
        """Groups that are trained on for the first time."""
        if not self.uses:
            return self.groups
        return [group for group, uses in zip(self.groups, self.uses, strict=True) if uses == 1]


@dataclass
class Course:
    """A trainer's steps."""

    leases: dict[int, Lease] = field(default_factory=dict)
    next_step: int = 0  # the first step that has no lease
    oldest_step: int = 0  # leases before it may have been dropped
    finished: int = 0  # steps consumed = policy version of the trainer
    run_epoch: int = 0
    saved: int = 0  # of the newest checkpoint, where somebody else might get what it lacks
    handed: bool = False  # batches of it to others, since it resumed
    goal: Goal | None = None  # where it has a name

    def go_on(self, step: int) -> None:
        """Behind `step`, and behind all leases, also those that are forgotten."""
        self.next_step = max(step, self.oldest_step, max(self.leases, default=-1) + 1)

    def replays(self, step: int) -> list[int]:
        """Steps from `step` on that already have their batch."""
        return sorted(leased for leased in self.leases if leased >= step)

    def forgotten(self, published: int) -> int:
        """Steps from `published` on that were taken and are no longer known: a checkpoint may be
        complete, and its data gone, before anybody serves it.
        """
        return max(0, min(self.oldest_step, self.next_step) - published)

    def leased(self, published: int) -> list[Lease]:
        """From step `published` on."""
        return [self.leases[s] for s in range(published, self.next_step) if s in self.leases]


@dataclass
class Explored:
    """An explorer. `incarnation`: how many processes have begun as it. `trainer`: of its run, which
    may have to come yet; `goal`: what that one is to take.
    """

    incarnation: int = 0
    done: bool = False
    silent: bool = False
    trainer: str = ""
    goal: Goal | None = None
