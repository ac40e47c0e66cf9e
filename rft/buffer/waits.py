"""How the callers of a buffer wait for each other, hear of its failure, and go home when it is closed.

In: `notify` after every change, `fail`, `close`. Out: `wait` for a condition, with a deadline; `watch` for the supervisor.
Invariant: after `fail` or `close` nobody waits any more, and whoever calls hears why.
"""

import asyncio
from collections.abc import Callable

from rft.buffer.journal import JournalError


class Waits:
    """Of one event loop."""

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
        self, ready: Callable[[], bool], timeout: float, wake: Callable[[], float | None] = lambda: None
    ) -> bool:
        """Wait, holding `changed`, until `ready()`; False after `timeout` seconds.

        `wake`: in how many seconds to look again although nobody notifies; None: that is not needed.
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
            raise JournalError(f"the experience buffer stopped: {self._failure}") from self._failure
