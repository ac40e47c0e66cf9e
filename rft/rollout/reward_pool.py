"""Runs reward functions in child processes that can be killed: groups of responses in, one
`RewardResult` each out.

    score(group) ──► idle worker ── one request ──►  process (own process group)
            deadline per item, counted by the pool
                          ▲         ◄── a reply per item ──
                          └── killed with its process group and replaced, when it hangs or dies

Rewards that are pure and quick (`rft.rollout.rewards.QUICK`) of texts that are not too long run
here, in the caller's process: a process that can be killed is for what may hang, and these cannot.
One such group takes milliseconds at most, so the deadline, of processor time here, is looked at
after each item. Where a run has no others, no worker is started: the first group that needs one
starts them all. Functions that are foreseen are imported by every worker as soon as it is there.

Invariant: every response gets exactly one result, in order, and an infrastructure failure never
looks like a reward: the item that hung is "timeout" (time for which the worker, or this process,
was stopped does not count); the item whose process died runs once more, in the replacement, and is
"error" where that dies too; the items behind it run in the replacement. Of workers of which nothing
is asked, a dead one is replaced within a second or two, a stopped one after half a minute.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TypeVar

from rft.ground.experience import Task, decode, encode
from rft.ground.process import Child
from rft.rollout.reward_worker import (
    UNKNOWN,
    Loaded,
    Named,
    Reply,
    RewardResult,
    ScoreRequest,
    judge,
)
from rft.rollout.rewards import REWARDS, is_quick

# start of the interpreter and import of user code; sympy alone takes seconds on a busy machine
LOAD_TIMEOUT_S = 120.0
LOOKS = 20  # at the worker, within a deadline
ATTEND_S = 1.0  # between two looks whether an idle worker still lives
STOPPED_S = 30.0  # a worker that is stopped for so long does not go on by itself
# of a group, for quick rewards: 5 ms at most where it was measured
QUICK_CHARACTERS = 2**18
Item = tuple[Task, str] | tuple[Task, str, int]
WORKER = "rft.rollout.reward_worker"
Answer = TypeVar("Answer", Loaded, RewardResult)


class RewardPool:
    """`workers` processes, each scoring one group at a time;
    `timeout_s` is the limit of one reward.
    """

    def __init__(
        self, workers: int, timeout_s: float, load_timeout_s: float = LOAD_TIMEOUT_S
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                "explorer.reward_workers must be at least 1 and explorer.reward_timeout above 0 "
                "seconds"
            )
        self._timeout_s, self._load_timeout_s = timeout_s, load_timeout_s
        self._workers = [Child(WORKER) for _ in range(workers)]
        self._idle: asyncio.Queue[Child] = asyncio.Queue()
        self._busy: set[Child] = set()
        self._attending: asyncio.Task[None] | None = None
        self._importing: list[asyncio.Task[None]] = []
        self._closed = False
        self.replaced = 0  # workers killed or found dead so far

    async def start(self, ahead: Sequence[Named] = ()) -> None:
        """Start the processes, so that the first group does not wait for interpreters, nor for the
        import of the functions `ahead`.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._attending is None:
            for worker in self._workers:
                worker.start()
                self._idle.put_nowait(worker)
            self._attending = asyncio.create_task(self._attend())
            if ahead:
                self._importing = [
                    asyncio.create_task(self._import(list(ahead))) for _ in self._workers
                ]

    async def _import(self, ahead: list[Named]) -> None:
        """By one worker. Whoever is scored first by a function that kills or hangs it is told."""
        async with self._taken() as worker:
            try:
                await self._ask(worker, ScoreRequest(ahead=ahead))
            except (TimeoutError, EOFError):
                self._replace(worker)

    @asynccontextmanager
    async def _taken(self) -> AsyncIterator["Child"]:
        """An idle worker; one that is left in the middle is replaced."""
        worker = await self._idle.get()
        self._busy.add(worker)
        try:
            yield worker
        except BaseException:  # cancelled: its answers must not reach the next group
            self._replace(worker)
            raise
        finally:
            self._busy.remove(worker)
            self._idle.put_nowait(worker)

    async def score(self, items: Sequence[Item]) -> list[RewardResult]:
        """Score (task, response[, its number of tokens]) at once, where that is quick, or in one
        round trip to one worker; results in the same order.
        """
        if not items:
            return []
        if are_quick(items):
            self._refuse_when_closed()
            return [self._score_here(*item) for item in items]
        await self.start()
        async with self._taken() as worker:
            return await self._score_on(worker, items)

    async def _attend(self) -> None:
        """Replace workers that died, or stay stopped, while nothing was asked of them: the next
        group finds one that is ready.
        """
        stopped = Counter[Child]()  # looks that found it so, one behind the other
        while not self._closed:
            await asyncio.sleep(ATTEND_S)
            for worker in set(self._workers) - self._busy:
                stopped[worker] = stopped[worker] + 1 if worker.stopped else 0
                if not worker.alive or stopped[worker] * ATTEND_S > STOPPED_S:
                    self._replace(worker)

    def _score_here(self, task: Task, response: str, tokens: int = UNKNOWN) -> RewardResult:
        began = time.thread_time()
        result = judge(REWARDS[task.reward], response, task, tokens)
        late = time.thread_time() - began > self._timeout_s
        return ran_longer(task, self._timeout_s) if late else result

    async def _score_on(self, worker: "Child", items: Sequence[Item]) -> list[RewardResult]:
        results: list[RewardResult] = []
        died_loading, died_over = False, -1
        if not worker.alive:
            self._replace(worker)
        while len(results) < len(items):
            self._refuse_when_closed()
            waiting_for = "import"
            try:
                await self._ask(worker, request_of(items[len(results) :]))
                waiting_for = "reward"
                while len(results) < len(items):
                    results.append(await self._reply(worker, RewardResult, self._timeout_s))
            except (TimeoutError, EOFError) as error:
                self._refuse_when_closed()
                is_dead = isinstance(error, EOFError)
                if waiting_for == "reward" and is_dead and died_over != len(results):
                    died_over = len(results)  # perhaps killed from outside: done again, once
                elif waiting_for == "reward":
                    results.append(
                        await self._blame(error, items[len(results)][0], self._timeout_s, worker)
                    )
                elif died_loading or isinstance(error, TimeoutError):
                    blamed = await self._blame(
                        error, items[len(results)][0], self._load_timeout_s, worker
                    )
                    blamed.message += " (while importing it)"
                    results += [blamed] * (len(items) - len(results))
                else:  # perhaps killed from outside while it was idle: nobody's fault yet
                    died_loading = True
                self._replace(worker)
        return results

    async def _ask(self, worker: "Child", request: ScoreRequest) -> None:
        """Until its functions are imported."""
        async with asyncio.timeout(self._load_timeout_s):
            await worker.send(encode(request))
        await self._reply(worker, Loaded, self._load_timeout_s)

    async def _reply(self, worker: "Child", kind: type[Answer], timeout_s: float) -> Answer:
        if (data := worker.come()) is None:
            data = await self._heard(worker, timeout_s)
        reply = decode(data, Reply)
        if not isinstance(reply, kind):
            raise EOFError(f"out of order: {type(reply).__name__} instead of {kind.__name__}")
        return reply

    async def _heard(self, worker: "Child", timeout_s: float) -> bytes:
        """The next message. Raises TimeoutError after `timeout_s` of looks at which the worker was
        not stopped; EOFError where it stays so. A stop of this process counts as one look.
        """
        coming, look_s = asyncio.ensure_future(worker.receive()), timeout_s / LOOKS
        works = stopped = 0
        try:
            while not (await asyncio.wait({coming}, timeout=look_s))[0]:
                is_stopped = worker.stopped
                works, stopped = works + (not is_stopped), stopped + is_stopped
                if works >= LOOKS:
                    raise TimeoutError
                if stopped * look_s > STOPPED_S:
                    raise EOFError("the worker stays stopped")
            return coming.result()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _blame(
        self, error: Exception, task: Task, limit_s: float, worker: "Child"
    ) -> RewardResult:
        if isinstance(error, TimeoutError):
            return ran_longer(task, limit_s)
        return RewardResult(
            outcome="error", message=f"reward {task.reward!r}: its process {await worker.end()}"
        )

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool was closed while a group was scored")

    def _replace(self, worker: "Child") -> None:
        worker.kill()
        if not self._closed:
            self.replaced += 1
            worker.start()

    async def close(self) -> None:
        """Kill all workers and wait until they are gone. Groups still being scored raise."""
        self._closed = True
        if self._attending is None:
            return
        self._attending.cancel()
        for worker in self._workers:
            worker.kill()
        # the groups in progress have seen the end
        returned = [await self._idle.get() for _ in self._workers]
        await asyncio.to_thread(lambda: [worker.reap() for worker in returned])
        for worker in returned:
            self._idle.put_nowait(worker)  # whoever still waits in line is woken, and refused

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def ran_longer(task: Task, limit_s: float) -> RewardResult:
    return RewardResult(
        outcome="timeout", message=f"reward {task.reward!r} ran longer than {limit_s:g} s"
    )


def request_of(items: Sequence[Item]) -> ScoreRequest:
    places: dict[int, int] = {}
    tasks: list[Task] = []
    for task, *_ in items:
        if id(task) not in places:
            places[id(task)] = len(tasks)
            tasks.append(task)
    return ScoreRequest(
        tasks=tasks,
        items=[(places[id(i[0])], i[1], i[2] if len(i) > 2 else UNKNOWN) for i in items],
    )


def are_quick(items: Sequence[Item]) -> bool:
    """Whether all of these are quick to score, together too."""
    tasks = {id(task): task for task, *_ in items}
    return (
        all(is_quick(task.reward, task.reward_args) for task in tasks.values())
        and sum(len(i[1]) + len(i[0].truth or "") for i in items) <= QUICK_CHARACTERS
    )
