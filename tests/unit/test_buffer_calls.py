"""Who asks a buffer again, and when: `rft.buffer.calls.answered`."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rft.buffer import calls
from rft.buffer.calls import BufferBroken, answered
from rft.ground.protocols import ActorHandle


def asked(monkeypatch: pytest.MonkeyPatch, *ends: Any) -> Any:
    """What a buffer answers whose calls end like that, one after the other."""
    monkeypatch.setattr(calls, "AGAIN_S", 0.0)
    left = list(ends)

    async def ask() -> Any:
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    return asyncio.run(answered(ask))


def test_a_buffer_between_two_processes_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ActorUnavailableError("its process was killed", actor_id=None)
    assert asked(monkeypatch, gone, gone, BufferBroken("full disk"), 7) == 7


def test_one_that_is_dead_for_good_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ActorDiedError):
        asked(monkeypatch, ActorDiedError(), 7)


class Method:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def options(self, **given: Any) -> "Method":
        self.given = given
        return self

    def remote(self) -> dict[str, Any]:
        return self.given


class Actor:
    async def stats(self) -> None: ...


def test_a_handle_of_one_life_keeps_ray_from_asking_the_next() -> None:
    handle: ActorHandle[Actor] = ActorHandle(type("Remote", (), {"stats": Method()})())
    assert handle.ask(Actor.stats) == {}
    assert handle.of_one_life().ask(Actor.stats) == {"max_task_retries": 0}
    assert handle.ask_once(Actor.stats) == {"max_task_retries": 0}
