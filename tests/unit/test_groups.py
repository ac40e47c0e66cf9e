"""Packed buckets pass from engine to engine in groups, between real processes that die; only the
devices' memory and NCCL are stand-ins.
"""

import multiprocessing.connection
import random
import time
from collections.abc import Callable, Iterator

import pytest
from group_world import IPC, NCCL, World, digest, plan, tensors

from rft.sync.connection import PeerLost

FREE_S = 5.0  # until everybody who is left knows
SEEDS = 50
FEW = 6


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
