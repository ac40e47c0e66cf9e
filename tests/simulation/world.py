"""Processes, a clock and a network, all simulated in one thread: the same seed gives the same order
of everything.

`SimulatedLoop` is an event loop whose clock moves only when nothing is left to do, and where work
in threads takes a time that is drawn. `World.call` is a call of an actor's method: delays of both
ways are drawn, a message may be held up by a partition, and the end of either process ends it.
Invariant: a process that was killed does nothing more, and nobody hears of it but by
`PartGone`.
"""

import asyncio
import contextvars
import pickle
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from rft.ground.protocols import ActorHandle
from tests.simulation.disk import Killed, Medium, SimulatedFiles


class Standstill(AssertionError):
    """Everybody waits, for ever."""


class PartGone(RayActorError):
    """The process that was asked died."""

    def __init__(self, name: str):
        super().__init__(error_msg=f"{name} is gone")


OF: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


def belonging(loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
    """A task ends with the process that began it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **named)
    context = named.get("context") or contextvars.copy_context()
    if process := context.get(OF):
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


class Clock:
    """In the place of a selector: there is no I/O to wait for."""

    def __init__(self, loop: "SimulatedLoop"):
        self.loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Standstill("nothing is left to happen")
        self.loop.now += max(timeout, 0.0)
        return []

    def close(self) -> None: ...


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.set_task_factory(belonging)
        self.set_exception_handler(lambda loop, context: None)  # of tasks that nobody awaits
        self.chance = chance
        self.now = 0.0
        self._selector = Clock(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> Any:
        """It happens at a time between the call and its end."""
        done = self.create_future()
        took = self.chance.expovariate(1 / 0.02)

        def work() -> None:
            try:
                result, error = function(*arguments), None
            except Killed:
                return
            except Exception as caught:
                result, error = None, caught
            self.call_later(took * self.chance.random(), tell, result, error)

        def tell(result: Any, error: Exception | None) -> None:
            if not done.done():
                done.set_exception(error) if error else done.set_result(result)

        self.call_later(took, work)
        return done


class Process:
    def __init__(self, world: "World", name: str):
        self.world, self.name = world, name
        self.files = SimulatedFiles(world.medium)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.part: Any = None  # the object that it runs, once it is made
        self.alive = True
        self.ended = world.loop.create_future()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(OF.set, self)
        return self.world.loop.create_task(work, context=context)

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self.alive = False
        self.files.release()
        for task in list(self.tasks):
            task.cancel()


class World:
    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.loop = SimulatedLoop(self.chance)
        self.medium = Medium()
        self.processes: dict[str, Process] = {}
        self.returning: set[str] = set()  # are started again, and asked again
        self.held_until: dict[frozenset[str], float] = {}  # partitions
        self.trace: list[str] = []

    def told(self, line: str) -> None:
        self.trace.append(f"{self.loop.now:9.3f} {line}")

    def start(self, name: str) -> Process:
        self.processes[name] = process = Process(self, name)
        return process

    def delay(self, *ends: str) -> float:
        drawn = self.chance.expovariate(1 / 0.01)
        places = frozenset(end.partition(".")[0] for end in ends)
        return drawn + max(0.0, self.held_until.get(places, 0.0) - self.loop.now)

    async def call(
        self, caller: Process, name: str, method: str, arguments: Any, named: Any
    ) -> Any:
        given = pickle.dumps((arguments, named))
        while True:
            await asyncio.sleep(self.delay(caller.name, name))
            target = self.processes.get(name)
            if target is None or not target.alive or target.part is None:
                if name not in self.returning:
                    raise PartGone(name)
                continue
            arguments, named = pickle.loads(given)
            work = target.spawn(answer(getattr(target.part, method), arguments, named))
            await asyncio.wait([work])
            await asyncio.sleep(self.delay(caller.name, name))
            # as Ray does: an answer is lost that was on its way when the process died
            if name in self.returning and not target.alive:
                continue
            if work.cancelled():
                raise PartGone(name)
            return pickle.loads(pickle.dumps(work.result()))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        asyncio.set_event_loop(self.loop)
        try:
            return self.loop.run_until_complete(work)
        finally:
            self._close()

    def _close(self) -> None:
        for process in self.processes.values():
            process.files.dead = True
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()


async def answer(method: Any, arguments: Any, named: Any) -> Any:
    """Of an actor's method, which need not be a coroutine."""
    result = method(*arguments, **named)
    return await result if asyncio.iscoroutine(result) else result


class Method:
    def __init__(self, actor: str, name: str):
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any, **named: Any) -> asyncio.Task[Any]:
        caller = OF.get()
        return caller.spawn(caller.world.call(caller, self.actor, self.name, arguments, named))


@dataclass(frozen=True)
class Remote:
    """Called as Ray's handle of an actor is; of the process that has this name when a call comes.
    Who holds it calls.
    """

    actor: str

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self.actor, name)


def handle(name: str) -> ActorHandle[Any]:
    return ActorHandle(Remote(name))
