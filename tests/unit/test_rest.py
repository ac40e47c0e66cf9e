"""Engines that take turns with the trainer, as the synchronizer leads them: who sleeps when, and
who takes weights when.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rft.ground.protocols import ActorHandle
from rft.ground.rounds import Installed, Received, Round, TrainerInfo, WorkerOffer
from rft.sync.plan import StreamPlan
from rft.sync.synchronizer import Synchronizer

PLAN = StreamPlan(streams=(), digest="plan")


class Engine:
    """What the synchronizer asks of it, in order. `fail`: what its sleep raises."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.fail = fail
        self.version = -1

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(type(self), f"do_{name}")
        return SimpleNamespace(
            remote=lambda *arguments: asyncio.ensure_future(method(self, *arguments))
        )

    async def do_worker_offers(self) -> list[WorkerOffer]:
        return []

    async def do_check_plan(self, plan: dict[str, Any]) -> None: ...

    async def do_init_weights(self, info: TrainerInfo) -> None:
        self.asked.append("connect")

    async def do_stage(self, coming: Round) -> Received:
        return Received()

    async def do_commit(self, coming: Round) -> Installed:
        self.asked.append(f"wake with {coming.version}")
        return Installed(version=coming.version, digest="plan", bytes=1)

    async def do_sleep(self, patience: float) -> dict[str, Any]:
        if self.fail is not None:
            raise self.fail
        self.asked.append("sleep")
        return {"frozen": 0, "answered_asleep": 0, "waited_s": 0.0}


async def connected(**engines: Engine) -> Synchronizer:
    async def published(version: int, epoch: int) -> None: ...

    buffer = ActorHandle(SimpleNamespace(published=SimpleNamespace(remote=published)))
    synchronizer = Synchronizer(buffer, timeout=10.0)
    for name, engine in engines.items():
        await synchronizer.join(name, ActorHandle(engine))
    await synchronizer.connect(PLAN, [], 1)
    await synchronizer.publish(0)
    return synchronizer


def test_engines_sleep_until_the_next_version_wakes_them() -> None:
    async def run() -> None:
        engines = {"a": Engine(), "b": Engine()}
        synchronizer = await connected(**engines)
        numbers = await synchronizer.rest()
        assert numbers["frozen"] == numbers["answered_asleep"] == 0
        await synchronizer.publish(1)
        for engine in engines.values():
            assert engine.asked == ["connect", "wake with 0", "sleep", "wake with 1"]

    asyncio.run(run())


def test_an_engine_that_comes_while_the_trainer_works_sleeps_too_and_takes_the_next_version() -> (
    None
):
    """Waking it with the version that is still offered would take the
    memory in which the trainer computes.
    """

    async def run() -> None:
        late = Engine()
        synchronizer = await connected(a=Engine())
        await synchronizer.rest()
        await synchronizer.join("late", ActorHandle(late))
        await synchronizer.offer(0, 1)
        await asyncio.sleep(0)  # its task would have begun
        assert late.asked == ["sleep"]
        await synchronizer.publish(1)
        assert late.asked == ["sleep", "connect", "wake with 1"]

    asyncio.run(run())


def test_a_trainer_that_comes_back_wakes_the_engines_that_slept_for_the_one_before() -> None:
    async def run() -> None:
        engine = Engine()
        synchronizer = await connected(a=engine)
        await synchronizer.rest()
        await synchronizer.connect(PLAN, [], 2)
        await synchronizer.publish(0, 2)
        assert engine.asked == ["connect", "wake with 0", "sleep", "connect", "wake with 0"]

    asyncio.run(run())


def test_an_engine_that_takes_weights_as_the_others_go_to_sleep_follows_them() -> None:
    async def run() -> None:
        class Slow(Engine):
            async def do_commit(self, coming: Round) -> Installed:
                begun.set()
                await rested.wait()
                return await super().do_commit(coming)

        begun, rested, slow = asyncio.Event(), asyncio.Event(), Slow()
        synchronizer = await connected(a=Engine())
        await synchronizer.join("slow", ActorHandle(slow))
        await begun.wait()
        await synchronizer.rest()
        rested.set()
        await synchronizer.wait_for(0)
        await synchronizer._until(lambda: len(slow.asked) > 3, 10)
        assert slow.asked == ["connect", "sleep", "wake with 0", "sleep"]

    asyncio.run(run())


def test_an_engine_that_cannot_sleep_is_left_out_and_told_of() -> None:
    async def run() -> None:
        synchronizer = await connected(
            good=Engine(), bad=Engine(fail=RuntimeError("no memory to sleep in"))
        )
        await synchronizer.rest()
        assert (await synchronizer.failures())[1] == [
            ("bad", "bad did not sleep: no memory to sleep in")
        ]
        assert list((await synchronizer.members())[1]) == ["good"]
        await synchronizer.publish(1)
        assert await synchronizer.wait_for(0) == 1

    asyncio.run(run())


def test_a_late_engine_that_cannot_sleep_is_left_out_by_its_own_task() -> None:
    async def run() -> None:
        synchronizer = await connected(a=Engine())
        await synchronizer.rest()
        await synchronizer.join("bad", ActorHandle(Engine(fail=RuntimeError("no"))))
        assert "bad" not in synchronizer.handles
        await synchronizer.publish(1)
        assert list((await synchronizer.members())[1]) == ["a"]

    asyncio.run(run())
