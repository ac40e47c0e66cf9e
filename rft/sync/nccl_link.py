"""Packed buckets between two devices: a private NCCL group of two, one trainer rank and one engine worker.

In: the wire of the pair, over which the trainer rank tells where its store listens. Out: a `Link`, the two verbs. The group
lives beside torch's default group, which both sides need for themselves. Invariants: every operation ends within the timeout;
whatever NCCL or its store raise is about the pair, and neither side's own failure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroupNCCL, TCPStore

from rft.device import collective_timeout
from rft.sync.wire import Lost, Wire

SENDER, RECEIVER = 0, 1  # ranks in a pair


class NcclLink:
    def __init__(self, name: str, store: TCPStore, side: int, timeout: float):
        options = ProcessGroupNCCL.Options()
        options._timeout = collective_timeout(timeout)
        self.name = name
        self._store = store  # the group keeps no reference of its own
        self._peer = 1 - side
        with pair(name):
            self._group: Any = ProcessGroupNCCL(store, side, 2, options)

    def send(self, data: torch.Tensor) -> "Sending":
        """Start sending a contiguous uint8 tensor; keep it unchanged until `wait` has returned."""
        with pair(self.name):
            return Sending(self.name, self._group.send([data], self._peer, 0))

    def receive(self, data: torch.Tensor) -> None:
        """Fill a contiguous uint8 tensor, on the current stream."""
        with pair(self.name):
            self._group.recv([data], self._peer, 0).wait()

    def close(self) -> None:
        self._group.abort()


@dataclass(frozen=True)
class Sending:
    name: str
    work: Any

    def wait(self) -> None:
        with pair(self.name):
            self.work.wait()


@contextmanager
def pair(name: str) -> Iterator[None]:
    """Errors of NCCL become those of a wire: the other end is lost."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"{name}: {error}") from error


def host_link(wire: Wire, address: str) -> NcclLink:
    """The trainer's end: a store for this pair alone, so that a pair can form at any time and end without others."""
    timeout = collective_timeout(wire.timeout)
    with pair(wire.name):
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    wire.send_record({"host": address, "port": store.port})
    return NcclLink(wire.name, store, SENDER, wire.timeout)


def join_link(wire: Wire) -> NcclLink:
    """The engine worker's end."""
    where, timeout = wire.receive_record(), collective_timeout(wire.timeout)
    with pair(wire.name):
        store = TCPStore(where["host"], where["port"], is_master=False, wait_for_workers=False, timeout=timeout)
    return NcclLink(wire.name, store, RECEIVER, wire.timeout)
