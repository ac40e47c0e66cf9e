"""The experience buffer of a run as tables in a database: explorers and trainers on several
machines share it.

    explorer process ── admit, put ──►  groups, experiences  ◄── take, consumed, retain ── trainer
                                                             process
                        (a slot each)   (one database)           (a lease per step)

The interface is that of `ExperienceBuffer`; any number of processes have one each on the same
tables. Every call is a transaction that decides about rows that it has locked, so what holds for
one process holds for all. The oldest groups are taken first. Waiting is looking again: at once
after a change by this process, every WATCH_S after one by another.

A process says every `lease_s / 4` seconds that it lives. Groups of an explorer that is silent for
`lease_s` are not waited for, until it comes back. Leases of a trainer that is silent for so long,
of steps that its newest checkpoint does not have, are given to a trainer that asks; the silent one
is told when it comes back, before it can save what it made of them.

Invariants: a group is held by at most one trainer, for one step; a step of a trainer has one batch,
which comes again after a restart; experiences are deleted only when no checkpoint that could need
them is retained.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sql
from sqlalchemy import Connection

from rft.buffer.calls import BatchedCalls, Waiters
from rft.buffer.delivery import Delivery, Facts, bad_reward, facts_of
from rft.buffer.progress import StepSize
from rft.buffer.sql_lives import Lives
from rft.buffer.sql_patience import LONGEST_NAP_S, NAP_S, RETRY_S, failure, passes
from rft.buffer.sql_steps import WAIT, Lost, Steps
from rft.buffer.sql_tables import Tables, connect, create
from rft.config import ExperienceBufferConfig
from rft.ground.experience import encode

WATCH_S = 0.2  # between two looks at what other processes have changed
COUNTERS = (
    "experiences",
    "duplicate_puts",
    "late_abandons",
    "short_groups",
    "incomplete_batches",
    "over_stale_groups",
    "bad_rewards",
    "oversized_groups",
    "database_retries",
)

logger = logging.getLogger(__name__)
_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])


class SqlBuffer(BatchedCalls):
    """One process's end of it.

    `owner`: the run, whose trainer it is and whose versions its explorers serve.
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
        size = StepSize(tasks_per_step, experiences_per_step)
        self._lives = Lives(self._tables, config.lease_s, clock)
        self._steps = Steps(self._tables, size, max_staleness, self._lives)
        self._pool = ThreadPoolExecutor(
            1 if self._engine.dialect.name == "sqlite" else 4, thread_name_prefix="buffer"
        )
        self._explorers: dict[str, int] = {}  # attached to this process, and as which incarnation
        self._trainer: tuple[str, int] | None = None  # attached to this process, and its run epoch
        self._attempt = 0
        self._published: int | None = None  # what this process's engines serve
        self._done_before = 0
        self._let_go: set[str] = set()
        self._stopped = ""
        self._stop_is_failure = False
        self._input_done = False
        self._counts: Counter[str] = Counter()
        self._changes = 0
        self._waits = Waiters()
        self._admission = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    # Explorers

    async def let_go(self, explorer: str) -> None:
        self._let_go.add(explorer)

    async def is_let_go(self, explorer: str) -> bool:
        return explorer in self._let_go

    async def attach_explorer(self, name: str) -> dict[str, Any]:
        """Begin as explorer `name` of this run; whoever was it before is no longer served.

        As `ExperienceBuffer` does.
        """
        me = f"{self.owner}/{name}"

        def attach(db: Connection) -> dict[str, Any]:
            self._explorers[me], cursor = self._steps.attach_explorer(db, me)
            reissue = self._steps.unfinished(db, me)
            told = self._steps.told(db, me)
            return {
                "cursor": cursor,
                "reissue": reissue,
                "run_epoch": self._epoch(db),
                "told": told,
                "heard": None,
            }

        found = await self._do(attach, patience=self._patience)
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
            self._steps.lock_buffer(db)
            self._check_explorer(db, me)
            # an earlier try may have been committed, though its answer was lost
            if tried and self._steps.is_running(db, me, tried[0]):
                return tried
            tried.clear()
            numbers = tried
            for (task, cursor), made in zip(tasks, most or [None] * len(tasks), strict=True):
                free = self._steps.may_admit(
                    db, f"{self.owner}/trainer", self._published, self.total_steps
                )
                if free is not True:
                    return WAIT if free is WAIT and not numbers else numbers
                numbers.append(
                    self._steps.issue(
                        db, me, task, encode(cursor), self._version_now(), self._epoch(db), made
                    )
                )
            return numbers

        async with self._admission:
            numbers = await self._until(admit)
        if numbers is WAIT:
            raise TimeoutError(
                f"no slot became free in {self.timeout:g} s for explorer {explorer!r}: it serves "
                f"version {self._published}, and too many groups are ahead ({await self._where()})"
            )
        return numbers

    async def readmit(self, explorer: str, group: int) -> None:
        """Wait until an unfinished group from `attach_explorer` may start again."""
        me, tries = f"{self.owner}/{explorer}", 0

        def readmit(db: Connection) -> bool | object:
            nonlocal tries
            self._check_explorer(db, me)
            if tries and self._steps.is_running(db, me, group):
                return True
            if not self._steps.is_free(db, f"{self.owner}/trainer", group, self._published):
                return WAIT
            tries += 1
            if not self._steps.restart(db, me, group, self._version_now(), self._epoch(db)):
                raise ValueError(
                    f"group {group} is not an unfinished group of explorer {explorer!r}"
                )
            return True

        if await self._until(readmit) is WAIT:
            raise TimeoutError(
                f"group {group} could not start again in {self.timeout:g} s ({await self._where()})"
            )

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
            facts, rows = facts_of(experiences), _rows.decode(experiences)
            if not rows:
                raise ValueError(
                    f"group {group} has no experiences: abandon it with a reason instead"
                )
            if why := self._refused(facts, rows):
                await self.abandon(group, why)
            else:
                tasks = [row.task for row in msgspec.msgpack.decode(experiences, type=list[_Task])]
                given.append((group, rows, facts, tasks, told))
        if not given:
            return
        given.sort(key=lambda one: one[0])  # rows are locked in one order by all
        tried = set[int]()

        def put(db: Connection) -> set[int]:
            """The groups that this call has stored, by an earlier try or now."""
            stored = set[int]()
            for group, *content in given:
                if self._steps.is_open(db, group):
                    self._steps.store(db, group, *content)
                    stored.add(group)
            tried.update(stored)
            return tried

        stored = await self._do(put, patience=self._patience)
        for group, rows, *_ in given:
            is_new = group in stored
            stored.discard(group)
            self._counts["duplicate_puts"] += not is_new
            self._counts["experiences"] += len(rows) if is_new else 0
            self._counts["short_groups"] += is_new and len(rows) < self.repeat_times

    def _refused(self, facts: list[Facts], rows: list[msgspec.Raw]) -> str:
        """Why a group is not stored, counted; empty if it is."""
        largest = max(len(row) for row in rows)
        if why := bad_reward(facts):
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
            if not self._steps.is_open(db, group):
                return tries > 0
            tries += 1
            self._steps.fail(db, group, reason)
            return True

        if await self._do(abandon, patience=self._patience):
            logger.warning("group %d was abandoned: %s", group, reason)
        else:
            self._counts["late_abandons"] += 1

    async def input_done(self, explorer: str | None = None) -> None:
        """The taskset of this explorer is exhausted.

        None: this process knows that nobody will add anything.
        """
        if explorer is None:
            self._input_done = True
            await self._notify()
        else:
            me = f"{self.owner}/{explorer}"
            await self._do(lambda db: self._steps.done(db, me), patience=self._patience)

    # Trainer

    async def attach_trainer(
        self, step: int, run_epoch: int, trainer: str = "trainer"
    ) -> dict[str, Any]:
        """Begin or resume at `step` = policy version: batches already leased from there on come
        again, the same.
        """
        me = f"{self.owner}/{trainer}"

        def attach(db: Connection) -> dict[str, Any]:
            self._steps.attach_trainer(db, me, step, run_epoch)
            self._done_before = self._steps.stored_units(db)
            return self._steps.position(db, me)

        found = await self._do(attach)
        self._trainer, self._attempt = (me, run_epoch), self._attempt + 1
        # engines that outlived the trainer before this one may serve an older version
        self._let_go.clear()
        self._published = step if self._published is None else min(step, self._published)
        self._stopped = self._stopped if self._stop_is_failure else ""
        self._beat()
        logger.info(
            "%s begins at step %d in run epoch %d: %d batches are replayed",
            me,
            step,
            run_epoch,
            len(found["replay"]),
        )
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
        me, epoch = f"{self.owner}/{trainer}", self._trainer[1] if self._trainer else 0

        def take(db: Connection, incomplete: bool = False) -> tuple[bool, bool, int] | object:
            """Whether there is a batch, whether from before, and how many of it are too late."""
            if attempt != self._attempt:
                raise RuntimeError(f"take({step}): another trainer has attached since")
            self._steps.lock_trainer(db, me, epoch)
            lease = self._steps.lease(db, me, step)
            if lease is not None:
                return True, lease != epoch, 0
            numbers = self._steps.choose(
                db, me, step, min_model_version, self._input_done, incomplete
            )
            if numbers is WAIT or not numbers:
                return WAIT if numbers is WAIT else (False, False, 0)
            return True, False, len(self._steps.take(db, me, step, epoch, numbers))

        found = await self._until(take, or_stopped=True)
        if found is WAIT and not self._stopped:
            found = await self._do(lambda db: take(db, incomplete=True))
            self._counts["incomplete_batches"] += found is not WAIT
        if self._stop_is_failure:
            raise RuntimeError(self._stopped)
        if found is WAIT:
            if self._stopped:
                return encode(Delivery(step=step))
            raise TimeoutError(
                f"no experiences for step {step} in {self.timeout:g} s (max_read_timeout): "
                f"is an explorer alive? ({await self._where()})"
            )
        is_batch, replayed, late = found
        self._counts["over_stale_groups"] += late
        # a transaction of its own: the groups are not locked for as long as they are read
        read = partial(self._steps.parts, trainer=me, run_epoch=epoch, step=step)
        parts = await self._do(read, tells=False) if is_batch else []
        return encode(
            Delivery(step=step, parts=parts, replayed=replayed, waited_s=loop.time() - begin)
        )

    async def consumed(self, step: int) -> None:
        """The trainer has finished `step`.

        Raises if the batch was given to another trainer meanwhile.
        """
        me, epoch = self._trainer or ("", 0)
        await self._do(lambda db: self._steps.consumed(db, me, epoch, step))

    async def published(self, version: int, run_epoch: int | None = None) -> None:
        """This process's engines serve `version`."""
        if self._trainer is not None and run_epoch is not None and run_epoch != self._trainer[1]:
            logger.warning("version %d of run epoch %d came late", version, run_epoch)
            return
        if self._published is None or version > self._published:
            self._published = version
            self._done_before = await self._do(self._steps.stored_units)
        await self._notify()

    async def wants_weights(self, interval: int) -> bool:
        """Whether the explorers of this process ask for a newer
        version; asked by the trainer after a step.
        """
        if self._published is None:
            return False
        return await self._do(
            lambda db: self._steps.asks(
                db,
                f"{self.owner}/trainer",
                int(self._published or 0),
                self._done_before,
                interval,
            )
        )

    # Checkpoints

    async def position(self) -> int:
        """A number to store in a checkpoint; the trainer's step is all that a resume needs."""
        return (await self._do(self._steps.count))["issued"]

    async def saved(self, step: int) -> None:
        """A checkpoint of `step` is complete: the batches before it are the trainer's for good."""
        me = self._trainer[0] if self._trainer else ""
        await self._do(lambda db: self._steps.saved(db, me, step))

    async def retain(self, position: int, step: int | None = None) -> None:
        """Experiences of steps before `step` may go: no retained
        checkpoint of this trainer is older.
        """
        me = self._trainer[0] if self._trainer else ""
        if step is not None:
            await self._do(lambda db: self._steps.forget(db, me, step))

    # The supervisor

    async def stats(self) -> dict[str, Any]:
        found = await self._do(self._steps.count, tells=False)
        return {
            **found,
            "published": self._published,
            **{name: self._counts[name] for name in COUNTERS},
        }

    async def watch(self) -> None:
        """Return when the buffer is closed, raise when its database fails; until then, wait."""
        await self._waits.watch()

    async def stop(self, reason: str = "") -> None:
        """A `take` that waits, and every later one, is answered as at the end of the run; with a
        `reason` it raises that.
        """
        self._stopped = reason or "stopped"
        self._stop_is_failure = bool(reason)
        await self._notify()

    async def shutdown(self) -> None:
        """Wake up all who wait, and leave the database."""
        if self._beating is not None:
            self._beating.cancel()
        await self._waits.close()
        await asyncio.to_thread(self._pool.shutdown)
        self._engine.dispose()

    # Inside

    async def _do(
        self,
        change: Callable[[Connection], Any],
        tells: bool = True,
        patience: float = RETRY_S,
    ) -> Any:
        """One transaction, in a thread; again for `patience` seconds after an error that passes,
        also where it was committed and only the answer got lost. `tells`: it may have changed what
        others here wait for.
        """

        def run() -> Any:
            with self._engine.begin() as db:
                return change(db)

        loop = asyncio.get_running_loop()
        deadline, nap = loop.time() + patience, NAP_S
        while True:
            self._waits.check_open()
            try:
                found = await loop.run_in_executor(self._pool, run)
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
            if or_stopped and self._stopped:
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
        trainer = self._trainer[0] if self._trainer else None
        beat = partial(self._lives.beat, explorers=list(self._explorers), trainer=trainer)
        # whether the database is away for too long is said by the calls that need it
        await self._do(beat, tells=False, patience=self._patience)

    def _check_explorer(self, db: Connection, name: str) -> None:
        if self._steps.incarnation(db, name) != self._explorers.get(name):
            raise Lost(
                f"another process has begun as explorer {name}: "
                "give every explorer of a run its own explorer.name"
            )

    def _epoch(self, db: Connection) -> int:
        return self._steps.run_epoch(db, f"{self.owner}/trainer")

    def _version_now(self) -> int | None:
        return None if self._steps.max_staleness is None else self._published

    async def _where(self) -> str:
        found = await self._do(self._steps.count, tells=False)
        return f"{found['ready_groups']} groups ready, {found['running_groups']} running"


class _Task(msgspec.Struct):
    task: str = ""
