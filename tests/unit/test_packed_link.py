"""Buckets that are packed first, as those of a GPU are, between two real processes; only the memory
of the card is a stand-in.
"""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packed_sender
import pytest
import torch
from packed_sender import SHAPES, link_of, tensors

from bench.host_card import HostCard
from rft.config import Config
from rft.ground.rounds import Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.connection import PeerConnection, PeerLost, PeerRefused
from rft.sync.links import SENDER, SLOTS, NcclLink, ask, decide
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender
from rft.sync.transport import IPC, NCCL, SOCKETS, WIRE, of_group, of_pair, told

LONG, SHORT = 60.0, 1.0  # seconds until a wait is given up


class Trainer:
    """The other process, and what the engine worker is told of it."""

    def __init__(self, timeout: float):
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(
            target=packed_sender.serve, args=(theirs, timeout), daemon=True
        )
        self.process.start()
        self.plan, self.endpoint = self.orders.recv()

    def ask(self, *order: Any) -> None:
        self.orders.send(order)
        self.orders.recv()

    def worker(self, timeout: float, number: int = 0) -> Receiver:
        receiver = Receiver(number, torch.device("cpu"), link_of)
        receiver.connect(
            TrainerInfo(
                plan=self.plan,
                streams=[self.endpoint],
                epoch=1,
                timeout=timeout,
                engine="engine_0",
            )
        )
        return receiver


@pytest.fixture
def trainer() -> Iterator[Callable[[float], Trainer]]:
    made: list[Trainer] = []

    def make(timeout: float) -> Trainer:
        made.append(Trainer(timeout))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.join()


def assert_is(version: int, found: dict[str, torch.Tensor]) -> None:
    expected = tensors(version)
    assert set(found) == set(SHAPES)
    for name in SHAPES:
        assert torch.equal(found[name], expected[name]), name


def test_rounds_go_through_two_slots_and_wrong_bits_come_again(
    trainer: Callable[[float], Trainer],
) -> None:
    there = trainer(LONG)
    receiver = there.worker(LONG)
    there.ask("open", 1)
    assert_is(1, receiver.stage(Round(version=1)))
    assert receiver.again == 0
    there.ask("close")
    there.ask("open", 2)
    assert_is(2, dict(receiver.tensors(2)))
    assert sum(len(stream["buckets"]) for stream in there.plan["streams"]) > 2 * SLOTS
    (link,) = receiver._links
    assert link.opened == SLOTS, "the memory of a slot is shared once"
    there.ask("close")
    there.ask("flip", 2)
    there.ask("open", 3)
    assert_is(3, receiver.stage(Round(version=3)))
    assert receiver.again == 2
    there.ask("close")
    there.ask("flip", 10**6)
    there.ask("open", 4)
    with pytest.raises(
        ValueError, match=r"checksum of bucket 0 and \d+ more from trainer rank 0 \(norm .*3 times"
    ):
        receiver.stage(Round(version=4))


def test_a_sender_that_packs_no_more_is_given_up(trainer: Callable[[float], Trainer]) -> None:
    there = trainer(LONG)
    receiver = there.worker(SHORT)
    there.ask("hang")
    there.ask("open", 1)
    with pytest.raises((TimeoutError, PeerLost), match=f"for {SHORT:g} s"):
        receiver.stage(Round(version=1))


def test_a_worker_that_reads_no_more_costs_the_trainer_its_deadline_and_nothing_else(
    trainer: Callable[[float], Trainer],
) -> None:
    there = trainer(SHORT)
    stuck, good = there.worker(LONG), there.worker(LONG, 1)
    go_on, link = threading.Event(), stuck._links[0]
    receive = link.receive
    link.receive = lambda size, use: receive(
        size, lambda message: use(message) if go_on.wait() else b""
    )
    there.ask("open", 1)
    failed: list[BaseException] = []
    reader = threading.Thread(target=lambda: failed.append(error_of(stuck)))
    reader.start()
    assert_is(1, good.stage(Round(version=1)))
    there.ask("close")  # returns: the other one was cut off
    there.ask("open", 2)
    assert_is(2, good.stage(Round(version=2)))
    go_on.set()
    reader.join()
    assert isinstance(failed[0], PeerLost)


def test_a_sender_that_dies_is_an_error_at_once(trainer: Callable[[float], Trainer]) -> None:
    there = trainer(LONG)
    receiver = there.worker(LONG)
    link = receiver._links[0]
    receive, seen = link.receive, []

    def dying(size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        seen.append(size)
        if len(seen) == 3:
            there.process.kill()
            there.process.join()
        return receive(size, use)

    link.receive = dying
    there.ask("open", 1)
    with pytest.raises(PeerLost, match="trainer rank 0"):
        receiver.stage(Round(version=1))


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])  # of the trainer; the engine has the other
def test_a_trainer_and_an_engine_of_two_kinds_refuse_each_other_by_name(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over real sockets; no memory of either device is touched."""
    other, links = {"cpu": "cuda:1", "cuda:1": "cpu"}[device], {"cpu": None, "cuda:1": link_of}
    weights, words = packed_sender.Weights(), {"cpu": "bytes of host", "cuda:1": "packed buckets"}
    sender = WeightSender(weights, 1, LONG, "127.0.0.1", links[device], device)
    plan = plans.build([weights.blocks()], packed_sender.BUCKET)
    sender.follow(plan, 0)
    receiver = Receiver(3, torch.device(other), links[other])
    info = TrainerInfo(
        plan=plans.encode(plan),
        streams=[sender.endpoint],
        epoch=1,
        timeout=LONG,
        engine="engine_0",
    )
    fix = {"cpu": "device=cuda, or install the CPU", "cuda:1": "device=cpu, or install the CUDA"}
    told = (
        f"trainer rank 0 is on {device} and sends {words[device]}.*, engine_0/3 is on {other} and "
        f"takes {words[other]}.*: set {fix[device]} build of vLLM"
    )
    with pytest.raises(PeerRefused, match=told):
        receiver.connect(info)
    assert re.search(told, caplog.text), "the trainer's own log says it too"
    sender.open(1)
    assert sender.close_version() == {"send_s": 0.0}, "and it goes on"
    sender.close()


def error_of(receiver: Receiver) -> BaseException:
    with pytest.raises(PeerLost) as error:
        receiver.stage(Round(version=1))
    return error.value


class NoWay(HostCard):
    def open(self, told: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("peer access is not supported between these two devices")


@pytest.mark.parametrize(
    ("memory", "alone", "chosen"),
    [(HostCard, False, IPC), (NoWay, False, NCCL), (HostCard, True, WIRE)],
)
def test_both_ends_take_the_same_way(memory: type[HostCard], alone: bool, chosen: str) -> None:
    here, there = (PeerConnection(end, "the other end", LONG) for end in socket.socketpair())
    heard: list[str] = []
    worker = threading.Thread(target=lambda: heard.append(ask(there, memory(), alone)))
    worker.start()
    assert decide(here, HostCard()) == chosen
    worker.join()
    assert heard == [chosen]


def test_the_way_follows_from_what_is_known() -> None:
    here = {"one_machine": True}
    assert of_pair("host", **here) == of_group("host", 2) == SOCKETS
    assert [of_pair("packed", **here, opens=opens) for opens in (True, False)] == [IPC, NCCL]
    assert of_pair("packed", one_machine=False) == NCCL
    assert of_pair("packed", **here, alone=True) == WIRE
    assert [of_group("packed", machines) for machines in (1, 2)] == [IPC, NCCL]
    assert of_group("packed", 1, opens=False) == NCCL


@pytest.mark.parametrize(
    ("device", "engines", "cluster", "receive", "line"),
    [
        (
            *("cpu", 4, None, "staged"),
            "weights over sockets, passed on from engine to engine over sockets (4 engines)",
        ),
        ("cpu", 4, None, "direct", "weights over sockets"),
        ("cuda", 1, None, "staged", "weights over CUDA IPC"),
        (
            *("cuda", 3, None, "staged"),
            "weights over CUDA IPC, passed on from engine to engine over CUDA IPC (3 engines)",
        ),
        (
            *("cuda", 3, "10.0.0.1:6379", "staged"),
            "weights over NCCL, passed on from engine to engine over NCCL (3 engines)",
        ),
    ],
)
def test_the_start_says_which_way_it_is(
    device: str, engines: int, cluster: str | None, receive: str, line: str
) -> None:
    config = Config(device=device)
    config.explorer.rollout_model.engine_num = engines
    config.cluster.ray_address, config.synchronizer.receive = cluster, receive
    assert told(config) == line


class Posting:
    """A transport at which everything is done at once, and written down."""

    def __init__(self) -> None:
        self.posted: list[int] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "Posting":
        self.posted.append(len(tensors[0]))
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...

    def abort(self) -> None: ...


def test_nothing_stands_on_a_card_that_the_other_end_does_not_take_yet() -> None:
    ours, theirs = (PeerConnection(end, "a pair", LONG) for end in socket.socketpair())
    transport = Posting()
    link = NcclLink(ours, SENDER, torch.device("cpu"), None, lambda *_: transport)  # type: ignore[arg-type]
    link.room_to_send(16, 1)
    theirs.send_record({"takes": 8})
    assert link.send(8, lambda message: b"sum") == b"sum"
    assert transport.posted == [16, 8]
    with pytest.raises(PeerLost):
        link.send(4, lambda message: theirs.close() or b"sum")  # type: ignore[func-returns-value]
    link.close()
    assert transport.posted == [16, 8]


def test_a_cards_kernel_gives_the_sums_of_torchs_operations() -> None:
    """Through Triton's interpreter, which must be chosen before anything loads Triton;
    `python -m bench.gpu 1.checksum` does the same on a card.
    """
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_checksum.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
