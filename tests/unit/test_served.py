"""What clients of mode=serve were answered and rewarded, through the real endpoint, explorer and
buffers.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft.agents.endpoint import OpenAIEndpointFactory
from rft.agents.endpoint.registry import Registry
from rft.buffer.calls import Lost
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.sql_buffer import SqlBuffer
from rft.config import ExperienceBufferConfig, ExplorerConfig, ModelConfig
from rft.ground.experience import Experience
from rft.ground.protocols import ActorHandle
from rft.rollout import explorer as exploring
from rft.rollout.context import Shared
from rft.rollout.explorer import Explorer
from rft.rollout.served import ServedGroup
from tests.unit.scripted import TOKENIZER
from tests.unit.test_over_rollout import Actor

KINDS = ("queue", "sql")


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is read, and the garbage of other tests is not kept."""

    async def load(shared: Shared, *_: Any) -> None:
        shared.tokenizer = TOKENIZER

    monkeypatch.setattr(Shared, "load", load)
    monkeypatch.setattr(exploring, "freeze_loaded", lambda _: None)


def buffer_of(kind: str, directory: Path) -> Any:
    if kind == "queue":
        return ExperienceBuffer(
            ExperienceBufferConfig(), str(directory / "queue"), 8, 1, None, None
        )
    url = f"sqlite:///{directory / 'buffer.db'}"
    config = ExperienceBufferConfig(storage_type="sql", path=url)
    return SqlBuffer(config, "served", 8, 1, None, None)


async def service(buffer: Any, directory: Path) -> tuple[Explorer, Registry]:
    """One that has begun, and whom its endpoint gives what is rewarded."""
    actor = Explorer(
        ExplorerConfig(proxy_port=0, runner_per_model=8),
        ModelConfig(model_path="m", max_model_len=64),
        *(None, [], {}, ActorHandle(Actor(buffer)), 8),
        api=OpenAIEndpointFactory(str(directory), serves=True),
    )
    await actor.prepare()
    endpoint: Any = actor.shared.endpoint
    return actor, endpoint.registry


def made() -> list[Experience]:
    one = Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0])
    one.reward, one.reward_outcome = 1.0, "ok"
    return [one]


async def counts(buffer: Any) -> tuple[int, int, int]:
    """Groups that were stored, that were given up, that are under way."""
    found = buffer.stats()
    found = await found if asyncio.iscoroutine(found) else found
    return found["stored"], found["failed"], found["running_groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_service_had_when_it_died_is_given_up_by_the_next(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = buffer_of(kind, tmp_path)
        first, registry = await service(buffer, tmp_path)
        await registry.store(ServedGroup("a", made()))
        put, begun = buffer.put_some, asyncio.Event()

        async def hang(puts: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        buffer.put_some = hang
        storing = asyncio.create_task(registry.store(ServedGroup("b", made())))
        await begun.wait()
        assert await counts(buffer) == (1, 0, 1)
        storing.cancel()
        await first.shutdown()

        buffer.put_some = put
        second, registry = await service(buffer, tmp_path)
        await registry.store(ServedGroup("c", made()))
        assert await counts(buffer) == (2, 1, 0)
        await second.shutdown()
        await buffer.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def rewarded(actor: Explorer) -> httpx.Response:
    """A session, and its client's reward."""
    endpoint: Any = actor.shared.endpoint
    session = endpoint.registry.open("visitor")
    session.experiences = made
    async with client_of(endpoint) as http:
        return await http.post("/feedback", json={"session": "visitor", "reward": 1.0})


def client_of(endpoint: Any) -> httpx.AsyncClient:
    key = {"Authorization": f"Bearer {endpoint.registry.token}"}
    return httpx.AsyncClient(base_url=endpoint.url, headers=key)


def held(buffer: Any) -> tuple[asyncio.Event, asyncio.Event]:
    """Puts tell that they have begun, and wait until they may."""
    put, begun, may = buffer.put_some, asyncio.Event(), asyncio.Event()

    async def slow(puts: Any) -> None:
        begun.set()
        await may.wait()
        await put(puts)

    buffer.put_some = slow
    return begun, may


async def committed(actor: Explorer) -> dict[str, Any]:
    async with client_of(actor.shared.endpoint) as http:
        return (await http.post("/commit")).json()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_client_did_not_wait_for_is_stored_once(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = buffer_of(kind, tmp_path)
        actor, _ = await service(buffer, tmp_path)
        begun, may = held(buffer)
        asking = asyncio.create_task(rewarded(actor))
        await begun.wait()
        asking.cancel()
        gate = actor.shared.endpoint._gate  # type: ignore[union-attr]
        while gate.lines:
            await asyncio.sleep(0.001)
        may.set()
        while await counts(buffer) != (1, 0, 0):
            await asyncio.sleep(0.001)
        assert await committed(actor) == {"groups": 0}
        assert await counts(buffer) == (1, 0, 0)
        await actor.shutdown()
        await buffer.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["admit_some", "put_some"])
def test_a_group_is_stored_once_whichever_answer_was_lost(
    kind: str, call: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        buffer = buffer_of(kind, tmp_path)
        actor, _ = await service(buffer, tmp_path)
        answered = getattr(buffer, call)

        async def lost(*given: Any) -> None:
            await answered(*given)
            raise RuntimeError("its answer is lost")

        setattr(buffer, call, lost)
        for _ in range(2):
            assert (await rewarded(actor)).json()["stored"] is False
        setattr(buffer, call, answered)
        # another one of the same name comes between
        assert (await rewarded(actor)).json()["stored"] is True
        assert await committed(actor) == {"groups": 2}
        assert await counts(buffer) == (3, 0, 0)
        await actor.shutdown()
        await buffer.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_being_stored_at_the_end_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = buffer_of("queue", tmp_path)
        actor, registry = await service(buffer, tmp_path)
        begun, may = held(buffer)
        asking = asyncio.create_task(rewarded(actor))
        await begun.wait()
        ending = asyncio.create_task(registry.end(20.0))
        await asyncio.sleep(0)
        may.set()
        await ending
        assert await counts(buffer) == (1, 0, 0) and (await asking).json()["stored"] is True
        await actor.shutdown()
        await buffer.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_of_two_services_with_one_name_the_first_hears_of_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffers = [buffer_of("sql", tmp_path) for _ in range(2)]
        services = [await service(buffer, tmp_path / f"{id(buffer)}") for buffer in buffers]
        first, registry = services[0]
        with pytest.raises(Lost, match="another process has begun as explorer served/"):
            await registry.store(ServedGroup("a", made()))
        with pytest.raises(RuntimeError, match="Lost: another process"):
            await first.watch()
        await services[1][1].store(ServedGroup("a", made()))
        assert await counts(buffers[1]) == (1, 0, 0)
        for (actor, _), buffer in zip(services, buffers, strict=True):
            await actor.shutdown()
            await buffer.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))
