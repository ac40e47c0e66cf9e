"""What has happened to every group: a pure state machine that the journal's records rebuild
exactly. No I/O, no clock.

    issued ──► answered ... ──► stored ──► leased(step) ──► consumed(step)
       └──────────┴─────► failed   └► evicted └─► kept for another step, where a replay buffer is on

In: `apply(record)`, for a record that was just journaled or is read back. Out: how many slots are
free, which groups a step takes, what an explorer has to run again, where its taskset continues.

Step k (counted from 0) trains policy version k into k + 1. Groups are numbered as they are admitted
and steps take them in that order. A group is active from issue until a version that contains its
step is published. A new one may start while those before it fill at most `max_staleness` steps from
the published version on (`steps_ahead`), whatever the unfinished ones turn out to hold: they count
as the most that they may have. It can therefore only end up in a step that is at most
`max_staleness` after the version published when it started, and nothing before it always lets it
start. After a restart the same bound decides when an unfinished group may start again, on the
version that is published then; what engines have answered to it before is kept, and its versions
with it: the step that it ends up in only comes nearer. What fills a step is `StepSize`.

Invariants: a group is leased at most once, for good (a resume replays the lease, it never
regroups); a group is either failed, evicted or in exactly one lease or still waiting, so none is
lost and none is trained twice. A replay buffer loosens this for the groups that a lease names as
kept: these alone may be in a later lease too.

Several trainers share the groups of a database: one that resumes under a name has a course of its
own, of steps, leases and versions; one without a name is alone. Batches of one that is silent are
handed over: a record puts the groups back where they waited, for whoever takes them next. What an
explorer that is silent, or done, has not finished is not waited for.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from rft.buffer.groups import Course, Explored, Goal, Group, Lease, StepSize, due, oldest, remember
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
    """A new process is `explorer`: what the last one left waits until it is restarted."""

    explorer: str
    incarnation: int = 0  # processes that have begun as it, with this one; 0: one more
    trainer: str = ""  # of its run, where there may be several, and what that one is to take
    goal: Goal | None = None


class Restarted(Record, tag="restarted", kw_only=True):
    """An unfinished group runs again."""

    group: int
    version: int | None = None
    run_epoch: int = 0


class Answered(Record, tag="answered", kw_only=True):
    """What engines have answered to a group that is not finished, an encoded list of
    `rft.rollout.answers.AnsweredSample`. Behind its experiences, or its failure, it says nothing.
    """

    group: int
    answers: bytes
    version: int | None = None  # the oldest that sampled any token of it


class Stored(Record, tag="stored", kw_only=True):
    """The experiences of a group, an encoded list.

    `told`: what its explorer's task selector learned of it.
    """

    group: int
    experiences: bytes
    version: int | None = None  # the oldest that sampled any token of it
    told: list[Any] | None = None
    size: int = 0  # experiences that are trained on
    rows: int = 0  # experiences, where these lie in a table


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
    trainer: str = ""  # where there are several, like in the records below


class Resumed(Record, tag="resumed", kw_only=True):
    """A trainer begins at `step` (= its policy version) under a new run epoch."""

    step: int
    run_epoch: int
    trainer: str = ""
    goal: Goal | None = None


class StepSaved(Record, tag="saved", kw_only=True):
    """A checkpoint of `step` is complete: the batches before it are the trainer's for good."""

    step: int
    trainer: str


class Handed(Record, tag="handed", kw_only=True):
    """The batches of these steps of a trainer that was silent for a lease are free again: what it
    has made of them counts no more, until it resumes.
    """

    trainer: str
    steps: list[int]


class Forgotten(Record, tag="forgotten", kw_only=True):
    """No retained checkpoint of this trainer resumes before `step`."""

    step: int
    trainer: str


class InputEnded(Record, tag="input_ended", kw_only=True):
    """The taskset of this explorer is exhausted."""

    explorer: str


class Silent(Record, tag="silent", kw_only=True):
    """These explorers were not heard of for a lease; or they are back."""

    explorers: list[str]
    back: bool = False


class Began(Record, tag="began", kw_only=True):
    """What follows, up to `Folded`, stands for all that was before."""


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
    Issued | Attached | Restarted | Answered | Stored | GroupFailed | Leased | Evicted | Pooled
    | Consumed | Resumed | StepSaved | Handed | Forgotten | InputEnded | Silent | Began | Stood
    | Folded
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(JournalRecord)


def decode_record(payload: bytes) -> JournalRecord:
    return _decoder.decode(payload)


def _is_same(pair: tuple[Group, tuple[bytes, Any]]) -> bool:
    return pair[0].task == pair[1][0]


@dataclass
class Progress(Course):
    """The state; itself the course of a trainer that is alone.

    `waiting` are the groups that no step has taken, in admission order; `pool` those that one may
    take again.
    """

    waiting: dict[int, Group] = field(default_factory=dict)
    pool: dict[int, Group] = field(default_factory=dict)
    courses: dict[str, Course] = field(default_factory=dict)  # of trainers with names
    cursors: dict[str, dict[str, Any]] = field(default_factory=dict)
    explorers: dict[str, Explored] = field(default_factory=dict)
    next_group: int = 0
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
                group.size, group.rows = record.size, record.rows
                group.kept, group.kept_version = False, None
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
            case Attached() | InputEnded() | Silent():
                self._hear(record)
            case Restarted():
                group = self.waiting[record.group]
                group.version, group.run_epoch = record.version, record.run_epoch
                if record.version is not None:
                    group.version = oldest(record.version, group.kept_version)
            case Answered():
                self._answer(record)
            case Began():
                vars(self).update(vars(Progress()))
            case Stood():
                self.stood = record
            case Folded():
                for name in Folded.__struct_fields__:
                    setattr(self, name, getattr(record, name))
            case _:
                self._go(record)

    def _answer(self, record: Answered) -> None:
        if not self.is_open(record.group):
            return
        group = self.waiting[record.group]
        group.kept, group.kept_version = True, oldest(group.kept_version, record.version)

    def _hear(self, record: Attached | InputEnded | Silent) -> None:
        """What concerns explorers."""
        match record:
            case Attached():
                incarnation = record.incarnation or self.explorer(record.explorer).incarnation + 1
                begun = Explored(incarnation, trainer=record.trainer, goal=record.goal)
                self.explorers[record.explorer] = begun
                for group in self.unfinished(record.explorer):
                    group.version = None
            case InputEnded():
                self.explorer(record.explorer).done = True
            case Silent():
                for name in record.explorers:
                    self.explorer(name).silent = not record.back

    def _go(self, record: Resumed | Consumed | StepSaved | Handed | Forgotten) -> None:
        """What concerns one trainer."""
        if isinstance(record, Resumed) and record.trainer:
            self.courses.setdefault(record.trainer, Course(saved=record.step))
        course = self.course(record.trainer)
        match record:
            case Resumed():
                course.finished, course.run_epoch = record.step, record.run_epoch
                course.handed, course.goal = False, record.goal
                course.go_on(record.step)
            case Consumed():
                course.finished = max(course.finished, record.step + 1)
            case StepSaved():
                course.saved = max(course.saved, record.step)
            case Handed():
                for step in record.steps:
                    self.waiting |= {g.number: g for g in course.leases.pop(step).groups}
                self.waiting = dict(sorted(self.waiting.items()))
                course.handed = True
                course.go_on(course.finished)
            case Forgotten():
                self.forget(record.step, record.trainer)
                course.next_step = max(course.next_step, course.oldest_step)

    def course(self, trainer: str = "") -> Course:
        """Of this trainer: its own, if it has begun under this name."""
        return self.courses.get(trainer, self)

    def explorer(self, name: str) -> Explored:
        return self.explorers.setdefault(name, Explored())

    def _lease(self, record: Leased) -> None:
        course = self.course(record.trainer)
        groups = [
            self.waiting.pop(number, None) or self.pool.pop(number) for number in record.groups
        ]
        course.leases[record.step] = Lease(
            record.trainer, record.run_epoch, groups, record.at, record.uses
        )
        course.next_step = max(course.next_step, record.step + 1)
        for group, uses in zip(groups, record.uses, strict=False):
            group.uses, group.leased_at = uses, record.at
            if group.number in record.kept:
                self.pool[group.number] = group

    # Admission

    def awaited(self) -> Collection[Group]:
        """Groups that no step has taken, less those that nobody works on."""
        away = {name for name, one in self.explorers.items() if one.done or one.silent}
        waiting = self.waiting.values()
        return [g for g in waiting if g.stored or g.explorer not in away] if away else waiting

    def steps_ahead(
        self, published: int, size: StepSize, before: int | None = None, trainer: str = ""
    ) -> int:
        """Steps from `published` on that are taken, or filled by the groups that wait; `before`: by
        those in front of this one.
        """
        waiting = self.awaited()
        if before is not None:
            waiting = [group for group in waiting if group.number < before]
        course = self.course(trainer)
        leases, forgotten = course.leased(published), course.forgotten(published)
        if any(lease.uses for lease in leases):  # not in the order of admission
            again = sum(size.are(lease.first) for lease in leases)
            return forgotten + (again + size.are(waiting)) // size.units
        return forgotten + len(leases) + size.formed(waiting)

    def slots(self, published: int, size: StepSize, max_staleness: int) -> int:
        """How many groups, or experiences, are missing until no group may start; negative after a
        resume to an older version.
        """
        leases = self.leased(published)
        taken = sum(size.are(lease.first) if lease.uses else size.units for lease in leases)
        taken += self.forgotten(published) * size.units
        return (max_staleness + 1) * size.units - taken - size.are(self.waiting.values())

    def oldest_version(self) -> int | None:
        """Of those that sampled a token which may be trained, or may yet sample one of a group that
        is under way; None where no group says which.
        """
        leased = (group for lease in self.leases.values() for group in lease.groups)
        groups = (*leased, *self.pool.values(), *self.waiting.values())
        return oldest(*(group.oldest_version for group in groups))

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
        trainer: str = "",
    ) -> bool:
        """Whether explorers want a version after `published`: they have finished `interval` steps'
        worth of groups since, or all that they may start with it. `done_before`: `done` when it was
        published.
        """
        if self.done(size) - done_before >= interval * size.units:
            return True
        if max_staleness is None or self.has_running():
            return False
        return self.steps_ahead(published, size, trainer=trainer) > max_staleness

    # Steps

    def wanted(self, step: int, size: StepSize, max_staleness: int | None) -> list[Group]:
        """The groups that `step` has to take: the next ones in admission order.

        More than fill it only when an earlier step was incomplete: then those that the next step
        could only train too late come along.
        """
        return due(self.awaited(), step, size, max_staleness)

    def has_running(self) -> bool:
        return any(not group.stored for group in self.awaited())

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

    def is_open(self, number: int) -> bool:
        """Whether the group was issued, and has neither experiences nor failed."""
        group = self.waiting.get(number)
        return group is not None and not group.stored

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

    def forget(self, oldest_step: int, trainer: str = "") -> None:
        """Drop the batches before `oldest_step`: no retained checkpoint resumes there."""
        course = self.course(trainer)
        course.leases = {step: held for step, held in course.leases.items() if step >= oldest_step}
        course.oldest_step = max(course.oldest_step, oldest_step)

    def held(self) -> dict[int, Group]:
        """All groups that are known, by number."""
        found = self.waiting | self.pool
        for lease in self._leases():
            found |= {group.number: group for group in lease.groups}
        return dict(sorted(found.items()))

    def _leases(self) -> list[Lease]:
        courses = [self, *self.courses.values()]
        return [lease for course in courses for _, lease in sorted(course.leases.items())]

    def survivors(self) -> Iterable[JournalRecord]:
        """Records that rebuild this state.

        `Stored` ones come without experiences, and one `Answered` of a group stands for all: the
        caller puts in what they hold.
        """
        yield from self._known()
        for group in self.held().values():
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
                    rows=group.rows,
                )
            elif group.kept:
                yield Answered(group=group.number, answers=b"", version=group.kept_version)
        for course in (self, *self.courses.values()):
            for step, lease in sorted(course.leases.items()):
                groups = [group.number for group in lease.groups]
                yield Leased(
                    step=step,
                    trainer=lease.trainer,
                    run_epoch=lease.run_epoch,
                    groups=groups,
                    at=lease.at,
                    uses=lease.uses,
                    kept=groups if lease.uses else [],  # for the leases behind, then `Pooled`
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

    def _known(self) -> Iterable[JournalRecord]:
        """Who explores, and how far each of several trainers is."""
        for name, one in self.explorers.items():
            if one.incarnation:
                begun = Attached(explorer=name, incarnation=one.incarnation)
                begun.trainer, begun.goal = one.trainer, one.goal
                yield begun
            if one.done:
                yield InputEnded(explorer=name)
            yield Silent(explorers=[name], back=not one.silent)
        for name, course in self.courses.items():
            for step in (course.saved, course.finished):
                epoch, goal = course.run_epoch, course.goal
                yield Resumed(step=step, run_epoch=epoch, trainer=name, goal=goal)
            yield Forgotten(step=course.oldest_step, trainer=name)
            if course.handed:
                yield Handed(trainer=name, steps=[])
