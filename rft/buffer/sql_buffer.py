"""The experience buffer of a run as tables in a database: explorers and trainers on several
machines share it.

    explorer process ── admit, put ──►  groups, experiences  ◄── take, consumed, retain ── trainer
                                                             process
                        (a slot each)   (one database)           (a lease per step)

The interface is that of `ExperienceBuffer`; any number of processes have one each on the same
tables. What happens is a record, numbered under the lock of the buffer's row; every process replays
all of them into its own `Progress`, and decides by it while it has the lock, so what holds for one
process holds for all, and the rules are those of the queue. The oldest groups are taken first.
Waiting is looking again: at once after a change by this process, every WATCH_S after one by
another.

A process says every `lease_s / 4` seconds that it lives. Groups of an explorer that is silent for
`lease_s` are not waited for, until it comes back. Batches of a trainer that is silent for so long,
of steps that its newest checkpoint does not have, are handed to a trainer that asks; the silent one
is told by its next call. Both are records, too.

Invariants: `Progress`'s, for all processes together; experiences, in rows of their own, are deleted
only when no checkpoint that could need them is retained.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import takewhile
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection, Engine

from rft.buffer import progress as records
from rft.buffer.calls import BatchedCalls, Waiters
from rft.buffer.delivery import Delivery, bad_reward
from rft.buffer.groups import Goal, StepSize
from rft.buffer.selection import BatchSelection
from rft.buffer.sql_events import Events
from rft.buffer.sql_lives import TRAINER, Lives, Parties
from rft.buffer.sql_patience import LONGEST_NAP_S, NAP_S, RETRY_S, failure, passes
from rft.buffer.sql_schema import Tables, answers_to
from rft.buffer.sql_stands import Stands
from rft.buffer.sql_tables import connect, create
from rft.buffer.sql_turns import Decisions, Put, SharedTurns, Taken, counted, put_of
from rft.config import ExperienceBufferConfig
from rft.ground.experience import encode

WAIT = object()  # not now: look again after a change
WATCH_S = 0.2  # between two looks at what other processes have changed
COUNTERS = (
    "experiences", "duplicate_puts", "late_abandons", "short_groups", "incomplete_batches",
    "over_stale_groups", "bad_rewards", "oversized_groups", "database_retries",
)  # fmt: skip

logger = logging.getLogger(__name__)


class SqlBuffer(BatchedCalls):
    """One process's end of it.

    `owner`: the run, whose trainer it is and whose versions its explorers serve. `life`: as for
    `ExperienceBuffer`.
    """

    def __init__(
        self,
        config: ExperienceBufferConfig,
        owner: str,
        tasks_per_step: int,
        repeat_times: int,
        max_staleness: int | None,
        total_steps: int | None,
        experiences_per_step: int | None = None,
        life: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout = config.max_read_timeout
        self._patience = max(self.timeout, RETRY_S)  # where nobody waits for a shorter time
        self.lease_s = config.lease_s
        self.max_bytes = int(config.max_experience_mb * 2**20)
        self.repeat_times = repeat_times
        self.total_steps = total_steps
        self.owner = owner
        self._tables = Tables(config.name)
        self._engine = connect(str(config.path))
        create(self._engine, self._tables)
        self.size = StepSize(tasks_per_step, experiences_per_step)
        self._goal = Goal(steps=total_steps, size=self.size)
        self.max_staleness = max_staleness
        self._events = Events(self._tables)
        self._progress = self._events.progress
        self._selection = BatchSelection(
            *(self._progress, self.size, max_staleness),
            trainer=f"{owner}/trainer",
            in_order=max_staleness is not None,
        )
        self._lives = Lives(self._tables, config.lease_s, clock)
        self._parties = Parties(self._events, self._lives)
        self._turns = Decisions(self._events, self._selection, self._parties)
        self._pool = ThreadPoolExecutor(
            1 if self._engine.dialect.name == "sqlite" else 4, thread_name_prefix="buffer"
        )
        self._shared = SharedTurns(self._events, self._pool)
        self._stands = Stands(self._tables, owner, life)
        self._stood = self._stands.read(self._engine)
        self._standing = asyncio.Lock()  # what is kept is kept in the order in which it was so
        self._attempt = 0  # trainers attached to this process
        self._counts: Counter[str] = Counter()
        self._changes = 0
        self._waits = Waiters()
        self._admission = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    # Explorers

    async def let_go(self, explorer: str) -> None:
        self._stood.exploring.add(explorer)
        await self._stand()

    async def is_let_go(self, explorer: str) -> bool:
        return explorer in self._stood.exploring

    async def attach_explorer(self, name: str) -> dict[str, Any]:
        """Begin as explorer `name` of this run; whoever was it before is no longer served.

        As `ExperienceBuffer` does.
        """
        me = f"{self.owner}/{name}"

        def attach(db: Connection) -> dict[str, Any]:
            known = (self._selection.trainer, self._goal)
            self._stood.explorers[me] = self._parties.attach_explorer(db, me, *known)
            unfinished = self._progress.unfinished(me)
            return {
                "cursor": self._progress.cursors.get(me),
                "reissue": [(group.number, group.task) for group in unfinished],
                "run_epoch": self._now()["run_epoch"],
                "told": list(self._progress.told.get(me, [])),
                "heard": self._progress.next_group - 1,
            }

        found = await self._do(attach, patience=self._patience)
        await self._stand()
        self._beat()
        return found

    async def admit_some(
        self,
        explorer: str,
        tasks: list[tuple[bytes, dict[str, Any]]],
        most: list[int | None] | None = None,
        heard: int | None = None,
    ) -> list[int]:
        """As `ExperienceBuffer.admit_some`. All explorers share the slots."""
        me, tried = f"{self.owner}/{explorer}", list[int]()

        def admit(db: Connection) -> list[int] | object:
            self._parties.check_explorer(db, me, self._stood.explorers.get(me))
            # an earlier try may have been committed, though its answer was lost
            mine = (self._progress.waiting.get(group) for group in tried)
            if tried and all(group is not None and group.explorer == me for group in mine):
                return tried
            tried[:] = self._progress.begun(me, tasks, heard)
            if tried:
                return tried
            self._parties.look(db)
            asked = zip(tasks, most or [None] * len(tasks), strict=True)
            away = self._turns.away(db)
            for (task, cursor), made in takewhile(lambda _: self._may_admit(away), asked):
                tried.append(self._progress.next_group)
                begins = {"group": tried[-1], "explorer": me, "most": made, **self._now()}
                self._events.add(records.Issued(task=task, cursor=cursor, **begins))
            is_supplied = self._selection.is_supplied(self.total_steps, away)
            return tried if tried or is_supplied else WAIT

        async with self._admission:
            numbers = await self._until(admit)
        if numbers is WAIT:
            raise TimeoutError(
                f"no slot became free in {self.timeout:g} s for explorer {explorer!r}: it serves "
                f"version {self._stood.published}, and too many groups are ahead "
                f"({await self._where()})"
            )
        return numbers

    async def readmit(self, explorer: str, group: int) -> list[bytes]:
        """As `ExperienceBuffer.readmit`."""
        me = f"{self.owner}/{explorer}"

        def readmit(db: Connection) -> list[bytes] | object:
            self._parties.check_explorer(db, me, self._stood.explorers.get(me))
            self._parties.look(db)
            if not self._selection.may_restart(group, self._stood.published):
                return WAIT
            if group not in {unfinished.number for unfinished in self._progress.unfinished(me)}:
                raise ValueError(
                    f"group {group} is not an unfinished group of explorer {explorer!r}"
                )
            self._events.add(records.Restarted(group=group, **self._now()))
            return answers_to(db, self._tables, group)

        found = await self._until(readmit)
        if found is WAIT:
            raise TimeoutError(
                f"group {group} could not start again in {self.timeout:g} s ({await self._where()})"
            )
        return found

    async def answered(self, answers: list[tuple[int, bytes, int | None]]) -> None:
        """As `ExperienceBuffer.answered`, in one transaction."""
        keep = partial(self._turns.keep, answers=answers)
        await self._do(keep, tells=False, patience=self._patience)

    async def put(self, group: int, experiences: bytes, told: list[Any] | None = None) -> None:
        """Store the encoded list of a group's experiences; durable on return. A second put changes
        nothing.

        `told`: as for `ExperienceBuffer.put`.
        """
        await self.put_some([(group, experiences, told)])

    async def put_some(self, puts: list[tuple[int, bytes, list[Any] | None]]) -> None:
        """`put` each, in one transaction: all of them, or none and an error."""
        given = []
        for group, experiences, told in puts:
            one = put_of(group, experiences, told)
            if why := self._refused(one):
                await self.abandon(group, why)
            else:
                given.append(one)
        if not given:
            return
        tried = set[int]()

        def put(db: Connection) -> set[int]:
            """The groups that this call has stored, by an earlier try or now."""
            tried.update(self._turns.store(db, given))
            return set(tried)

        stored = await self._do(put, patience=self._patience)
        for one in given:
            is_new = one.group in stored
            stored.discard(one.group)
            self._counts["duplicate_puts"] += not is_new
            self._counts["experiences"] += len(one.rows) if is_new else 0
            self._counts["short_groups"] += is_new and len(one.rows) < self.repeat_times

    def _refused(self, given: Put) -> str:
        """Why a group is not stored, counted; empty if it is."""
        largest = max(len(row) for row in given.rows)
        if why := bad_reward(given.facts):
            self._counts["bad_rewards"] += 1
        elif largest > self.max_bytes:
            self._counts["oversized_groups"] += 1
            why = (
                f"an experience has {largest} bytes, "
                f"more than experience_buffer.max_experience_mb allows ({self.max_bytes})"
            )
        return why

    async def abandon(self, group: int, reason: str) -> None:
        """Give a group up: no step waits for it any more. Does nothing for one that is stored."""

        tries = 0

        def abandon(db: Connection) -> bool:
            nonlocal tries
            tries += self._turns.fail(db, group, reason)
            return tries > 0

        if await self._do(abandon, patience=self._patience):
            logger.warning("group %d was abandoned: %s", group, reason)
        else:
            self._counts["late_abandons"] += 1

    async def input_done(self, explorer: str | None = None) -> None:
        """The taskset of this explorer is exhausted.

        None: this process knows that nobody will add anything.
        """
        if explorer is None:
            self._stood.all_done = True
            await self._stand()
            await self._notify()
        else:
            me = f"{self.owner}/{explorer}"
            ended = records.InputEnded(explorer=me)
            await self._do(lambda _: self._events.add(ended), patience=self._patience)

    # Trainer

    async def attach_trainer(
        self, step: int, run_epoch: int, trainer: str = "trainer"
    ) -> dict[str, Any]:
        """Begin or resume at `step` = policy version: batches already leased from there on come
        again, the same.
        """
        me = f"{self.owner}/{trainer}"

        def attach(db: Connection) -> dict[str, Any]:
            self._turns.check_resume(me, step, run_epoch)
            begins = records.Resumed(step=step, run_epoch=run_epoch, trainer=me, goal=self._goal)
            self._events.add(begins)
            self._lives.enter(db, TRAINER, [me])
            self._stood.done_before = self._progress.done(self.size)
            return {
                "replay": self._progress.course(me).replays(step),
                "next_step": self._progress.course(me).next_step,
                "stored": len(self._progress.stored()),
                "waiting": len(self._progress.awaited()),
            }

        found = await self._do(attach)
        self._attempt += 1
        self._stood.begin(me, run_epoch, step)
        await self._stand()
        self._beat()
        told = "%s begins at step %d in run epoch %d: %d batches are replayed"
        logger.info(told, me, step, run_epoch, len(found["replay"]))
        await self._notify()
        return found

    async def take(
        self, step: int, trainer: str = "trainer", min_model_version: int | None = None
    ) -> bytes:
        """The encoded `Delivery` of `step`, leased durably; as `ExperienceBuffer.take`, from the
        oldest group on.
        """
        loop = asyncio.get_running_loop()
        begin, attempt = loop.time(), self._attempt
        if self.total_steps is not None and step >= self.total_steps:
            return encode(Delivery(step=step))
        me, epoch = f"{self.owner}/{trainer}", self._stood.me[1]

        def take(db: Connection, incomplete: bool = False) -> Taken | object:
            if attempt != self._attempt:
                raise RuntimeError(f"take({step}): another trainer has attached since")
            course, late = self._parties.trainer(me, epoch), list[int]()
            if step not in course.leases:
                if step != course.next_step:
                    raise ValueError(f"cannot take step {step}: the next one is {course.next_step}")
                groups = self._turns.choose(
                    db, me, step, min_model_version, self._stood.all_done, incomplete
                )
                if not groups:
                    return WAIT if groups is None else Taken([])
                late = self._selection.late(step, groups)
                self._events.add(self._selection.lease(step, me, groups))
            lease = course.leases[step]
            return Taken(list(lease.groups), lease.run_epoch != epoch, len(late))

        found = await self._until(take, or_stopped=True)
        if found is WAIT and not self._stood.stopped:
            found = await self._do(lambda db: take(db, incomplete=True))
            self._counts["incomplete_batches"] += found is not WAIT
        if self._stood.stop_is_failure:
            raise RuntimeError(self._stood.stopped)
        if found is WAIT:
            if self._stood.stopped:
                return encode(Delivery(step=step))
            raise TimeoutError(
                f"no experiences for step {step} in {self.timeout:g} s (max_read_timeout): "
                f"is an explorer alive? ({await self._where()})"
            )
        assert isinstance(found, Taken)
        self._counts["over_stale_groups"] += found.late
        # a transaction of its own: nobody waits for as long as they are read
        read = partial(self._turns.parts, trainer=me, step=step, groups=found.groups)
        parts = await self._do(read, tells=False, how=Engine.begin) if found.groups else []
        waited_s = loop.time() - begin
        return encode(Delivery(step=step, parts=parts, replayed=found.replayed, waited_s=waited_s))

    async def consumed(self, step: int) -> int:
        """The trainer has finished `step`; what to store in a checkpoint behind it.

        Raises if the batch was given to another trainer meanwhile.
        """
        me, epoch = self._stood.me

        def consume(_: Connection) -> None:
            course = self._parties.trainer(me, epoch)
            if step not in course.leases and step >= course.finished:
                raise self._parties.lost(me)
            if step >= course.finished:  # or it comes again
                self._events.add(records.Consumed(step=step, trainer=me))

        await self._do(consume)
        return step + 1

    async def published(self, version: int, run_epoch: int | None = None) -> None:
        """This process's engines serve `version`."""
        trainer = self._stood.trainer
        if trainer is not None and run_epoch is not None and run_epoch != trainer[1]:
            logger.warning("version %d of run epoch %d came late", version, run_epoch)
            return
        if self._stood.published is None or version > self._stood.published:
            self._stood.published = version
            self._stood.done_before = await self._do(
                lambda _: self._progress.done(self.size), tells=False, how=self._events.looking
            )
            await self._stand()
        await self._notify()

    async def wants_weights(self, interval: int) -> bool:
        """Whether the explorers of this process ask for a newer
        version; asked by the trainer after a step.
        """
        published, before = self._stood.published, self._stood.done_before
        if published is None:
            return False

        def asks(db: Connection) -> bool:
            self._parties.look(db)
            limits = (interval, self.size, self.max_staleness, f"{self.owner}/trainer")
            return self._progress.asks(published, before, *limits)

        return await self._do(asks, tells=False)

    # Checkpoints

    async def position(self) -> int:
        """A number to store in a checkpoint; the trainer's step is all that a resume needs."""
        return (await self._count())["issued"]

    async def saved(self, step: int) -> None:
        """A checkpoint of `step` is complete: the batches before it are the trainer's for good."""
        me, epoch = self._stood.me

        def save(_: Connection) -> None:
            if step > self._parties.trainer(me, epoch).saved:
                self._events.add(records.StepSaved(step=step, trainer=me))

        await self._do(save)

    async def retain(self, position: int, step: int | None = None) -> None:
        """Experiences of steps before `step` may go: no retained
        checkpoint of this trainer is older.
        """
        me, _ = self._stood.me

        def forget(db: Connection) -> None:
            if step is not None:
                self._turns.forget(db, me, step)

        await self._do(forget)

    # The supervisor

    async def stats(self) -> dict[str, Any]:
        return {
            **(await self._count()),
            "published": self._stood.published,
            **{name: self._counts[name] for name in COUNTERS},
        }

    async def watch(self) -> None:
        """Return when the buffer is closed, raise when its database fails; until then, wait."""
        if self._stood.explorers or self._stood.trainer:  # of the process before
            self._beat()
        await self._waits.watch()

    async def stop(self, reason: str = "") -> None:
        """A `take` that waits, and every later one, is answered as at the end of the run; with a
        `reason` it raises that.
        """
        self._stood.stopped = reason or "stopped"
        self._stood.stop_is_failure = bool(reason)
        await self._stand()
        await self._notify()

    async def shutdown(self) -> None:
        """Wake up all who wait, and leave the database."""
        if self._beating is not None:
            self._beating.cancel()
        await self._waits.close()
        await asyncio.to_thread(self._pool.shutdown)
        with suppress(sql.exc.SQLAlchemyError):  # a row that stays is nobody's
            await asyncio.to_thread(self._stands.drop, self._engine)
        self._engine.dispose()

    # Inside

    async def _do(
        self,
        change: Callable[[Connection], Any],
        tells: bool = True,
        patience: float = RETRY_S,
        how: Callable[[Engine], AbstractContextManager[Connection]] | None = None,
    ) -> Any:
        """In a transaction, in a thread; again for `patience` seconds after an error that passes,
        also where it was committed and only the answer got lost. `tells`: it may have changed what
        others here wait for. `how`: where it is no turn.
        """

        def look() -> Any:
            assert how is not None
            with how(self._engine) as db:
                return change(db)

        def once() -> Awaitable[Any]:
            if how is None:
                return self._shared(self._engine, change)
            return loop.run_in_executor(self._pool, look)

        loop = asyncio.get_running_loop()
        deadline, nap = loop.time() + patience, NAP_S
        while True:
            self._waits.check_open()
            try:
                found = await once()
                break
            except sql.exc.SQLAlchemyError as error:
                failed = failure(error)
                if not passes(error) or loop.time() + nap > deadline:
                    self._waits.fail(failed)
                    raise failed from None
            self._counts["database_retries"] += 1
            logger.warning("%s; trying again", failed)
            await asyncio.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
        if tells:
            await self._notify()
        return found

    async def _until(self, attempt: Callable[[Connection], Any], or_stopped: bool = False) -> Any:
        """`attempt` until it gives something else than WAIT, or the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout
        while True:
            seen = self._changes
            if or_stopped and self._stood.stopped:
                return WAIT
            # an attempt that has to wait wakes nobody
            patience = max(deadline - loop.time(), RETRY_S)
            found = await self._do(attempt, tells=False, patience=patience)
            if found is not WAIT:
                await self._notify()
            left = deadline - loop.time()
            if found is not WAIT or left <= 0:
                return found
            async with self._waits.changed:
                await self._waits.wait(lambda seen=seen: self._changes > seen, min(left, WATCH_S))  # type: ignore[misc]

    async def _stand(self) -> None:
        """Keep how the parts stand with this process."""
        async with self._standing:
            if self._stands.life:
                keep = partial(self._stands.keep, encode(self._stood))
                await self._do(keep, tells=False, how=self._events.looking)

    async def _notify(self) -> None:
        self._changes += 1
        await self._waits.notify()

    def _beat(self) -> None:
        if self._beating is None:
            self._beating = asyncio.create_task(self._beats())

    async def _beats(self) -> None:
        """Tell the others that this process lives."""
        while True:
            await asyncio.sleep(self.lease_s / 4)
            try:
                await self._beat_once()
            except Exception as error:  # ends the run through `watch`: nobody awaits this task
                self._waits.fail(error)
                return

    async def _beat_once(self) -> None:
        explorers = sorted(self._stood.explorers)

        def beat(db: Connection) -> bool:
            self._lives.beat(db, explorers, self._stood.me[0] or None)
            return any(self._progress.explorers[name].silent for name in explorers)

        # whether the database is away for too long is said by the calls that need it
        how, patience = self._events.looking, self._patience
        if await self._do(beat, tells=False, patience=patience, how=how):
            await self._do(partial(self._parties.back, explorers=explorers), patience=patience)

    def _may_admit(self, away: Collection[str] = ()) -> bool:
        return self._selection.may_admit(self._stood.published, self.total_steps, away)

    def _now(self) -> dict[str, Any]:
        version = None if self.max_staleness is None else self._stood.published
        epoch = self._progress.course(f"{self.owner}/trainer").run_epoch
        return {"version": version, "run_epoch": epoch}

    async def _count(self) -> dict[str, int]:
        count = partial(counted, self._progress)
        return await self._do(lambda _: count(), tells=False, how=self._events.looking)

    async def _where(self) -> str:
        found = await self._count()
        return f"{found['ready_groups']} groups ready, {found['running_groups']} running"
