"""Ranks that torchrun has started again meet its store with what the rank 0 before has said there:
they hear their own rank 0, over real stores.
"""

import threading
from datetime import timedelta

import msgspec
import pytest
from torch.distributed import HashStore

from rft.ground.device import hosted_store
from rft.run import outer
from rft.run.outer import Announcement

HERE, WAIT = "127.0.0.1", timedelta(seconds=60)


def said(what: str, port: int) -> str:
    place = {"MASTER_ADDR": HERE, "MASTER_PORT": str(port)}
    return msgspec.json.encode(Announcement(resolved=what, environment=place)).decode()


def test_only_a_rank_0_that_lives_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    launchers, asked = HashStore(), threading.Event()
    dead, own = hosted_store(HERE, 0, WAIT), hosted_store(HERE, 0, WAIT)
    port = dead.port
    del dead
    launchers.set("stage", said("before", port))
    is_heard = outer._is_heard

    def looked(place: dict[str, str]) -> bool:
        asked.set()
        return is_heard(place)

    monkeypatch.setattr(outer, "_is_heard", looked)
    heard: list[Announcement] = []
    rank = threading.Thread(target=lambda: heard.append(outer._heard(launchers)))
    rank.start()
    assert asked.wait(60) and not heard
    launchers.set("stage", said("now", own.port))
    outer._let_hear(own)
    rank.join(60)
    assert [one.resolved for one in heard] == ["now"] and own.add("heard", 0) == 1


def test_where_the_store_is_of_this_attempt_alone_it_is_believed() -> None:
    launchers = HashStore()
    launchers.set("stage", msgspec.json.encode(Announcement(code=2)).decode())
    assert outer._heard(launchers).code == 2
    assert launchers.add("heard", 0) == 1  # whose process goes, and the store with it
