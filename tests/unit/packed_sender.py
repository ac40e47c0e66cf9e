"""A trainer rank in miniature in a process of its own: it serves buckets over shared memory, as it
would those of its GPU.
"""

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.host_card import HostCard
from rft.ground.protocols import Block
from rft.sync import plan as plans
from rft.sync.connection import PeerConnection
from rft.sync.links import IpcLink
from rft.sync.sender import WeightSender

BUCKET = 4096
SHAPES = {"norm": (64,), "up": (64, 96), "down": (96, 64), "head": (300, 64)}


class Weights:
    """`WeightSource`: of each version other values, the same in every process."""

    def __init__(self) -> None:
        self.version = 0

    def blocks(self) -> list[Block]:
        return [Block(name, "bfloat16", shape, 0, 0, shape[0]) for name, shape in SHAPES.items()]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return iter(tensors(self.version).values())


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


class FaultyLink(IpcLink):
    """Does to a bucket that was hashed what it is told: flips one bit of so many buckets, or never
    lets the next one go.
    """

    flips = 0
    hangs = False

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        def faulty(message: torch.Tensor) -> bytes:
            if FaultyLink.hangs:
                # nobody says anything: this ends with the wire
                self.wire.receive_record(patient=True)
            digest = fill(message)
            if FaultyLink.flips:
                FaultyLink.flips -= 1
                message[17] ^= 1
            return digest

        return super().send(size, faulty)


def serve(orders: Connection, timeout: float) -> None:
    """Body of the process.

    Orders: ("open", version), ("close",), ("flip", buckets), ("hang",); each is answered.
    """
    weights = Weights()
    sender = WeightSender(weights, 1, timeout, make_link=lambda wire: FaultyLink(wire, HostCard()))
    plan = plans.build([weights.blocks()], BUCKET)
    sender.follow(plan, 0)
    orders.send((plans.encode(plan), sender.endpoint))
    while True:
        order, *arguments = orders.recv()
        orders.send(obey(order, arguments, weights, sender))


def obey(order: str, arguments: list[Any], weights: Weights, sender: WeightSender) -> Any:
    if order == "open":
        weights.version = arguments[0]
        return sender.open(weights.version)
    if order == "flip":
        FaultyLink.flips = arguments[0]
    elif order == "hang":
        FaultyLink.hangs = True
    else:
        sender.close_version()
    return None


def link_of(wire: PeerConnection, alone: bool = False) -> IpcLink:
    """The engine worker's end."""
    return IpcLink(wire, HostCard())
