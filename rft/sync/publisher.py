"""Weight publication as the training loop sees it, on every rank: connect once, then start and wait per version.

    connect: every rank's blocks ─gather─► rank 0 plans ─broadcast─► senders serve; the synchronizer hears of them
    start:   every owner opens the version for whoever asks; rank 0 asks the synchronizer for the round, or only offers
    wait:    rank 0 takes the synchronizer's answer ─broadcast─► every rank knows that the engines serve it
    rest:    where trainer and engines take turns: as wait; then the engines sleep, until the next round wakes them
    release: as wait; then owners close the version, as soon as nobody reads it any more

Consumes versions, produces `version` (the last one that all engines serve) and the rounds' numbers. Invariant: after
`release` returns, this rank's weights may change; between `start` and `release` they must not.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rft import device as devices
from rft.config import SynchronizerConfig
from rft.protocols import Block, WeightSource
from rft.sync import plan as plans
from rft.sync.sender import Link, WeightSender
from rft.sync.synchronizer import reason
from rft.sync.wire import Wire

if TYPE_CHECKING:
    import torch

REPLY_S = 30.0  # on top of sync_timeout: the synchronizer raises the better error first


class Ranks(Protocol):
    """What is needed of the trainer's mesh."""

    rank: int

    def broadcast(self, item: Any) -> Any: ...
    def gather(self, item: Any) -> list[Any] | None: ...


class Rounds:
    """What every way to publish has in common."""

    version: int | None = None  # the last one that all engines serve

    def __init__(self, mesh: Ranks, synchronizer: Any | None, config: SynchronizerConfig, epoch: int):
        self.mesh = mesh
        self.synchronizer = synchronizer
        self.config = config
        self.epoch = epoch
        self.last: dict[str, float] = {}
        self.digest = ""  # of the plan, or of what stands in for it

    def pop(self) -> dict[str, float]:
        """The numbers of rounds since the last call."""
        numbers, self.last = self.last, {}
        return numbers

    def claim_save(self, version: int) -> bool:
        """Whether `version` is to be saved now, for the engines; see `rft.sync.publisher_disk`."""
        return False

    def rest(self) -> None:
        """Called when a step has its batch. Does nothing where engines have devices of their own."""


class Publisher(Rounds):
    """Every rank has one and calls it in the same order. `enabled=False` (no engines in this run): versions just count."""

    def __init__(
        self, mesh: Ranks, source: WeightSource, synchronizer: Any | None, config: SynchronizerConfig, epoch: int,
        enabled: bool = True, address: str = "127.0.0.1", probe: Callable[[int], dict[str, float]] = lambda version: {},
        takes_turns: bool = False,
    ):  # fmt: skip
        super().__init__(mesh, synchronizer, config, epoch)
        self.source = source
        self.enabled = enabled
        self.address = address
        self.probe = probe  # looks at the engines while they serve exactly these weights
        self.takes_turns = takes_turns  # with engines on the same devices
        self._sender: WeightSender | None = None
        self._open: int | None = None  # the version that these weights are offered as
        self._due = False
        self._reply: Any = None

    def connect(self) -> None:
        """Plan the streams and let the engines know. Collective; raises on every rank if planning fails."""
        if not self.enabled:
            return
        blocks = self.source.blocks()
        if blocks:
            device = next(iter(self.source.read_blocks())).device
            self._sender = WeightSender(
                self.source, self.epoch, self.config.sync_timeout, self.address, link_maker(device, self.address)
            )
        endpoint = self._sender.endpoint if self._sender else None
        offers = self.mesh.gather((blocks, endpoint))  # over the wire a record becomes a plain dictionary
        decision = self.mesh.broadcast(self._decide(offers) if offers is not None else None)
        if "error" in decision:
            raise ValueError(decision["error"])
        plan = plans.decode(decision["plan"])
        self.digest = plan.digest
        if self._sender:
            owners = [stream.rank for stream in plan.streams]
            self._sender.follow(plan, owners.index(self.mesh.rank))
        if self.synchronizer is not None:
            self._reply = self.synchronizer.connect.remote(decision["plan"], decision["streams"], self.epoch)
        agreed(self.mesh, self._outcome())

    def start(self, version: int, due: bool = True) -> None:
        """Begin publishing the current weights as `version`; does not block. Not `due`: they are only there for engines that
        have come back without any. What was started before is released first."""
        self.release()
        self._open, self._due = version, due
        if self._sender:
            self._sender.open(version)
        if self.synchronizer is None:
            return
        if due:
            self._reply = self.synchronizer.publish.remote(version, self.epoch)
        else:
            self.synchronizer.offer.remote(version, self.epoch)

    def wait(self) -> None:
        """Return when the started version, if it was due, is served by all engines. Collective."""
        if self._open is None or not self._due:
            return
        numbers = agreed(self.mesh, self._outcome()) | self.probe(self._open) if self.enabled else {}
        self._due, self.version = False, self._open
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}

    def rest(self) -> None:
        """The engines have done their part of the step: return when they sleep, if they share this rank's devices. Collective."""
        if not self.takes_turns:
            return
        self.wait()
        if self.synchronizer is not None:
            self._reply = self.synchronizer.rest.remote()
        numbers = agreed(self.mesh, self._outcome(), "putting the engines to sleep")
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}

    def release(self) -> None:
        """Return when the weights may change: as `wait`, and nobody reads them any more. Collective."""
        self.wait()
        if self._open is None:
            return
        self._open = None
        if self._sender:
            self.last |= {f"sync/{name}": value for name, value in self._sender.close_version().items()}

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    def _decide(self, offers: list[tuple[list[Block], dict[str, Any] | None]]) -> dict[str, Any]:
        """Rank 0: the plan and who serves which stream; or the error that all ranks raise."""
        found = planned([blocks for blocks, _ in offers], self.config.bucket_bytes)
        if "error" in found:
            return found
        return {**found, "streams": [offers[stream["rank"]][1] for stream in found["plan"]["streams"]]}

    def _outcome(self) -> dict[str, Any]:
        """Rank 0: what the synchronizer answered; its failure becomes one of all ranks."""
        if self._reply is None:
            return {}
        reply, self._reply = self._reply, None
        return answer(reply, self.config.sync_timeout)


def planned(offers: list[list[Block]], bucket_bytes: int | None) -> dict[str, Any]:
    """Rank 0: the plan for ranks that own these blocks; or the error that all ranks raise."""
    assert bucket_bytes is not None, "the rank chooses one by its device"
    try:
        plan = plans.build([msgspec.convert(blocks, list[Block]) for blocks in offers], bucket_bytes)
    except ValueError as error:
        return {"error": str(error)}
    return {"plan": plans.encode(plan)}


def answer(reply: Any, timeout: float) -> dict[str, Any]:
    """What the synchronizer says to rank 0, as an outcome for all ranks: its failure becomes one of theirs."""
    import ray

    try:
        return {"numbers": ray.get(reply, timeout=timeout + REPLY_S) or {}}
    except Exception as error:  # raised on every rank, after these have heard of it
        return {"error": reason(error)}


def agreed(mesh: Ranks, outcome: dict[str, Any], what: str = "weight sync") -> dict[str, float]:
    """Rank 0's outcome, on every rank; raises on every rank if it is a failure."""
    outcome = mesh.broadcast(outcome)
    if "error" in outcome:
        raise RuntimeError(f"{what} failed: {outcome['error']}")
    return dict(outcome.get("numbers", {}))


def link_maker(device: "torch.device", address: str) -> Callable[[Wire], Link] | None:
    """How packed buckets leave this rank; None: its weights lie in host memory and go over the wire as they lie there."""
    if devices.choose(device.type).backend != "nccl":
        return None
    from rft.sync.links import host_link

    return lambda wire: host_link(wire, device, address)
