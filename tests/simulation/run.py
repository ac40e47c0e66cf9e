"""A whole run in a simulated world: the product's buffer with its journal, its explorer with its
pool of engines, its synchronizer, its cadence of publications and its budgets of restarts; trainer,
engines and the threads of the supervisor stand for what cannot be here, in the product's order of
calls.

    Run(seed).check()      raises what went wrong, with the seed, and `trace` tells how

Faults, drawn from the seed: a part dies by itself, once or in a loop, the machine loses its power,
a partition, a full disk. A trainer or engine that died comes back alone, and so do, in half of all
runs, explorer, buffer and synchronizer, as often within an hour as they may: calls that were under
way come again, at least once, in any order. In the others their death ends all, and somebody
starts the run again. What must hold, whatever happens: the run reaches its end; what was
acknowledged is there; a turn that its workflow has heard is not sampled again; a step that comes
again has the same batch; no group is in two steps; none is trained later than `max_staleness`
allows; every task is given out once; who is admitted holds what is published; nothing that may come
back ends a run, and nothing comes back too often.
"""

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rft.buffer.calls import BufferBroken
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExperienceBufferConfig, ExplorerConfig, ModelConfig, SynchronizerConfig
from rft.ground.experience import Experience
from rft.rollout.explorer import Explorer
from rft.run.restarts import HOUR_S, Restarts, pause_s
from rft.sync.lead import NotConnected
from rft.sync.style import Cadence, default_staleness
from rft.sync.synchronizer import Synchronizer
from tests.simulation.disk import Killed
from tests.simulation.parts import PLAN, Sampler, SimulatedEngine, Tasks, TrainerStreams
from tests.simulation.world import OF, PartGone, Process, World, handle

STEPS, GROUPS, KEPT = 6, 3, 2
ENGINES = ("engine_0", "engine_1")
RETURNING = ("buffer", "explorer", "synchronizer")
PARTS = (*RETURNING, "trainer", *ENGINES)
KINDS = ("trainer", "trainer", "explorer", "buffer", "synchronizer", "engine_0", "engine_1")
KINDS += ("power", "power", "partition", "full disk", "loop")
RESTARTS = 120
DEATHS = (PartGone, Killed, asyncio.CancelledError)
SYNC_S = 600.0
LONGEST_S = 200_000.0  # of simulated time


class Broken(AssertionError):
    """Something that must hold did not."""


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
    reached: int = 0
    heard: dict[int, list[list[int]]] = field(default_factory=dict)  # turns, by group
    anew: list[str] = field(default_factory=list)  # that were sampled again after they were heard
    lost_power: bool = False
    led: set[str] = field(default_factory=set)  # attempts that have had a synchronizer

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
        self.turns = 2 if self.seed % 5 == 2 else 1
        self.save_interval = chance.choice((1, 1, 2))
        self.lives, self.tokens = itertools.count(1), itertools.count(10)
        self.heals = chance.random() < 0.5
        self.epochs = itertools.count(1)
        # an hour is a few steps of a slow run, in which one part dies again and again
        self.step_s = chance.choice((1.0, 1.0, 1.0, 1500.0))
        self.kinds = KINDS if self.step_s == 1.0 else (*KINDS, *(chance.choice(RETURNING),) * 24)
        self.limit = chance.choice((1, 2, 3))
        self.faults = [self._fault() for _ in range(chance.choice((0, 1, 2, 3, 4)))]

    def _fault(self) -> tuple[float, str]:
        mean = 15.0 if self.step_s == 1.0 else 2 * self.step_s
        return self.chance.expovariate(1 / mean), self.chance.choice(self.kinds)

    def let_engines_fall(self) -> None:
        """Instead of its faults: engines die again and again."""
        self.faults = [
            (self.chance.expovariate(1 / 4.0), self.chance.choice(ENGINES)) for _ in range(8)
        ]

    def check(self) -> None:
        """Raises what did not hold."""
        try:
            self.world.run(self._supervised())
        except Exception as error:
            last = "\n".join(self.world.trace[-40:])
            raise Broken(f"seed {self.seed}: {type(error).__name__}: {error}\n{last}") from error

    # --- the supervisor ----------------------------------------------------------------------

    async def _supervised(self) -> None:
        self.supervisor = self.world.start("supervisor")
        OF.set(self.supervisor)
        await asyncio.wait_for(self._supervise(), LONGEST_S)

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
        self.world.returning = set(RETURNING) if self.heals else set()
        self.engines: dict[str, Any] = {}  # that live, as the fleet knows them
        self.restarts = {name: Restarts(self.limit, self.world.loop.time) for name in RETURNING}
        self.deaths: dict[str, list[tuple[float, str]]] = {name: [] for name in RETURNING}
        self.fleet: list[asyncio.Task[None]] = []
        self.world.told("the run starts")
        again = {
            "buffer": self._start_buffer,
            "explorer": self._start_explorer,
            "synchronizer": self._start_synchronizer,
            "trainer": self._trainer,
        }
        for start in again.values():
            start()
        for name in ENGINES:
            self._keep(self._live(name))
        self._keep(self._replace())
        while True:
            who, error = await self.dead.get()
            self.world.told(f"{who} ended: {error!r}")
            if error is not None and not isinstance(error, (*DEATHS, OSError, BufferBroken)):
                raise error
            if who == "trainer" and self.reached >= STEPS:
                await self._close()
                return True
            if self.lost_power or (who in RETURNING and not await self._may_return(who, error)):
                self.lost_power = False
                await self._close()
                return False
            self.world.processes[who].kill()
            await asyncio.sleep(0.5)
            if not self.lost_power:
                again[who]()

    async def _may_return(self, who: str, error: BaseException | None) -> bool:
        """The product's budget, and an account of our own."""
        if not self.heals:
            return False
        restarts, deaths, now = self.restarts[who], self.deaths[who], self.world.loop.time()
        deaths.append((now, f"{error!r} at {now}"))
        recent = [cause for at, cause in deaths if now - at < HOUR_S]
        allowed = restarts.allow(deaths[-1][1])
        if allowed != (len(recent) <= self.limit):
            raise Broken(f"{who} died {len(recent)} times within an hour: allowed is {allowed}")
        if not allowed:
            if f"the first cause: {recent[0]}" not in restarts.cause():
                raise Broken(f"{who} first died of {recent[0]}, not as in {restarts.cause()}")
            return False
        if isinstance(error, BufferBroken):  # it lives
            await asyncio.sleep(pause_s(restarts.used))
        return True

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """A thread of the supervisor's."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.dead.put_nowait(("supervisor", task.exception()))

        self.fleet.append(asyncio.create_task(work))
        self.fleet[-1].add_done_callback(ended)

    async def _live(self, name: str) -> None:
        """`rft.run.fleet.EngineFleet`'s thread of one engine."""
        for life in itertools.count():
            process = self.world.start(f"{name}.{life}")
            process.part = SimulatedEngine(self.chance, self.tokens)
            self.world.processes[name] = process  # for who kills it
            await asyncio.sleep(self.chance.expovariate(1 / 2.0))
            self.engines[name] = handle(process.name)
            joined = asyncio.create_task(self._told(Synchronizer.join, name, self.engines[name]))
            await process.ended
            joined.cancel()
            self.world.told(f"{name} died")
            await self._told(Synchronizer.leave, name, "it died")
            del self.engines[name]

    async def _replace(self) -> None:
        """An engine that takes no weights any more is replaced."""
        seen = 0
        while True:
            seen, news = await self._told(Synchronizer.failures, seen)
            for name, cause in news:
                self.world.told(f"{name} is replaced: {cause}")
                self.world.processes[name].kill()

    async def _told(self, method: Callable[..., Any], *arguments: Any) -> Any:
        while True:
            try:
                return await handle("synchronizer").ask(method, *arguments)
            except PartGone:
                await asyncio.sleep(0.5)

    async def _reintroduce(self) -> None:
        told: dict[str, Any] = {}
        while True:
            living = dict(self.engines)
            await self._told(Synchronizer.recover, living)
            for name in told.keys() - living.keys():
                await self._told(Synchronizer.leave, name, "it ended")
            if living == self.engines:
                return
            told = living

    def _start_synchronizer(self) -> None:
        process = self.world.start("synchronizer")
        is_first = self.life not in self.led
        self.led.add(self.life)

        async def made() -> None:
            process.part = Synchronizer(
                handle("buffer"),
                SYNC_S,
                begins=lambda: 0 if is_first else self.chance.getrandbits(48) + 2,
            )
            await process.part.watch()

        self._watch(process, made)
        if not is_first:
            self._keep(self._reintroduce())

    def _start_buffer(self) -> None:
        buffer = self.world.start("buffer")
        try:
            buffer.part = self._buffer(buffer)
        except OSError as error:  # a full disk
            self.dead.put_nowait(("buffer", error))
            return
        self._compare(buffer.part)
        self._watch(buffer, buffer.part.watch)

    def _buffer(self, buffer: Process) -> ExperienceBuffer:
        return ExperienceBuffer(
            ExperienceBufferConfig(name="b", max_read_timeout=LONGEST_S),
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

    def _start_explorer(self) -> None:
        explorer = self.world.start("explorer")
        made = self._explorer(explorer)
        explorer.spawn(made.pool.follow(handle("synchronizer")))
        if self.turns > 1 and self.step_s == 1.0:  # in an hour it would look too often
            explorer.spawn(made.keeper.follow(made.pool))
        explorer.spawn(made.resume())
        self._watch(explorer, lambda: _watched(made))

    def _explorer(self, process: Process) -> Explorer:
        process.part = found = Explorer(
            ExplorerConfig(name="explorer", runner_per_model=2),
            ModelConfig(),
            Tasks(),  # type: ignore[arg-type]
            [],
            {},
            handle("buffer"),
            GROUPS,
            max_read_timeout=LONGEST_S,
        )
        sampler = Sampler(self.chance, found.pool, self.failing, self.turns, self._hear)
        found.runner = sampler  # type: ignore[assignment]
        found.max_failures = 10**6
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
        for task in self.fleet:
            task.cancel()
        for name in PARTS:
            self.world.processes[name].kill()
        await asyncio.sleep(0)

    async def _weather(self) -> None:
        for after, kind in self.faults:
            await asyncio.sleep(after)
            self.world.told(f"fault: {kind}")
            if kind in PARTS:
                self.world.processes[kind].kill()
            elif kind == "loop":
                part = self.chance.choice(RETURNING)
                for _ in range(self.chance.randint(2, 5)):
                    self.world.processes[part].kill()
                    await asyncio.sleep(self.chance.uniform(0.5, 30))
            elif kind == "power":
                for name in PARTS:
                    self.world.processes[name].kill()
                self.world.medium.lose_power(self.chance)
                self.lost_power = True
            elif kind == "full disk":
                self.world.medium.is_full = True
                await asyncio.sleep(self.chance.uniform(1, 20))
                self.world.medium.is_full = False
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
        ask, lead = handle("buffer").ask, handle("synchronizer").ask
        epoch, step = next(self.epochs), self.saved[-1].step if self.saved else 0
        process.part = streams = TrainerStreams(epoch)
        while not await self._attached(ask, step, epoch):
            await asyncio.sleep(1.0)
        await lead(Synchronizer.connect, PLAN, [], epoch)
        process.spawn(self._connect_again(streams))
        await handle("explorer").ask(Explorer.hold)
        cadence = Cadence(self.sync, ask=lambda interval: False)

        async def publish(version: int) -> None:
            try:
                await lead(Synchronizer.publish, version, epoch)
            except Exception as error:
                self.dead.put_nowait(("trainer", error))
                raise
            self._look_at_engines((epoch, version))

        def start(due: bool) -> asyncio.Task[None] | None:
            streams.version = step
            if not due:
                process.spawn(lead_offer(step))
                return None
            cadence.published = step
            return process.spawn(publish(step))

        async def lead_offer(version: int) -> None:
            await lead(Synchronizer.offer, version, epoch)

        pushes = start(due=True)
        assert pushes is not None
        await pushes
        await handle("explorer").ask(Explorer.explore)
        while step < STEPS:
            batch = opened(await ask(ExperienceBuffer.take, step))
            self._look(step, batch.experiences)
            await asyncio.sleep(self.chance.expovariate(1.0 / self.step_s))
            if pushes is not None:
                await pushes
            streams.version = None
            step += 1
            asked = False
            if self.sync.sync_style == "dynamic_by_explorer":
                asked = await ask(ExperienceBuffer.wants_weights, self.sync.sync_interval)
            cadence.ask = lambda interval, said=asked: said  # type: ignore[misc]
            pushes = start(cadence.is_due(step))
            await ask(ExperienceBuffer.consumed, step - 1)
            if step % self.save_interval == 0 or step == STEPS:
                position = await ask(ExperienceBuffer.position)
                process.spawn(self._save(step, position))
            self.world.told(f"step {step} in epoch {epoch}")
        if pushes is not None:
            await pushes
        self.reached = step

    async def _connect_again(self, streams: TrainerStreams) -> None:
        """`rft.sync.publisher.Connection`: whenever the synchronizer is a new process."""
        lead = handle("synchronizer").ask
        while True:
            try:
                await lead(Synchronizer.lead, streams.epoch)
            except NotConnected:
                await lead(Synchronizer.connect, PLAN, [], streams.epoch)
                if streams.version is not None:
                    await lead(Synchronizer.offer, streams.version, streams.epoch)

    async def _attached(self, ask: Any, step: int, epoch: int) -> bool:
        try:
            await ask(ExperienceBuffer.attach_trainer, step, epoch)
        except PartGone:
            return False
        return True

    async def _save(self, step: int, position: int) -> None:
        """A checkpoint in the background; the older ones go, and what only they needed."""
        await asyncio.sleep(self.chance.expovariate(1.0))
        if self.saved and self.saved[-1].step >= step:
            return
        self.saved = [*self.saved, Saved(step, position)][-KEPT:]
        oldest = self.saved[0]
        await handle("buffer").ask(ExperienceBuffer.retain, oldest.position, oldest.step)

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

    def _hear(self, group: int, turns: list[list[int]]) -> None:
        """What a workflow has acted on is what it acts on again. Told to `_judge`: what is raised
        here would be the task's own failure.
        """
        if self.heard.setdefault(group, turns) != turns:
            self.anew.append(f"group {group} heard {self.heard[group]}, and now {turns}")

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

    def _look_at_engines(self, mark: tuple[int, int]) -> None:
        """What was published is held by whoever gets requests."""
        leads = self.world.processes["synchronizer"]
        if not leads.alive or leads.part is None:
            return
        for name in leads.part._admitted:
            engine = self.world.processes[name]
            if engine.alive and (engine.part.mark is None or engine.part.mark < mark):
                raise Broken(f"{name} is admitted and holds {engine.part.mark}, not {mark}")

    def _judge(self) -> None:
        every = [group for batch in self.trained.values() for group, _ in batch]
        tasks = [task for batch in self.trained.values() for _, task in batch]
        if sorted(self.trained) != list(range(STEPS)):
            raise Broken(f"trained steps {sorted(self.trained)}")
        if len(set(every)) < len(every) or len(set(tasks)) < len(tasks):
            raise Broken(f"a group or a task was trained twice: {self.trained}")
        if self.anew:
            raise Broken("; ".join(self.anew))


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
