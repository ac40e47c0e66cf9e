"""A card of so many bytes, shared by a trainer and an engine that take turns.

    rank    stub: keeps what it has freed, as torch's caching allocator does, until `empty_cache`
    engine  stub: maps its memory when it wakes, in vLLM's order, and unmaps it when it sleeps
    real    Publisher, Synchronizer, EngineWeights with its Turns, Device.give_back; and vLLM's own
            check at its start

A part that takes more than is free raises, and the run ends with that.
"""

import ast
import asyncio
import importlib.util
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.config import ModelConfig, SynchronizerConfig
from rft.ground.device import Device
from rft.ground.experience import decode, encode
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import STREAM, Received, Round, WorkerState
from rft.rollout.engine import UNCHECKED, cache_beside_trainer
from rft.rollout.engine_weights import EngineWeights
from rft.sync.publisher import Origin, Outcome, Publisher
from rft.sync.synchronizer import Synchronizer, reason

GIB = 2**30
SERVED_S = 20.0
# of one card: 80; the trainer's weights and state, and what a step needs beside them
CARD, STATE, ACTIVATIONS = 80, 30, 45
# of the engine, half of the card: what stays while it sleeps, and what sleeps
CONTEXT, WEIGHTS, CACHE = 3, 10, 27


class OutOfMemory(RuntimeError):
    pass


@dataclass
class Card:
    """`lowest`: what was left at the worst time; `refused`: what it could not give, for whoever
    took it may only say that it came too late.
    """

    used: int = 0
    lowest: int = CARD
    refused: list[str] = field(default_factory=list)

    def take(self, who: str, size: int) -> None:
        if self.used + size > CARD:
            self.refused.append(f"{who} takes {size} of {CARD - self.used} that are free")
            raise OutOfMemory(self.refused[-1])
        self.used += size
        self.lowest = min(self.lowest, CARD - self.used)

    def give(self, size: int) -> None:
        self.used -= size


@dataclass
class RankMemory:
    """Torch's allocator: what is freed stays its own."""

    card: Card
    allocated: int = 0
    reserved: int = 0

    def allocate(self, size: int) -> None:
        self.card.take("the trainer", max(0, self.allocated + size - self.reserved))
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def empty_cache(self) -> None:
        self.card.give(self.reserved - self.allocated)
        self.reserved = self.allocated


class SleepingEngine:
    """vLLM with a worker on each card: sleep unmaps, `wake_up` maps part by part."""

    PARTS = {"weights": WEIGHTS, "kv_cache": CACHE}

    def __init__(self, cards: list[Card]):
        self.cards = cards
        self.mapped: list[str] = []
        self.versions: list[int] = []
        self.asked: list[str] = []
        for card in cards:
            card.take("the engine's context", CONTEXT)
        for part in self.PARTS:
            self._map(part)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._nothing)

    def _map(self, part: str) -> None:
        for card in self.cards:
            card.take(f"the engine's {part}", self.PARTS[part])
        self.mapped.append(part)

    async def _nothing(self) -> None: ...

    async def _pause(self, mode: str, clear_cache: bool) -> None: ...

    async def init_weight_transfer_engine(self, request: Any) -> None: ...

    async def update_weight_version(self, version: str) -> None: ...

    async def sleep(self, level: int, mode: str) -> None:
        for part in self.mapped:
            for card in self.cards:
                card.give(self.PARTS[part])
        self.mapped.clear()

    async def wake_up(self, tags: list[str]) -> None:
        for tag in tags:
            self._map(tag)

    async def resume_generation(self) -> None:
        assert self.mapped == ["weights", "kv_cache"], "it would decode without"

    async def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[bytes]:
        assert "weights" in self.mapped, "there is no place for the weights"
        if method == "rft_install":
            self.versions.append(decode(args[0], Round).version)
        held = self.versions[-1] if self.versions else None
        state = WorkerState(version=held, mixed=False, unreachable=False, received=Received())
        return [encode(state)]


class Loop:
    """The actors' event loop, beside the ranks' threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class Ranks:
    """What the ranks of a test are to each other; `first`: rank 0 waits for them, or has gone
    ahead.
    """

    def __init__(self, count: int):
        self.count = count
        self.meeting = threading.Barrier(count, timeout=SERVED_S)
        self.item: Any = None
        self.first = threading.Semaphore(0)


@dataclass
class Mesh:
    ranks: Ranks
    rank: int

    @property
    def world(self) -> int:
        return self.ranks.count

    def gather(self, item: Any) -> None:
        raise NotImplementedError

    def barrier(self, name: str) -> None:
        if self.rank == 0:
            self.ranks.first.release()
        self.ranks.meeting.wait()

    def broadcast(self, item: Any) -> Any:
        if self.rank == 0:
            self.ranks.item = item
        self.ranks.meeting.wait()
        found = self.ranks.item
        self.ranks.meeting.wait()
        return found


class LoopOrigin(Origin):
    """Asks the synchronizer as the streams do; the weights need no way here."""

    is_live = True

    def __init__(self, mesh: Mesh, synchronizer: Synchronizer, loop: Loop):
        super().__init__(mesh, None, SynchronizerConfig(), 1)
        self.there, self.loop = synchronizer, loop

    def connect(self) -> Outcome:
        return Outcome()

    def start(self, version: int, due: bool) -> None:
        if self.mesh.rank == 0:
            self.asked = self.loop.call(partial(self.there.publish, version, 1))
            self.asked.exception(SERVED_S)  # the engines are as quick as can be
            self.mesh.ranks.first.release()  # type: ignore[attr-defined]

    def outcome(self) -> Outcome:
        return self._of(self.asked) if self.mesh.rank == 0 else Outcome()

    def rest(self) -> Outcome:
        return self._of(self.loop.call(self.there.rest)) if self.mesh.rank == 0 else Outcome()

    def _of(self, asked: Any) -> Outcome:
        try:
            return Outcome(numbers=asked.result(SERVED_S))
        except Exception as error:  # becomes that of every rank
            return Outcome(error=reason(error))


@dataclass
class World:
    """One engine over the cards of `count` ranks."""

    count: int
    cards: list[Card] = field(init=False)
    memory: dict[int, RankMemory] = field(default_factory=dict)  # by thread
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cards = [Card() for _ in range(self.count)]
        self.llm = SleepingEngine(self.cards)

    def empty_cache(self) -> None:
        self.memory[threading.get_ident()].empty_cache()

    async def join(self) -> None:
        async def published(version: int, epoch: int) -> None: ...

        weights = EngineWeights("engine_0", ModelConfig(), self.count, 0)
        weights.llm = self.llm  # type: ignore[assignment]
        buffer = ActorHandle[Any](SimpleNamespace(published=SimpleNamespace(remote=published)))
        self.synchronizer = Synchronizer(buffer, timeout=SERVED_S, direct=True)
        actor = SimpleNamespace(
            **{
                name: SimpleNamespace(remote=partial(begun, getattr(weights, name)))
                for name in (
                    "worker_offers",
                    "init_weights",
                    "stage",
                    "commit",
                    "sleep",
                    "dump_stacks",
                )
                if hasattr(weights, name)
            }
        )
        await self.synchronizer.join("engine_0", ActorHandle(actor))
        await self.synchronizer.attach(1, STREAM)

    def train(self, mesh: Mesh, loop: Loop, steps: int) -> None:
        """A rank's thread: `Trainer.fit` as far as memory and turns go."""
        try:
            rank, origin = mesh.rank, LoopOrigin(mesh, self.synchronizer, loop)
            memory = self.memory[threading.get_ident()] = RankMemory(self.cards[rank])
            device = Device("cuda", rank, "nccl", 1, pin_memory=True)
            publisher = Publisher(origin, takes_turns=True, give_back=device.give_back)
            memory.allocate(STATE)
            for version in range(steps):
                if rank > 0:  # it is late: rank 0 has arrived, or not waited for it
                    assert mesh.ranks.first.acquire(timeout=SERVED_S)
                publisher.start(version)
                publisher.rest()
                memory.allocate(ACTIVATIONS)
                memory.free(ACTIVATIONS)
        except Exception as error:
            self.errors.append(error)
            mesh.ranks.meeting.abort()


def begun(method: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.ensure_future(method(*arguments))


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.distributed.weight_transfer.base"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(WeightTransferInitRequest=dict))


@contextmanager
def actors() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.verify), 2])
def test_what_wakes_finds_the_memory_that_it_needs(
    no_vllm: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A step's activations and an engine that is awake are more than the card; so are a rank that
    is late with giving back, and an engine that does not wait for it.
    """
    assert STATE + ACTIVATIONS + CONTEXT + WEIGHTS > CARD >= STATE + CONTEXT + WEIGHTS + CACHE
    world, ranks = World(count), Ranks(count)
    monkeypatch.setattr(torch.cuda, "empty_cache", world.empty_cache)
    with actors() as loop:
        loop.call(world.join).result(SERVED_S)
        threads = [
            threading.Thread(target=world.train, args=(Mesh(ranks, rank), loop, 3), daemon=True)
            for rank in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SERVED_S)
        loop.call(world.synchronizer.shutdown).result(SERVED_S)
    assert [card.refused for card in world.cards] == [[]] * count
    assert world.errors == [] and world.llm.versions == [0, 1, 2]
    assert all(card.lowest < CARD // 20 for card in world.cards), "the cards were about full"


def vllm_function(name: str, file: str) -> Callable[..., Any]:
    """A function as it stands in the installed vLLM, without importing the rest."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], *file.split("/"))
    (node,) = (
        part
        for part in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(part, ast.FunctionDef) and part.name == name
    )
    lines = [f"from __future__ import annotations\n{ast.unparse(node)}"]
    known: dict[str, Any] = {
        "math": math,
        "logger": logging.getLogger(name),
        "format_gib": lambda size: f"{size / GIB:.1f}",
    }
    exec(compile("\n".join(lines), str(path), "exec"), known)
    return known[name]


def test_an_engine_can_start_beside_a_trainer_that_is_there() -> None:
    """vLLM's own check: it wants its share free at the start, and after a restart the trainer has
    more than its own.
    """
    check = vllm_function("request_memory", "v1/worker/utils.py")
    snapshot = SimpleNamespace(free_memory=35 * GIB, total_memory=80 * GIB, device_="cuda:0")
    check(snapshot, SimpleNamespace(gpu_memory_utilization=UNCHECKED))
    with pytest.raises(ValueError, match="Free memory on device"):
        check(snapshot, SimpleNamespace(gpu_memory_utilization=0.5))
    assert 0 < cache_beside_trainer(0.5, 80 * GIB, 16 * GIB, 2 * GIB) < 0.5 * 80 * GIB - 18 * GIB
