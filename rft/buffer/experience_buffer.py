"""Between explorers and trainer: gives out slots, keeps experiences durably, gives out the batch of
every step.

    explorer ── admit ─► slot, group number         trainer ── take(step) ─► batch       checkpoint
            ── position ─► number
             ── answered, put ─► durable, acknowledged      ── consumed(step)
                     ── retain
             ── abandon                             sync    ── published(version) ─► frees slots

Every change is a journal record that is durable before the call returns; `Progress` is the fold of
these records, so a new process on the same directory goes on where the old one was killed.
Experiences lie in the journal only, not in memory. All waits are conditions with a deadline.
Nothing here knows Ray; the supervisor makes it a named actor, which Ray starts again when it dies:
the calls that were under way then come again, so each of them may come twice.

Invariants: `Progress`'s, plus: a batch that was handed out for a step is handed out again, the
same, whenever that step is asked for; an incomplete batch is returned only after `max_read_timeout`
or at the end of the input; a call that comes again changes nothing, and is answered as it was.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any

from rft.buffer import delivery
from rft.buffer import progress as records
from rft.buffer.calls import BatchedCalls, BufferBroken, Waiters
from rft.buffer.delivery import Delivery, PartKey, StoredGroup
from rft.buffer.experience_file import Copy, is_file
from rft.buffer.journal import JournalError
from rft.buffer.ledger import Ledger
from rft.buffer.progress import Evicted, Group, JournalRecord, StepSize
from rft.buffer.selection import BatchSelection, OverRollout, Replay
from rft.config import ExperienceBufferConfig
from rft.config.explorer import OverRolloutConfig
from rft.ground.durable import FILES, Files
from rft.ground.experience import encode

COUNTERS = (
    "experiences", "duplicate_puts", "late_abandons", "short_groups", "incomplete_batches",
    "over_stale_groups", "bad_rewards", "cut_groups",
)  # fmt: skip
SEGMENT_BYTES = 64 * 2**20  # of the journal

logger = logging.getLogger(__name__)


class ExperienceBuffer(BatchedCalls):
    """The one buffer of a run.

    `max_staleness=None`: no slot limit; `total_steps=None`: until the input is done.
    `experiences_per_step`: what fills a step, in place of `tasks_per_step` groups.
    """

    def __init__(
        self,
        config: ExperienceBufferConfig,
        directory: str,
        tasks_per_step: int,
        repeat_times: int,
        max_staleness: int | None,
        total_steps: int | None,
        seed: int = 0,
        over_rollout: OverRolloutConfig | None = None,
        experiences_per_step: int | None = None,
        life: str = "",
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
        files: Files = FILES,
    ) -> None:
        """`life`: names this start of the run; one that is made again in it goes on with the
        explorers and the trainer that the last one had. Empty: nobody outlives this one.
        """
        self.timeout = config.max_read_timeout
        self.size = StepSize(tasks_per_step, experiences_per_step)
        self.repeat_times = repeat_times
        self.max_staleness = max_staleness
        self.total_steps = total_steps
        self._ledger = Ledger(directory, segment_bytes, files)
        self._progress = self._ledger.progress
        self._over = OverRollout(over_rollout or OverRolloutConfig(), self.size)
        stood = self._progress.stood
        # what parts that live on must not have to tell again
        self._stood = records.Stood(life=life)
        if life and stood is not None and stood.life == life:
            self._stood = deepcopy(stood)
        self._attempt = 0  # trainers attached to this process
        self._attempts = Counter[str]()  # the same of each explorer
        self._counts: Counter[str] = Counter()
        replay = Replay(config.replay_buffer, seed) if config.replay_buffer.enable else None
        self._selection = BatchSelection(self._progress, self.size, max_staleness, replay, clock)
        self._copy = Copy(str(config.path), self._ledger.stored()) if is_file(config.path) else None
        self._copying = asyncio.Lock()  # a group's lines stay together
        self._waits = Waiters()
        # first come, first served: groups are issued in the order of the cursors
        self._admission = asyncio.Lock()

    # Explorers

    async def attach_explorer(self, name: str) -> dict[str, Any]:
        """Begin as explorer `name`; the groups that its last process left must each be `readmit`ted
        and run again.

        Returns `cursor` (None: from the start), `reissue` as [(group, encoded task)] in admission
        order, `run_epoch`, `heard`: the last group that it has heard of then.
        """
        self._attempts[name] += 1
        self._over.begin(name, self._progress.unfinished(name))
        self._stood.attached.add(name)
        self._stood.done.discard(name)
        self._stood.all_done = False
        self._stand()
        if name in self._progress.cursors:
            self._append(records.Attached(explorer=name))
        heard = self._progress.next_group - 1
        await self._settle()
        return {
            "cursor": self._progress.cursors.get(name),
            "reissue": [(one.number, one.task) for one in self._progress.unfinished(name)],
            "run_epoch": self._progress.run_epoch,
            "told": self._progress.told.get(name, []),
            "heard": heard,
        }

    async def let_go(self, explorer: str) -> None:
        """The trainer that is attached lets it explore."""
        self._stood.exploring.add(explorer)
        self._stand()
        await self._settle()

    async def is_let_go(self, explorer: str) -> bool:
        """Whether a new process of this explorer goes on by itself."""
        return explorer in self._stood.exploring

    async def admit_some(
        self,
        explorer: str,
        tasks: list[tuple[bytes, dict[str, Any]]],
        most: list[int | None] | None = None,
        heard: int | None = None,
    ) -> list[int]:
        """Wait for a slot and begin groups for the first of these tasks, as many as may begin;
        returns their numbers.

        Empty: the run needs no more. Each task comes with the taskset's cursor behind it. `most`:
        how many experiences each may become; None: nobody knows. Calls are served in their order.
        `heard`: the last number that this explorer heard of; groups behind it that are begun are
        those of this call, which came before, and are its answer. None: it never asks again.
        """
        is_left = self._left(explorer)
        async with self._admission, self._waits.changed:
            if not (
                numbers := self._progress.begun(explorer, tasks, heard)
            ) and not await self._waits.wait(
                lambda: (
                    is_left() or self._may_admit() or self._selection.is_supplied(self.total_steps)
                ),
                self.timeout,
            ):
                raise TimeoutError(
                    f"no slot became free in {self.timeout:g} s for explorer {explorer!r}: "
                    f"{self._why()}"
                )
            now = {"explorer": explorer, **self._now()}
            asked = zip(tasks, most or [None] * len(tasks), strict=True)
            if numbers or is_left():
                asked = zip((), (), strict=True)
            for (task, cursor), made in takewhile(lambda _: self._may_admit(), asked):
                numbers.append(self._progress.next_group)
                begins: dict[str, Any] = {"group": numbers[-1], "most": made, **now}
                self._append(records.Issued(task=task, cursor=cursor, **begins))
        await self._settle()
        return numbers

    async def readmit(self, explorer: str, group: int) -> list[bytes]:
        """Wait until an unfinished group from `attach_explorer` may start again; returns what was
        `answered` to it.
        """
        async with self._waits.changed:
            if not await self._waits.wait(
                lambda: self._selection.may_restart(group, self._stood.published), self.timeout
            ):
                raise TimeoutError(
                    f"group {group} could not start again in {self.timeout:g} s: {self._why()}"
                )
            if group not in [one.number for one in self._progress.unfinished(explorer)]:
                raise ValueError(
                    f"group {group} is not an unfinished group of explorer {explorer!r}"
                )
            self._append(records.Restarted(group=group, **self._now()))
        await self._settle()
        return await self._ledger.answers(group)

    async def answered(self, answers: list[tuple[int, bytes, int | None]]) -> None:
        """Keep what engines have answered to groups that are not finished, and only to these: the
        group, an encoded list, the oldest version that sampled a token of it. Durable on return.
        """
        for group, encoded, version in answers:
            if self._progress.is_open(group):
                self._append(records.Answered(group=group, answers=encoded, version=version))
        await self._settle()

    async def put(self, group: int, experiences: bytes, told: list[Any] | None = None) -> None:
        """Store the encoded list of a group's experiences; durable on return. A second put changes
        nothing.

        `told`: what the task selector of its explorer learns of it; every later `attach_explorer`
        returns all of these.
        """
        rows = delivery.facts_of(experiences)
        if not rows:
            raise ValueError(f"group {group} has no experiences: abandon it with a reason instead")
        if why := delivery.bad_reward(rows):
            self._counts["bad_rewards"] += 1
            await self.abandon(group, why)
        elif self._is_open_group(group, "duplicate_puts"):
            self._counts["short_groups"] += len(rows) < self.repeat_times
            self._counts["experiences"] += len(rows)
            timeline = self._progress.waiting[group].run_epoch
            self._append(
                records.Stored(
                    group=group,
                    experiences=experiences,
                    version=delivery.oldest_version(rows),
                    told=told,
                    size=delivery.trained(rows),
                )
            )
            self._evict(self._selection.surplus())
            await self._settle()
            if self._copy is not None:
                async with self._copying:
                    part = StoredGroup(group=group, timeline=timeline, experiences=experiences)
                    await asyncio.to_thread(self._copy.add, part)
        else:
            await self._settle()  # the first put may still be on its way to the disk

    async def abandon(self, group: int, reason: str) -> None:
        """Give a group up: no step waits for it any more. Does nothing for one that is stored."""
        if self._is_open_group(group, "late_abandons"):
            logger.warning("group %d was abandoned: %s", group, reason)
            await self._record(records.GroupFailed(group=group, reason=reason))

    async def cuts(self, explorer: str) -> list[int]:
        """Wait for groups of this explorer that a step goes on without: it puts what is finished of
        each, or abandons it. A process that another has followed hears of none.
        """
        is_left, over = self._left(explorer), self._over
        async with self._waits.changed:
            await self._waits.wait(lambda: is_left() or not over.is_told(explorer), self.timeout)
            return [] if is_left() else over.tell(explorer)

    async def input_done(self, explorer: str | None = None) -> None:
        """The taskset of this explorer, or of all, is exhausted: no step waits for groups that
        nobody will issue.
        """
        self._stood.all_done = self._stood.all_done or explorer is None
        self._stood.done |= {explorer} if explorer else set()
        self._stand()
        await self._settle()

    # Trainer

    async def attach_trainer(
        self, step: int, run_epoch: int, trainer: str = "trainer"
    ) -> dict[str, Any]:
        """Begin or resume at `step` = policy version: batches already leased from there on come
        again, the same.
        """
        self._progress.check_resume(step)
        self._attempt += 1
        # engines that outlived the trainer before this one may serve an older version until it
        # publishes its own
        before = step if self._stood.published is None else min(step, self._stood.published)
        self._stood.serve(before, self._progress.done(self.size))
        # a plain stop was meant for the trainer before
        self._stood.stopped = self._stood.stopped if self._stood.stop_is_failure else ""
        self._stood.exploring.clear()
        self._stand()
        await self._record(records.Resumed(step=step, run_epoch=run_epoch))
        replays = self._progress.replays(step)
        told = f"{len(replays)} batches are replayed, {len(self._progress.waiting)} groups wait"
        logger.info("%s begins at step %d in run epoch %d: %s", trainer, step, run_epoch, told)
        return {
            "replay": replays,
            "next_step": self._progress.next_step,
            "stored": len(self._progress.stored()),
            "waiting": len(self._progress.waiting),
        }

    async def take(
        self,
        step: int,
        trainer: str = "trainer",
        min_model_version: int | None = None,
        seen: Sequence[PartKey] = (),
    ) -> bytes:
        """The encoded `Delivery` of `step`, leased durably. Without parts: the run is over.

        Waits for the next groups in admission order, with a replay buffer for the first by
        priority. After `max_read_timeout` it returns those that are there, fewer than a step's if
        need be; the others go into later steps. Raises TimeoutError if there is none. Groups from
        before `min_model_version` are evicted, counted. Of what was `seen` it has no experiences.
        """
        loop = asyncio.get_running_loop()
        begin, attempt = loop.time(), self._attempt
        if self.total_steps is not None and step >= self.total_steps:
            return encode(Delivery(step=step))
        async with self._waits.changed:
            self._check_step(step)

            def is_over() -> bool:
                is_left = self._attempt != attempt or bool(self._stood.stopped)
                return is_left or step in self._progress.leases

            groups = (
                None if is_over() else await self._await_groups(step, min_model_version, is_over)
            )
            if self._stood.stop_is_failure:
                raise RuntimeError(self._stood.stopped)
            if self._stood.stopped:
                return encode(Delivery(step=step))
            if self._attempt != attempt:
                raise RuntimeError(f"take({step}): another trainer has attached since")
            if step not in self._progress.leases:
                groups = self._incomplete(step) if groups is None else groups
                if not groups:
                    return encode(Delivery(step=step))
                self._lease(step, trainer, groups)
        await self._settle()
        lease = self._progress.leases[step]
        parts = await self._ledger.parts(lease, set(map(tuple, seen)))
        replayed = lease.run_epoch != self._progress.run_epoch
        waited_s = loop.time() - begin
        return encode(Delivery(step=step, parts=parts, replayed=replayed, waited_s=waited_s))

    async def look(self, step: int) -> bytes:
        """The encoded `Delivery` that `take(step)` would return as things stand, once all of it is
        here: nothing is leased, and nothing decided. Without parts: there is nothing to see.
        """
        attempt, found = self._attempt, list[Group]()

        def is_ready() -> bool:
            is_over = step == self.total_steps or step in self._progress.leases
            is_left = self._attempt != attempt or bool(self._stood.stopped)
            groups = [] if is_over or is_left else self._next_groups(step, None)
            found[:] = groups or []
            return groups is not None

        async with self._waits.changed:
            await self._waits.wait(is_ready, self.timeout, self._selection.wake)
        await self._settle()  # what is seen is durable
        parts = await self._ledger.parts(self._selection.foreseen(step, found))
        return encode(Delivery(step=step, parts=parts))

    async def consumed(self, step: int) -> int:
        """The trainer has finished `step`; the position for a checkpoint behind it."""
        if step >= self._progress.finished:  # or it comes again
            if step not in self._progress.leases:
                raise ValueError(
                    f"step {step} has no batch that could be consumed ({self._progress.where()})"
                )
            self._append(records.Consumed(step=step))
        return await self.position()

    async def published(self, version: int, run_epoch: int | None = None) -> None:
        """All engines serve `version`: groups of the steps before it free their slots.

        With `run_epoch`, a late call of an earlier attempt is ignored.
        """
        epoch = self._progress.run_epoch
        if run_epoch is not None and run_epoch != epoch:
            told = version, run_epoch, epoch
            logger.warning("version %d of run epoch %d came late: the trainer is in %d", *told)
            return
        if self._stood.published is None or version > self._stood.published:
            self._stood.serve(version, self._progress.done(self.size))
            self._stand()
        await self._settle()

    async def wants_weights(self, interval: int) -> bool:
        """Whether the explorers ask for a newer version (`Progress.asks`); asked by the trainer
        after a step.
        """
        published, before = self._stood.published, self._stood.done_before
        return published is not None and self._progress.asks(
            published, before, interval, self.size, self.max_staleness
        )

    # Checkpoints

    async def position(self) -> int:
        """The journal position to store in a checkpoint; durable."""
        position = self._ledger.journal.position
        await self._settle()
        return position

    async def saved(self, step: int) -> None:
        """A checkpoint of `step` is complete: nobody else could have its batches."""

    async def retain(self, position: int, step: int | None = None) -> int | None:
        """What no retained checkpoint needs may go: `position` and `step` are the smallest that any
        of them has.

        Whole segments go; the groups in them that are still needed move into a compacted file. That
        is begun here, and nobody waits for it: of a large journal it takes minutes. Returns the
        oldest version that a token of what is here may be of.
        """
        self._ledger.retain(position, step)
        return self._progress.oldest_version()

    # The supervisor

    def stats(self) -> dict[str, Any]:
        """Counters and sizes now."""
        published = self._stood.published
        limited = self.max_staleness is not None and published is not None
        return {
            **self._ledger.stats(),
            "published": published,
            "input_done": self._is_input_done(),
            "slots": self._progress.slots(published, self.size, self.max_staleness)
            if limited
            else None,
            **{name: self._counts[name] for name in COUNTERS},
        }

    async def watch(self) -> None:
        """Return when the buffer is closed, raise when its journal fails; until then, wait."""
        await self._waits.watch()

    async def stop(self, reason: str = "") -> None:
        """End the giving out of batches: a `take` that waits, and every later one, is answered as
        at the end of the run.

        With a `reason` (another part died) it raises that instead. What is stored stays for the
        next attempt.
        """
        self._stood.stopped = reason or "stopped"
        self._stood.stop_is_failure = bool(reason)
        self._stand()
        await self._settle()

    async def shutdown(self) -> None:
        """Wake up all who wait, sync and release the journal."""
        await self._waits.close()
        if self._copy is not None:
            self._copy.close()
        await self._ledger.close()

    # Inside

    def _append(self, record: JournalRecord) -> None:
        """Journal a record, not yet durably, and take it into the state."""
        self._waits.check_open()
        try:
            self._ledger.append(record)
        except JournalError as error:
            self._waits.fail(error)
            raise BufferBroken(str(error)) from error

    async def _settle(self) -> None:
        """Make all that was appended durable and tell those who wait."""
        self._waits.check_open()
        try:
            await self._ledger.journal.commit()
        except JournalError as error:
            self._waits.fail(error)
            raise BufferBroken(str(error)) from error
        await self._waits.notify()

    async def _record(self, record: JournalRecord) -> None:
        self._append(record)
        await self._settle()

    def _stand(self) -> None:
        """Journal how the parts stand, not yet durably."""
        if self._stood.life and self._stood != self._progress.stood:
            self._append(deepcopy(self._stood))

    def _now(self) -> dict[str, int | None]:
        version = None if self.max_staleness is None else self._stood.published
        return {"version": version, "run_epoch": self._progress.run_epoch}

    def _may_admit(self) -> bool:
        return self._selection.may_admit(self._stood.published, self.total_steps)

    def _left(self, explorer: str) -> Callable[[], bool]:
        """Whether another process is this explorer by then: nobody waits for what is answered."""
        attempt = self._attempts[explorer]
        return lambda: attempt != self._attempts[explorer]

    def _is_input_done(self) -> bool:
        return self._stood.all_done or (
            bool(self._stood.attached) and self._stood.attached <= self._stood.done
        )

    def _is_open_group(self, number: int, counter: str) -> bool:
        """Whether it waits for its experiences; one that does not is counted under `counter`."""
        if not 0 <= number < self._progress.next_group:
            raise ValueError(
                f"group {number} was never admitted; the next group is {self._progress.next_group}"
            )
        is_open = self._progress.is_open(number)
        self._counts[counter] += not is_open
        return is_open

    def _check_step(self, step: int) -> None:
        if step not in self._progress.leases and step != self._progress.next_step:
            raise ValueError(
                f"cannot take step {step}: "
                f"the next one is {self._progress.next_step} ({self._progress.where()})"
            )

    def _next_groups(self, step: int, min_model_version: int | None) -> list[Group] | None:
        """What `step` takes, once all of it is there; empty when nothing will ever come. None: wait
        on.
        """
        if min_model_version is not None:
            self._evict(self._selection.too_old(min_model_version))
        abandoned = self._stood.all_done and not self._stood.attached
        return self._selection.groups(step, self._is_input_done(), abandoned)

    def _evict(self, record: Evicted | None) -> None:
        if record is not None:
            logger.warning("groups %s are dropped: %s", record.groups, record.reason)
            self._append(record)

    async def _await_groups(
        self, step: int, min_model_version: int | None, is_over: Callable[[], bool]
    ) -> list[Group] | None:
        """What `step` takes; None after the deadline.

        With over_rollout: what is there of it when the others were cut.
        """
        found: list[Group] | None = None
        waits, over, wake = self._waits, self._over, self._selection.wake

        def is_ready() -> bool:
            nonlocal found
            found = None if is_over() else self._next_groups(step, min_model_version)
            return is_over() or found is not None

        def wanted() -> list[Group]:
            return self._progress.wanted(step, self.size, self.max_staleness)

        await waits.wait(lambda: is_ready() or over.has_enough(wanted()), self.timeout, wake)
        if is_ready() or not over.has_enough(wanted()):
            return found
        if await waits.wait(is_ready, over.wait_s, wake):
            return found
        groups = wanted()
        late = over.cut(groups)
        self._counts["cut_groups"] += len(late)
        logger.warning("step %d goes on without groups %s", step, [group.number for group in late])
        waits.changed.notify_all()
        running = self._progress.waiting
        await waits.wait(
            lambda: is_over() or all(group.stored or group.number not in running for group in late),
            self.timeout,
        )
        return [group for group in groups if group.stored]

    def _incomplete(self, step: int) -> list[Group]:
        groups = self._selection.here()
        if not groups:
            raise TimeoutError(
                f"no experiences for step {step} in {self.timeout:g} s (max_read_timeout): "
                f"is the explorer alive? ({self._progress.where()})"
            )
        self._counts["incomplete_batches"] += 1
        what = "groups" if self.size.experiences is None else "experiences"
        told = step, self.size.are(groups), self.size.units, what, self.timeout
        where = self._progress.where()
        logger.warning("step %d takes %d of %d %s after %g s (%s)", *told, where)
        return groups

    def _lease(self, step: int, trainer: str, groups: list[Group]) -> None:
        late = self._selection.late(step, groups)
        self._counts["over_stale_groups"] += len(late)
        if late:
            told = step, late, self.max_staleness
            logger.warning("step %d trains groups %s later than max_staleness=%s", *told)
        self._append(self._selection.lease(step, trainer, groups))

    def _why(self) -> str:
        return (
            f"the trainer published no version after {self._stood.published} "
            f"({self._progress.where()})"
        )
