"""Many small calls as few large ones: what an explorer asks of a buffer costs less by the dozen.

    explorer: Together(buffer.put_some) ── puts of about the same time go in one call ──► buffer: Several

In: calls for one task or group. Out: the same effect, and the same error for all of a call that failed. Invariant: whoever
called goes on only after its own part is durable.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

GATHER_S = 0.02  # of about one step of an engine, which ends several groups


class Buffer(Protocol):
    async def admit_some(self, explorer: str, tasks: list[tuple[bytes, dict[str, Any]]]) -> list[int]: ...
    async def put(self, group: int, experiences: bytes, told: list[Any] | None = None) -> None: ...


class Several:
    """Of a buffer that has `admit_some` and `put`."""

    async def admit(self: Buffer, explorer: str, task: bytes, cursor: dict[str, Any]) -> int | None:
        """`admit_some` of one: the number of its group. None: the run needs no more."""
        return next(iter(await self.admit_some(explorer, [(task, cursor)])), None)

    async def put_some(self: Buffer, puts: list[tuple[int, bytes, list[Any] | None]]) -> None:
        """`put` each, with one write to the disk for all."""
        await asyncio.gather(*(self.put(*given) for given in puts))


class Together:
    """Gathers what is to be sent by `call`, of which one is under way at a time: all that comes within `GATHER_S`.

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
