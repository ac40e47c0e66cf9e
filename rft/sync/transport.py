"""Two verbs, send and receive one bucket, over a private process group of two: one trainer rank and one engine worker.

In: a TCPStore hosted by the trainer rank and a name for the pair. Out: a `Link`. The groups live beside torch's default
group, which both the trainer and vLLM need for themselves. Invariants: every operation ends within the link's deadline, with
an exception if need be; a closed link wakes its peer at once; nothing listens on another address than the one configured.
"""

import ipaddress
import socket
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from rft.device import collective_timeout

SENDER, RECEIVER = 0, 1  # ranks in a pair
BACKLOG = 1024  # engine workers that may connect at the same moment


def host_store(address: str, timeout: float) -> tuple[TCPStore, int]:
    """A store that listens on `address` only (TCPStore itself would listen on all); returns it and its port."""
    listener = socket.create_server((address, 0), backlog=BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=collective_timeout(timeout),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def join_store(address: str, port: int, timeout: float) -> TCPStore:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=collective_timeout(timeout))


class Link:
    """One end of a pair. Construction waits for the other end (at most the timeout)."""

    def __init__(self, store: Store, name: str, side: int, backend: str, address: str, timeout: float):
        self.name = name
        self.peer = 1 - side
        self._group: Any = _group(backend, PrefixStore(name, store), side, address, timeout)

    def send(self, data: torch.Tensor) -> Any:
        """Start sending a contiguous uint8 tensor; returns a work object to `wait` on. Keep `data` unchanged until then."""
        return self._alive().send([data], self.peer, 0)

    def receive(self, data: torch.Tensor) -> None:
        """Fill a contiguous uint8 tensor; raises RuntimeError when the peer is gone or the deadline passes."""
        self._alive().recv([data], self.peer, 0).wait()

    def close(self) -> None:
        """Drop the connection: the peer's running and later operations fail at once instead of waiting."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # aborting a connection that the peer has already dropped
                group.abort()

    def _alive(self) -> Any:
        if self._group is None:
            raise RuntimeError(f"link {self.name} is closed")
        return self._group


def _group(backend: str, store: Store, rank: int, address: str, timeout: float) -> Any:
    """A process group of two, not registered anywhere."""
    if backend == "gloo":
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address))]
        options._threads = 1
        options._timeout = collective_timeout(timeout)
        return ProcessGroupGloo(store, rank, 2, options)
    from torch.distributed import ProcessGroupNCCL

    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = collective_timeout(timeout)
    return ProcessGroupNCCL(store, rank, 2, nccl)


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`: loopback for loopback. Sends nothing (UDP connect only routes)."""
    if peer == "localhost" or ipaddress.ip_address(peer).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
