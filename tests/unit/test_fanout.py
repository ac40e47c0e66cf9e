"""How a version goes from engine to engine: the rings, and real receivers and senders that follow
them over sockets.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft.ground.protocols import Block
from rft.ground.rounds import HOST, Round, TrainerInfo, WorkerOffer
from rft.sync import plan as plans
from rft.sync.connection import PeerConnection, PeerLost
from rft.sync.fanout import Rings, before, comes_from_trainer
from rft.sync.plan import Share
from rft.sync.receiver import Receiver
from rft.sync.relay import Relay
from rft.sync.sender import WeightSender

TIMEOUT_S = 30.0
ONE, TWO = (1, 2, HOST), (2, 2, HOST)  # shapes
ROWS, WIDTH, BUCKET = 64, 32, 512
NAMES = [
    f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(3) for kind in "qo"
]


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_stream_is_a_chain_from_the_trainer_through_all_engines(
    streams: int, size: int
) -> None:
    for stream in range(streams):
        heads = [place for place in range(size) if comes_from_trainer(stream, place, size)]
        assert len(heads) == 1
        met, place = set(), heads[0]
        for _ in range(size):
            met.add(place)
            place = next(p for p in range(size) if before(p, size) == place)
        assert met == set(range(size)) and place == heads[0]
    taken = [
        sum(comes_from_trainer(s, place, size) for s in range(streams)) for place in range(size)
    ]
    assert max(taken) == -(-streams // size)


def test_rings_follow_who_is_here() -> None:
    rings = Rings()
    for name, shape in {"a": ONE, "b": TWO, "c": ONE, "d": None}.items():
        rings.join(name, shape)
    assert rings.ring_of("a") is None and not rings.generation
    assert rings.settle("abcd") and rings.ring_of("c") == ("a", "c") and rings.ring_of("d") is None
    assert not rings.settle("abcd") and rings.generation == 1
    rings.fail(1, "a")
    assert rings.ring_of("c") == ("c",) and rings.generation == 2
    rings.fail(1, "c")
    assert rings.generation == 2, "meant of a ring that is no more"
    rings.fail(2, "")
    assert rings.generation == 3 and rings.ring_of("c") == ("c",), "it was the trainer"
    rings.join("e", ONE)
    assert rings.ring_of("e") is None, "in the middle of a round"
    assert rings.settle("abcde") and rings.ring_of("e") == ("a", "c", "e")
    rings.leave("c")
    assert rings.ring_of("e") == ("a", "e") and rings.generation == 5
    rings.join("c", ONE)
    assert rings.settle("abcde") and rings.ring_of("c") == ("a", "e", "c")
    rings.drop("e")
    assert rings.ring_of("c") == ("a", "c") and rings.generation == 7
    rings.drop("e")
    assert rings.generation == 7, "it is out already"
    assert rings.settle("abcde") and rings.ring_of("e") == ("a", "e", "c")


def test_workers_sit_with_those_of_their_number_in_engines_of_their_shape() -> None:
    rings, offers = Rings(), {}
    for name, workers in {"a": 2, "b": 1, "c": 2, "d": 1, "e": 2}.items():
        rings.join(name, (workers, 2, HOST))
        offers[name] = [WorkerOffer((workers, 2), {"at": f"{name}/{t}"}) for t in range(workers)]
    rings.settle("abcde")
    found = {name: rings.seats(name, offers) for name in "abcde"}
    assert [seat.before["at"] for seat in found["e"]] == ["c/0", "c/1"]
    assert [seat.before["at"] for seat in found["b"]] == ["d/0"]
    assert [(seat.mine, seat.leader["at"]) for seat in found["c"]] == [(1, "a/0"), (1, "a/1")]
    rings.leave("d")
    assert [seat.names for seat in rings.seats("b", offers)] == [["b"]], "all from the trainer"
    rings.join("d", ONE)
    assert rings.seats("d", offers) == [], "from the next round on"


# --- over sockets ---------------------------------------------------------------------------------


class Weights:
    """`WeightSource` of a rank: its half of every tensor's rows, which change with the version."""

    def __init__(self, rank: int, ranks: int):
        rows = ROWS // ranks
        self.cut = slice(rank * rows, (rank + 1) * rows)
        self.version = 0

    def blocks(self) -> list[Block]:
        return [
            Block(name, "float32", (ROWS, WIDTH), 0, self.cut.start, self.cut.stop)
            for name in NAMES
        ]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (values[self.cut] for values in weights(self.version).values())


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in NAMES}


class Fleet:
    """Trainer ranks, engines with a worker each, and the rings between these."""

    def __init__(self, ranks: int, engines: str):
        self.sources = [Weights(rank, ranks) for rank in range(ranks)]
        self.plan = plans.build([source.blocks() for source in self.sources], BUCKET)
        self.senders = [WeightSender(source, 1, TIMEOUT_S) for source in self.sources]
        for rank, sender in enumerate(self.senders):
            sender.follow(self.plan, rank)
        self.rings = Rings()
        self.receivers: dict[str, Receiver] = {}
        self.offers: dict[str, list[WorkerOffer]] = {}
        for name in engines:
            self.join(name)
        self.rings.settle(engines)
        self.pool = ThreadPoolExecutor(16)

    def join(self, name: str) -> None:
        receiver = self.receivers[name] = Receiver(0, torch.device("cpu"))
        receiver.relay = Relay("127.0.0.1")
        self.offers[name] = [WorkerOffer(shape=(1, 1), endpoint=receiver.relay.endpoint)]
        self.rings.join(name, ONE)

    def connect(self, *names: str) -> None:
        def one(name: str) -> None:
            info = TrainerInfo(
                epoch=1,
                timeout=TIMEOUT_S,
                plan=plans.encode(self.plan),
                streams=[sender.endpoint for sender in self.senders],
                engine=name,
                seats=self.rings.seats(name, self.offers),
            )
            self.receivers[name].connect(info)

        for done in [self.pool.submit(one, name) for name in names or self.receivers]:
            done.result()

    def open(self, version: int) -> None:
        for source, sender in zip(self.sources, self.senders, strict=True):
            source.version = version
            sender.open(version)

    def stage(self, version: int, *names: str) -> dict[str, Future[dict[str, torch.Tensor]]]:
        return {
            name: self.pool.submit(self.receivers[name].stage, Round(version=version))
            for name in names or self.receivers
        }

    def close_version(self) -> None:
        for sender in self.senders:
            sender.close_version()

    def end(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()
            if receiver.relay is not None:
                receiver.relay.close()
        for sender in self.senders:
            sender.close()
        self.pool.shutdown()


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(ranks: int, engines: str) -> Fleet:
        made.append(Fleet(ranks, engines))
        return made[-1]

    yield make
    for one in made:
        one.end()


def assert_is(version: int, found: dict[str, torch.Tensor]) -> None:
    expected = weights(version)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(("ranks", "engines"), [(2, "a"), (2, "abcd"), (1, "abc"), (4, "ab")])
def test_every_byte_leaves_a_rank_once(
    fleet: Callable[..., Fleet], ranks: int, engines: str
) -> None:
    here = fleet(ranks, engines)
    here.connect()
    for version in (1, 2, 3):
        here.open(version)
        for found in here.stage(version).values():
            assert_is(version, found.result())
        here.close_version()
    own = ROWS * WIDTH * 4 * len(NAMES) // ranks
    assert [sender.sent for sender in here.senders] == [3 * own] * ranks
    passed_on = sum(receiver.relay.sent for receiver in here.receivers.values())
    assert passed_on == 3 * own * ranks * (len(engines) - 1)


def cut_after(receiver: Receiver, buckets: int) -> None:
    """This engine dies as soon as it has passed on so many buckets of a stream."""
    relay, lock, count = receiver.relay, threading.Lock(), [0]
    send = relay._send

    def mortal(wire: PeerConnection, *arguments: Any) -> None:
        with lock:
            count[0] += 1
        if count[0] > buckets:
            relay.close()
            receiver.close()
        send(wire, *arguments)

    relay._send = mortal


def test_who_is_lost_is_named_and_the_others_go_on_without(fleet: Callable[..., Fleet]) -> None:
    here = fleet(2, "abcd")
    here.connect()
    cut_after(here.receivers["b"], 5)
    here.open(1)
    staged = here.stage(1)
    generation = here.rings.generation
    failed = {}
    for name, made in staged.items():
        try:
            assert_is(1, made.result())
        except PeerLost as error:
            failed[name] = error.lost
    assert "c" in failed and set(failed) <= set("abcd")
    assert {failed[name] for name in failed if name != "b"} == {"b"}, "it is b, whoever tells"
    for lost in failed.values():
        here.rings.fail(generation, lost or "b")
    assert here.rings.generation == generation + 1
    again = [name for name in failed if name != "b"]
    here.connect(*again)
    for made in here.stage(1, *again).values():
        assert_is(1, made.result())
    here.close_version()


def test_one_that_comes_late_takes_all_from_the_trainer(fleet: Callable[..., Fleet]) -> None:
    here = fleet(2, "ab")
    here.connect()
    here.open(1)
    for made in here.stage(1).values():
        made.result()
    here.join("c")
    here.connect("c")
    assert_is(1, here.stage(1, "c")["c"].result())
    here.close_version()
    assert here.rings.settle("abc")
    here.connect()
    here.open(2)
    for made in here.stage(2).values():
        assert_is(2, made.result())
    here.close_version()


def test_a_bit_that_flips_between_two_engines_comes_again(fleet: Callable[..., Fleet]) -> None:
    here = fleet(1, "abc")
    here.connect()
    relay, left = here.receivers["a"].relay, iter([False] * 4 + [True])
    serve = relay.listener._serve

    def faulty(wire: PeerConnection, hello: dict[str, Any]) -> None:
        send = wire.send

        def flipping(data: memoryview) -> None:
            if len(data) > 100 and next(left, False):
                wrong = bytearray(data)
                wrong[7] ^= 1
                data = memoryview(wrong)
            send(data)

        wire.send = flipping  # type: ignore[method-assign]
        serve(wire, hello)

    relay.listener._serve = faulty
    here.connect()
    here.open(1)
    for made in here.stage(1).values():
        assert_is(1, made.result())
    assert {name: receiver.again for name, receiver in here.receivers.items()} == {
        "a": 0,
        "b": 1,
        "c": 0,
    }
    here.close_version()


def test_engines_of_two_generations_do_not_wait_for_each_other(fleet: Callable[..., Fleet]) -> None:
    """b takes part in a new ring before it has anything; c still follows the old one."""
    here = fleet(1, "abc")
    here.connect()
    here.rings.fail(here.rings.generation, "a")
    here.connect("b")
    here.open(1)
    with pytest.raises(PeerLost, match="another group") as error:
        here.stage(1, "c")["c"].result()
    assert error.value.lost == "b"
    generation, ring = here.rings.generation, here.rings.ring_of("b")
    here.rings.fail(generation - 1, "b")
    assert (here.rings.generation, here.rings.ring_of("b")) == (generation, ring), "not its fault"
    here.close_version()


def test_a_worker_of_another_shape_gets_nothing(fleet: Callable[..., Fleet]) -> None:
    here = fleet(1, "ab")
    here.receivers["b"].share = Share(worker=0, workers=2, kv_heads=2)
    here.connect()
    here.open(1)
    staged = here.stage(1)
    with pytest.raises(PeerLost, match="a takes .*workers=1.* of the weights, b/0 .*workers=2"):
        staged["b"].result()
    assert_is(1, staged["a"].result())
    here.close_version()


def test_who_asks_an_engine_that_is_not_yet_told_of_the_trainer_waits(
    fleet: Callable[..., Fleet],
) -> None:
    here = fleet(1, "ab")
    here.connect("b")
    here.open(1)
    waiting = here.stage(1, "b")["b"]
    here.connect("a")
    assert_is(1, here.stage(1, "a")["a"].result())
    assert_is(1, waiting.result())
    here.close_version()
