"""The trainer end of the weight stream: one `WeightSender` on each rank that owns blocks.

    read_blocks() ──► pack bucket i ──► send to every engine worker (own link each) ──► pack bucket i+1 while i travels

In: the rank's `WeightSource` and the plan. Out: its stream, once per `push`. Contract: the weights must not change between
`push` and the end of `wait`; the trainer keeps it by waiting just before its optimizer writes. Invariants: every message ends
with the checksum of its payload, seeded with plan, version, stream and bucket, so bytes of another round are refused too; a
link that failed is closed, and the other engines still get the whole stream.
"""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from rft.protocols import WeightSource
from rft.sync.plan import Bucket, Plan, Stream, row_bytes
from rft.sync.transport import SENDER, Link, host_store

log = logging.getLogger(__name__)
CHECKSUM_BYTES = 16  # xxh3-128, at the end of every message
BUFFERS = 2  # one is packed while the other travels


class WeightSender:
    """Life: hosting -> connected -> (push -> wait)*. After a failed round its broken links stay closed: connect anew."""

    def __init__(
        self, source: WeightSource, epoch: int, timeout: float, address: str = "127.0.0.1", backend: str = "gloo"
    ):
        self.source = source
        self.epoch = epoch
        self.timeout = timeout
        self.address = address
        self.backend = backend
        self._store, self._port = host_store(address, timeout)
        self._links: dict[str, Link] = {}
        self._round: _Round | None = None

    @property
    def endpoint(self) -> dict[str, Any]:
        """Where engine workers find this rank's store."""
        return {"host": self.address, "port": self._port}

    def connect(self, plan: Plan, index: int, peers: list[str]) -> None:
        """Form one link per engine worker, in the order of `peers`: every rank must use the same order."""
        self.plan = plan
        self.stream = plan.streams[index]
        self._check_source()
        self.index = index
        self._store.set(digest_key(self.epoch), plan.digest)
        for peer in peers:
            name = link_name(self.epoch, index, peer)
            self._links[peer] = Link(self._store, name, SENDER, self.backend, self.address, self.timeout)

    def push(self, version: int) -> None:
        """Start sending the current weights as `version`, in a thread. They must not change until `wait` returns."""
        assert self._round is None, "push while the last one was not waited for"
        thread = threading.Thread(target=self._run, args=(version,), name=f"push-{version}", daemon=True)
        self._round = _Round(thread)
        thread.start()

    def wait(self) -> dict[str, float]:
        """Return when every engine has the last push's bytes; raises what kept one from getting them."""
        if self._round is None:
            return {}
        this, self._round = self._round, None
        this.thread.join()  # ends: every send in it has the link's deadline
        if this.failures:
            causes = "; ".join(f"{peer}: {error}" for peer, error in this.failures.items())
            raise RuntimeError(f"weight stream {self.index} did not reach {len(this.failures)} peer(s): {causes}")
        return {"send_s": this.seconds}

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _check_source(self) -> None:
        if tuple(self.source.blocks()) != self.stream.blocks:
            raise ValueError(f"trainer rank {self.stream.rank}: the plan's blocks are not those of this rank's policy")

    def _run(self, version: int) -> None:
        """Body of the push thread; whatever goes wrong ends up in the round's failures and closes the links."""
        this = self._round
        assert this is not None
        began = time.monotonic()
        try:
            self._send_all(version, this.failures)
        except Exception as error:
            this.failures["trainer"] = error
            self.close()  # peers must not wait for buckets that will never come
        this.seconds = time.monotonic() - began

    def _send_all(self, version: int, failures: dict[str, Exception]) -> None:
        links = dict(self._links)
        device = next(iter(self.source.read_blocks())).device
        largest = max(bucket.nbytes for bucket in self.stream.buckets) + CHECKSUM_BYTES
        memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        travelling: list[dict[str, Any]] = [{} for _ in range(BUFFERS)]
        for number, message in enumerate(self._messages(version, memory, travelling, links, failures)):
            travelling[number % BUFFERS] = _each(links, failures, lambda link, message=message: link.send(message))
        for works in travelling:
            _settle(works, links, failures)

    def _messages(
        self, version: int, memory: list[torch.Tensor], travelling: list[dict[str, Any]], links: dict[str, Link],
        failures: dict[str, Exception],
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """Each bucket, packed and sealed, in one of the buffers; waits until the buffer's last message has left."""
        packer = _Packer(self.stream, self.source.read_blocks())
        for number, bucket in enumerate(self.stream.buckets):
            _settle(travelling[number % BUFFERS], links, failures)
            message = memory[number % BUFFERS][: bucket.nbytes + CHECKSUM_BYTES]
            packer.fill(bucket, message)
            seed = bucket_seed(self.plan.digest, version, self.index, number)
            message[bucket.nbytes :] = torch.frombuffer(
                bytearray(checksum(message[: bucket.nbytes], seed)), dtype=torch.uint8
            )
            yield message


@dataclass
class _Round:
    thread: threading.Thread
    failures: dict[str, Exception] = field(default_factory=dict)
    seconds: float = 0.0


class _Packer:
    """Copies a stream's blocks, read once and in order, into one bucket after the other."""

    def __init__(self, stream: Stream, blocks: Iterator[torch.Tensor]):
        self.stream = stream
        self.blocks = enumerate(blocks)
        self.number = -1
        self.flat = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: Bucket, message: torch.Tensor) -> None:
        for piece in bucket.pieces:
            while self.number < piece.block:
                self._next()
            rows = row_bytes(self.stream.blocks[piece.block])
            part = self.flat[piece.start * rows : piece.stop * rows]
            message[piece.offset : piece.offset + len(part)].copy_(part)

    def _next(self) -> None:
        self.number, tensor = next(self.blocks)
        block = self.stream.blocks[self.number]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (block.dtype, block.block_shape):
            raise ValueError(
                f"{block.name}: plan says {block.dtype} {block.block_shape}, got {dtype} {tuple(tensor.shape)}"
            )
        self.flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _each(links: dict[str, Link], failures: dict[str, Exception], act: Any) -> dict[str, Any]:
    """`act` on every live link; a link that fails is closed, remembered, and left out from now on."""
    results: dict[str, Any] = {}
    for peer, link in list(links.items()):
        try:
            results[peer] = act(link)
        except RuntimeError as error:
            _drop(peer, links, failures, error)
    return results


def _settle(works: dict[str, Any], links: dict[str, Link], failures: dict[str, Exception]) -> None:
    """Wait for sends under way."""
    for peer, work in works.items():
        try:
            work.wait()
        except RuntimeError as error:
            _drop(peer, links, failures, error)
    works.clear()


def _drop(peer: str, links: dict[str, Link], failures: dict[str, Exception], error: Exception) -> None:
    failures.setdefault(peer, error)
    if peer in links:
        log.warning("weight stream to %s failed: %s", peer, error)
        links.pop(peer).close()


def checksum(data: torch.Tensor, seed: int) -> bytes:
    """xxh3-128 of a uint8 tensor's bytes (device tensors go through host memory)."""
    return xxhash.xxh3_128_digest(data.cpu().numpy().data, seed)


def bucket_seed(digest: str, version: int, stream: int, bucket: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{digest}/{version}/{stream}/{bucket}".encode())


def link_name(epoch: int, stream: int, peer: str) -> str:
    """Prefix of a pair's keys in the store: a member of another epoch never meets this one's."""
    return f"{epoch}/{stream}/{peer}"


def digest_key(epoch: int) -> str:
    return f"{epoch}/digest"
