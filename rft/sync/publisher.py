"""Weight publication as the training loop sees it, on every rank: connect once, then start and wait per version.

    connect: every rank's blocks ─gather─► rank 0 plans ─broadcast─► senders and engines form their links
    start:   owners push their streams in threads; rank 0 asks the synchronizer for the round
    wait:    owners join their push; rank 0 takes the synchronizer's answer

Consumes versions, produces `version` (the last one that all engines serve) and `last` (its numbers, rank 0). Invariant: after
`wait` returns, this rank's weights may change; between `start` and `wait` they must not.
"""

from typing import Any, Protocol

import msgspec

from rft import device as devices
from rft.config import SynchronizerConfig
from rft.protocols import Block, WeightSource
from rft.sync import plan as plans
from rft.sync.sender import WeightSender
from rft.sync.synchronizer import reason

REPLY_S = 30.0  # on top of sync_timeout: the synchronizer raises the better error first


class Ranks(Protocol):
    """What is needed of the trainer's mesh."""

    rank: int
    world: int

    def broadcast(self, item: Any) -> Any: ...
    def gather(self, item: Any) -> list[Any] | None: ...
    def barrier(self, name: str) -> None: ...


class Publisher:
    """Every rank has one and calls it in the same order. `enabled=False` (no engines in this run): versions just count."""

    def __init__(
        self, mesh: Ranks, source: WeightSource, synchronizer: Any | None, config: SynchronizerConfig, epoch: int,
        enabled: bool = True, address: str = "127.0.0.1",
    ):  # fmt: skip
        self.mesh = mesh
        self.source = source
        self.synchronizer = synchronizer
        self.config = config
        self.epoch = epoch
        self.enabled = enabled
        self.address = address
        self.version: int | None = None
        self.last: dict[str, float] = {}
        self._sender: WeightSender | None = None
        self._pending: int | None = None
        self._reply: Any = None

    def connect(self) -> None:
        """Plan the streams and connect every owner with every engine. Collective; raises on every rank if planning fails."""
        if not self.enabled:
            return
        blocks = self.source.blocks()
        if blocks:
            backend = devices.choose(next(iter(self.source.read_blocks())).device.type).backend
            self._sender = WeightSender(self.source, self.epoch, self.config.sync_timeout, self.address, backend)
        endpoint = self._sender.endpoint if self._sender else None
        offers = self.mesh.gather((blocks, endpoint))  # over the wire a record becomes a plain dictionary
        decision = self.mesh.broadcast(self._decide(offers) if offers is not None else None)
        if "error" in decision:
            raise ValueError(decision["error"])
        plan = plans.decode(decision["plan"])
        if self.synchronizer is not None:
            self._reply = self.synchronizer.connect.remote(decision["plan"], decision["streams"], self.epoch)
        if self._sender:
            owners = [stream.rank for stream in plan.streams]
            self._sender.connect(plan, owners.index(self.mesh.rank), decision["peers"])
        self._take_reply()
        self.mesh.barrier("weight streams connected")

    def start(self, version: int) -> None:
        """Begin publishing the current weights as `version`; does not block."""
        assert self._pending is None, f"version {self._pending} was not waited for"
        self._pending = version
        if self._sender:
            self._sender.push(version)
        if self.synchronizer is not None:
            self._reply = self.synchronizer.publish.remote(version, self.epoch)

    def wait(self) -> dict[str, float] | None:
        """Return when the started version is sent and, at rank 0, served by all engines; None if nothing was started."""
        if self._pending is None:
            return None
        sent = self._join()
        self.version, self._pending = self._pending, None
        self.last = {f"sync/{name}": value for name, value in sent.items()}
        return self.last

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    def _decide(self, offers: list[tuple[list[Block], dict[str, Any] | None]]) -> dict[str, Any]:
        """Rank 0: the plan, who serves which stream, and whom to serve; or the error that all ranks raise."""
        import ray

        assert self.synchronizer is not None, "rank 0 needs the synchronizer's handle"
        try:
            plan = plans.build([msgspec.convert(blocks, list[Block]) for blocks, _ in offers], self.config.bucket_bytes)
        except ValueError as error:
            return {"error": str(error)}
        peers = ray.get(self.synchronizer.peers.remote(), timeout=REPLY_S)
        streams = [offers[stream.rank][1] for stream in plan.streams]
        return {"plan": plans.encode(plan), "streams": streams, "peers": peers}

    def _join(self) -> dict[str, float]:
        """The round's numbers. When both ends failed, the engines' reason comes first: they saw the bytes."""
        try:
            sent = self._sender.wait() if self._sender else {}
        except RuntimeError as failure:
            try:
                self._take_reply()
            except Exception as cause:
                raise RuntimeError(f"version {self._pending}: {reason(cause)}; {failure}") from cause
            raise
        return {**(self._take_reply() or {}), **sent}

    def _take_reply(self) -> Any:
        if self._reply is None:
            return None
        import ray

        reply, self._reply = self._reply, None
        return ray.get(reply, timeout=self.config.sync_timeout + REPLY_S)
