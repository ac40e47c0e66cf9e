"""A whole run in a simulated world: the product's buffer with its journal, its explorer and its
cadence of publications; trainer, engines and supervisor stand for what cannot be here, in the
product's order of calls.

    Run(seed).check()      raises what went wrong, with the seed, and `trace` tells how

Faults, drawn from the seed: a part dies by itself, the machine loses its power, a partition.
A trainer that died comes back alone, and so do, in half of all runs, explorer and buffer: calls
that were under way come again, at least once, in any order. In the others their death ends all, and
the supervisor starts the run again. What must hold, whatever happens: the run reaches its end; what
was acknowledged is there; a step that comes again has the same batch; no group is in two steps;
none is trained later than `max_staleness` allows; every task is given out once.
"""

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExperienceBufferConfig, ExplorerConfig, ModelConfig, SynchronizerConfig
from rft.ground.experience import Experience, Sampling, Task, VersionSpan
from rft.rollout.explorer import Explorer
from rft.sync.style import Cadence, default_staleness
from tests.simulation.disk import Killed
from tests.simulation.world import PartGone, Process, World

STEPS, GROUPS, KEPT = 6, 3, 2
PARTS = ("buffer", "explorer", "trainer")
RESTARTS = 12
DEATHS = (PartGone, Killed, asyncio.CancelledError)
LONGEST_ROLLOUT_S = 300.0  # the product ends a task by its timeout
LONGEST_S = 36_000.0  # of simulated time


class Broken(AssertionError):
    """Something that must hold did not."""


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


@dataclass
class Sampler:
    """In the place of the explorer's runner: an engine's time, and its version."""

    run_: "Run"
    chance: random.Random

    async def run(self, group: int, task: Task, holds: int) -> list[Experience]:
        began = self.run_.served
        await asyncio.sleep(min(self.chance.paretovariate(1.5), LONGEST_ROLLOUT_S))
        if self.chance.random() < self.run_.failing:
            raise RuntimeError("the environment fell over")
        ends = VersionSpan(start=0, end=1, version=began)
        return [
            Experience(
                tokens=[1, group],
                prompt_length=1,
                action_mask=[1],
                logprobs=[0.0],
                versions=[ends],
                reward=1.0,
                task=task.id,
            )
        ]

    def cut(self, group: int) -> None: ...


@dataclass
class Saved:
    step: int
    position: int


@dataclass
class Run:
    seed: int
    trained: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)  # durable
    served: int = 0  # by the engines
    reached: int = 0
    lost_power: bool = False

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.chance = chance = self.world.chance
        interval, offset = chance.choice((1, 1, 2)), chance.choice((0, 0, 1))
        style = chance.choice(("fixed", "fully_async", "trainer_driven", "dynamic_by_explorer"))
        staleness = default_staleness(style, interval, offset) + chance.choice((0, 0, 1))
        self.sync = SynchronizerConfig(
            sync_style=style, sync_interval=interval, sync_offset=offset, max_staleness=staleness
        )
        self.staleness = staleness
        self.failing = chance.choice((0.0, 0.0, 0.1))
        self.save_interval = chance.choice((1, 1, 2))
        self.lives = itertools.count(1)
        self.heals = chance.random() < 0.5
        self.epochs = itertools.count(1)
        self.faults = [self._fault() for _ in range(chance.choice((0, 1, 2, 3)))]

    def _fault(self) -> tuple[float, str]:
        kinds = ("trainer", "trainer", "explorer", "buffer", "power", "power", "partition")
        return self.chance.expovariate(1 / 15), self.chance.choice(kinds)

    def check(self) -> None:
        """Raises what did not hold."""
        try:
            self.world.run(asyncio.wait_for(self._supervise(), LONGEST_S))
        except Exception as error:
            last = "\n".join(self.world.trace[-40:])
            raise Broken(f"seed {self.seed}: {type(error).__name__}: {error}\n{last}") from error

    # --- the supervisor ----------------------------------------------------------------------

    async def _supervise(self) -> None:
        weather = asyncio.create_task(self._weather())
        try:
            for _ in range(RESTARTS):
                if await self._attempt():
                    break
                await asyncio.sleep(1.0)
            else:
                raise Broken("the run was started again and again")
        finally:
            weather.cancel()
        self._judge()

    async def _attempt(self) -> bool:
        """All parts, from their start to the end of one of them; whether the run is complete."""
        self.dead: asyncio.Queue[tuple[str, BaseException | None]] = asyncio.Queue()
        self.life = f"attempt {next(self.lives)}"
        self.world.returning = {"buffer", "explorer"} if self.heals else set()
        self.world.told("the run starts")
        self._start_buffer()
        self._start_explorer()
        self._trainer()
        while True:
            who, error = await self.dead.get()
            self.world.told(f"{who} ended: {error!r}")
            if error is not None and not isinstance(error, DEATHS):
                raise error
            if who == "trainer" and self.reached >= STEPS:
                await self._close()
                return True
            if self.lost_power or (who != "trainer" and not self.heals):
                self.lost_power = False
                await self._close()
                return False
            self.world.processes[who].kill()
            await asyncio.sleep(0.5)
            if self.lost_power:
                continue
            again = {"buffer": self._start_buffer, "explorer": self._start_explorer}
            again.get(who, self._trainer)()

    def _start_buffer(self) -> None:
        buffer = self.world.start("buffer")
        buffer.part = ExperienceBuffer(
            ExperienceBufferConfig(name="b", max_read_timeout=3600.0),
            "/journal",
            tasks_per_step=GROUPS,
            repeat_times=1,
            max_staleness=self.staleness,
            total_steps=STEPS,
            segment_bytes=1500,
            clock=self.world.loop.time,
            files=buffer.files,
            life=self.life,
        )
        self._compare(buffer.part)
        self._watch(buffer, buffer.part.watch)

    def _start_explorer(self) -> None:
        explorer = self.world.start("explorer")
        made = self._explorer(explorer)
        explorer.spawn(made.resume())
        self._watch(explorer, lambda: _watched(made))

    def _explorer(self, process: Process) -> Explorer:
        engines = {"engine_0": None}

        def make() -> Explorer:
            found = Explorer(
                ExplorerConfig(name="explorer", runner_per_model=4),
                ModelConfig(),
                Tasks(),  # type: ignore[arg-type]
                [],
                engines,  # type: ignore[arg-type]
                self.world.handle(process, "buffer"),
                GROUPS,
            )
            found.runner = Sampler(self, self.chance)  # type: ignore[assignment]
            found.max_failures = 10**6
            return found

        process.part = found = make()
        put = found._put

        async def noted(puts: list[tuple[int, bytes, Any]]) -> None:
            await put(puts)
            for group, experiences, _ in puts:
                self.acknowledged.setdefault(group, repr(experiences))

        found.put.call = noted
        return found

    def _watch(self, process: Process, work: Callable[[], Any]) -> None:
        async def watched() -> None:
            error: BaseException | None = None
            try:
                await work()
            except BaseException as caught:
                error = caught
            if process is self.world.processes[process.name]:
                self.dead.put_nowait((process.name, error))

        process.spawn(watched())

    async def _close(self) -> None:
        for name in PARTS:
            self.world.processes[name].kill()
        await asyncio.sleep(0)

    async def _weather(self) -> None:
        for after, kind in self.faults:
            await asyncio.sleep(after)
            self.world.told(f"fault: {kind}")
            if kind in PARTS:
                self.world.processes[kind].kill()
            elif kind == "power":
                for name in PARTS:
                    self.world.processes[name].kill()
                self.world.medium.lose_power(self.chance)
                self.lost_power = True
            else:
                ends = frozenset(self.chance.sample(PARTS, 2))
                self.world.held_until[ends] = self.world.loop.now + self.chance.uniform(1, 60)

    # --- the trainer -------------------------------------------------------------------------

    def _trainer(self) -> Process:
        process = self.world.start("trainer")
        self._watch(process, lambda: self._train(process))
        return process

    async def _train(self, process: Process) -> None:
        """`rft.trainer.trainer.Trainer.fit`, of one rank."""
        ask = self.world.handle(process, "buffer").ask
        epoch, step = next(self.epochs), self.saved[-1].step if self.saved else 0
        while not await self._attached(ask, step, epoch):
            await asyncio.sleep(1.0)
        await self.world.handle(process, "explorer").ask(Explorer.hold)
        cadence = Cadence(self.sync, ask=lambda interval: False)
        pushes: asyncio.Task[None] | None = None

        async def push(version: int) -> None:
            await asyncio.sleep(self.chance.expovariate(1 / 0.3))
            self.served = version
            await ask(ExperienceBuffer.published, version, epoch)

        async def publish(version: int) -> asyncio.Task[None]:
            cadence.published = version
            return process.spawn(push(version))

        pushes = await publish(step)
        await pushes
        await self.world.handle(process, "explorer").ask(Explorer.explore)
        while step < STEPS:
            batch = opened(await ask(ExperienceBuffer.take, step))
            self._look(step, batch.experiences)
            await asyncio.sleep(self.chance.expovariate(1.0))
            if pushes is not None:
                await pushes
            step += 1
            asked = False
            if self.sync.sync_style == "dynamic_by_explorer":
                asked = await ask(ExperienceBuffer.wants_weights, self.sync.sync_interval)
            cadence.ask = lambda interval, said=asked: said  # type: ignore[misc]
            if cadence.is_due(step):
                pushes = await publish(step)
            await ask(ExperienceBuffer.consumed, step - 1)
            if step % self.save_interval == 0 or step == STEPS:
                position = await ask(ExperienceBuffer.position)
                process.spawn(self._save(process, step, position))
            self.world.told(f"step {step} in epoch {epoch}")
        if pushes is not None:
            await pushes
        self.reached = step

    async def _attached(self, ask: Any, step: int, epoch: int) -> bool:
        try:
            await ask(ExperienceBuffer.attach_trainer, step, epoch)
        except PartGone:
            return False
        return True

    async def _save(self, process: Process, step: int, position: int) -> None:
        """A checkpoint in the background; the older ones go, and what only they needed."""
        await asyncio.sleep(self.chance.expovariate(1.0))
        if self.saved and self.saved[-1].step >= step:
            return
        self.saved = [*self.saved, Saved(step, position)][-KEPT:]
        oldest = self.saved[0]
        await self.world.handle(process, "buffer").ask(
            ExperienceBuffer.retain, oldest.position, oldest.step
        )

    # --- what must hold ----------------------------------------------------------------------

    def _compare(self, buffer: ExperienceBuffer) -> None:
        """What was acknowledged is there."""
        progress = buffer._progress
        leased = {g.number for lease in progress.leases.values() for g in lease.groups}
        here = {n for n, group in progress.waiting.items() if group.stored} | leased
        oldest = self.saved[0].step if self.saved else 0
        gone = {g for step in range(oldest) for g, _ in self.trained.get(step, [])}
        lost = set(self.acknowledged) - here - gone
        if lost:
            raise Broken(f"groups {sorted(lost)} were acknowledged, and are lost")

    def _look(self, step: int, experiences: list[Experience]) -> None:
        batch = [(one.group, one.task) for one in experiences]
        self.world.told(f"step {step} takes {batch}")
        if self.trained.setdefault(step, batch) != batch:
            raise Broken(f"step {step} had {self.trained[step]}, and now {batch}")
        if len(batch) < GROUPS:
            raise Broken(f"step {step} has {len(batch)} groups")
        for one in experiences:
            if step - one.versions[0].version > self.staleness:
                version = one.versions[0].version
                raise Broken(f"step {step} trains group {one.group} of version {version}")

    def _judge(self) -> None:
        every = [group for batch in self.trained.values() for group, _ in batch]
        tasks = [task for batch in self.trained.values() for _, task in batch]
        if sorted(self.trained) != list(range(STEPS)):
            raise Broken(f"trained steps {sorted(self.trained)}")
        if len(set(every)) < len(every) or len(set(tasks)) < len(tasks):
            raise Broken(f"a group or a task was trained twice: {self.trained}")


async def _watched(explorer: Explorer) -> None:
    await asyncio.shield(explorer.broken)


def main() -> int:
    """Of one seed: what it did, and what went wrong."""
    logging.disable(logging.CRITICAL)
    run = Run(int(sys.argv[1]))
    try:
        run.check()
    finally:
        print("\n".join(run.world.trace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
