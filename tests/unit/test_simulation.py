"""Whole runs in a simulated world, with faults by the seed: what must hold does, and of faults that
are planted into the product each is found.

One run again, with what it did: `python -m tests.simulation.run SEED`.
"""

import logging
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from rft.buffer import progress as records
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.journal import Journal
from rft.buffer.ledger import Ledger
from rft.buffer.progress import Progress
from rft.rollout.explorer import Explorer
from rft.run import restarts
from rft.run.restarts import Restarts
from rft.sync.members import Members
from tests.simulation.disk import SimulatedFiles
from tests.simulation.run import Broken, Run

SEEDS, MANY = 300, 20_000
FOUND_WITHIN = 2_000
OF_PLANTS = ("TypeError", "AttributeError", "NameError", "UnboundLocalError", "ImportError")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A run that loses its power tells of it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_what_must_hold_does() -> None:
    for seed in range(SEEDS):
        Run(seed).check()


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_what_must_hold_does_in_many_runs() -> None:
    for seed in range(SEEDS, MANY):
        Run(seed).check()


def test_a_seed_is_one_run() -> None:
    one, other = Run(7), Run(7)
    one.check()
    other.check()
    assert one.world.trace == other.world.trace and one.trained == other.trained


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[Plant, int, bool]] = {}


def planted(plant: Plant) -> Plant:
    return planted_at(0)(plant)


def planted_at(seed: int, engines_fall: bool = False) -> Callable[[Plant], Plant]:
    """`seed`: one that has found it, of a run that is tried first. Another change of the product
    may make it found by others only. `engines_fall`: in runs in which they die all the time.
    """

    def kept(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = plant, seed, engines_fall
        return plant

    return kept


@planted
def a_lost_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedFiles, "sync", lambda self, descriptor: self.check())


@planted
def a_directory_that_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedFiles, "sync_directory", lambda self, directory: self.check())


@planted
def an_answer_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: Any) -> None:
        self._waits.check_open()
        await self._waits.notify()

    patch.setattr(ExperienceBuffer, "_settle", settle)


@planted_at(134)
def a_mark_before_its_fsync(patch: pytest.MonkeyPatch) -> None:
    """And synced itself: it says too much."""
    append = Journal.append

    def early(self: Journal, payloads: Any) -> int:
        end = append(self, payloads)
        self._mark(end)
        self.files.sync(self._mark_fd)
        return end

    patch.setattr(Journal, "append", early)


@planted
def a_base_that_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    write_base = Journal.write_base

    def write(self: Journal, end: int, payloads: Any) -> Any:
        sync, self.files.sync = self.files.sync, lambda descriptor: None  # type: ignore[method-assign]
        try:
            return write_base(self, end, payloads)
        finally:
            self.files.sync = sync  # type: ignore[method-assign]

    patch.setattr(Journal, "write_base", write)


@planted
def a_double_lease(patch: pytest.MonkeyPatch) -> None:
    lease = Progress._lease

    def twice(self: Progress, record: Any) -> None:
        before = dict(self.waiting)
        lease(self, record)
        self.waiting = {record.groups[-1]: before[record.groups[-1]], **self.waiting}

    patch.setattr(Progress, "_lease", twice)


@planted
def a_batch_that_is_grouped_anew(patch: pytest.MonkeyPatch) -> None:
    """After a resume, instead of the lease that there was."""
    apply = Progress.apply

    def forgetful(self: Progress, record: Any) -> None:
        apply(self, record)
        if isinstance(record, records.Resumed):
            for step in [step for step in self.leases if step >= record.step]:
                groups = {g.number: g for g in self.leases.pop(step).groups}
                self.waiting = {**groups, **self.waiting}
                self.next_step = min(self.next_step, step)
            self.waiting = dict(sorted(self.waiting.items(), key=lambda one: -one[0]))

    patch.setattr(Progress, "apply", forgetful)


@planted
def a_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    ahead = Progress.steps_ahead

    def fewer(self: Progress, *args: Any, **kwargs: Any) -> int:
        return ahead(self, *args, **kwargs) - 1

    patch.setattr(Progress, "steps_ahead", fewer)


@planted
def a_cursor_that_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    attach = ExperienceBuffer.attach_explorer

    @wraps(attach)
    async def lost(self: ExperienceBuffer, name: str) -> dict[str, Any]:
        return {**await attach(self, name), "cursor": None}

    patch.setattr(ExperienceBuffer, "attach_explorer", lost)


@planted
def answers_that_are_heard_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    async def answered(self: ExperienceBuffer, answers: Any) -> None:
        for group, encoded, version in answers:
            if self._progress.is_open(group):
                self._append(records.Answered(group=group, answers=encoded, version=version))

    patch.setattr(ExperienceBuffer, "answered", answered)


@planted
def answers_that_a_cut_of_the_journal_drops(patch: pytest.MonkeyPatch) -> None:
    survivors = Progress.survivors

    def without(self: Progress) -> Any:
        return (one for one in survivors(self) if not isinstance(one, records.Answered))

    patch.setattr(Progress, "survivors", without)


@planted_at(486)
def a_version_of_an_engine_that_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The trainer's own counts, when it comes back, though engines serve an older one."""
    attach = ExperienceBuffer.attach_trainer

    @wraps(attach)
    async def early(self: ExperienceBuffer, step: int, run_epoch: int) -> dict[str, Any]:
        self._stood.published = None
        return await attach(self, step, run_epoch)

    patch.setattr(ExperienceBuffer, "attach_trainer", early)


@planted_at(128)
def sampling_that_is_not_held(patch: pytest.MonkeyPatch) -> None:
    @wraps(Explorer.hold)
    async def unheard(self: Explorer) -> None: ...

    patch.setattr(Explorer, "hold", unheard)


@planted_at(20)
def leases_that_are_forgotten_and_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "forgotten", lambda self, published: 0)


@planted
def a_journal_that_is_cut_too_far(patch: pytest.MonkeyPatch) -> None:
    retain = Ledger.retain

    def newest(self: Ledger, position: int, step: int | None) -> None:
        retain(self, self.journal.position, self.progress.finished)

    patch.setattr(Ledger, "retain", newest)


@planted
def a_version_that_is_told_before_it_is_served(patch: pytest.MonkeyPatch) -> None:
    published = ExperienceBuffer.published

    @wraps(published)
    async def early(self: ExperienceBuffer, version: int, run_epoch: int | None = None) -> None:
        await published(self, version + 1, run_epoch)

    patch.setattr(ExperienceBuffer, "published", early)


@planted_at(545)
def an_admission_that_comes_again_and_admits_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "begun", lambda self, explorer, tasks, heard: [])


@planted
def a_buffer_that_comes_back_and_knows_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExperienceBuffer, "_stand", lambda self: None)


@planted
def an_explorer_that_comes_back_and_waits_for_a_word(patch: pytest.MonkeyPatch) -> None:
    @wraps(ExperienceBuffer.is_let_go)
    async def never(self: ExperienceBuffer, explorer: str) -> bool:
        return False

    patch.setattr(ExperienceBuffer, "is_let_go", never)


@planted_at(1335)
def an_offer_that_takes_back_a_newer_one(patch: pytest.MonkeyPatch) -> None:
    def offer(self: Members, version: int) -> None:
        self.offered = (self.epoch, version)

    patch.setattr(Members, "offer", offer)


@planted_at(3842, engines_fall=True)
def an_engine_that_missed_an_older_version_and_gets_no_newer_one(
    patch: pytest.MonkeyPatch,
) -> None:
    missed = Members.missed

    def passed_over(self: Members, name: str, mark: Any, reason: str) -> None:
        missed(self, name, mark, reason)
        self._pass_over(name)

    patch.setattr(Members, "missed", passed_over)


@planted_at(168)
def an_engine_that_joins_and_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Without weights."""
    join = Members.join

    def joins(self: Members, name: str) -> None:
        join(self, name)
        self.all[name].held = self.published

    patch.setattr(Members, "join", joins)


@planted_at(304)
def a_synchronizer_that_comes_back_and_asks_nobody(patch: pytest.MonkeyPatch) -> None:
    """What engines hold: it trusts what the buffer says."""
    recover = Members.recover

    def recovers(self: Members, held: Any, published: Any = None) -> None:
        recover(self, dict.fromkeys(held, published), published)

    patch.setattr(Members, "recover", recovers)


@planted
def a_version_that_one_engine_serves_and_not_the_others(patch: pytest.MonkeyPatch) -> None:
    """Is published as if all did, and all get requests."""

    def by_one(self: Members) -> bool:
        return any(map(self._holds_target, self.alive().values()))

    patch.setattr(Members, "is_over", by_one)
    patch.setattr(Members, "admitted", lambda self: [n for n, m in self.alive().items() if m.held])


@planted_at(51)
def a_budget_that_no_hour_fills_up_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restarts, "HOUR_S", float("inf"))


@planted
def a_budget_that_is_spent_one_too_late(patch: pytest.MonkeyPatch) -> None:
    allow = Restarts.allow

    def one_more(self: Restarts, cause: str) -> bool:
        return allow(self, cause) or self.used <= self.limit + 1

    patch.setattr(Restarts, "allow", one_more)


@planted
def a_cause_that_is_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "first", property(lambda self: self._deaths[-1][1]))


def is_the_plants_own(error: Broken) -> bool:
    """Whether what was found is a plant that does not fit the product any more. By its words: an
    error that went through the simulated network is another one.
    """
    return bool(re.search(rf"\b({'|'.join(OF_PLANTS)}):", str(error).splitlines()[0]))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, first, engines_fall = PLANTED[name]
    plant(monkeypatch)
    for seed in (first, *range(FOUND_WITHIN)):
        run = Run(seed)
        if engines_fall:
            run.let_engines_fall()
        try:
            run.check()
        except Broken as error:
            assert not is_the_plants_own(error), error
            print(f"{name}: {str(error).splitlines()[0]}")
            return
    raise AssertionError(f"{name} was not found in {FOUND_WITHIN} runs")
