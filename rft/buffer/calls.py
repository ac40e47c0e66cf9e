"""What the callers of a buffer share: calls that come at about the same time are batched, and
callers wait for each other.

    explorer: CallBatcher(buffer.put_some) ── puts of about the same time go in one call
            ──► buffer: BatchedCalls

In: calls for one task or group; `notify` after every change, `fail`, `close`. Out: the same effect,
and the same error for all of a call that failed; `wait` for a condition, with a deadline; `watch`
for the supervisor. Invariants: whoever called goes on only after its own part is durable; after
`fail` or `close` nobody waits any more, and whoever calls hears why.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from rft.buffer.delivery import Delivery
from rft.buffer.journal import JournalError
from rft.ground.experience import encode

GATHER_S = 0.02  # of about one step of an engine, which ends several groups
AGAIN_S = 1.0  # until a buffer that is broken is asked again
T = TypeVar("T")


class BufferBroken(JournalError):
    """It can do nothing more (a full disk), and says so to the supervisor, too: that begins it
    anew, or ends the run. Who asks again within its own deadline loses nothing.
    """


class Lost(RuntimeError):
    """Another process has taken over what this one held."""


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """What a buffer answers, broken or not: who calls sets the deadline."""
    while True:
        try:
            return await ask()
        except BufferBroken:
            await asyncio.sleep(AGAIN_S)


class BatchingBuffer(Protocol):
    async def admit_some(
        self,
        explorer: str,
        tasks: list[tuple[bytes, dict[str, Any]]],
        most: list[int | None] | None = None,
        heard: int | None = None,
    ) -> list[int]: ...
    async def put(self, group: int, experiences: bytes, told: list[Any] | None = None) -> None: ...


class BatchedCalls:
    """Many small calls as few large ones, of a buffer that has `admit_some` and `put`: what an
    explorer asks of it costs less by the dozen.
    """

    async def admit(
        self: BatchingBuffer,
        explorer: str,
        task: bytes,
        cursor: dict[str, Any],
        most: int | None = None,
    ) -> int | None:
        """`admit_some` of one: the number of its group. None: the run needs no more."""
        return next(iter(await self.admit_some(explorer, [(task, cursor)], [most])), None)

    async def look(self, step: int) -> bytes:
        """What `take(step)` would give, an encoded `Delivery`: here nothing can be told before."""
        return encode(Delivery(step=step))

    async def put_some(
        self: BatchingBuffer, puts: list[tuple[int, bytes, list[Any] | None]]
    ) -> None:
        """`put` each, with one write to the disk for all."""
        await asyncio.gather(*(self.put(*given) for given in puts))


class CallBatcher:
    """Gathers what is to be sent by `call`, of which one is under way at a time: all that comes
    within `GATHER_S`.

    `expected`: how many callers there may be now; once all of them wait, nothing is waited for.
    """

    def __init__(self, call: Callable[[list[Any]], Awaitable[None]], expected: Callable[[], int]):
        self.call = call
        self.expected = expected
        self._waiting: list[tuple[Any, asyncio.Future[None]]] = []
        self._all_wait = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    async def __call__(self, item: Any) -> None:
        """Return when the call with `item` has; raises what it raised."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if len(self._waiting) >= self.expected():
            self._all_wait.set()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await done

    async def _send(self) -> None:
        while self._waiting:
            if not self._all_wait.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_wait.wait(), GATHER_S)
            self._all_wait.clear()
            sent, self._waiting = self._waiting, []
            try:
                await self.call([item for item, _ in sent])
                error = None
            except Exception as caught:
                error = caught
            for _, done in sent:
                if not done.done():  # cancelled
                    done.set_result(None) if error is None else done.set_exception(error)


class Waiters:
    """How the callers of a buffer wait for each other, hear of its failure, and go home when it is
    closed. Of one event loop.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.closed = False
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait(
        self,
        ready: Callable[[], bool],
        timeout: float,
        wake: Callable[[], float | None] = lambda: None,
    ) -> bool:
        """Wait, holding `changed`, until `ready()`; False after `timeout` seconds.

        `wake`: in how many seconds to look again although nobody notifies; None: that is not
        needed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not (self.closed or self._failure is not None or ready()):
            left, nap = deadline - loop.time(), wake()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(left if nap is None else min(left, max(nap, 0.001))):
                    await self.changed.wait()
            except TimeoutError:
                continue  # the condition decides, and then the deadline
        self.check_open()
        return True

    def fail(self, error: BaseException) -> None:
        """The first failure counts. Does not wait: the caller may hold `changed`."""
        if self._failure is None:
            self._failure = error
            self._ended.set()
            task = asyncio.get_running_loop().create_task(self.notify())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def check_open(self) -> None:
        self._raise_failure()
        if self.closed:
            raise JournalError("the experience buffer is closed")

    async def watch(self) -> None:
        """Return when the buffer is closed, raise when it has failed; until then, wait."""
        await self._ended.wait()
        self._raise_failure()

    async def close(self) -> None:
        self.closed = True
        await self.notify()
        self._ended.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise BufferBroken(f"the experience buffer stopped: {self._failure}") from self._failure
