"""No group is lost or trained twice, none too stale, and the journal rebuilds the state: as a pure
fold and as a buffer.
"""

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.buffer import calls
from rft.buffer import journal as journal_module
from rft.buffer.calls import answered
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.groups import Goal
from rft.buffer.journal import JournalError
from rft.buffer.progress import (
    Answered,
    Attached,
    Began,
    Consumed,
    Forgotten,
    GroupFailed,
    Handed,
    InputEnded,
    Issued,
    JournalRecord,
    Leased,
    Progress,
    Restarted,
    Resumed,
    Silent,
    StepSaved,
    StepSize,
    Stored,
    decode_record,
)
from rft.config import ExperienceBufferConfig
from rft.ground.experience import Batch, Experience, encode
from tests.unit import virtual_clock


class Run:
    """A whole run by value: explorer, trainer, synchronizer and crashes, with its own account of
    what must hold.
    """

    def __init__(
        self, size: StepSize, max_staleness: int, table: list[tuple[int, int | None]]
    ) -> None:
        """`table`: experiences of a group, and how many more it was said to have at most."""
        self.size, self.max_staleness, self.table = size, max_staleness, table
        self.progress, self.journal = Progress(), list[bytes]()
        self.published = self.step = self.checkpoint = self.epoch = 0
        self.started: dict[int, int] = {}  # running group -> version published at its start
        self.answered: dict[int, int] = {}  # group -> oldest version of an answer that is kept
        self.to_restart: list[int] = []
        self.failed: set[int] = set()
        self.batches: dict[int, list[int]] = {}
        self.taken: int | None = None
        self.write(Resumed(step=0, run_epoch=0))

    def write(self, record: JournalRecord) -> None:
        self.journal.append(encode(record))
        self.progress.apply(record)

    def issue(self, _: int) -> None:
        if self.progress.steps_ahead(self.published, self.size) <= self.max_staleness:
            group = self.progress.next_group
            made, more = self.table[group % len(self.table)]
            self.write(
                Issued(
                    group=group,
                    explorer="e",
                    task=b"task %d" % group,
                    cursor={"next": group + 1},
                    version=self.published,
                    run_epoch=self.epoch,
                    most=None if more is None else made + more,
                )
            )
            self.started[group] = self.published

    def running(self) -> list[int]:
        return [g.number for g in self.progress.unfinished("e") if g.number not in self.to_restart]

    def answer(self, pick: int) -> None:
        """By an engine, which serves what is published; or behind the end of its group."""
        if running := self.running():
            group = running[pick % len(running)]
            version = max(self.published, self.started[group])
            self.answered[group] = min(version, self.answered.get(group, version))
        elif (group := self.progress.next_group - 1) < 0 or self.progress.is_open(group):
            return
        else:
            version = 0
        self.write(Answered(group=group, answers=b"", version=version))
        if self.progress.is_open(group):
            known = self.progress.oldest_version()
            assert known is not None and known <= self.answered[group]

    def finish(self, pick: int) -> None:
        if running := self.running():
            group = running[pick % len(running)]
            made, _ = self.table[group % len(self.table)]
            self.write(Stored(group=group, experiences=b"", size=made))

    def fail(self, pick: int) -> None:
        if running := self.running():
            self.write(GroupFailed(group=running[pick % len(running)], reason="failed"))
            self.failed.add(running[pick % len(running)])

    def restart(self, _: int) -> None:
        if not self.to_restart:
            return
        ahead = self.progress.steps_ahead(self.published, self.size, before=self.to_restart[0])
        if ahead <= self.max_staleness:
            group = self.to_restart.pop(0)
            self.write(Restarted(group=group, version=self.published, run_epoch=self.epoch))
            self.started[group] = self.published

    def train(self, _: int) -> None:
        """Take the batch of the step, or finish it."""
        if self.taken is not None:
            self.write(Consumed(step=self.step))
            self.step, self.taken = self.step + 1, None
            return
        if self.step in self.progress.leases:
            groups = [g.number for g in self.progress.leases[self.step].groups]
            assert groups == self.batches[self.step], "a replayed step has the same batch"
            self.taken = self.step
            return
        wanted = self.progress.wanted(self.step, self.size, self.max_staleness)
        assert self.size.are(wanted[:-1]) < self.size.units, (
            "no step is larger than its last group makes it, unless an earlier one was incomplete"
        )
        if self.size.are(wanted) >= self.size.units and all(g.stored for g in wanted):
            groups = [g.number for g in wanted]
            for group in groups:
                oldest = min(self.started[group], self.answered.get(group, self.step))
                assert self.step - oldest <= self.max_staleness
            self.write(Leased(step=self.step, trainer="t", run_epoch=self.epoch, groups=groups))
            self.batches[self.step], self.taken = groups, self.step

    def publish(self, pick: int) -> None:
        if self.step > self.published:
            self.published += 1 + pick % (self.step - self.published)

    def save(self, _: int) -> None:
        self.checkpoint = self.step

    def crash_trainer(self, _: int) -> None:
        self.epoch += 1
        self.step = self.published = self.checkpoint
        self.taken = None
        self.write(Resumed(step=self.step, run_epoch=self.epoch))

    def crash_explorer(self, _: int) -> None:
        self.write(Attached(explorer="e"))
        groups = self.progress.unfinished("e")
        assert [g.task for g in groups] == [b"task %d" % g.number for g in groups]
        self.to_restart = [g.number for g in groups]
        assert self.progress.cursors.get("e", {"next": 0})["next"] == self.progress.next_group

    def crash_all(self, _: int) -> None:
        rebuilt = self.rebuilt(self.journal)
        assert rebuilt == self.progress
        self.progress = rebuilt
        self.crash_trainer(0)
        self.crash_explorer(0)

    @staticmethod
    def rebuilt(journal: list[bytes]) -> Progress:
        progress = Progress()
        for payload in journal:
            progress.apply(decode_record(payload))
        return progress

    def drain(self) -> None:
        """Run on without crashes until every issued group had its
        turn, and at least one step was trained.
        """
        last = self.progress.next_group
        while (
            any(number < last for number in self.progress.waiting)
            or self.taken is not None
            or self.step < max(self.progress.next_step, 1)
        ):
            before = len(self.journal), self.published
            for act in (self.restart, self.issue, self.finish, self.train, self.publish):
                act(0)
            assert (len(self.journal), self.published) != before or self.taken is not None, (
                "nothing moves any more"
            )


ACTIONS = (
    ["issue"] * 9
    + ["answer"] * 6
    + ["finish"] * 9
    + ["train"] * 8
    + ["publish"] * 4
    + ["restart"] * 5
    + ["save"] * 2
    + ["fail", "crash_trainer", "crash_explorer", "crash_all"]
)
# what happens, and to which of several
ACTION = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30))


@settings(max_examples=250, deadline=None)
@given(
    size=st.builds(StepSize, st.integers(1, 4), st.none() | st.integers(1, 9)),
    max_staleness=st.integers(0, 3),
    table=st.lists(
        st.tuples(st.integers(1, 12), st.none() | st.integers(0, 6)), min_size=1, max_size=5
    ),
    actions=st.integers(0, 250).flatmap(
        lambda size: st.lists(ACTION, min_size=size, max_size=size)
    ),
)
def test_any_history_loses_nothing_repeats_nothing_and_keeps_the_staleness_bound(
    size: StepSize,
    max_staleness: int,
    table: list[tuple[int, int | None]],
    actions: list[tuple[str, int]],
) -> None:
    """Of groups of one size, and of any sizes, known before or not."""
    run = Run(size, max_staleness, table)
    for action, pick in actions:
        getattr(run, action)(pick)
    assert run.rebuilt(run.journal) == run.progress, "replay gives the live state"
    survivors = [encode(record) for record in run.progress.survivors()]
    assert run.rebuilt(survivors) == run.progress, "so do the compacted records"
    run.drain()
    trained = [group for step in range(run.step) for group in run.batches[step]]
    assert len(trained) == len(set(trained))
    assert set(trained) | run.failed | set(run.progress.waiting) == set(
        range(run.progress.next_group)
    )
    assert not set(trained) & run.failed
    assert sorted(trained) == trained, "steps take groups in admission order"


class Shared:
    """Two explorers and several trainers on one buffer, by value; any of them dies, or is silent
    while it works on.
    """

    def __init__(self, size: StepSize, trainers: int, table: list[int]) -> None:
        self.size, self.table, self.names = size, table, [f"t{n}" for n in range(trainers)]
        self.progress, self.journal = Progress(), list[bytes]()
        self.epoch, self.failed = 1, set[int]()
        # by trainer: what it learned from, step by step, and how many steps its checkpoint has
        self.learned: dict[str, list[list[int]]] = {name: [] for name in self.names}
        self.saved = dict.fromkeys(self.names, 0)
        self.lost: set[str] = set()  # has not heard yet that its batches are another's
        for name in self.names:
            goal = Goal(steps=len(table), size=size)
            self.write(Resumed(step=0, run_epoch=1, trainer=name, goal=goal))
        for name in "ab":
            self.write(Attached(explorer=name, trainer="t9", goal=Goal(size=size)))

    def write(self, record: JournalRecord) -> None:
        self.journal.append(encode(record))
        self.progress.apply(decode_record(self.journal[-1]))

    def name(self, pick: int) -> str:
        return self.names[pick % len(self.names)]

    def issue(self, pick: int) -> None:
        made = {"group": self.progress.next_group, "explorer": "ab"[pick % 2], "version": 0}
        self.write(Issued(task=b"t", cursor={"next": self.progress.next_group + 1}, **made))  # type: ignore[arg-type]

    def store(self, pick: int) -> None:
        open_groups = [g.number for g in self.progress.waiting.values() if not g.stored]
        if open_groups:
            group = open_groups[pick % len(open_groups)]
            size = self.table[group % len(self.table)]
            self.write(Stored(group=group, experiences=b"", size=size, rows=size + 1))

    def answer(self, pick: int) -> None:
        """Of any group, also one that is finished."""
        if self.progress.next_group:
            group = pick % self.progress.next_group
            self.write(Answered(group=group, answers=b"", version=pick % 3))

    def fail(self, pick: int) -> None:
        if running := [g.number for g in self.progress.waiting.values() if not g.stored]:
            self.failed.add(running[pick % len(running)])
            self.write(GroupFailed(group=running[pick % len(running)], reason="failed"))

    def train(self, pick: int) -> None:
        """A step, the same as before where there was one."""
        name = self.name(pick)
        course, step = self.progress.course(name), len(self.learned[name])
        if name in self.lost:
            return
        if step not in course.leases:
            wanted = self.progress.wanted(step, self.size, 3)
            if not all(g.stored for g in wanted) or self.size.are(wanted) < self.size.units:
                return
            assert step == course.next_step
            groups = [g.number for g in wanted]
            self.write(Leased(step=step, trainer=name, run_epoch=self.epoch, groups=groups))
        self.learned[name].append([g.number for g in course.leases[step].groups])
        if pick % 3:
            self.write(Consumed(step=step, trainer=name))

    def save(self, pick: int) -> None:
        name = self.name(pick)
        if name not in self.lost:
            self.saved[name] = len(self.learned[name])
            self.write(StepSaved(step=self.saved[name], trainer=name))

    def retain(self, pick: int) -> None:
        name = self.name(pick)
        self.write(Forgotten(step=self.saved[name], trainer=name))

    def hand_over(self, pick: int) -> None:
        name = self.name(pick)
        course = self.progress.course(name)
        assert course.saved == self.saved[name]
        if steps := [step for step in course.leases if step >= course.saved]:
            self.write(Handed(trainer=name, steps=steps))
            self.lost.add(name)
            assert course.next_step <= max(course.finished, steps[0])
            assert list(self.progress.waiting) == sorted(self.progress.waiting)

    def resume(self, pick: int) -> None:
        """From its checkpoint: what it has learned since is not, or it comes again."""
        name = self.name(pick)
        again = self.learned[name][self.saved[name] :]
        del self.learned[name][self.saved[name] :]
        self.epoch += 1
        self.write(Resumed(step=self.saved[name], run_epoch=self.epoch, trainer=name))
        course = self.progress.course(name)
        for step, groups in enumerate(again, self.saved[name]):
            if name not in self.lost:
                assert [g.number for g in course.leases[step].groups] == groups
            else:
                assert step not in course.leases
        self.lost.discard(name)

    def silent(self, pick: int) -> None:
        name = "ab"[pick % 2]
        self.write(Silent(explorers=[name], back=pick % 3 == 0))
        is_away = self.progress.explorers[name].silent
        assert is_away == (pick % 3 != 0)
        running = {g.explorer for g in self.progress.awaited() if not g.stored}
        assert not is_away or name not in running

    def attach(self, pick: int) -> None:
        name = "ab"[pick % 2]
        before = self.progress.explorers[name].incarnation
        self.write(Attached(explorer=name))
        assert self.progress.explorers[name].incarnation == before + 1
        if pick % 5 == 0:
            self.write(InputEnded(explorer=name))

    def snapshot(self, _: int) -> None:
        """A new process reads this, in the place of all that was."""
        before = self.progress
        records = [Began(), *before.survivors()]
        self.progress = Progress()
        for record in records:
            self.write(record)
        assert self.progress == before
        self.journal = self.journal[-len(records) :]


SHARED = (
    ["issue"] * 9 + ["answer"] * 5 + ["store"] * 9 + ["train"] * 9 + ["save"] * 3 + ["retain"] * 2
    + ["hand_over"] * 3 + ["resume", "silent", "attach", "snapshot", "fail"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    size=st.builds(StepSize, st.integers(1, 4), st.none() | st.integers(1, 9)),
    trainers=st.integers(1, 3),
    table=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    actions=st.integers(0, 200).flatmap(
        lambda size: st.lists(
            st.tuples(st.sampled_from(SHARED), st.integers(0, 30)), min_size=size, max_size=size
        )
    ),
)
def test_trainers_that_share_groups_learn_from_each_once_whoever_is_silent(
    size: StepSize, trainers: int, table: list[int], actions: list[tuple[str, int]]
) -> None:
    run = Shared(size, trainers, table)
    for action, pick in actions:
        getattr(run, action)(pick)
    assert Run.rebuilt(run.journal) == run.progress, "replay gives the live state"
    for name in list(run.lost):  # it hears of it, and goes on from its checkpoint
        run.resume(run.names.index(name))
    learned = [group for steps in run.learned.values() for groups in steps for group in groups]
    assert len(learned) == len(set(learned)) and not set(learned) & run.failed
    leases = [one for c in run.progress.courses.values() for one in c.leases.values()]
    leased = {group.number for lease in leases for group in lease.groups}
    waiting = list(run.progress.waiting)
    assert not leased & set(waiting) and waiting == sorted(waiting)
    everything = set(range(run.progress.next_group))
    assert set(learned) | leased | set(waiting) | run.failed == everything


def test_the_slot_formula_counts_started_groups_until_a_version_covers_their_step() -> None:
    progress = Progress()
    for group in range(6):
        progress.apply(Issued(group=group, explorer="e", task=b"", cursor={}))
    two = StepSize(2)
    assert progress.slots(0, two, max_staleness=2) == 0
    progress.apply(GroupFailed(group=5, reason=""))
    assert progress.slots(0, two, 2) == 1
    for group in (0, 1):
        progress.apply(Stored(group=group, experiences=b""))
    progress.apply(Leased(step=0, trainer="t", run_epoch=0, groups=[0, 1]))
    assert progress.slots(0, two, 2) == 1, "leased is not covered"
    assert progress.slots(1, two, 2) == 3


def test_a_step_whose_lease_is_forgotten_counts_until_a_version_covers_it() -> None:
    progress, two = Progress(), StepSize(2)
    for group in range(2):
        progress.apply(Issued(group=group, explorer="e", task=b"", cursor={}))
        progress.apply(Stored(group=group, experiences=b""))
    progress.apply(Leased(step=0, trainer="t", run_epoch=0, groups=[0, 1]))
    progress.apply(Consumed(step=0))
    before = progress.steps_ahead(0, two), progress.slots(0, two, 1)
    progress.forget(1)
    assert (progress.steps_ahead(0, two), progress.slots(0, two, 1)) == before == (1, 2)
    assert (progress.steps_ahead(1, two), progress.slots(1, two, 1)) == (0, 4)


def test_after_an_incomplete_step_the_next_one_takes_what_would_become_too_stale() -> None:
    progress = Progress()
    for group in range(8):
        progress.apply(Issued(group=group, explorer="e", task=b"", cursor={}, version=0))
        progress.apply(Stored(group=group, experiences=b""))
    progress.apply(Leased(step=0, trainer="t", run_epoch=0, groups=[0, 1]))
    four = StepSize(4)
    assert [g.number for g in progress.wanted(1, four, max_staleness=1)] == [2, 3, 4, 5, 6, 7]
    assert [g.number for g in progress.wanted(1, four, max_staleness=2)] == [2, 3, 4, 5]


def test_experiences_fill_steps_and_an_unfinished_group_counts_as_the_most_it_may_have() -> None:
    """Eight experiences a step, staleness 0: groups of 3, 9, and two of which one may have 4 and
    of the other nothing is known.
    """
    progress, eight = Progress(), StepSize(1, 8)
    started = []
    for group, most in enumerate([3, 9, 4, None]):
        started.append(progress.steps_ahead(0, eight))
        progress.apply(Issued(group=group, explorer="e", task=b"", cursor={}, most=most, version=0))
    assert started == [0, 0, 1, 1], "the second may start, whatever it is; then it might be a step"
    progress.apply(Stored(group=1, experiences=b"", size=2))
    assert progress.steps_ahead(0, eight) == 2, "3 + 2 + 4, and a whole one"
    progress.apply(Stored(group=0, experiences=b"", size=1))
    progress.apply(Stored(group=2, experiences=b"", size=4))
    assert progress.steps_ahead(0, eight) == 1 and progress.steps_ahead(0, eight, before=3) == 0
    assert [group.number for group in progress.wanted(0, eight, 5)] == [0, 1, 2, 3]
    progress.apply(Stored(group=3, experiences=b"", size=30))
    assert progress.slots(0, eight, 0) == 8 - (1 + 2 + 4 + 8)
    assert (progress.num_experiences, progress.done(eight), progress.done(StepSize(1))) == (
        *(37, 37),
        4,
    )


# The buffer around it


def rows(*rewards: float) -> bytes:
    return encode(
        [
            Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], reward=reward)
            for reward in rewards
        ]
    )


def make(
    directory: Path,
    tasks_per_step: int = 2,
    max_staleness: int | None = 1,
    total_steps: int | None = None,
    timeout: float = 1000.0,
    segment_bytes: int = 2**20,
    experiences_per_step: int | None = None,
) -> ExperienceBuffer:
    config = ExperienceBufferConfig(max_read_timeout=timeout)
    return ExperienceBuffer(
        config,
        str(directory),
        tasks_per_step,
        1,
        max_staleness,
        total_steps,
        segment_bytes=segment_bytes,
        experiences_per_step=experiences_per_step,
    )


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def admitted(buffer: ExperienceBuffer, count: int) -> list[int | None]:
    first = buffer.stats()["issued"]
    return [
        await buffer.admit("e", b"task %d" % n, {"next": n + 1})
        for n in range(first, first + count)
    ]


async def batch(buffer: ExperienceBuffer, step: int) -> Batch:
    return opened(await buffer.take(step))


def groups_of(taken: Batch) -> list[int]:
    return [experience.group for experience in taken.experiences]


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would run in a thread runs at once, so that `turns` is enough for all that does not wait
    for an event.
    """

    async def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


async def turns(count: int = 50) -> None:
    """Let every other task run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_admission_waits_for_a_published_version_and_keeps_the_order_of_the_cursors(
    inline: None, tmp_path: Path
) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        early = asyncio.create_task(buffer.admit("e", b"0", {"next": 1}))
        await turns()
        assert not early.done(), "no trainer, no slot"
        await buffer.attach_trainer(0, 1)
        assert await early == 0
        assert await admitted(buffer, 3) == [1, 2, 3]
        later = [
            asyncio.create_task(buffer.admit("e", b"%d" % n, {"next": n + 1})) for n in (4, 5, 6)
        ]
        for group in range(4):
            await buffer.put(group, rows(1))
        await batch(buffer, 0)
        await buffer.consumed(0)
        assert not any(task.done() for task in later)
        await buffer.published(1)
        assert [await later[0], await later[1]] == [4, 5]
        assert not later[2].done()
        assert buffer.stats()["slots"] == 0
        assert (await buffer.attach_explorer("e"))["cursor"] == {"next": 6}
        later[2].cancel()
        await buffer.shutdown()

    run(test)


def test_several_are_admitted_in_one_call_as_far_as_slots_go(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        tasks = [(b"%d" % n, {"next": n + 1}) for n in range(6)]
        assert await buffer.admit_some("e", tasks) == [0, 1, 2, 3], "two steps of two tasks"
        start = await buffer.attach_explorer("e")
        assert start["cursor"] == {"next": 4}, "what was not admitted is no part of it"
        assert start["reissue"] == [(n, b"%d" % n) for n in range(4)]
        await buffer.shutdown()

    run(test)


def test_a_late_publication_of_an_earlier_attempt_frees_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 7)
        await buffer.published(5, run_epoch=6)
        assert buffer.stats()["published"] == 0
        await buffer.published(1, run_epoch=7)
        assert buffer.stats()["published"] == 1
        await buffer.shutdown()

    run(test)


def test_a_step_waits_for_its_groups_in_admission_order(inline: None, tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 4)
        taking = asyncio.create_task(batch(buffer, 0))
        for group in (3, 2, 1):
            await buffer.put(group, rows(group, group + 0.5))
        await turns()
        assert not taking.done(), "three groups are there, but not the first"
        await buffer.put(0, rows(0))
        first = await taking
        assert groups_of(first) == [0, 1, 1]
        assert [e.reward for e in first.experiences] == [0, 1, 1.5]
        assert not first.replayed
        assert groups_of(await batch(buffer, 1)) == [2, 2, 3, 3]
        with pytest.raises(ValueError, match="next one is 2"):
            await buffer.take(3)
        await buffer.shutdown()

    run(test)


def test_who_waits_is_told_and_does_not_ask_again_and_again(tmp_path: Path) -> None:
    """W22: an hour on a clock that only moves when nobody has anything to do."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        buffer = make(tmp_path, max_staleness=0, timeout=1e6)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 2)
        taking = asyncio.create_task(batch(buffer, 0))
        next_task = asyncio.create_task(buffer.admit("e", b"task 2", {"next": 3}))
        await asyncio.sleep(3600.3)
        for group in (0, 1):
            await buffer.put(group, rows(1))
        assert groups_of(await taking) == [0, 1] and loop.time() == 3600.3
        await asyncio.sleep(0.4)
        assert not next_task.done()
        await buffer.published(1, 1)
        assert await next_task == 2 and loop.time() == pytest.approx(3600.7)
        await buffer.shutdown()

    virtual_clock.run(test())


def test_an_abandoned_group_is_skipped_and_frees_its_slot(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path, max_staleness=0)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 2)
        await buffer.abandon(0, "engine said no")
        assert await admitted(buffer, 1) == [2]
        await buffer.put(1, rows(1))
        await buffer.put(2, rows(1))
        assert groups_of(await batch(buffer, 0)) == [1, 2]
        await buffer.put(0, rows(1))
        assert buffer.stats()["duplicate_puts"] == 1
        await buffer.shutdown()

    run(test)


def test_a_second_put_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path, tasks_per_step=1)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 1)
        await asyncio.gather(buffer.put(0, rows(1)), buffer.put(0, rows(2)))
        assert [e.reward for e in (await batch(buffer, 0)).experiences] == [1]
        await buffer.put(0, rows(3))
        assert buffer.stats()["duplicate_puts"] == 2
        with pytest.raises(ValueError, match="never admitted"):
            await buffer.put(1, rows(1))
        with pytest.raises(ValueError, match="abandon it"):
            await buffer.put(0, rows())
        await buffer.shutdown()

    run(test)


def test_a_timed_out_step_takes_what_is_there_and_loses_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path, tasks_per_step=3, timeout=0.05)
        await buffer.attach_trainer(0, 1)
        with pytest.raises(TimeoutError, match="no experiences for step 0"):
            await buffer.take(0)
        await admitted(buffer, 6)
        for group in (1, 2):
            await buffer.put(group, rows(1))
        assert groups_of(await batch(buffer, 0)) == [1, 2]
        assert buffer.stats()["incomplete_batches"] == 1
        for group in (0, 3, 4, 5):
            await buffer.put(group, rows(1))
        assert groups_of(await batch(buffer, 1)) == [0, 3, 4, 5], (
            "all of them would be too stale in step 2"
        )
        assert buffer.stats()["over_stale_groups"] == 0
        await buffer.shutdown()

    run(test)


def test_at_the_end_of_the_input_comes_the_rest_and_then_an_empty_batch(
    inline: None, tmp_path: Path
) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        await buffer.attach_explorer("e")
        await admitted(buffer, 3)
        for group in (0, 1):
            await buffer.put(group, rows(1))
        await batch(buffer, 0)
        taking = asyncio.create_task(batch(buffer, 1))
        await buffer.input_done("e")
        await turns()
        assert not taking.done(), "group 2 is still running"
        await buffer.put(2, rows(1))
        assert groups_of(await taking) == [2]
        assert (await batch(buffer, 2)).experiences == []
        await buffer.shutdown()

    run(test)


def test_no_group_is_admitted_for_a_step_after_the_last_but_a_failed_one_is_replaced(
    inline: None, tmp_path: Path
) -> None:
    async def test() -> None:
        buffer = make(tmp_path, max_staleness=5, total_steps=2)
        await buffer.attach_trainer(0, 1)
        assert await admitted(buffer, 4) == [0, 1, 2, 3]
        fifth, sixth = (asyncio.create_task(buffer.admit("e", b"", {"next": n})) for n in (5, 6))
        for group in range(3):
            await buffer.put(group, rows(1))
        await turns()
        assert not fifth.done()
        await buffer.abandon(3, "failed")
        assert await fifth == 4
        await buffer.put(4, rows(1))
        assert await sixth is None
        assert groups_of(await batch(buffer, 0)) == [0, 1]
        assert groups_of(await batch(buffer, 1)) == [2, 4]
        assert (await batch(buffer, 2)).experiences == []
        await buffer.shutdown()

    run(test)


def test_a_resumed_trainer_gets_the_same_batches_and_an_explorer_its_unfinished_groups(
    inline: None, tmp_path: Path
) -> None:
    async def test() -> None:
        buffer = make(tmp_path / "a")
        await buffer.attach_trainer(0, 1)
        await buffer.attach_explorer("e")
        for step in range(3):
            for group in await admitted(buffer, 2):
                assert group is not None
                await buffer.put(group, rows(group))
            await batch(buffer, step)
            await buffer.consumed(step)
            await buffer.published(step + 1)
        await admitted(buffer, 4)
        await buffer.put(7, rows(7))
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # as a kill -9 would leave it
        await buffer.shutdown()

        buffer = make(tmp_path / "b")
        assert (await buffer.attach_trainer(1, 2))["replay"] == [1, 2]
        first, second = await batch(buffer, 1), await batch(buffer, 2)
        assert (groups_of(first), groups_of(second)) == ([2, 3], [4, 5])
        assert [e.reward for e in second.experiences] == [4, 5]
        assert first.replayed and second.replayed
        start = await buffer.attach_explorer("e")
        assert start["cursor"] == {"next": 10}
        assert start["reissue"] == [(6, b"task 6"), (8, b"task 8"), (9, b"task 9")]
        again = asyncio.create_task(buffer.readmit("e", 6))
        await turns()
        assert not again.done(), "it would start on version 1 and be trained in step 3"
        await buffer.published(2)
        await again
        await buffer.put(6, rows(6))
        third = await batch(buffer, 3)
        assert groups_of(third) == [6, 7]
        assert [e.timeline for e in third.experiences] == [2, 1]
        assert not third.replayed
        await buffer.shutdown()

    run(test)


def test_a_new_trainer_ends_the_wait_of_the_old_one(inline: None, tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        old = asyncio.create_task(buffer.take(0))
        await turns()
        await buffer.attach_trainer(0, 2)
        with pytest.raises(RuntimeError, match="another trainer"):
            await old
        await buffer.shutdown()

    run(test)


def test_retention_shrinks_the_journal_and_keeps_what_a_checkpoint_needs(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path, segment_bytes=3000)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 1)
        marks, batches = {}, {}
        await buffer.abandon(0, "failed")
        for step in range(30):
            for group in await admitted(buffer, 2):
                assert group is not None
                await buffer.put(group, rows(*range(10)))
            batches[step] = groups_of(await batch(buffer, step))
            await buffer.consumed(step)
            await buffer.published(step + 1)
            marks[step + 1] = await buffer.position()
            if step >= 10:
                # a checkpoint may be read late: the step decides
                await buffer.retain(marks[step + 1], step - 4)
                await buffer._ledger.retained()
        assert buffer.stats()["journal_bytes"] < 0.4 * buffer.stats()["journal_position"]
        await admitted(buffer, 1)
        # cut at whole segments
        with pytest.raises(ValueError, match="keeps batches from step 2[45] on") as refusal:
            await buffer.attach_trainer(20, 2)
        oldest = 24 if "step 24" in str(refusal.value) else 25
        await buffer.shutdown()

        buffer = make(tmp_path, segment_bytes=3000)
        await buffer.retain(marks[oldest])  # without the step: it follows from the position
        await buffer._ledger.retained()
        assert (await buffer.attach_trainer(oldest, 2))["replay"] == list(range(oldest, 30))
        for step in range(oldest, 30):
            assert groups_of(await batch(buffer, step)) == batches[step]
        start = await buffer.attach_explorer("e")
        assert [group for group, _ in start["reissue"]] == [61]
        assert buffer.stats()["failed"] == 1
        await buffer.shutdown()

    run(test)


def test_answers_stay_until_their_group_is_finished_whatever_is_cut(tmp_path: Path) -> None:
    """Also those that were kept while the journal was cut; of a finished group nothing is left."""

    async def test() -> None:
        buffer = make(tmp_path, 1, max_staleness=None, segment_bytes=2000)
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 4)
        for word in (b"one", b"two"):
            await buffer.answered([(group, word * 100, 3) for group in range(3)])
        await buffer.abandon(1, "failed")
        await buffer.put(3, rows(1.0))
        await buffer.answered([(1, b"late", 0), (3, b"late", 0)])
        for step, group in enumerate(await admitted(buffer, 30)):
            assert group is not None
            await buffer.put(group, rows(*range(9)))
            if step == 20:
                await buffer.retain(await buffer.position(), 0)
                await buffer.answered([(0, b"three", None)])
        await buffer._ledger.retained()
        assert list(tmp_path.glob("*.base"))
        await buffer.shutdown()

        for again in range(2):  # from the cut journal, and from one that is cut again
            buffer = make(tmp_path, 1, max_staleness=None, segment_bytes=2000)
            left = await buffer.attach_explorer("e")
            assert [group for group, _ in left["reissue"]] == [0, 2]
            words = [b"one" * 100, b"two" * 100]
            assert await buffer.readmit("e", 2) == words
            assert await buffer.readmit("e", 0) == [*words, b"three"]
            assert not buffer._ledger._places.answers.keys() - {0, 2}
            assert buffer._progress.oldest_version() == 3
            if again:
                await buffer.put(0, rows(1.0))
                assert list(buffer._ledger._places.answers) == [2]
            else:
                for group in await admitted(buffer, 30):
                    assert group is not None
                    await buffer.put(group, rows(*range(9)))
                await buffer.retain(await buffer.position(), 0)
                await buffer._ledger.retained()
            await buffer.shutdown()

    run(test)


def test_retention_without_a_step_keeps_what_was_not_finished_at_the_position(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        buffer = make(tmp_path, segment_bytes=300)
        await buffer.attach_trainer(0, 1)
        marks = []
        for step in range(10):
            marks.append(await buffer.position())
            for group in await admitted(buffer, 2):
                assert group is not None
                await buffer.put(group, rows(1))
            await batch(buffer, step)
            await buffer.consumed(step)
            await buffer.published(step + 1)
        await buffer.retain(marks[6])
        await buffer._ledger.retained()
        with pytest.raises(ValueError, match="from step 6 on"):
            await buffer.attach_trainer(5, 2)
        assert (await buffer.attach_trainer(6, 2))["replay"] == [6, 7, 8, 9]
        assert groups_of(await batch(buffer, 6)) == [12, 13]
        await buffer.shutdown()

    run(test)


async def some_steps(buffer: ExperienceBuffer, first: int, last: int) -> None:
    for step in range(first, last):
        for group in await admitted(buffer, 2):
            assert group is not None
            await buffer.put(group, rows(step))
        assert [e.reward for e in (await batch(buffer, step)).experiences] == [step, step]
        await buffer.consumed(step)
        await buffer.published(step + 1)


def test_nobody_waits_for_a_long_retention_and_a_full_disk_only_puts_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        buffer = make(tmp_path, segment_bytes=400)
        await buffer.attach_trainer(0, 1)
        await some_steps(buffer, 0, 5)
        real, begun, go_on = os.rename, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(*paths: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(20)
            real(*paths)

        def full(*paths: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal_module.os, "rename", slow)
        await buffer.retain(await buffer.position(), 4)
        await begun.wait()
        await buffer.admit("e", b"meanwhile", {"next": 11})
        await buffer.abandon(10, "failed")
        size = buffer.stats()["journal_bytes"]
        go_on.set()
        await buffer._ledger.retained()
        assert buffer.stats()["journal_bytes"] < size
        await some_steps(buffer, 5, 8)
        monkeypatch.setattr(journal_module.os, "rename", full)
        size = buffer.stats()["journal_bytes"]
        await buffer.retain(await buffer.position(), 7)
        await buffer._ledger.retained()
        assert buffer.stats()["failed_retentions"] == 1
        assert buffer.stats()["journal_bytes"] == size
        await some_steps(buffer, 8, 10)
        monkeypatch.setattr(journal_module.os, "rename", real)
        await buffer.retain(await buffer.position(), 9)
        await buffer._ledger.retained()
        with pytest.raises(ValueError, match="keeps batches from step 9 on"):
            await buffer.attach_trainer(8, 2)
        await buffer.shutdown()
        buffer = make(tmp_path, segment_bytes=400)
        assert (await buffer.attach_trainer(9, 2))["replay"] == [9]
        assert [e.reward for e in (await batch(buffer, 9)).experiences] == [9, 9]
        await buffer.shutdown()

    run(test)


def test_watch_waits_while_healthy_and_raises_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        watching = asyncio.create_task(buffer.watch())
        taking = asyncio.create_task(buffer.take(0))
        await turns()
        assert not watching.done()

        def failing(fd: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(journal_module.os, "fsync", failing)
        with pytest.raises(JournalError, match="Input/output error"):
            await admitted(buffer, 1)
        for task in (watching, taking):
            with pytest.raises(JournalError, match="Input/output error"):
                await task
        await buffer.shutdown()

    run(test)


def test_who_asks_a_broken_buffer_is_answered_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(28, "No space left on device")

    async def test() -> None:
        monkeypatch.setattr(calls, "AGAIN_S", 0.0)
        buffers = [make(tmp_path)]
        await buffers[-1].attach_trainer(0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(journal_module.os, "fsync", failing)
            asked = ("e", [(b"task", {"next": 1})])
            asking = asyncio.create_task(answered(lambda: buffers[-1].admit_some(*asked)))
            with pytest.raises(JournalError, match="No space left"):
                await buffers[-1].watch()
            await turns()
            assert not asking.done()
            await buffers[-1].shutdown()
        buffers.append(make(tmp_path))
        await buffers[-1].attach_trainer(0, 2)
        assert len(await asking) == 1
        await buffers[-1].shutdown()

    run(test)


def test_close_ends_every_wait(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = make(tmp_path)
        await buffer.attach_trainer(0, 1)
        waits = [asyncio.create_task(wait) for wait in (buffer.take(0), buffer.watch())]
        await turns()
        await buffer.shutdown()
        with pytest.raises(JournalError, match="closed"):
            await waits[0]
        await waits[1]

    run(test)


def test_explorers_ask_for_weights_after_an_interval_or_when_they_may_do_no_more(
    tmp_path: Path,
) -> None:
    """Two groups a step, slots for three steps: an interval of two steps is over at the fourth
    group since the last version.
    """

    async def test() -> None:
        buffer = make(tmp_path, max_staleness=2)
        assert not await buffer.wants_weights(1), "nothing is published, nothing can be newer"
        await buffer.attach_trainer(0, 1)
        await admitted(buffer, 6)
        asked = []
        for group in range(6):
            await buffer.put(group, rows(1))
            asked.append((await buffer.wants_weights(2), await buffer.wants_weights(9)))
        assert asked == [(False, False)] * 3 + [(True, False)] * 2 + [(True, True)]
        await batch(buffer, 0)
        await buffer.consumed(0)
        await buffer.published(1)
        assert not await buffer.wants_weights(1), (
            "what was finished before that version came does not count"
        )
        await admitted(buffer, 2)
        await buffer.put(6, rows(1))
        assert not await buffer.wants_weights(1)
        await buffer.published(1)
        await buffer.abandon(7, "failed")
        assert not await buffer.wants_weights(1), "a slot is free again"
        await admitted(buffer, 1)
        await buffer.put(8, rows(1))
        assert await buffer.wants_weights(1) and await buffer.wants_weights(9)
        await buffer.shutdown()

    run(test)


def test_without_a_staleness_limit_an_explore_run_collects_all_and_a_later_one_trains_them(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        buffer = make(tmp_path, max_staleness=None)
        for group in await admitted(buffer, 8):
            assert group is not None
            if group not in (1, 7):  # the explorer was killed while it ran these
                await buffer.put(group, rows(1))
        await buffer.shutdown()
        buffer = make(tmp_path, max_staleness=0)
        await buffer.attach_trainer(0, 1)
        await buffer.input_done()
        assert [groups_of(await batch(buffer, step)) for step in range(4)] == [
            [0, 2],
            [3, 4],
            [5, 6],
            [],
        ]
        await buffer.shutdown()

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_crashes_at_random_points_trains_every_group_once(
    tmp_path: Path, seed: int
) -> None:
    """Explorer and trainer as they are, except that work takes a random number of turns; five
    crashes of everything.
    """
    chance = random.Random(seed)
    total_steps, tasks_per_step, max_staleness = 12, 3, chance.choice([0, 1, 3])
    experiences = 5 if seed % 2 else None
    sizes = [chance.choice([1, 2, 3, 7]) if experiences else 1 for _ in range(11)]
    most = chance.choice([7, None])
    started: dict[int, int] = {}
    state: dict[str, Any] = {"checkpoint": 0, "batches": {}}

    async def work(buffer: ExperienceBuffer, group: int) -> None:
        started[group] = buffer.stats()["published"]
        await turns(chance.randrange(200))
        if chance.random() < 0.1:
            await buffer.abandon(group, "failed")
        else:
            await buffer.put(group, rows(*[group] * sizes[group % 11]))

    async def explore(buffer: ExperienceBuffer) -> None:
        async with asyncio.TaskGroup() as tasks:
            start = await buffer.attach_explorer("e")
            for group, task in start["reissue"]:
                assert task == b"%d" % group
                await buffer.readmit("e", group)
                tasks.create_task(work(buffer, group))
            row = (start["cursor"] or {"next": 0})["next"]
            while True:
                group = await buffer.admit("e", b"%d" % row, {"next": row + 1}, most)
                if group is None:
                    break
                assert group == row, "no task is skipped or repeated"
                tasks.create_task(work(buffer, group))
                row += 1

    async def train(buffer: ExperienceBuffer, run_epoch: int) -> None:
        step = state["checkpoint"]
        await buffer.attach_trainer(step, run_epoch)
        while (taken := await batch(buffer, step)).experiences:
            groups = groups_of(taken)
            assert groups == state["batches"].setdefault(step, groups)
            assert [e.reward for e in taken.experiences] == groups
            whole = [group for group in dict.fromkeys(groups) for _ in range(sizes[group % 11])]
            assert groups == whole, "no group is parted"
            last = sizes[groups[-1] % 11]
            if experiences:
                assert len(groups) >= experiences > len(groups) - last
            assert taken.replayed or all(step - started[g] <= max_staleness for g in groups)
            await turns(chance.randrange(50))
            await buffer.consumed(step)
            step += 1
            if chance.random() < 0.4:
                state["checkpoint"] = step
                await buffer.retain(await buffer.position(), step)
            await buffer.published(step, run_epoch)

    async def attempt(directory: Path, run_epoch: int, crash: bool) -> None:
        buffer = make(
            *(directory, tasks_per_step, max_staleness, total_steps),
            segment_bytes=2000,
            experiences_per_step=experiences,
        )
        both = asyncio.gather(explore(buffer), train(buffer, run_epoch))
        if crash:
            await turns(chance.randrange(1500))
            await buffer._ledger.retained()  # a copy takes longer than a kill: no file may go
            shutil.copytree(directory, tmp_path / str(run_epoch + 1))
            both.cancel()
            await asyncio.gather(both, return_exceptions=True)
        else:
            await both
        await buffer.shutdown()

    for run_epoch in range(6):
        checkpoint = dict(state)
        run(lambda n=run_epoch: attempt(tmp_path / str(n), n, crash=n < 5))
        assert state["checkpoint"] >= checkpoint["checkpoint"]
    steps = [dict.fromkeys(state["batches"][step]) for step in range(total_steps)]
    trained = [group for step in steps for group in step]
    assert len(trained) == len(set(trained))
    buffer = make(tmp_path / "5")
    told = buffer.stats()
    assert told["issued"] == len(trained) + told["failed"] + told["ready_groups"]
    if experiences is None:
        assert len(trained) == total_steps * tasks_per_step and told["ready_groups"] == 0
    assert os.listdir(tmp_path / "5")
    run(buffer.shutdown)


def test_stop_lets_a_waiting_take_go_home(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = ExperienceBuffer(ExperienceBufferConfig(), str(tmp_path), 1, 1, 1, 5)
        await buffer.attach_trainer(0, 1)
        waiting = asyncio.ensure_future(buffer.take(0))
        await asyncio.sleep(0)
        await buffer.stop()
        assert opened(await waiting).experiences == []
        await buffer.stop("the engine died")
        with pytest.raises(RuntimeError, match="the engine died"):
            await buffer.take(0)
        await buffer.shutdown()

    run(test)
