"""Packed buckets between two devices: a private NCCL group of two, one trainer rank and one engine worker.

In: the wire of the pair, over which the trainer rank tells where its store listens. Out: a `Link`. The group lives beside torch's
default group, which both sides need for themselves. Invariants: every operation ends within the timeout; whatever NCCL or its
store raise is about the pair, and neither side's own failure.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroupNCCL, TCPStore

from rft.device import collective_timeout
from rft.sync.wire import Lost, Wire

SENDER, RECEIVER = 0, 1  # ranks in a pair
BUFFERS = 2  # one is filled while the other travels


class NcclLink:
    def __init__(self, name: str, store: TCPStore, side: int, timeout: float, device: torch.device):
        options = ProcessGroupNCCL.Options()
        options._timeout = collective_timeout(timeout)
        self.name = name
        self._store = store  # the group keeps no reference of its own
        self._peer = 1 - side
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._travelling: dict[int, Any] = {}  # work, by buffer
        self._turn = 0
        with pair(name):
            self._group: Any = ProcessGroupNCCL(store, side, 2, options)

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if turn in self._travelling:
            self._await(turn)
        message = self._room(turn, size)
        made = fill(message)
        with pair(self.name):
            self._travelling[turn] = self._group.send([message], self._peer, 0)
        return made

    def flush(self) -> None:
        for turn in list(self._travelling):
            self._await(turn)
        self._memory.clear()

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        message = self._room(0, size)
        with pair(self.name):
            self._group.recv([message], self._peer, 0).wait()
        return use(message)

    def close(self) -> None:
        self._group.abort()

    def _await(self, turn: int) -> None:
        with pair(self.name):
            self._travelling.pop(turn).wait()

    def _room(self, number: int, size: int) -> torch.Tensor:
        if number not in self._memory or len(self._memory[number]) < size:
            self._memory[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[number][:size]


@contextmanager
def pair(name: str) -> Iterator[None]:
    """Errors of NCCL become those of a wire: the other end is lost."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"{name}: {error}") from error


def host_link(wire: Wire, address: str, device: torch.device) -> NcclLink:
    """The trainer's end: a store for this pair alone, so that a pair can form at any time and end without others."""
    timeout = collective_timeout(wire.timeout)
    with pair(wire.name):
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    wire.send_record({"host": address, "port": store.port})
    return NcclLink(wire.name, store, SENDER, wire.timeout, device)


def join_link(wire: Wire, device: torch.device) -> NcclLink:
    """The engine worker's end."""
    where, timeout = wire.receive_record(), collective_timeout(wire.timeout)
    with pair(wire.name):
        store = TCPStore(where["host"], where["port"], is_master=False, wait_for_workers=False, timeout=timeout)
    return NcclLink(wire.name, store, RECEIVER, wire.timeout, device)
