"""What stands in a simulated run for that which cannot be here: a taskset, what samples a group,
vLLM's engines, and the trainer's streams.

An engine is told all that the product's synchronizer tells one, and what it answers is what it
holds: it takes the bytes of a round from the streams of the trainer that it was told of, as long as
these hold that version.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rft.ground import rounds
from rft.ground.experience import (
    Completion,
    Experience,
    GenerateRequest,
    Sampling,
    Task,
    VersionSpan,
    encode,
)
from rft.ground.rounds import Holding, Installed, Received, Round, TrainerInfo, WorkerOffer
from rft.rollout.answers import GroupAnswers
from rft.rollout.pool import EnginePool
from rft.sync.plan import StreamPlan
from tests.simulation.world import PartGone, handle

PLAN = StreamPlan(streams=(), digest="plan")
LONGEST_ROLLOUT_S = 300.0  # the product ends a task by its timeout


class Tasks:
    """A taskset without end."""

    name = "tasks"
    learns = False

    def __init__(self) -> None:
        self.index = 0

    @property
    def cursor(self) -> dict[str, Any]:
        return {"index": self.index}

    def seek(self, cursor: dict[str, Any]) -> None:
        self.index = cursor["index"]

    def __iter__(self) -> "Tasks":
        return self

    def __next__(self) -> Task:
        self.index += 1
        row = self.index - 1
        return Task(id=f"task {row}", taskset="tasks", row=row, prompt="", sampling=Sampling())


class Sampler:
    """In the place of the explorer's runner: one request, or two turns with an environment that
    takes its time; at times a failure. `hear`: the turns of a group that may not be sampled again
    now.
    """

    def __init__(
        self,
        chance: random.Random,
        pool: EnginePool,
        failing: float,
        turns: int,
        hear: Callable[[int, list[list[int]]], None],
    ):
        self.chance, self.pool, self.failing = chance, pool, failing
        self.turns, self.hear, self.starts = turns, hear, count()

    async def run(self, group: int, task: Task, answers: GroupAnswers) -> list[Experience]:
        turns: list[Completion] = []
        start = next(self.starts)
        for turn in range(self.turns):
            prompt = [1, *(token for made in turns for token in made.ids)]
            name = f"{group}/{start}/{turn}"
            request = GenerateRequest(request_id=name, prompt=prompt, sampling=task.sampling)
            turns += await answers.complete(self.pool, "run", request, ahead=turn > 0)
        if self.turns > 1:
            self.hear(group, [made.ids for made in turns])
            await asyncio.sleep(self.chance.expovariate(0.2))  # what its environment does with them
        if self.chance.random() < self.failing:
            raise RuntimeError("the environment fell over")
        return [
            Experience(
                tokens=[1, group],
                prompt_length=1,
                action_mask=[1],
                logprobs=[0.0],
                versions=sorted(
                    (span for made in turns for span in made.versions), key=lambda s: s.version
                ),
                reward=1.0,
                task=task.id,
            )
        ]

    def cut(self, group: int) -> None: ...


class TrainerStreams:
    """Of the trainer of `epoch`: `version` is what its weights are, None while they change."""

    def __init__(self, epoch: int):
        self.epoch = epoch
        self.version: int | None = None

    async def read(self, epoch: int, version: int) -> str:
        """Whom it blames, if these bytes are not to be had."""
        if epoch != self.epoch:
            return rounds.UNREACHABLE
        return "" if version == self.version else rounds.MISSED


class SimulatedEngine:
    """`tokens`: no two of them are the same."""

    def __init__(self, chance: random.Random, tokens: Iterator[int]):
        self.chance, self.tokens = chance, tokens
        self.mark: tuple[int, int] | None = None
        self.generation = 0
        self.staged: tuple[int, int] | None = None

    async def worker_offers(self) -> list[WorkerOffer]:
        return [WorkerOffer(shape=(1, 1), endpoint={})]

    async def holding(self) -> Holding:
        return Holding(mark=self.mark, digest=PLAN.digest, generation=self.generation)

    async def check_plan(self, plan: dict[str, object]) -> None: ...

    async def init_weights(self, info: TrainerInfo) -> None:
        self.generation = max([self.generation, *(seat.generation for seat in info.seats)])

    async def stage(self, coming: Round) -> Received:
        try:
            asked = (coming.epoch, coming.version)
            blame = await handle("trainer").ask(TrainerStreams.read, *asked)
        except PartGone:
            blame = rounds.UNREACHABLE
        if blame == rounds.MISSED:
            return Received(error="the version is over", blame=blame)
        if blame:
            error = RuntimeError("no trainer is there")
            error.kind = blame  # type: ignore[attr-defined]
            raise error
        await asyncio.sleep(self.chance.expovariate(1 / 0.1))
        self.staged = asked
        return Received(digest=coming.digest)

    async def commit(self, coming: Round) -> Installed:
        await asyncio.sleep(self.chance.expovariate(1 / 0.1))
        if self.staged != (coming.epoch, coming.version):
            raise RuntimeError(f"{coming} was not staged, {self.staged} was")
        self.mark = self.staged
        return Installed(version=coming.version, digest=coming.digest)

    async def generate(self, request: bytes) -> list[bytes]:
        """Tokens of the version that there is when each is sampled."""
        spans = [self._version()]
        await asyncio.sleep(min(self.chance.paretovariate(1.5), LONGEST_ROLLOUT_S))
        spans.append(self._version())
        versions = [VersionSpan(start=n, end=n + 1, version=v) for n, v in enumerate(spans)]
        tokens = [next(self.tokens), 2]
        made = Completion(tokens=tokens, logprobs=[0, 0], versions=versions, stop="stop")
        return encode([made])

    def _version(self) -> int:
        assert self.mark is not None, "an engine without weights was asked"
        return self.mark[1]

    async def abort(self, request_id: str) -> None: ...
    async def disband(self, generation: int) -> None: ...
    async def dump_stacks(self) -> None: ...
