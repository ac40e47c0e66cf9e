"""A small run that may be killed at any of its points: explorer, runner, endpoint and buffer are
the product's, an engine answers what was never said before, or what its seed says.

    World(directory, workload).live(kill_at)    until it is killed, at that point, or done

A point is before and after each call of the buffer and of the engine, and where a workflow or an
agent hears an answer. What a killed life leaves is what its buffer made durable. `heard` and
`answered` are accounts of all lives together.
"""

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from rft.buffer.delivery import StoredGroup
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExperienceBufferConfig, ExplorerConfig, ModelConfig
from rft.ground.experience import (
    Completion,
    Experience,
    GenerateRequest,
    Sampling,
    Task,
    VersionSpan,
    decode,
    encode,
)
from rft.ground.protocols import ActorHandle
from rft.rollout.context import TokenLimits
from rft.rollout.explorer import Explorer
from rft.rollout.reward_worker import RewardResult
from rft.rollout.workflows import MultiTurn
from tests.unit.scripted import TOKENIZER, listening

TASKS, RUNS, TURNS = 2, 2, 3
HEARD: list[str] = []  # by workflows and agents, in all lives
MODULE = "tests.unit.answer_world"
WORKLOADS = {
    "turns": {"workflow": f"{MODULE}:Talks"},
    "agent": {"workflow": "agent", "workflow_args": {"agent": f"{MODULE}:talks"}},
}


class Talks(MultiTurn):
    max_step_num = TURNS

    async def step(self, answer: str) -> list[dict[str, Any]]:
        await World.now.hear(answer)
        return [{"role": "user", "content": "?"}]

    def reward(self, answer: str) -> float:
        return 1.0


async def talks(task: Task, base_url: str, api_key: str) -> float:
    """An agent: asks, and asks again about the answer."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        said = [{"role": "user", "content": str(task.prompt)}]
        for _ in range(TURNS):
            made = await client.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]
            answer = made.choices[0].message.content or ""
            await World.now.hear(answer)
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "?"}]
    return 1.0


class Remote:
    """Its methods, called as Ray calls an actor's, are points on both sides."""

    def __init__(self, target: Any, point: Callable[[str], Awaitable[None]]):
        self.target, self.point = target, point

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any) -> Any:
            await self.point(f"before {name}")
            answer = getattr(self.target, name)(*arguments)
            answer = await answer if asyncio.iscoroutine(answer) else answer
            await self.point(f"after {name}")
            return answer

        return type(
            "Method", (), {"remote": staticmethod(lambda *a: asyncio.ensure_future(called(*a)))}
        )


class Tasks:
    name, learns = "tasks", False

    def __init__(self, found: list[Task]):
        self.found, self.at = found, 0

    @property
    def cursor(self) -> dict[str, Any]:
        return {"at": self.at}

    def seek(self, cursor: dict[str, Any]) -> None:
        self.at = cursor["at"]

    def __iter__(self) -> "Tasks":
        return self

    def __next__(self) -> Task:
        if self.at == len(self.found):
            raise StopIteration
        self.at += 1
        return self.found[self.at - 1]


class Engine:
    def __init__(self, world: "World"):
        self.world = world

    async def generate(self, request: bytes) -> bytes:
        asked = decode(request, GenerateRequest)
        self.world.asked_by.add(asked.group)
        made = [self._sample(asked, asked.first + n) for n in range(asked.n)]
        self.world.answered += [TOKENIZER.decode(one.ids[:-1]) for one in made]
        return encode(made)

    def _sample(self, asked: GenerateRequest, number: int) -> Completion:
        seed = asked.sampling.seed
        word = next(self.world.words) if seed is None else (seed + number) % 10**6
        tokens = [*TOKENIZER.encode(str(word), add_special_tokens=False), TOKENIZER.eos_token_id]
        logprobs = [-word / 10**7 - at for at in range(len(tokens))]
        spans = [VersionSpan(version=self.world.version, start=0, end=len(tokens))]
        return Completion(tokens=tokens, logprobs=logprobs, versions=spans, stop="stop")

    async def finished(self, asked: dict[str, list[int]]) -> bytes:
        return encode({})

    async def abort(self, request_id: str) -> None: ...


class Scores:
    async def score(self, items: list[Any]) -> list[RewardResult]:
        return [RewardResult(reward=1.0)] * len(items)

    async def close(self) -> None: ...


def journal(directory: Path) -> ExperienceBuffer:
    config = ExperienceBufferConfig()
    return ExperienceBuffer(config, str(directory), TASKS, RUNS, None, None, segment_bytes=4000)


def durable_copy(buffer: ExperienceBuffer, source: Path, target: Path) -> None:
    """What a loss of power leaves at least. Not while a thread syncs: between its mark on disk and
    its `durable` the copy would lack what the mark says is there.
    """
    made = buffer._ledger.journal
    with made._syncing:
        shutil.copytree(source, target)
        last = made._segments[-1]
        with open(target / last.path.name, "r+b") as file:
            file.truncate(max(0, made.durable - last.start))


class World:
    now: "World"

    def __init__(
        self,
        directory: Path,
        workload: str,
        seed: int | None = None,
        make: Callable[[Path], Any] = journal,
        leaves: Callable[[Any, Path, Path], None] = durable_copy,
        read: Callable[[Any], Iterable[StoredGroup]] = lambda buffer: buffer._ledger.stored(),
    ):
        self.directory, self.seed, self.make = directory, seed, make
        self.leaves, self.read = leaves, read
        self.workload, self.lives = workload, 0
        self.words, self.version = itertools.count(100), 0
        self.heard: list[str] = []
        self.answered: list[str] = []
        self.asked_by: set[int | None] = set()
        self.stored: dict[int, list[Experience]] = {}
        World.now = self

    @property
    def place(self) -> Path:
        return self.directory / str(self.lives)

    def tasks(self) -> Tasks:
        sampling = Sampling(temperature=0.9, max_tokens=8)
        given = {"repeat_times": RUNS, "sampling": sampling, **WORKLOADS[self.workload]}
        rows = range(TASKS)
        return Tasks(
            [Task(id=f"t/0/{n}", taskset="t", row=n, prompt=f"{n}+1=", **given) for n in rows]
        )

    async def point(self, name: str) -> None:
        self.points += 1
        if self.points == self.kill_at:
            self.killed.set()
        if self.killed.is_set():
            await self.never.wait()

    async def hear(self, answer: str) -> None:
        self.heard.append(answer)
        await self.point("heard")

    async def live(self, kill_at: int | None = None) -> bool:
        """Whether it came to its end."""
        self.points, self.kill_at = 0, kill_at
        self.killed, self.never = asyncio.Event(), asyncio.Event()
        buffer = self.make(self.place)
        explorer = self._explorer(buffer)
        async with asyncio.timeout(100), listening(explorer.pool, self.directory) as endpoint:
            explorer.shared.endpoint = endpoint
            works = asyncio.ensure_future(self._work(explorer))
            killed = asyncio.ensure_future(self.killed.wait())
            await asyncio.wait({works, killed}, return_when=asyncio.FIRST_COMPLETED)
            was_killed = self.killed.is_set()
            if was_killed:
                self.lives += 1
                self.leaves(buffer, self.directory / str(self.lives - 1), self.place)
            else:
                await works
            self.killed.set()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if task.get_coro().__qualname__ != "RequestHandler.start":  # type: ignore[union-attr]
                    task.cancel()
            await asyncio.gather(works, killed, return_exceptions=True)
        if not was_killed:
            self.stored = {
                part.group: decode(part.experiences, list[Experience]) for part in self.read(buffer)
            }
        await buffer.shutdown()
        self.version += 1
        return not was_killed

    def _explorer(self, buffer: Any) -> Explorer:
        config = ExplorerConfig(max_retry_times=0, max_timeout=60.0, runner_per_model=8)
        self.engine = Engine(self)
        explorer = Explorer(
            *(config, ModelConfig(), self.tasks(), [], {}, None),  # type: ignore[arg-type]
            batch_size=8,
            seed=self.seed,
        )
        explorer.buffer = ActorHandle(Remote(buffer, self.point))
        explorer.pool.add("engine_0", ActorHandle(Remote(self.engine, self.point)))
        explorer.runners.resize(1)
        shared = explorer.shared
        shared.tokenizer, shared.rewards = TOKENIZER, Scores()  # type: ignore[assignment]
        shared.limits, shared.stop_token = TokenLimits(256, 512), TOKENIZER.eos_token_id
        explorer._keep(explorer.keeper.follow(explorer.pool))
        explorer.prepared.set()
        return explorer

    async def _work(self, explorer: Explorer) -> None:
        await explorer.explore()
        await explorer.finished()
