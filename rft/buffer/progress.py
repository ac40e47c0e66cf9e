"""What has happened to every group: a pure state machine that the journal's records rebuild
exactly. No I/O, no clock.

    issued ──► stored ──► leased(step) ──► consumed(step)
       └─────► failed   └► evicted └─► kept for another step, where a replay buffer is on

In: `apply(record)`, for a record that was just journaled or is read back. Out: how many slots are
free, which groups a step takes, what an explorer has to run again, where its taskset continues.

Step k (counted from 0) trains policy version k into k + 1. Groups are numbered as they are admitted
and steps take them in that order. A group is active from issue until a version that contains its
step is published. A new one may start while those before it fill at most `max_staleness` steps from
the published version on (`steps_ahead`), whatever the unfinished ones turn out to hold: they count
as the most that they may have. It can therefore only end up in a step that is at most
`max_staleness` after the version published when it started, and nothing before it always lets it
start. After a restart the same bound decides when an unfinished group may start again, because it
starts anew on the version that is published then. What fills a step is `StepSize`.

Invariants: a group is leased at most once, for good (a resume replays the lease, it never
regroups); a group is either failed, evicted or in exactly one lease or still waiting, so none is
lost and none is trained twice. A replay buffer loosens this for the groups that a lease names as
kept: these alone may be in a later lease too.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from rft.ground.experience import Record


class Issued(Record, tag="issued", kw_only=True):
    """`explorer` may run `task` as group `group`; its taskset continues at `cursor`."""

    group: int
    explorer: str
    task: bytes
    cursor: dict[str, Any]
    version: int | None = None  # published at the start; None where staleness is not limited
    run_epoch: int = 0
    most: int | None = None  # experiences that it may have; None: nobody knows


class Attached(Record, tag="attached", kw_only=True):
    """A new process is `explorer`: what the last one left
    unfinished waits until it is restarted.
    """

    explorer: str


class Restarted(Record, tag="restarted", kw_only=True):
    """An unfinished group runs again."""

    group: int
    version: int | None = None
    run_epoch: int = 0


class Stored(Record, tag="stored", kw_only=True):
    """The experiences of a group, an encoded list.

    `told`: what its explorer's task selector learned of it.
    """

    group: int
    experiences: bytes
    version: int | None = None  # the oldest that sampled any token of it
    told: list[Any] | None = None
    size: int = 0  # experiences that are trained on


class GroupFailed(Record, tag="failed", kw_only=True):
    """The group will never have experiences."""

    group: int
    reason: str


class Leased(Record, tag="leased", kw_only=True):
    """These groups are the batch of `step`."""

    step: int
    trainer: str
    run_epoch: int
    groups: list[int]
    at: float = 0.0  # seconds since 1970; with a replay buffer only, like the next two
    uses: list[int] = []  # of each group, with this lease
    kept: list[int] = []  # groups that a later step may take again


class Evicted(Record, tag="evicted", kw_only=True):
    """Stored groups that no step will take, or take again."""

    groups: list[int]
    reason: str


class Pooled(Record, tag="pooled", kw_only=True):
    """In a compacted file: these groups, and no others, are kept for later steps."""

    groups: list[int]
    uses: list[int]
    at: list[float]


class Consumed(Record, tag="consumed", kw_only=True):
    """The trainer has finished `step`."""

    step: int


class Resumed(Record, tag="resumed", kw_only=True):
    """A trainer begins at `step` (= its policy version) under a new run epoch."""

    step: int
    run_epoch: int


class Stood(Record, tag="stood", kw_only=True):
    """How the parts of one start of the run stand with the buffer; each takes the last one's place.

    For a buffer that comes back while the others live on. A later start has another `life`, and
    begins without it.
    """

    life: str
    published: int | None = None  # unknown until a trainer says where it begins
    done_before: int = 0  # groups or experiences stored when that version was published
    attached: set[str] = set()
    done: set[str] = set()
    all_done: bool = False
    exploring: set[str] = set()  # let go, since a trainer attached
    stopped: str = ""  # why no more batches are given out
    stop_is_failure: bool = False

    def serve(self, version: int, done: int) -> None:
        self.published, self.done_before = version, done


class Folded(Record, tag="folded", kw_only=True):
    """What dropped records add up to; the last record of a compacted file."""

    next_group: int
    oldest_step: int
    next_step: int
    finished: int
    run_epoch: int
    cursors: dict[str, dict[str, Any]]
    num_stored: int
    num_failed: int
    num_evicted: int = 0
    num_experiences: int = 0
    told: dict[str, list[list[Any]]] = {}


JournalRecord = (
    Issued
    | Attached
    | Restarted
    | Stored
    | GroupFailed
    | Leased
    | Evicted
    | Pooled
    | Consumed
    | Resumed
    | Stood
    | Folded
)
_decoder = msgspec.msgpack.Decoder(JournalRecord)


def decode_record(payload: bytes) -> JournalRecord:
    return _decoder.decode(payload)


@dataclass
class Group:
    """One admitted task.

    `task` is dropped once it is stored; `version` is None while it waits for a restart.
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


def _is_same(pair: tuple[Group, tuple[bytes, Any]]) -> bool:
    return pair[0].task == pair[1][0]


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
    """`Progress.wanted` of groups that wait, in admission order."""
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
class Progress:
    """The state.

    `waiting` are the groups that no step has taken, in admission order; `pool` those that one may
    take again.
    """

    waiting: dict[int, Group] = field(default_factory=dict)
    pool: dict[int, Group] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    cursors: dict[str, dict[str, Any]] = field(default_factory=dict)
    next_group: int = 0
    next_step: int = 0  # the first step that has no lease
    oldest_step: int = 0  # leases before it may have been dropped
    finished: int = 0  # steps consumed = policy version of the trainer
    run_epoch: int = 0
    num_stored: int = 0
    num_failed: int = 0
    num_evicted: int = 0
    num_experiences: int = 0  # of all groups that were stored
    # by explorer, what its task selector learned of its groups: `remember`
    told: dict[str, list[list[Any]]] = field(default_factory=dict)
    stood: Stood | None = None  # the last of them

    # Records

    def apply(self, record: JournalRecord) -> None:
        """Take one record into the state, in the order of the journal."""
        match record:
            case Issued():
                self.waiting[record.group] = Group(
                    record.group,
                    record.explorer,
                    record.task,
                    record.version,
                    record.run_epoch,
                    most=record.most,
                )
                self.next_group = max(self.next_group, record.group + 1)
                self.cursors[record.explorer] = record.cursor
            case Stored():
                group = self.waiting[record.group]
                group.stored, group.task = True, b""
                group.model_version = (
                    record.version if record.version is not None else group.version
                )
                group.size = record.size
                self.num_stored += 1
                self.num_experiences += record.size
                if record.told is not None:
                    remember(self.told.setdefault(group.explorer, []), record.told)
            case GroupFailed():
                del self.waiting[record.group]
                self.num_failed += 1
            case Leased():
                self._lease(record)
            case Evicted():
                for number in record.groups:
                    self.waiting.pop(number, None) or self.pool.pop(number)
                self.num_evicted += len(record.groups)
            case Pooled():
                found = self.pool | self.waiting
                self.pool = {number: found[number] for number in record.groups}
                self.waiting = {n: group for n, group in self.waiting.items() if n not in self.pool}
                for number, uses, at in zip(record.groups, record.uses, record.at, strict=True):
                    self.pool[number].uses, self.pool[number].leased_at = uses, at
            case Consumed():
                self.finished = max(self.finished, record.step + 1)
            case Attached():
                for group in self.unfinished(record.explorer):
                    group.version = None
            case Restarted():
                group = self.waiting[record.group]
                group.version, group.run_epoch = record.version, record.run_epoch
            case Resumed():
                self.finished, self.run_epoch = record.step, record.run_epoch
                self.next_step = max(record.step, max(self.leases, default=-1) + 1)
            case Stood():
                self.stood = record
            case Folded():
                for name in Folded.__struct_fields__:
                    setattr(self, name, getattr(record, name))

    def _lease(self, record: Leased) -> None:
        groups = [
            self.waiting.pop(number, None) or self.pool.pop(number) for number in record.groups
        ]
        self.leases[record.step] = Lease(
            record.trainer, record.run_epoch, groups, record.at, record.uses
        )
        self.next_step = max(self.next_step, record.step + 1)
        for group, uses in zip(groups, record.uses, strict=False):
            group.uses, group.leased_at = uses, record.at
            if group.number in record.kept:
                self.pool[group.number] = group

    # Admission

    def steps_ahead(self, published: int, size: StepSize, before: int | None = None) -> int:
        """Steps from `published` on that are taken, or filled by the groups that wait; `before`: by
        those in front of this one.
        """
        waiting: Collection[Group] = self.waiting.values()
        if before is not None:
            waiting = [group for group in waiting if group.number < before]
        leases = [self.leases[s] for s in range(published, self.next_step) if s in self.leases]
        forgotten = self._forgotten(published)
        if any(lease.uses for lease in leases):  # not in the order of admission
            again = sum(size.are(lease.first) for lease in leases)
            return forgotten + (again + size.are(waiting)) // size.units
        return forgotten + len(leases) + size.formed(waiting)

    def _forgotten(self, published: int) -> int:
        """Steps from `published` on that were taken and are no longer known: a checkpoint may be
        complete, and its data gone, before anybody serves it.
        """
        return max(0, min(self.oldest_step, self.next_step) - published)

    def slots(self, published: int, size: StepSize, max_staleness: int) -> int:
        """How many groups, or experiences, are missing until no group may start; negative after a
        resume to an older version.
        """
        leases = [self.leases[s] for s in range(published, self.next_step) if s in self.leases]
        taken = sum(size.are(lease.first) if lease.uses else size.units for lease in leases)
        taken += self._forgotten(published) * size.units
        return (max_staleness + 1) * size.units - taken - size.are(self.waiting.values())

    def missing(self, total_steps: int, size: StepSize) -> int:
        """How many of the steps before `total_steps` are not filled yet, if none of the groups that
        wait fails or holds fewer than it may.
        """
        return total_steps - self.next_step - size.formed(self.waiting.values())

    def done(self, size: StepSize) -> int:
        """Groups, or experiences, that were stored, in all of the run."""
        return self.num_stored if size.experiences is None else self.num_experiences

    def asks(
        self,
        published: int,
        done_before: int,
        interval: int,
        size: StepSize,
        max_staleness: int | None,
    ) -> bool:
        """Whether explorers want a version after `published`: they have finished `interval` steps'
        worth of groups since, or all that they may start with it. `done_before`: `done` when it was
        published.
        """
        if self.done(size) - done_before >= interval * size.units:
            return True
        no_slots = max_staleness is not None and self.steps_ahead(published, size) > max_staleness
        return no_slots and not self.has_running()

    # Steps

    def wanted(self, step: int, size: StepSize, max_staleness: int | None) -> list[Group]:
        """The groups that `step` has to take: the next ones in admission order.

        More than fill it only when an earlier step was incomplete: then those that the next step
        could only train too late come along.
        """
        return due(self.waiting.values(), step, size, max_staleness)

    def has_running(self) -> bool:
        return any(not group.stored for group in self.waiting.values())

    def stored(self) -> list[Group]:
        """Groups that have experiences and no lease."""
        return [group for group in self.waiting.values() if group.stored]

    # Restarts

    def check_resume(self, step: int) -> None:
        if step < self.oldest_step:
            raise ValueError(
                f"cannot resume at step {step}: "
                f"the journal was cut and keeps batches from step {self.oldest_step} on. "
                "Resume from a newer checkpoint, or begin with an empty buffer directory."
            )

    def replays(self, step: int) -> list[int]:
        """Steps from `step` on that already have their batch."""
        return sorted(leased for leased in self.leases if leased >= step)

    def unfinished(self, explorer: str) -> list[Group]:
        """Groups of `explorer` that were issued and have neither experiences nor failed, in
        admission order.
        """
        return [
            group
            for group in self.waiting.values()
            if group.explorer == explorer and not group.stored
        ]

    def begun(
        self, explorer: str, tasks: Sequence[tuple[bytes, Any]], heard: int | None
    ) -> list[int]:
        """Groups behind `heard` that were begun for the first of these tasks: their explorer asks
        again, and was not answered.
        """
        behind = [
            group
            for group in self.unfinished(explorer)
            if heard is not None and group.number > heard
        ]
        pairs = zip(behind, tasks, strict=False)
        return [group.number for group, (task, _) in takewhile(_is_same, pairs)]

    def where(self) -> str:
        """For messages: what is there, and what is waited for."""
        running = [number for number, group in self.waiting.items() if not group.stored]
        first = ", ".join(map(str, running[:8])) + (", ..." if len(running) > 8 else "")
        return f"{len(self.stored())} groups ready, {len(running)} running: {first or 'none'}"

    # Retention

    def forget(self, oldest_step: int) -> None:
        """Drop the batches before `oldest_step`: no retained checkpoint resumes there."""
        self.leases = {step: lease for step, lease in self.leases.items() if step >= oldest_step}
        self.oldest_step = max(self.oldest_step, oldest_step)

    def survivors(self) -> Iterable[JournalRecord]:
        """Records that rebuild this state.

        `Stored` ones come without experiences: the caller puts them in.
        """
        groups = (
            self.waiting
            | self.pool
            | {g.number: g for lease in self.leases.values() for g in lease.groups}
        )
        for _, group in sorted(groups.items()):
            yield Issued(
                group=group.number,
                explorer=group.explorer,
                task=group.task,
                cursor={},
                version=group.version,
                run_epoch=group.run_epoch,
                most=group.most,
            )
            if group.stored:
                yield Stored(
                    group=group.number,
                    experiences=b"",
                    version=group.model_version,
                    size=group.size,
                )
        for step, lease in sorted(self.leases.items()):
            yield Leased(
                step=step,
                trainer=lease.trainer,
                run_epoch=lease.run_epoch,
                groups=[group.number for group in lease.groups],
                at=lease.at,
                uses=lease.uses,
                # for the leases behind, then `Pooled`
                kept=[group.number for group in lease.groups] if lease.uses else [],
            )
        if any(lease.uses for lease in self.leases.values()) or self.pool:
            pool = self.pool.values()
            yield Pooled(
                groups=list(self.pool),
                uses=[group.uses for group in pool],
                at=[group.leased_at for group in pool],
            )
        if self.stood is not None:
            yield self.stood
        yield Folded(**{name: getattr(self, name) for name in Folded.__struct_fields__})
