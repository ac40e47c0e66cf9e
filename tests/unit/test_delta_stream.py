"""`sync: delta` between real senders and a real receiver over TCP, where every byte is counted on
its way: what is staged is the trainer's weights bit by bit, whatever came as a delta, and whatever
went wrong before.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rft.ground.delta import Buffer, Changes
from rft.ground.protocols import Block
from rft.ground.rounds import GroupSeat, Round, TrainerInfo, WorkerOffer
from rft.sync import buckets, history
from rft.sync import plan as plans
from rft.sync import receiver as receivers
from rft.sync.connection import PeerLost
from rft.sync.fanout import Rings
from rft.sync.history import Told
from rft.sync.receiver import Receiver
from rft.sync.relay import Relay
from rft.sync.sender import WeightSender

WAIT_S = 20.0
SHAPES = {"norm": (96,), "up": (640, 96), "o_proj": (96, 320), "embed": (1500, 96)}
ACROSS = {"o_proj"}  # cut in columns: a rank's part does not lie together in the tensor


class Shards:
    """WeightSource: half of every tensor that is cut, on one of two ranks."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int):
        self.whole = whole
        self._blocks = []
        for name, value in whole.items():
            dim = int(name in ACROSS)
            half = value.shape[dim] // 2
            if value.dim() > 1:
                cut = (rank * half, (rank + 1) * half)
            elif rank:
                continue
            else:
                cut = (0, value.shape[0])
            self._blocks.append(Block(name, "bfloat16", tuple(value.shape), dim, *cut))

    def blocks(self) -> list[Block]:
        return self._blocks

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (
            self.whole[b.name].narrow(b.dim, b.start, b.stop - b.start).contiguous()
            for b in self._blocks
        )


class Meter:
    """Stands before a sender's TCP port and counts what comes out of it."""

    def __init__(self, port: int):
        self.port = port
        self.bytes = 0
        self.ends: list[socket.socket] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.port))
            self.ends += near, far
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, counts in ((near, far, 0), (far, near, 1)):
                threading.Thread(target=self._pump, args=(source, sink, counts)).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: int) -> None:
        try:
            while data := source.recv(2**18):
                self.bytes += counts * len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the test has closed it

    def close(self) -> None:
        self.server.close()
        for end in self.ends:
            end.close()


class World:
    """Two trainer ranks, one worker, and the weights that all of them should have."""

    def __init__(self, full_interval: int | None = 1000, epoch: int = 1):
        self.random = torch.Generator().manual_seed(5)
        self.whole = {
            name: torch.randn(shape, generator=self.random).to(torch.bfloat16)
            for name, shape in SHAPES.items()
        }
        sources = [Shards(self.whole, rank) for rank in range(2)]
        self.plan = plans.build([source.blocks() for source in sources], 2**16)
        self.senders = [
            WeightSender(source, epoch, WAIT_S, full_interval=full_interval) for source in sources
        ]
        for index, sender in enumerate(self.senders):
            sender.follow(self.plan, index)
        self.meters = [Meter(sender.endpoint["port"]) for sender in self.senders]
        self.epoch = epoch
        self.nbytes = sum(value.nbytes for value in self.whole.values())
        self.version = 0
        self.worker = self.join()

    def join(
        self, receiver: Receiver | None = None, name: str = "", seats: list[GroupSeat] | None = None
    ) -> Receiver:
        receiver = receiver or Receiver(0, torch.device("cpu"))
        streams = [
            sender.endpoint | {"machine": "another", "port": meter.server.getsockname()[1]}
            for sender, meter in zip(self.senders, self.meters, strict=True)
        ]
        receiver.connect(
            TrainerInfo(
                plan=plans.encode(self.plan),
                streams=streams,
                epoch=self.epoch,
                timeout=WAIT_S,
                engine=name,
                seats=seats or [],
            )
        )
        return receiver

    def change(self, share: float) -> int:
        """So many elements get other bits, any of them. How many did."""
        changed = 0
        for value in self.whole.values():
            bits = value.view(torch.int16).view(-1)
            at = torch.rand(len(bits), generator=self.random) < share
            steps = torch.randint(1, 2**16, (int(at.sum()),), generator=self.random)
            bits[at] += steps.to(torch.int16)
            changed += len(steps)
        return changed

    def open(self) -> None:
        self.version += 1
        for sender in self.senders:
            sender.open(self.version)

    def close_version(self) -> None:
        for sender in self.senders:
            sender.close_version()

    def take(self, worker: Receiver | None = None) -> int:
        """The open version, compared bit by bit. Returns the bytes that came over the sockets."""
        worker, before = worker or self.worker, sum(meter.bytes for meter in self.meters)
        found = worker.stage(Round(version=self.version))
        assert set(found) == set(self.whole)
        for name, value in self.whole.items():
            assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name
        return sum(meter.bytes for meter in self.meters) - before

    def round(self, share: float) -> int:
        self.change(share)
        self.open()
        try:
            return self.take()
        finally:
            self.close_version()

    def close(self) -> None:
        self.worker.close()
        for one in (*self.senders, *self.meters):
            one.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of torch's only wait for each other over tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_200_versions_by_what_changed(world: World) -> None:
    assert world.round(0.01) >= world.nbytes
    came = [world.round(0.01) for _ in range(199)]
    assert sum(came) <= 0.025 * world.nbytes * len(came)
    assert world.worker.again == 0


def test_full_ones_now_and_then_and_wherever_a_delta_would_be_larger(world: World) -> None:
    for sender in world.senders:
        sender.full_interval = 4
    came = [world.round(0.01) >= world.nbytes for _ in range(9)]
    assert came == [True, False, False, False, True, False, False, False, True]
    assert world.round(1.0) >= world.nbytes
    assert world.round(0.0) < 0.02 * world.nbytes


def test_without_it_all_bytes_come_always() -> None:
    world = World(full_interval=None)
    assert all(world.round(0.01) >= world.nbytes for _ in range(3))
    world.close()


def test_who_has_another_version_gets_all_of_it(world: World) -> None:
    late = Receiver(1, torch.device("cpu"))
    world.round(0.01)
    world.change(0.01)
    world.open()  # the late one has nothing, and takes what the other one got as a delta
    assert world.take() < 0.03 * world.nbytes
    assert world.take(world.join(late)) >= world.nbytes
    world.close_version()
    world.round(0.01)  # not by the late one, which is behind now
    world.change(0.01)
    world.open()
    assert world.take() < 0.03 * world.nbytes
    assert world.take(late) >= world.nbytes
    world.close_version()
    world.change(0.01)
    world.open()
    assert max(world.take(), world.take(late)) < 0.03 * world.nbytes
    world.close_version()
    late.close()


def test_versions_that_nobody_took_are_no_ones_base(world: World) -> None:
    world.round(0.01)
    for _ in range(2):
        world.change(0.01)
        world.open()
        world.close_version()
    assert world.round(0.01) < 0.06 * world.nbytes, "from the version that was told last"


def test_staged_bits_that_turned_come_again_in_full(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.round(0.01)
    staged = world.worker._kept
    assert staged is not None
    staged._tensors["up"].view(torch.int16)[7, 7] ^= 4
    one_bucket = world.round(0.01)
    assert world.worker.again == 1
    assert 2**15 < one_bucket < 0.5 * world.nbytes
    assert "arrived wrong, again" in caplog.text


def test_a_delta_that_cannot_be_read_comes_again_in_full(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.round(0.01)
    finish = history.Encoder.finish
    monkeypatch.setattr(history.Encoder, "finish", lambda self: (finish(self) or b"")[:-1])
    assert world.round(0.01) >= world.nbytes
    assert world.worker.again == sum(len(stream.buckets) for stream in world.plan.streams)
    assert "a delta of" in caplog.text


def test_after_a_round_that_failed_nothing_is_built_on(world: World) -> None:
    world.round(0.01)
    world.change(0.01)
    world.open()
    for wire in list(world.senders[1]._wires):
        wire.close()  # one rank is gone; buckets of the other one come
    with pytest.raises(ConnectionError):
        world.take()
    kept = world.worker._kept
    assert world.join(world.worker)._kept is kept, "of two versions now"
    assert world.take() >= world.nbytes
    world.close_version()
    assert world.round(0.01) < 0.03 * world.nbytes


class HeldThread:
    """Stream 0's thread stands still, as it is about to add its first delta to what is staged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.arrived, self.let_go = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        apply = Changes.apply

        def held(changes: Changes, into: Buffer, first: int) -> int:
            here = threading.current_thread()
            if self.thread is None and here.name == "stream-0":
                self.thread = here
                self.arrived.set()
                assert self.let_go.wait(WAIT_S)
            return apply(changes, into, first)

        monkeypatch.setattr(Changes, "apply", held)

    def fail(self, world: World) -> None:
        """A round by deltas, whose other stream is lost before it begins, while that thread stands
        there.
        """
        world.change(0.01)
        world.version += 1
        world.senders[0].open(world.version)
        with ThreadPoolExecutor(1) as pool:
            took = pool.submit(world.take)
            assert self.arrived.wait(WAIT_S)
            for wire in list(world.senders[1]._wires):
                wire.close()
            with pytest.raises(ConnectionError):
                took.result()
        world.senders[1].open(world.version)

    def end(self) -> None:
        self.let_go.set()
        assert self.thread is not None
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def test_threads_of_a_round_that_failed_have_ended_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.round(0.01)
    held, kept, close = HeldThread(monkeypatch), world.worker._kept, world.worker.close

    def closes() -> None:
        close()
        held.let_go.set()

    monkeypatch.setattr(world.worker, "close", closes)
    held.fail(world)
    assert held.thread is not None and not held.thread.is_alive()
    assert world.join(world.worker)._kept is kept
    assert world.take() >= world.nbytes
    world.close_version()


def test_a_thread_that_does_not_end_keeps_the_memory_to_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receivers, "ENDS_S", 0.0)
    relay = world.worker.relay = Relay("127.0.0.1")
    world.join(world.worker, "a")
    world.round(0.01)
    held, kept = HeldThread(monkeypatch), world.worker._kept
    held.fail(world)
    assert "['stream-0'] did not end in 0 s" in caplog.text
    assert world.join(world.worker, "a")._kept is not kept
    assert world.take() >= world.nbytes
    held.end()
    here, told = world.worker._kept, dict(relay._good)
    assert here is not None and kept is not None
    relay.good(0, 0, Told(bytes(16), None, b""), kept)
    assert relay._good == told, "who is behind is not told of what is there"
    for name, value in world.whole.items():
        found = here._tensors[name]
        assert torch.equal(found.view(torch.int16), value.view(torch.int16)), name
    world.close_version()
    relay.close()


def test_a_reconnect_comes_after_the_round_that_it_cuts_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.round(0.01)
    held = HeldThread(monkeypatch)
    world.change(0.01)
    world.version += 1
    world.senders[0].open(world.version)  # the other stream is late
    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(world.take)
        assert held.arrived.wait(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(receivers, "OVER_S", 0.0)
            with pytest.raises(PeerLost, match="has not ended in 0 s"):
                world.join(world.worker)
        assert not took.done()
        held.let_go.set()
        world.join(world.worker)
        with pytest.raises(PeerLost):
            took.result()
    world.senders[1].open(world.version)
    assert world.take() >= world.nbytes
    world.close_version()


def test_threads_of_a_round_that_nobody_reads_on_have_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "AHEAD", 1)  # who brings a stream waits for who reads it
    world.open()
    arriving = world.worker.tensors(1)
    next(arriving)
    arriving.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("stream-")]
    world.close_version()


def test_another_trainer_knows_nothing_of_this_ones_versions(world: World) -> None:
    world.round(0.01)
    assert world.join(world.worker)._base == 1, "the same trainer, another connection"
    other = World(epoch=2)
    assert other.join(world.worker)._base is None
    other.close()


def test_engines_pass_on_what_came_to_those_who_have_the_same(world: World) -> None:
    engines = {name: Receiver(0, torch.device("cpu")) for name in "abc"}
    offers, rings = {}, Rings()
    for name, receiver in engines.items():
        receiver.relay = Relay("127.0.0.1")
        offers[name] = [WorkerOffer(shape=(1, 1), endpoint=receiver.relay.endpoint)]
        rings.join(name, (1, 1))

    def settle(names: str) -> None:
        rings.settle(names)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: world.join(engines[n], n, rings.seats(n, offers)), names))

    def stage(names: str) -> int:
        """Bytes that the engines passed on, of a version that all of them have now."""
        before = sum(receiver.relay.sent for receiver in engines.values())
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: world.take(engines[n]), names))
        return sum(receiver.relay.sent for receiver in engines.values()) - before

    def version(names: str) -> tuple[float, float]:
        """Shares of all bytes that came from the trainer, and from engine to engine."""
        sent = sum(sender.sent for sender in world.senders)
        world.change(0.01)
        world.open()
        passed = stage(names)
        world.close_version()
        sent = sum(sender.sent for sender in world.senders) - sent
        return sent / world.nbytes, passed / world.nbytes

    settle("ab")
    assert version("ab") == (1, 1)
    assert max(version("ab")) < 0.025
    settle("abc")  # c has nothing: each stream comes to it in full, and goes on so once
    sent, passed = version("abc")
    assert sent < 0.025 and 1 < passed < 1.6
    assert version("abc")[0] < 0.025 and version("abc")[1] < 0.05
    for receiver in engines.values():
        receiver.close()
        receiver.relay.close()
