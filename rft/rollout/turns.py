"""When an engine works, and when its devices are the trainer's: the gate for requests, sleeping and
waking.

    request ──► gate ──► under way ──► answered          sleep: under way are finished
            ─► gate closes ─► vLLM sleeps
                (closed while weights are installed,     wake:  weights ─► (new ones are installed)
                        ─► cache ─► gate opens
                 and while the engine sleeps)

In: requests, and the word of who leads the engine. On a GPU vLLM's sleep frees the card: the
weights wait in host memory, the cache is dropped. On a CPU it frees nothing, but nobody computes,
so the cores are the trainer's; all the rest is the same. Invariants: a request that has not passed
the gate is not known to vLLM; nothing decodes between `sleep` and the last `wake`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import AsyncLLM

log = logging.getLogger(__name__)
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's words for the parts of an engine that sleep
# of vLLM's sleep: 2 would forget the weights, and a round that fails leaves the old ones to be
# served
LEVEL = 1


class Turns:
    def __init__(self, name: str):
        self.name = name
        self.answered_asleep = 0  # requests; none, if all is right
        self._asleep: set[str] = set()
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def close(self) -> None:
        """New requests wait from now on."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait for the gate; under way until the block is left."""
        await self._open.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            self.answered_asleep += self.asleep
            if not self._under_way:
                self._idle.set()

    async def sleep(self, llm: "AsyncLLM", patience: float) -> dict[str, Any]:
        """Sleep as soon as nothing is under way. What is not finished after `patience` seconds is
        frozen as it is, and goes on when the engine wakes: its tokens from then on are of the
        weights from then on, as its versions say.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                # one more may have come when this is told of the last one's end
                while self._under_way:
                    await self._idle.wait()
        except TimeoutError:
            log.warning(
                "%s sleeps over %d requests that were not finished in %g s",
                self.name,
                self._under_way,
                patience,
            )
        self.close()
        if WEIGHTS not in self._asleep:
            await llm.sleep(level=LEVEL, mode="keep")
            self._asleep = {WEIGHTS, CACHE}
        return {
            "waited_s": time.monotonic() - began,
            "frozen": self._under_way,
            "answered_asleep": self.answered_asleep,
        }

    async def wake(self, llm: "AsyncLLM", *parts: str) -> None:
        """Wake those parts that sleep. With the last one vLLM goes on with what was frozen."""
        for part in parts:
            if part in self._asleep:
                await llm.wake_up([part])
                self._asleep.discard(part)
