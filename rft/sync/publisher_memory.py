"""Publication by `memory`: every trainer rank leaves its own shards in Ray's object store, and engines take them from there.

    connect: every rank's blocks ─gather─► rank 0 plans ─broadcast─► the synchronizer checks the plan against its engines
    start:   a thread packs this rank's stream, bucket by bucket ─► the synchronizer makes each an object of its own
    release: the thread is through: weights may change, whatever engines do
    wait:    rank 0 takes the synchronizer's answer ─broadcast─► every rank knows that the engines serve the version

The same calls as `rft.sync.publisher.Publisher`, and the same plan and buckets. What was left outlives the trainer: an engine that
starts later takes it although nobody is there to send. No rank ever holds another's shards, nor more than two buckets beside
its own. Invariant: a bucket's checksum is that of the weights as they were when it was packed, before they could change.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rft.config import SynchronizerConfig
from rft.protocols import WeightSource
from rft.sync import checksum
from rft.sync import plan as plans
from rft.sync.narrow import WHOLE, part_of
from rft.sync.plan import Plan
from rft.sync.publisher import Ranks, Rounds, agreed, answer, planned
from rft.sync.sender import Blocks, pack


class MemoryPublisher(Rounds):
    """Every rank has one, and a handle of the synchronizer: objects of a rank's own process would be gone with it."""

    def __init__(self, mesh: Ranks, source: WeightSource, synchronizer: Any, config: SynchronizerConfig, epoch: int):
        super().__init__(mesh, synchronizer, config, epoch)
        self.source = source
        self._stream: int | None = None
        self._open: int | None = None
        self._reply: Any = None
        self._leaving: Leaving | None = None

    def connect(self) -> None:
        """Plan who leaves what. Collective; raises on every rank if that fails."""
        offers = self.mesh.gather(self.source.blocks())
        decision = self.mesh.broadcast(planned(offers, self.config.bucket_bytes) if offers is not None else None)
        if "error" in decision:
            raise ValueError(decision["error"])
        self.plan = plans.decode(decision["plan"])
        self.digest = self.plan.digest
        owners = [stream.rank for stream in self.plan.streams]
        self._stream = owners.index(self.mesh.rank) if self.mesh.rank in owners else None
        outcome: dict[str, Any] = {}
        if self.mesh.rank == 0:
            reply = self.synchronizer.connect.remote(decision["plan"], [], self.epoch, method="memory")
            outcome = answer(reply, self.config.sync_timeout)
        agreed(self.mesh, outcome)

    def start(self, version: int, due: bool = True) -> None:
        """Begin publishing the current weights as `version`, if it is due; does not block. What was begun before is finished
        first. A version that is not due needs nothing: engines that come back find the last one."""
        self.release()
        self.wait()
        if not due:
            return
        self._open = version
        if self._stream is not None:
            self._leaving = Leaving(lambda: self._leave(version))
        if self.mesh.rank == 0:
            self._reply = self.synchronizer.publish_deposited.remote(version, self.epoch)

    def wait(self) -> None:
        """Return when the started version is served by all engines. Collective."""
        if self._open is None:
            return
        outcome: dict[str, Any] = {}
        if self.mesh.rank == 0:
            outcome, self._reply = answer(self._reply, self.config.sync_timeout), None
        numbers = agreed(self.mesh, outcome)
        self.version, self._open = self._open, None
        self.last |= {f"sync/{name}": value for name, value in numbers.items()}

    def release(self) -> None:
        """Return when this rank's weights may change: all of them are in the object store."""
        if self._leaving is not None:
            self._leaving.wait(self.config.sync_timeout)
            self._leaving = None

    def close(self) -> None:
        """What was left stays, for as long as the synchronizer wants it."""

    def _leave(self, version: int) -> None:
        import ray

        assert self._stream is not None
        under_way = None  # one bucket travels while the next is packed
        for number, (data, digest) in enumerate(packed(self.plan, self._stream, self.source, version)):
            if under_way is not None:
                ray.get(under_way, timeout=self.config.sync_timeout)
            under_way = self.synchronizer.deposit.remote(version, self.epoch, self._stream, number, data, digest)
        ray.get(under_way, timeout=self.config.sync_timeout)


class Leaving:
    """A thread whose failure is raised to who waits for it."""

    def __init__(self, work: Callable[[], None]):
        self._failure: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="leave-weights", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"this rank's weights are not in the object store after {timeout:g} s")
        if self._failure is not None:
            raise RuntimeError(f"this rank's weights could not be left in the object store: {self._failure}")

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # raised by `wait`
            self._failure = error


def packed(plan: Plan, index: int, source: WeightSource, version: int) -> Iterator[tuple[np.ndarray, str]]:
    """Stream `index` of the current weights, bucket by bucket: the bytes, and their checksum in hex."""
    part = part_of(plan, index, WHOLE)
    blocks = Blocks(plan.streams[index], part, source)
    for number, bucket in enumerate(part.stream.buckets):
        message = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack(bucket, blocks, message)
        data = message.numpy()
        digest = checksum.host(checksum.seed_of(plan.digest, version, index, number))
        digest.update(data)
        yield data, digest.hexdigest()
