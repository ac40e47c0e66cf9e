"""Permissions to work, as many as the engines that serve can use: a semaphore whose size may
change.

Holders take one, wait for their turn in the order in which they came, and give it back. Invariant:
no slot is given while `taken` is at or above `size`; when the size falls, holders keep theirs and
the next ones wait for longer.
"""

import asyncio
from collections import deque


class Slots:
    def __init__(self, each: int, engines: int):
        self.each = each  # per engine
        self.size = each * engines
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        return max(0, self.size - self.taken)

    def resize(self, engines: int) -> None:
        self.size = self.each * engines
        self._grant()

    async def acquire(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in the same turn of the loop
                self.release()
            raise

    def release(self) -> None:
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.taken < self.size:
            turn = self._waiting.popleft()
            if not turn.done():  # the others have given up
                self.taken += 1
                turn.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()
