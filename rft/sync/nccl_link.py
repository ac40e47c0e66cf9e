"""Packed buckets between two devices: a private NCCL group of two, one trainer rank and one engine worker.

In: the wire of the pair, over which the trainer rank tells where its store listens. Out: a `Link`, the two verbs. The group
lives beside torch's default group, which both sides need for themselves. Invariant: every operation ends within the timeout.
"""

from typing import Any

import torch
from torch.distributed import ProcessGroupNCCL, TCPStore

from rft.device import collective_timeout
from rft.sync.wire import Wire

SENDER, RECEIVER = 0, 1  # ranks in a pair


class NcclLink:
    def __init__(self, store: TCPStore, side: int, timeout: float):
        options = ProcessGroupNCCL.Options()
        options._timeout = collective_timeout(timeout)
        self._store = store  # the group keeps no reference of its own
        self._group: Any = ProcessGroupNCCL(store, side, 2, options)
        self._peer = 1 - side

    def send(self, data: torch.Tensor) -> Any:
        """Start sending a contiguous uint8 tensor; returns a work object to `wait` on. Keep `data` unchanged until then."""
        return self._group.send([data], self._peer, 0)

    def receive(self, data: torch.Tensor) -> None:
        """Fill a contiguous uint8 tensor, on the current stream."""
        self._group.recv([data], self._peer, 0).wait()

    def close(self) -> None:
        self._group.abort()


def host_link(wire: Wire, address: str) -> NcclLink:
    """The trainer's end: a store for this pair alone, so that a pair can form at any time and end without others."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=collective_timeout(wire.timeout))
    wire.send_record({"host": address, "port": store.port})
    return NcclLink(store, SENDER, wire.timeout)


def join_link(wire: Wire) -> NcclLink:
    """The engine worker's end."""
    where = wire.receive_record()
    timeout = collective_timeout(wire.timeout)
    store = TCPStore(where["host"], where["port"], is_master=False, wait_for_workers=False, timeout=timeout)
    return NcclLink(store, RECEIVER, wire.timeout)
