"""Three engine workers and two trainer ranks, each a process, whose device memory is host memory:
the product's senders, receivers, groups and guards over a stand-in for NCCL or for CUDA IPC.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from bench.host_card import ForeignCard, HostCard
from bench.nccl_like import NcclLike
from rft.ground.protocols import Block
from rft.ground.rounds import GroupSeat, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.connection import PeerConnection
from rft.sync.links import BucketLink, host_link, join_link
from rft.sync.receiver import Receiver
from rft.sync.relay import Relay
from rft.sync.sender import WeightSender

CPU = torch.device("cpu")
BUCKET = 32 * 1024
ROWS, SOURCES = 480, 2
SHAPES = {"norm": (ROWS,), "up": (ROWS, 512), "down": (ROWS, 768), "head": (ROWS, 256)}
PIECE = 8 * 1024  # of a message, between two points at which a process may die
HOST = "127.0.0.1"
IPC, NCCL = "ipc", "nccl"
PRELOADED = ["rft.sync.receiver", "rft.sync.sender", "bench.nccl_like", "bench.host_card"]


def tensors(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=made).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def digest(found: dict[str, torch.Tensor]) -> str:
    made = xxhash.xxh3_128()
    for name in sorted(found):
        made.update(name.encode())
        made.update(found[name].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


class Weights:
    """`WeightSource`: rank `rank` has its share of every tensor's rows."""

    def __init__(self, rank: int):
        self.rows = rank * ROWS // SOURCES, (rank + 1) * ROWS // SOURCES
        self.version = 0

    def blocks(self) -> list[Block]:
        return [Block(name, "bfloat16", shape, 0, *self.rows) for name, shape in SHAPES.items()]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        start, stop = self.rows
        return iter(tensor[start:stop] for tensor in tensors(self.version).values())


def plan() -> plans.StreamPlan:
    return plans.build([Weights(rank).blocks() for rank in range(SOURCES)], BUCKET)


class Life:
    """Of this process: it ends, by SIGKILL, at a move that it was told."""

    moves = 0
    last: int | None = None

    @classmethod
    def move(cls) -> None:
        cls.moves += 1
        if cls.last is not None and cls.moves >= cls.last:
            os.kill(os.getpid(), signal.SIGKILL)


class MortalNccl(NcclLike):
    def _write(self, wire: Any, data: Any) -> None:
        for at in range(0, len(data), PIECE):
            Life.move()
            super()._write(wire, memoryview(data)[at : at + PIECE])

    def _read(self, wire: Any, data: Any) -> None:
        Life.move()
        super()._read(wire, data)


class MortalCard(HostCard):
    def settle(self) -> None:
        Life.move()


class Flips:
    """One bit of so many buckets, after they were hashed."""

    left = 0


def flipping(link: BucketLink) -> BucketLink:
    send = link.send

    def faulty(size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        def filled(message: torch.Tensor) -> bytes:
            made = fill(message)
            if Flips.left:
                Flips.left -= 1
                message[17] ^= 1
            return made

        return send(size, filled)

    link.send = faulty  # type: ignore[method-assign]
    return link


def transport(store: Any, rank: int, size: int, *_: Any) -> NcclLike:
    return MortalNccl(store, rank, size)


def rank_process(orders: Connection, rank: int, way: str, epoch: int, timeout: float) -> None:
    weights, memory = Weights(rank), MortalCard() if way == IPC else ForeignCard()

    def link(wire: PeerConnection) -> BucketLink:
        return flipping(host_link(wire, memory, HOST, CPU, transport))

    sender = WeightSender(weights, epoch, timeout, HOST, link)
    sender.follow(plan(), rank)
    orders.send(sender.endpoint)
    while True:
        order, *arguments = orders.recv()
        if order == "open":
            weights.version = arguments[0]
            sender.open(weights.version)
        elif order == "close":
            sender.close_version()
        elif order == "flip":
            Flips.left = arguments[0]
        elif order == "die":
            Life.last = Life.moves + arguments[0]
        orders.send(Life.moves if order == "moves" else sender.sent)


def worker_process(orders: Connection, way: str) -> None:
    memory = MortalCard() if way == IPC else ForeignCard()

    def link(wire: PeerConnection, alone: bool) -> BucketLink:
        return join_link(wire, memory, CPU, transport, alone)

    receiver = Receiver(0, CPU, link, transport=transport, memory=memory)
    receiver.relay = Relay(HOST)
    receiver.relay.meeting.opens = way == IPC
    orders.send(receiver.relay.endpoint)

    def stage(version: int) -> None:
        try:
            found = receiver.stage(Round(version=version))
            orders.send((digest(found), receiver.again))
        except Exception as error:
            tell(error)

    def tell(error: Exception) -> None:
        receiver.close()
        orders.send((type(error), str(error), getattr(error, "lost", "")))

    while True:
        order, *arguments = orders.recv()
        try:
            if order == "connect":
                receiver.connect(arguments[0])
            elif order == "stage":
                threading.Thread(target=stage, args=arguments, daemon=True).start()
                continue
            elif order == "disband":
                receiver.relay.meeting.disband(arguments[0])
                continue
            elif order == "moves":
                orders.send(Life.moves)
                continue
            elif order == "spoil":
                spoil(receiver, arguments[0])
            elif order == "die":
                Life.last = Life.moves + arguments[0]
            orders.send(None)
        except Exception as error:
            tell(error)


def spoil(receiver: Receiver, buckets: int) -> None:
    """So many that the group brings are wrong here."""
    passing, left = receiver._passing, [buckets]
    assert passing is not None
    finish = passing.group.finish

    def spoiled(started: Any) -> None:
        finish(started)
        for message in passing._incoming:
            if left[0] and message.any():
                left[0] -= 1
                message[5] ^= 1

    passing.group.finish = spoiled  # type: ignore[method-assign]


class Member:
    def __init__(self, name: str, body: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # torch once, not in every process
        self.name = name
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.endpoint = self.orders.recv()

    def ask(self, *order: Any) -> Any:
        self.orders.send(order)
        return self.orders.recv()


class World:
    def __init__(self, way: str, engines: int = 3, timeout: float = 60.0):
        self.way, self.timeout, self.epoch, self.generation = way, timeout, 1, 0
        self.ranks = [self._rank(number) for number in range(SOURCES)]
        self.workers = [
            Member(f"engine_{number}", worker_process, way) for number in range(engines)
        ]

    def _rank(self, number: int) -> Member:
        arguments = (number, self.way, self.epoch, self.timeout)
        return Member(f"trainer rank {number}", rank_process, *arguments)

    def new_epoch(self) -> None:
        self.epoch += 1
        for rank in self.ranks:
            rank.process.kill()
        self.ranks = [self._rank(number) for number in range(SOURCES)]

    def connect(self, alone: bool = False) -> None:
        self.generation += 1
        for place, worker in enumerate(self.workers):
            seats = [] if alone or len(self.workers) == 1 else [self._seat(place)]
            worker.orders.send(("connect", self._info(worker.name, seats, alone)))
        for worker in self.workers:
            assert (told := worker.orders.recv()) is None, told

    def _seat(self, place: int) -> GroupSeat:
        ends = [worker.endpoint for worker in self.workers]
        names = [worker.name for worker in self.workers]
        return GroupSeat(self.generation, names, place, ends[place - 1], ends[0])

    def _info(self, name: str, seats: list[GroupSeat], alone: bool) -> TrainerInfo:
        return TrainerInfo(
            plan=plans.encode(plan()),
            streams=[rank.endpoint for rank in self.ranks],
            epoch=self.epoch,
            timeout=self.timeout,
            engine=name,
            seats=seats,
            alone=alone,
        )

    def open(self, version: int) -> None:
        for rank in self.ranks:
            rank.ask("open", version)

    def stage(self, version: int) -> None:
        for worker in self.workers:
            worker.orders.send(("stage", version))

    def close(self) -> list[int]:
        """Bytes that left each rank, so far."""
        for rank in self.ranks:
            rank.orders.send(("close",))
        return [rank.orders.recv() for rank in self.ranks]

    def end(self) -> None:
        for member in (*self.ranks, *self.workers):
            member.process.kill()
            member.process.join()
