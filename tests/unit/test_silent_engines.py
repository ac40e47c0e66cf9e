"""When an engine counts as silent: by its actor's word of vLLM, and in the supervisor's count; a
synchronizer that is silent because the run ends; and a request that nobody wants any more, at the
gate of an engine whose weights change, and whose keys and values one meets behind it.
"""

import asyncio
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from rft.config import ModelConfig, RolloutModelConfig
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import Received, Round, RoundFailed, WorkerState
from rft.rollout import engine as engines
from rft.rollout.engine import RolloutEngine
from rft.run import fleet
from rft.run.fleet import EngineFleet

BEATS = int(fleet.SILENT_S / fleet.BEAT_S)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return functools.wraps(test)(lambda **given: asyncio.run(test(**given)))


class Vllm:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def is_sleeping(self) -> bool:
        return not await self.may.wait()


def asked() -> tuple[RolloutEngine, Vllm]:
    """An engine that has answered a request, and has just been asked for a sign of life."""
    made = RolloutEngine("engine_0", ModelConfig(), RolloutModelConfig(), 1, 0, "cuda", 64)
    made.llm = vllm = Vllm()  # type: ignore[assignment]
    made.requests = 1
    return made, vllm


@in_a_loop
async def test_one_whose_vllm_owes_an_answer_is_silent_until_it_comes() -> None:
    engine, vllm = asked()
    assert not await engine.is_silent()
    assert await engine.is_silent() and await engine.is_silent()
    vllm.may.set()
    await engine._asked  # type: ignore[misc]
    assert not await engine.is_silent()


@in_a_loop
async def test_what_is_aborted_at_the_gate_never_begins() -> None:
    """vLLM does not know of it yet, so its own abort finds nothing."""
    engine, vllm = asked()
    vllm.abort = aborted = Calls()  # type: ignore[attr-defined]
    vllm.generate = None  # type: ignore[attr-defined]
    engine.turns.hold()
    request = GenerateRequest(request_id="t/0", prompt=[1], n=2, sampling=Sampling(max_tokens=4))
    answer = asyncio.create_task(engine.generate(encode(request)))
    await asyncio.sleep(0)
    await engine.abort("t/0")
    engine.turns.open()
    assert [one.stop for one in decode(await answer, list[Completion])] == ["abort", "abort"]
    assert aborted.made == ["t/0"] and not engine._wanted


class Installing:
    """vLLM of an engine that keeps its cache: `salts` are those of the requests, in their order."""

    def __init__(self) -> None:
        self.salts: list[str] = []
        self.held: int | None = None  # by the worker
        self.fails = False
        self.renderer = SimpleNamespace(clear_mm_cache_async=self.done)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.done)
        self.update_weight_version = self.resume_generation = self.done

    async def done(self, *_: Any, **__: Any) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[bytes]:
        if method == "rft_install" and not self.fails:
            self.held = decode(args[0], Round).version
        state = WorkerState(self.held, mixed=False, unreachable=False, received=Received())
        return [encode(state)]

    async def generate(self, prompt: dict[str, Any], *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        yield SimpleNamespace(finished=True)


@in_a_loop
async def test_no_request_meets_keys_of_an_earlier_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that resumes publishes the same versions again, with other weights."""
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(TokensPrompt=dict))
    engine, vllm = asked()[0], Installing()
    engine.llm, engine._kv = vllm, "keep"  # type: ignore[assignment]
    request = GenerateRequest(request_id="t/0", prompt=[1], n=1, sampling=Sampling(max_tokens=4))
    params: Any = None

    async def salts() -> set[str]:
        """Of the next two requests."""
        for _ in range(2):
            await engine._run(request, params, None)
        return set(vllm.salts[-2:])

    seen = [await salts()]
    for epoch, version in ((1, 4), (1, 5), (2, 4), (2, 5)):
        await engine._install(Round(version=version, epoch=epoch))
        seen.append(await salts())
    assert [len(some) for some in seen] == [1] * 5, "those of one installation share"
    assert len(set.union(*seen)) == 5
    vllm.fails = True
    with pytest.raises(RoundFailed):
        await engine._install(Round(version=6, epoch=2))
    assert await salts() == seen[-1], "the weights are those of before"


class Calls:
    def __init__(self) -> None:
        self.made: list[str] = []

    async def __call__(self, name: str) -> None:
        self.made.append(name)


@in_a_loop
async def test_one_that_loads_or_ends_owes_nothing() -> None:
    engine, _ = asked()
    engine.llm = None
    assert [await engine.is_silent() for _ in range(3)] == [False] * 3


async def sleeps(engine: RolloutEngine) -> None:
    engine.turns._asleep = {"weights"}


async def changes(engine: RolloutEngine) -> None:
    await engine._round.acquire()


async def compiles(engine: RolloutEngine) -> None:
    engine.requests = 0
    with engine._counted():
        pass


async def computes(engine: RolloutEngine) -> None:
    """On a CPU: it is this process."""
    engine.device_kind, engine._processes = "cpu", [psutil.Process()]
    end = time.process_time() + 4 * engines.LITTLE_S
    while time.process_time() < end:
        pass


@pytest.mark.parametrize("keeps", [sleeps, changes, compiles, computes])
@in_a_loop
async def test_what_keeps_it_long_is_no_silence(keeps: Callable[[RolloutEngine], Any]) -> None:
    engine, _ = asked()
    await engine.is_silent()
    await keeps(engine)
    assert not await engine.is_silent()


@in_a_loop
async def test_what_keeps_nobody_long_excuses_nothing() -> None:
    """Weights that come beside the decoding, a first request of long ago, a process that waits."""
    engine, _ = asked()
    await engine.is_silent()
    await changes(engine)
    engine._staging = True
    engine.requests, engine._first = 0, time.monotonic() - engines.FIRST_S
    engine.device_kind, engine._processes = "cpu", [psutil.Process()]
    await engine.is_silent()
    assert await engine.is_silent()


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ([True] * BEATS, "no sign of it for 30 s"),
        ([None] * BEATS, "no sign of it for 30 s"),
        ([None, True] * (BEATS // 2) + [None], "no sign of it for 30 s"),
        ([*[True] * (BEATS - 1), False] * 3, "it died"),
        ([*[None] * (BEATS - 1), False] * 3, "it died"),
    ],
    ids=["vLLM", "actor", "both", "vLLM for less", "actor for less"],
)
def test_silence_is_counted_from_one_sign_of_life_to_the_next(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool | None], ends: str
) -> None:
    """`answers`: to each beat; None: none has come. The engine dies behind the last."""
    left = list(answers)

    def wait(references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        is_there = not left if references == ["end"] else left[0] is not None
        if references != ["end"] and not is_there:
            left.pop(0)
        return (references, []) if is_there else ([], references)

    def get(reference: str) -> bool | None:
        if reference == "end":
            raise RuntimeError("it died")
        return left.pop(0)

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    names = ("is_silent", "dump_stacks")
    actor = SimpleNamespace(**{n: SimpleNamespace(remote=lambda n=n: n) for n in names})
    made = EngineFleet(lambda *_: None, None, 0, lambda *_: None, print)  # type: ignore
    with pytest.raises((TimeoutError, RuntimeError), match=ends):
        made._attend(ActorHandle(actor), "end")


def test_a_run_that_ends_while_it_starts_leaves_the_synchronizer_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal while the parts load: the actor is gone before it heard which engines live."""
    made = EngineFleet(lambda *_: None, None, 0, lambda *_: None, print)  # type: ignore

    def get(reference: str, timeout: float | None = None) -> None:
        made.close()
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "get", get)
    asked = SimpleNamespace(recover=SimpleNamespace(remote=lambda *_: "recover"))
    made.synchronizer = ActorHandle(asked)
    made.reintroduce()
    assert made.closing
