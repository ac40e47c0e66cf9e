"""Packed buckets pass from engine to engine in groups, between real processes that die; only the
devices' memory and NCCL are stand-ins.
"""

import multiprocessing.connection
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from group_world import IPC, NCCL, World, digest, plan, tensors
from torch.distributed import HashStore

from bench.nccl_like import SETTING, NcclLike
from rft.ground import device as devices
from rft.sync.communicator import Communicator
from rft.sync.connection import PeerLost

FREE_S = 5.0  # until everybody who is left knows
SEEDS = 50
FEW = 3


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(way: str, **options: float) -> World:
        made.append(World(way, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def assert_whole(world: World, version: int) -> list[int]:
    """Returns how many buckets came again, by worker."""
    expected, again = digest(tensors(version)), []
    for worker in world.workers:
        found = worker.orders.recv()
        assert found[0] == expected, (worker.name, found)
        again.append(found[1])
    return again


def test_torch_is_told_to_leave_the_process_alone_and_others_hear_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its watchdog would do is settled when a group is made, by the environment."""
    monkeypatch.setenv(SETTING, "1")  # torch's elastic launcher does
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    store = HashStore()
    other = NcclLike(store, 0, 1, name="another one's")
    ours = Communicator("ours", 60.0, torch.device("cpu"))
    ours.build(lambda: NcclLike(store, 0, 1), lambda _: [])
    assert isinstance(ours.transport, NcclLike)
    assert (other.tears_down, ours.transport.tears_down) == (True, False)
    assert os.environ[SETTING] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    assert devices.quiet_environment() == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    other.abort()
    ours.close()


def test_nothing_moves_for_longer_than_the_deadline() -> None:
    """The other member never posts its half."""
    store = HashStore()
    there = NcclLike(store, 1, 2)
    ours = Communicator("ours", 0.2, torch.device("cpu"))
    ours.build(lambda: NcclLike(store, 0, 2), lambda _: [])
    with pytest.raises(PeerLost, match="ours: nothing moved for 0.2 s"), ours.running():
        assert ours.transport is not None
        ours.transport.send([torch.zeros(8)], 1, 0).wait()
    there.abort()


@pytest.mark.parametrize("way", [NCCL, IPC])
def test_each_byte_leaves_its_rank_once_and_all_have_it(
    world: Callable[..., World], way: str
) -> None:
    here = world(way)
    here.connect()
    sizes = [stream.nbytes for stream in plan().streams]
    for version in (1, 2):
        here.open(version)
        here.stage(version)
        assert assert_whole(here, version) == [0, 0, 0]
        assert here.close() == [version * size for size in sizes]
    here.ranks[0].ask("flip", 2)  # wrong at the root: both come again, to all
    here.open(3)
    here.stage(3)
    assert assert_whole(here, 3) == [2, 2, 2]
    here.close()
    here.workers[2].ask("spoil", 1)  # wrong at one: that one fetches it
    here.open(4)
    here.stage(4)
    assert assert_whole(here, 4) == [0, 0, 1]
    here.close()
    here.connect(alone=True)
    here.open(5)
    here.stage(5)
    assert assert_whole(here, 5) == [0, 0, 0]


@pytest.mark.parametrize("absent", [0, 2])
def test_nobody_waits_for_who_does_not_come_to_a_group_that_is_over(
    world: Callable[..., World], absent: int
) -> None:
    """The leader, or another one."""
    here = world(NCCL)
    here.connect()
    here.open(1)
    others = [worker for place, worker in enumerate(here.workers) if place != absent]
    for worker in others:
        worker.orders.send(("stage", 1))
    for worker in here.workers:
        worker.orders.send(("disband", here.generation))
    for worker in others:
        assert worker.orders.poll(20), f"{worker.name} waits"
        kind, text, lost = worker.orders.recv()
        assert kind is PeerLost and lost.startswith("engine_"), text
    here.connect()
    here.stage(1)
    assert_whole(here, 1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FEW else pytest.mark.verify) for seed in range(SEEDS)],
)
def test_a_death_in_a_broadcast_costs_seconds(world: Callable[..., World], seed: int) -> None:
    drawn = random.Random(seed)
    here = world(IPC if seed % 3 == 2 else NCCL)
    victim = drawn.choice([*here.workers, *here.ranks])
    here.connect()
    for version in (1, 2):  # the group comes together with the first
        before = victim.ask("moves")
        here.open(version)
        here.stage(version)
        assert_whole(here, version)
        here.close()
    victim.ask("die", drawn.randrange(1, victim.ask("moves") - before))
    here.open(3)
    here.stage(3)
    assert multiprocessing.connection.wait([victim.process.sentinel], timeout=20), "it lives"
    died = time.monotonic()
    for worker in here.workers:
        if worker is victim:
            continue
        left = FREE_S - (time.monotonic() - died)
        assert worker.orders.poll(max(left, 0)), f"{worker.name} hangs: {victim.name} has died"
        told = worker.orders.recv()
        if len(told) == 2:
            assert told[0] == digest(tensors(3))
        else:
            kind, text, lost = told
            assert kind is PeerLost and victim.name in text, told
            assert lost == (victim.name if victim in here.workers else ""), told
    if victim in here.workers:
        here.workers.remove(victim)
    else:
        here.new_epoch()
        here.open(3)
    assert all(rank.process.is_alive() for rank in here.ranks), "a trainer rank has died"
    here.connect()
    here.stage(3)
    assert_whole(here, 3)
    began = time.monotonic()
    here.close()
    assert time.monotonic() - began < FREE_S
