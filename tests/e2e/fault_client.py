"""The explorer's part in a world of faults: requests at all times, to whoever is admitted, every
answer written down at once.
"""

import asyncio
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rft.ground import columns
from rft.ground.experience import Completion, GenerateRequest, Sampling
from rft.ground.protocols import ActorHandle
from rft.rollout.pool import EnginePool

TOKENS = 80  # of one answer: some are always under way when new weights come
TEMPERATURE = 0.7
# 2: cached
PROMPTS = [
    [10, 23, 42, 31, 17, 8],
    [10 + i % 80 for i in range(200)],
    [12 + i % 70 for i in range(90)],
]


class Answered(msgspec.Struct):
    prompt: list[int]
    completions: list[Completion]


class Client:
    """A Ray actor; the real pool chooses the engines. `width`: requests under way."""

    def __init__(self, name: str, file: str, width: int):
        self.name = name
        self.width = width
        self.pool = EnginePool({})
        self._file = open(file, "ab", buffering=0)  # noqa: SIM115  as long as this actor
        self._numbers = itertools.count()
        self._following: asyncio.Task[None] | None = None
        self._asking: set[str] = set()
        self._traffic: list[asyncio.Task[None]] = []
        self._held = True

    async def follow(self, synchronizer: Any) -> None:
        if self._following is not None:
            self._following.cancel()
        self.pool.generation = -1
        self._following = asyncio.create_task(self._follow(synchronizer))

    async def go(self) -> None:
        self._held = False
        self._traffic = [asyncio.create_task(self._ask()) for _ in range(self.width)]

    async def hold(self) -> dict[str, float]:
        """End the traffic; what is under way ends where it is.

        Raises what went wrong with any request.
        """
        self._held = True
        for request_id in list(self._asking):
            await self.pool.abort(request_id)
        await asyncio.gather(*self._traffic)
        return self.pool.stats()

    async def pid(self) -> int:
        return os.getpid()

    async def watch(self) -> None:
        """Never returns: raises, in Ray's words, when this process ends."""
        await asyncio.Event().wait()

    async def _follow(self, synchronizer: Any) -> None:
        from ray.exceptions import RayActorError

        with suppress(RayActorError):  # the test knows; it tells us of another one
            await self.pool.follow(ActorHandle(synchronizer))

    async def _ask(self) -> None:
        while not self._held:
            number = next(self._numbers)
            sampling = Sampling(
                temperature=TEMPERATURE, max_tokens=TOKENS, min_tokens=TOKENS, seed=number
            )
            request = GenerateRequest(
                request_id=f"{self.name}/{number}",
                prompt=PROMPTS[number % len(PROMPTS)],
                n=1,
                sampling=sampling,
            )
            self._asking.add(request.request_id)
            made = await self.pool.generate(request)
            self._asking.remove(request.request_id)
            line = msgspec.json.encode(Answered(request.prompt, made), enc_hook=columns.listed)
            self._file.write(line + b"\n")


def answers(file: Path) -> list[Answered]:
    """All that a client has got, also one that died; a line
    that it could not end does not count.
    """
    lines = file.read_bytes().split(b"\n")[:-1]
    reader = msgspec.json.Decoder(Answered, dec_hook=columns.unpacked)
    return [reader.decode(line) for line in lines]
