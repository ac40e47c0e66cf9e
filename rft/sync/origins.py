"""How versions leave the trainer, by `synchronizer.sync_method`.

    stream      every rank serves its own shards from where they lie, while the version is open
    memory      every rank leaves its own shards in Ray's object store, and engines take them there
    checkpoint  a version goes to the engines as a save of the weights, which they read where it
                lies

No rank ever holds another's shards. What was left or saved outlives the trainer: an engine that
starts later takes it although nobody is there to send.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from rft.checkpoint.catalog import read_manifest
from rft.checkpoint.records import Committed, Report, SaveFailed
from rft.checkpoint.storage import WEIGHTS, Storage
from rft.config import SynchronizerConfig
from rft.ground.experience import Record
from rft.ground.process import NamedThread
from rft.ground.protocols import Block, Collective, WeightSource
from rft.ground.rounds import CHECKPOINT, MEMORY, InSave
from rft.ground.streams import Beside, enter_thread
from rft.sync import plan as plans
from rft.sync.buckets import Blocks, host_checksum, pack, seed_of
from rft.sync.links import host_links
from rft.sync.plan import WHOLE, StreamPlan, part_of
from rft.sync.publisher import REPLY_S, Connection, Origin, Outcome
from rft.sync.sender import WeightSender
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle, reason

log = logging.getLogger(__name__)
Endpoint = dict[str, Any]


class Agreement(Record, frozen=True):
    """What rank 0 tells all ranks: the encoded plan and who serves each rank's stream, or why there
    is none.
    """

    plan: dict[str, object] = {}
    endpoints: list[Endpoint | None] = []
    error: str | None = None


class ShardOrigin(Origin):
    """What streams and memory share: every rank's blocks ─gather─► rank 0 plans ─broadcast─► every
    rank knows its stream of the plan.
    """

    def __init__(
        self,
        mesh: Collective,
        source: WeightSource,
        synchronizer: SynchronizerHandle | None,
        config: SynchronizerConfig,
        epoch: int,
    ):
        super().__init__(mesh, synchronizer, config, epoch)
        self.source = source
        self._reply: Any = None  # of the synchronizer, to rank 0

    def agree_on_plan(self, endpoint: Endpoint | None) -> tuple[int | None, list[Endpoint]]:
        """Returns this rank's stream, if it has one, and who serves each. Collective; raises on
        every rank if planning fails.
        """
        # over the wire a record becomes a plain dictionary
        offers = self.mesh.gather((self.source.blocks(), endpoint))
        decision = self.mesh.broadcast(self._decide(offers) if offers is not None else None)
        agreed = msgspec.convert(decision, Agreement)
        if agreed.error is not None:
            raise ValueError(agreed.error)
        self.plan = plans.decode(agreed.plan)
        self.digest = self.plan.digest
        owners = [stream.rank for stream in self.plan.streams]
        mine = owners.index(self.mesh.rank) if self.mesh.rank in owners else None
        return mine, [agreed.endpoints[rank] for rank in owners]

    def _decide(self, offers: list[tuple[list[Block], Endpoint | None]]) -> Agreement:
        """Rank 0: the plan; or the error that all ranks raise."""
        size = self.config.bucket_bytes
        assert size is not None, "the rank chooses one by its device"
        try:
            blocks = [msgspec.convert(blocks, list[Block]) for blocks, _ in offers]
            plan = plans.encode(plans.build(blocks, size))
        except ValueError as error:
            return Agreement(error=str(error))
        return Agreement(plan=plan, endpoints=[endpoint for _, endpoint in offers])

    def outcome(self) -> Outcome:
        reply, self._reply = self._reply, None
        return self.answer(reply)


# --- streams --------------------------------------------------------------------------------------


class StreamOrigin(ShardOrigin):
    """Owners open the version for whoever asks, and close it as soon as nobody reads it any more.

    `address`: where this rank's stream is served.
    """

    is_live = True

    def __init__(
        self,
        mesh: Collective,
        source: WeightSource,
        synchronizer: SynchronizerHandle | None,
        config: SynchronizerConfig,
        epoch: int,
        address: str = "127.0.0.1",
    ):
        super().__init__(mesh, source, synchronizer, config, epoch)
        self.address = address
        self.sender: WeightSender | None = None
        self._is_open = False

    def connect(self) -> Outcome:
        if self.source.blocks():
            device = next(iter(self.source.read_blocks())).device
            links, timeout = host_links(device, self.address), self.config.sync_timeout
            self.sender = WeightSender(
                self.source,
                self.epoch,
                timeout,
                self.address,
                links,
                str(device),
                self.config.full_interval if self.config.sync == "delta" else None,
            )
        stream, endpoints = self.agree_on_plan(self.sender.endpoint if self.sender else None)
        if self.sender and stream is not None:
            self.sender.follow(self.plan, stream)
        return self.lead(Synchronizer.connect, self.plan, endpoints, self.epoch)

    def start(self, version: int, due: bool) -> None:
        """Not `due`: the version is only offered."""
        self._is_open, self._offered = True, version
        if self.sender:
            self.sender.open(version)
        if due:
            self._reply = self.ask(Synchronizer.publish, version, self.epoch)
        else:
            self.ask(Synchronizer.offer, version, self.epoch)

    def release(self) -> dict[str, float]:
        """Close the version; engines serve it, or have taken what they wanted of it."""
        was_open, self._is_open, self._offered = self._is_open, False, None
        return self.sender.close_version() if self.sender and was_open else {}

    def close(self) -> None:
        super().close()
        if self.sender:
            self.sender.close()


# --- memory ---------------------------------------------------------------------------------------


class MemoryOrigin(ShardOrigin):
    """A thread packs this rank's stream, bucket by bucket, and the synchronizer, of which every
    rank has a handle, makes each an object of its own: objects of a rank's process would be gone
    with it. Never more than two buckets are held beside the weights. A bucket's checksum is that of
    the weights as they were when it was packed, before they could change.

    What was left is lost with the synchronizer. Every rank leaves it again, for as long as its
    weights are the same; once they may have changed it gives the version up, and the next one is
    published in its place.
    """

    def __init__(
        self,
        mesh: Collective,
        source: WeightSource,
        synchronizer: SynchronizerHandle,
        config: SynchronizerConfig,
        epoch: int,
    ):
        super().__init__(mesh, source, synchronizer, config, epoch)
        self._stream: int | None = None
        self._deposit: DepositThread | None = None
        self._version: int | None = None  # started last
        self._is_same = False  # the weights are
        self._changing = threading.Lock()

    def connect(self) -> Outcome:
        self._stream, _ = self.agree_on_plan(None)
        if self._stream is not None:
            self._device = next(iter(self.source.read_blocks())).device
            self._beside = Beside(self._device)
        if self.mesh.rank != 0:
            return Outcome()
        return self.lead(Synchronizer.connect, self.plan, [], self.epoch, MEMORY)

    def start(self, version: int, due: bool) -> None:
        """A version that is not due needs nothing: engines that come back find the last one."""
        if not due:
            return
        if self.connection is None and self.synchronizer is not None:
            self.connection = Connection(self.synchronizer, self.epoch, self._await_lead)
        with self._changing:
            self._version, self._is_same = version, True
            self._begin()
        if self.mesh.rank == 0:
            self._reply = self.ask(Synchronizer.publish_deposited, version, self.epoch)

    def release(self) -> dict[str, float]:
        """Return when all of this rank's weights are in the object store."""
        with self._changing:
            if self._deposit is not None:
                self._deposit.wait(self.config.sync_timeout)
                self._deposit = None
            self._is_same = False
        return {}

    def renew(self) -> None:
        """By a thread of the connection's: nothing is left of what was in the object store."""
        with self._changing:
            version, is_same = self._version, self._is_same
            if is_same:
                if self._deposit is not None:
                    self._deposit.wait(self.config.sync_timeout)
                self._begin()
        if version is not None and not is_same:
            self.ask(Synchronizer.give_up, version, self.epoch)
        elif version is not None and self.mesh.rank == 0 and self._reply is None:
            # it was served already; engines that come back want it
            self.ask(Synchronizer.publish_deposited, version, self.epoch)

    def _await_lead(self) -> None:
        """Of the other ranks: rank 0 connects."""
        import ray

        asked = self.ask(Synchronizer.connected, self._version or 0, self.epoch)
        ray.get(asked, timeout=self.config.sync_timeout + REPLY_S)
        self.renew()

    def _begin(self) -> None:
        version = self._version
        if self._stream is not None and version is not None:
            self._deposit = DepositThread(lambda: self._leave(version), self._device, self._beside)

    def _leave(self, version: int) -> None:
        import ray

        assert self._stream is not None
        under_way = None  # one bucket travels while the next is packed
        for number, (data, digest) in enumerate(
            packed(self.plan, self._stream, self.source, version)
        ):
            if under_way is not None:
                ray.get(under_way, timeout=self.config.sync_timeout)
            under_way = self.ask(
                Synchronizer.deposit, version, self.epoch, self._stream, number, data, digest
            )
        ray.get(under_way, timeout=self.config.sync_timeout)


class DepositThread:
    """A thread that reads weights `beside` the computation, and whose failure is raised to who
    waits for it.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, beside: Beside):
        self._device, self._beside = device, beside
        self._failure: Exception | None = None
        self._work = work
        self._thread = NamedThread(target=self._run, name="leave-weights", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"this rank's weights are not in the object store after {timeout:g} s"
            )
        if self._failure is not None:
            raise RuntimeError(
                f"this rank's weights could not be left in the object store: {self._failure}"
            )

    def _run(self) -> None:
        enter_thread(self._device)
        try:
            with self._beside:
                self._work()
        except Exception as error:  # raised by `wait`
            self._failure = error


def packed(
    plan: StreamPlan, index: int, source: WeightSource, version: int
) -> Iterator[tuple[np.ndarray, str]]:
    """Stream `index` of the current weights, bucket by bucket: the bytes, and their checksum in
    hex.
    """
    part = part_of(plan, index, WHOLE)
    blocks = Blocks(plan.streams[index], part, source)
    for number, bucket in enumerate(part.stream.buckets):
        message = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack(bucket, blocks, message)
        data = message.numpy()
        digest = host_checksum(seed_of(plan.digest, version, index, number))
        digest.update(data)
        yield data, digest.hexdigest()


# --- checkpoint -----------------------------------------------------------------------------------


class Saves(Protocol):
    """What is needed of the checkpoint manager.

    `hear` is called, by another thread, with every report of the agent.
    """

    storage: Storage
    hear: Any


class CheckpointOrigin(Origin):
    """The loop saves a version that is due, with its checkpoint if that is due too: one staging for
    both. Agents write and commit it, rank 0 hears of it and tells the synchronizer.

    For an explorer on another cluster, which has no synchronizer of ours and looks for saves itself
    (`rft.sync.stored_versions`), and for one of this run (`engines`). Weights may change as soon as
    the save's copies are made, which the loop waits for anyway. The next version is begun only when
    this one is served, or, without engines here, committed; so a reader of the newest version
    always has the two newest saves on disk.
    """

    def __init__(
        self,
        mesh: Collective,
        saves: Saves,
        synchronizer: SynchronizerHandle | None,
        config: SynchronizerConfig,
        epoch: int,
        deadline_s: float,
        engines: bool = True,
    ):
        super().__init__(mesh, synchronizer, config, epoch)
        self.saves = saves
        self.deadline_s = deadline_s  # for one save, from its beginning to its commit
        self.engines = engines
        self._wanted: int | None = None  # a version that is to be saved
        self._saving: int | None = None
        # rank 0: the synchronizer's answer, once there is a save to tell of
        self._told: Future[Any] = Future()

    def connect(self) -> Outcome:
        self.saves.hear = self._hear
        return self.lead(Synchronizer.attach, self.epoch, CHECKPOINT)

    def start(self, version: int, due: bool) -> None:
        """If it is due, `claim_save` must follow. If not, nothing is needed: engines that come back
        find the last one on disk.
        """
        if due:
            self._wanted = version

    def claim_save(self, version: int) -> bool:
        if self._wanted != version:
            return False
        self._saving, self._wanted, self._told = version, None, Future()
        return True

    def outcome(self) -> Outcome:
        """Rank 0: what became of the save, and of the round.

        Without engines here a save that failed is only counted, as others.
        """
        assert self._wanted is None, f"version {self._wanted} was never saved"
        if self.mesh.rank != 0:
            return Outcome()
        try:
            reply = self._told.result(self.deadline_s)
        except TimeoutError:
            return Outcome(
                error=f"version {self._saving} is not committed after {self.deadline_s:g} s"
            )
        except Exception as error:
            if self.engines:
                return Outcome(error=reason(error))
            log.error("weights for explorers elsewhere: %s", error)
            return Outcome()
        return self.answer(reply)

    def close(self) -> None:
        super().close()
        self.saves.hear = lambda report: None

    def _hear(self, report: Report) -> None:
        """By the thread that listens to the agent: a save of the weights that is due ends in
        exactly one of two ways.
        """
        told = self._told
        if (
            told.done()
            or not isinstance(report, Committed | SaveFailed)
            or report.step != self._saving
        ):
            return
        if isinstance(report, SaveFailed):
            told.set_exception(RuntimeError(f"version {report.step} was not saved: {report.cause}"))
        elif report.collection == WEIGHTS:
            self._tell(report, told)

    def _tell(self, report: Committed, told: "Future[Any]") -> None:
        try:
            self.digest = read_manifest(self.saves.storage, report.name).seal
        except (OSError, ValueError) as error:  # raised by `wait`
            told.set_exception(error)
            return
        location = InSave(root=self.saves.storage.where, path=report.name)
        told.set_result(
            self.ask(Synchronizer.publish, report.step, self.epoch, self.digest, location)
        )
