"""The engine end of the weight stream, without vLLM: streams in, whole Hugging Face
tensors out.

    stream 0 ──thread─┐  bytes land in the tensor that they belong to,
    stream 1 ──thread─┼─► every bucket is checked, wrong ones come again
            ──► (name, tensor), each name once
    ...               ┘        └─► the engine behind this one (`rft.sync.relay`)

Each stream comes from the trainer rank that owns it, or from the engine before this one in its ring
(`rft.sync.fanout`); to the threads both are the same.

`rft.sync.install` is the part that lives in vLLM and consumes the tensors. A tensor-parallel worker
takes only its part of the streams (`rft.sync.plan`); the tensors have their whole shape all the
same, and what is not there cannot be read (`rft.sync.loading`). Invariants: a tensor is handed out
only when all its bytes have come and their checksums fit; whatever a receiving thread meets is
raised to the consumer; after a failed round every wire is closed, and nothing that belongs to it
writes into the memory of a later one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from rft.ground import device as devices
from rft.ground.delta import Changes, read
from rft.ground.process import NamedThread
from rft.ground.rounds import GroupSeat, Round, TrainerInfo
from rft.ground.streams import Beside, enter_thread, settle
from rft.sync import plan as plans
from rft.sync.buckets import (
    CHECKSUM_BYTES,
    Checksum,
    Staging,
    host_checksum,
    largest,
    seed_of,
)
from rft.sync.communicator import MakeTransport, nccl
from rft.sync.connection import CHUNK, PeerConnection, PeerLost, handshake, told
from rft.sync.fanout import before, comes_from_trainer, head
from rft.sync.groups import Way, join_group
from rft.sync.history import BucketHead, Told, itemsize, payload
from rft.sync.links import BucketLink, CardMemory, JoinLink, LinkSide
from rft.sync.passing import Passed, Passing, Use
from rft.sync.plan import WHOLE, Share, StreamPart, StreamPlan, WeightStream, part_of
from rft.sync.relay import SILENCE_S, Relay

log = logging.getLogger(__name__)
TRIES = 3  # of one bucket: a bit may flip on the way, a faulty machine flips them all
ENDS_S = 10.0  # for threads whose wires are closed; decoding has the cores first
OVER_S = 2 * ENDS_S  # for the round that they belong to


class Receiver:
    """One per engine worker: joins one trainer epoch's streams, makes tensors of each round."""

    def __init__(
        self,
        worker: int,
        device: torch.device,
        make_link: JoinLink | None = None,
        share: Share = WHOLE,
        transport: MakeTransport = nccl,
        memory: CardMemory | None = None,
    ):
        self.worker = worker
        self.device = device
        self.make_link = make_link
        self.transport = transport
        self.memory = memory or devices.SharedCard(device)
        self.share = share
        self.relay: Relay | None = None  # what this worker has is passed on
        self.plan: StreamPlan | None = None
        self.epoch = -1
        self.timeout = 0.0
        self.again = 0  # buckets of the last round that had to be sent again
        self._info: TrainerInfo | None = None  # None: not connected
        self._parts: list[StreamPart] = []  # of the streams that hold anything for this worker
        self._indices: list[int] = []  # of these in the plan
        self._wires: list[PeerConnection] = []  # one per part, or per part that a group has by it
        self._links: list[BucketLink | None] = []
        self._passing: Passing | None = None  # begins with the first round
        self._besides: list[Beside] = []  # one per link, also after the next `connect`
        self._checksum = Checksum(device)
        self._kept: Staging | None = None
        self._base: int | None = None  # the version that is in there, all of it and checked
        # tensors of which anything came since who reads them has emptied this; None: all of them
        self.changed: set[str] | None = None
        self._came: list[int] = []  # bytes of the last round, by stream
        self._spare = threading.Semaphore(devices.spare_cores())
        self._using = threading.Lock()  # of all that `connect` makes: while it does, and by `stage`

    def connect(self, info: TrainerInfo) -> None:
        """Join these streams instead of those of before, if any.

        A round that still comes over those fails; this waits for its end, or raises PeerLost.
        """
        assert info.plan is not None
        plan = plans.decode(info.plan)
        if info.epoch < self.epoch:
            raise ValueError(
                f"weight streams of epoch {info.epoch} cannot be joined: epoch {self.epoch} was "
                "here before"
            )
        if len(info.streams) != len(plan.streams):
            raise ValueError(
                f"the plan has {len(plan.streams)} streams, the trainer offers {len(info.streams)}"
            )
        self.close()
        if not self._using.acquire(timeout=OVER_S):
            raise PeerLost(f"a round of the streams before has not ended in {OVER_S:g} s")
        try:
            self.close()  # what that round has made meanwhile
            self._join_all(info, plan)
        except BaseException:
            self.close()
            raise
        finally:
            self._using.release()

    def _join_all(self, info: TrainerInfo, plan: StreamPlan) -> None:
        if self.plan is None or self.plan.digest != plan.digest:
            self._kept = None
        if self._kept is None or info.epoch != self.epoch:
            self._base = None  # another trainer's version of the same number is another one
        self.plan, self.epoch, self.timeout = plan, info.epoch, info.timeout
        self._info = info
        parts = [part_of(plan, index, self.share) for index in range(len(plan.streams))]
        mine = {index: part for index, part in enumerate(parts) if part.stream.blocks}
        if self.relay is not None:
            generation = info.seats[self.worker].generation if info.seats else 0
            key = info.epoch, plan.digest
            self.relay.follow(info.engine, key, generation, mine, self.share)
        self._parts, self._indices = list(mine.values()), list(mine)
        for index, part in mine.items():
            if not self._is_taken(index):
                continue
            wire = self._join(info, index, part)
            self._wires.append(wire)
            self._links.append(self._link(part, wire))
        if self._kept is None and not info.direct:
            self._kept = Staging(self._streams(), self.device, kept=True, timeout=self.timeout)

    def _link(self, part: StreamPart, wire: PeerConnection) -> BucketLink | None:
        """With all of its memory, which its stream alone will use and free."""
        number = len(self._links)
        if number == len(self._besides):
            self._besides.append(Beside(self.device))
        if self.make_link is None:
            return None
        with self._besides[number]:
            assert self._info is not None
            link = self.make_link(wire, self._info.alone)
            link.room_to_receive(largest(part), sum(map(self._is_taken, self._indices)))
            self._checksum.make()
        return link

    def _seat(self) -> GroupSeat | None:
        """None where this engine takes everything from the trainer."""
        seats = self._connected().seats
        return seats[self.worker] if seats else None

    def _is_taken(self, index: int) -> bool:
        """Whether a wire brings stream `index` here; if not, a group does."""
        seat = self._seat()
        if seat is None or self.make_link is None:
            return True
        return comes_from_trainer(index, seat.mine, len(seat.names))

    def _hello(self, info: TrainerInfo, part: StreamPart) -> dict[str, Any]:
        assert self.plan is not None
        return {
            "epoch": info.epoch,
            "digest": self.plan.digest,
            "peer": f"{info.engine}/{self.worker}",
            "share": msgspec.to_builtins(self.share),
            "link": msgspec.to_builtins(LinkSide.of(self.make_link, str(self.device))),
            "part": part.digest,
        }

    def _join(self, info: TrainerInfo, index: int, part: StreamPart) -> PeerConnection:
        """The wire over which stream `index` comes: of its trainer rank, or of the engine that is
        before this one.
        """
        hello, seat = self._hello(info, part), self._seat()
        if seat is None or comes_from_trainer(index, seat.mine, len(seat.names)):
            name = f"stream {index} from trainer rank {part.stream.rank}"
            return handshake(info.streams[index], hello, name, self.timeout)
        engine = seat.names[before(seat.mine, len(seat.names))]
        hello |= {"stream": index, "generation": seat.generation}
        silence = min(SILENCE_S, self.timeout)
        return handshake(seat.before, hello, f"stream {index} from {engine}", silence, engine)

    @property
    def payload(self) -> int:
        """Bytes of one round."""
        return sum(part.payload for part in self._parts)

    def _connected(self) -> TrainerInfo:
        if (info := self._info) is None:
            raise RuntimeError("no weight streams are connected")
        return info

    def check(self, coming: Round) -> None:
        """Refuse a round of another plan or epoch before any byte of it is taken."""
        self._connected()
        assert self.plan is not None
        if coming.digest != self.plan.digest:
            raise ValueError(
                f"round follows plan {coming.digest}, this engine was connected with "
                f"{self.plan.digest}"
            )
        if coming.epoch != self.epoch:
            raise ValueError(
                f"round belongs to epoch {coming.epoch}, this engine was connected in {self.epoch}"
            )

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        """What came in one round.

        It lies in memory that the next `stage` overwrites. Closes what it has begun with where it
        fails, and nothing that was connected since.
        """
        with self._using:
            self._connected()
            assert self._kept is not None, "connected for direct rounds"
            if self._base is None or self.make_link is not None:
                self.changed = None  # nothing is known of what is not compared with a version here
            base, self._base = self._base, None  # what fails in between has changed some of it
            if self.relay is not None:
                self.relay.begin(coming.version, self._kept)
            try:
                tensors = dict(self._round(coming.version, self._kept, base))
            except Exception as error:
                if self.relay is not None:
                    self.relay.fail(error)
                raise
            if self.relay is not None:
                self.relay.complete()
            self._base = coming.version
            return tensors

    def size(self, staged: dict[str, torch.Tensor]) -> int:
        """Bytes that came: fewer than those of the tensors, where this worker takes a part, or what
        has changed.
        """
        return sum(self._came)

    def tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """One round without staging memory: every tensor in order
        of completion, in memory of its own.
        """
        return self._round(
            version, Staging(self._streams(), self.device, kept=False, timeout=self.timeout)
        )

    def _streams(self) -> list[WeightStream]:
        return [part.stream for part in self._parts]

    def _round(
        self, version: int, staging: Staging, base: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """`base`: the version whose bits are in `staging`."""
        inbox: queue.SimpleQueue[tuple[int, int] | Exception] = queue.SimpleQueue()
        self.again, self._came = 0, [0] * len(self._parts)
        staging.begin()
        wires, links = self._wires, self._links
        info = self._connected()  # so these are all of them, whoever closes them meanwhile
        ends = list(zip(wires, links, strict=True))
        names = [wire.name for wire in wires]
        threads = [
            NamedThread(
                target=self._receive,
                args=(version, index, *end, staging, inbox, base),
                name=f"stream-{index}",
                daemon=True,
            )
            for index, end in enumerate(ends)
        ]
        if self.make_link is not None and info.seats:
            names = [f"trainer rank {part.stream.rank}" for part in self._parts]
            arguments = (version, staging, inbox)
            threads = [NamedThread(target=self._pass, args=arguments, name="group", daemon=True)]
        try:
            for thread in threads:
                thread.start()
            yield from self._taken(version, staging, inbox, names)
        except BaseException:  # or nobody reads on
            self._end(info, staging, threads)
            raise
        for thread in threads:
            thread.join()  # its last word is said before the first one of another round

    def _taken(
        self, version: int, staging: Staging, inbox: "queue.SimpleQueue[Any]", names: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What the threads of a round bring. `names`: whom they bring it from."""
        for number in range(sum(len(part.stream.buckets) for part in self._parts)):
            try:
                arrived = inbox.get(timeout=self.timeout)
            except queue.Empty:
                late = ", ".join(names[index] for index in staging.late())
                raise TimeoutError(
                    f"{self._what_is_there(version, staging, number)}; waiting for {late}"
                ) from None
            if isinstance(arrived, Exception):
                raise arrived
            yield from staging.arrived(*arrived)
        staging.check_complete()

    def _end(self, info: TrainerInfo, staging: Staging, threads: list[NamedThread]) -> None:
        """A round by the wires of `info` has failed: none of its threads writes where a later one
        does, for they have ended, or the memory is left to them.
        """
        if self._info is info:
            self.close()
        staging.give_up()
        until = time.monotonic() + ENDS_S
        for thread in (one for one in threads if one.is_alive()):
            thread.join(max(0.0, until - time.monotonic()))
        if late := [thread.name for thread in threads if thread.is_alive()]:
            log.warning("%s did not end in %g s: their memory is given up", late, ENDS_S)
            if self._kept is staging:
                self._kept = None

    def _what_is_there(self, version: int, staging: Staging, number: int) -> str:
        streams = self._streams()
        return (
            f"weights of version {version}: nothing came for {self.timeout:g} s after {number} of "
            f"{sum(len(stream.buckets) for stream in streams)} buckets, {staging.bytes} of "
            f"{sum(stream.nbytes for stream in streams)} bytes"
        )

    def _receive(
        self,
        version: int,
        index: int,
        wire: PeerConnection,
        link: BucketLink | None,
        staging: Staging,
        inbox: "queue.SimpleQueue[Any]",
        base: int | None,
    ) -> None:
        """Body of one stream's thread: the consumer hears of every good
        bucket, or of what ended the stream.
        """
        enter_thread(self.device)
        take = partial(self._take, version, index, wire)
        try:
            if link is not None:
                take = partial(self._take_packed, version, index, wire, link, self._besides[index])
            wire.send_record({"version": version, "base": base})
            wanted = list(range(len(self._parts[index].stream.buckets)))
            self._take_all(version, index, wire, wanted, lambda some: take(some, staging, inbox))
        except Exception as error:
            inbox.put(error)

    def _take_all(
        self,
        version: int,
        index: int,
        wire: PeerConnection,
        wanted: list[int],
        take: Callable[[list[int]], set[int]],
    ) -> None:
        """What the other end of `wire` was asked for; what is wrong, again."""
        told(wire)
        for _ in range(TRIES):
            good = take(wanted)
            wanted = [number for number in wanted if number not in good]
            self.again += len(wanted)
            wire.send_record({"again": wanted})
            if not wanted:
                return
            log.warning("%s", self._wrong(version, index, wanted))
        raise ValueError(f"{self._wrong(version, index, wanted)}, {TRIES} times")

    def _pass(self, version: int, staging: Staging, inbox: "queue.SimpleQueue[Any]") -> None:
        """Body of the thread that takes what the group brings."""
        enter_thread(self.device)

        def put(index: int, number: int, data: torch.Tensor) -> None:
            staging.reserve(index)
            self._put(index, number, staging, data)
            stream = self._parts[index].stream
            self._came[index] += payload(stream, stream.buckets[number])
            inbox.put((index, number))

        def fetch(index: int, numbers: list[int]) -> None:
            log.warning("%s", self._wrong(version, index, numbers))
            self.again += len(numbers)
            self._fetch(version, index, numbers, staging, inbox)

        def wrong(index: int, numbers: list[int]) -> str:
            self.again += len(numbers)
            return self._wrong(version, index, numbers)

        try:
            self._passing = self._passing or self._joined()
            self._passing.run(version, Use(put, wrong, fetch))
        except Exception as error:
            inbox.put(error)

    def _joined(self) -> Passing:
        """The group comes together with the first round, in the thread that takes it: requests go
        on meanwhile, and the others come when they are told of the round.
        """
        seat, relay = self._seat(), self.relay
        assert seat is not None and relay is not None
        way = Way(
            relay.endpoint, relay.meeting, self.transport, self.memory, self.device, self.timeout
        )
        ends, streams = iter(zip(self._wires, self._links, strict=True)), list[Passed]()
        for index, part in zip(self._indices, self._parts, strict=True):
            ours = next(ends) if self._is_taken(index) else (None, None)
            streams.append(Passed(part, head(index, len(seat.names)), *ours))
        info, group = self._info, join_group(seat, self.epoch, way)
        if self._info is not info:
            group.close()
            raise PeerLost(f"{group.name} came together when it was no longer wanted")
        return Passing(streams, group, self.memory.room, self.device, self._checksum, TRIES)

    def _fetch(
        self,
        version: int,
        index: int,
        numbers: list[int],
        staging: Staging,
        inbox: "queue.SimpleQueue[Any]",
    ) -> None:
        """Some buckets from the trainer, without the group."""
        assert self._info is not None and self.make_link is not None
        part, at = self._parts[index], self._indices[index]
        name = f"stream {at} from trainer rank {part.stream.rank}"
        hello = self._hello(self._info, part)
        wire = handshake(self._info.streams[at], hello, name, self.timeout)
        try:
            link = self.make_link(wire, True)
            link.room_to_receive(largest(part), 1)
            take = partial(self._take_packed, version, index, wire, link, Beside(self.device))
            wire.send_record({"version": version, "buckets": numbers})
            self._take_all(version, index, wire, numbers, lambda some: take(some, staging, inbox))
        finally:
            wire.close()

    def _wrong(self, version: int, index: int, numbers: list[int]) -> str:
        stream = self._parts[index].stream
        pieces = stream.buckets[numbers[0]].pieces
        names = f"{stream.blocks[pieces[0].block].name} .. {stream.blocks[pieces[-1].block].name}"
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return (
            f"checksum of bucket {numbers[0]}{more} from trainer rank {stream.rank} ({names}) is "
            "wrong: its bytes are not those of "
            f"version {version}"
        )

    def _take(
        self,
        version: int,
        index: int,
        wire: PeerConnection,
        wanted: list[int],
        staging: Staging,
        inbox: "queue.SimpleQueue[Any]",
    ) -> set[int]:
        """Buckets from the wire, each piece into its place; returns those whose checksum fits."""
        part, good = self._parts[index], set()
        theirs = bytearray(CHECKSUM_BYTES)
        for number in wanted:
            head = msgspec.convert(told(wire), BucketHead)
            head.check(payload(part.stream, part.stream.buckets[number]), wire)
            self._came[index] += head.size
            staging.reserve(index)
            delta = bytearray(head.size if head.delta else 0)
            ours = self._fill(version, index, wire, number, staging, delta)
            wire.receive(memoryview(theirs))
            if theirs == ours:
                good.add(number)
                if self.relay is not None:
                    told_of = Told(ours, head.base, bytes(delta))
                    self.relay.good(index, number, told_of, staging)
                inbox.put((index, number))
            else:
                staging.release(index)
        return good

    def _fill(
        self,
        version: int,
        index: int,
        wire: PeerConnection,
        number: int,
        staging: Staging,
        delta: bytearray,
    ) -> bytes:
        """The bytes of a bucket from the wire, or what a `delta` changes in those that are there.
        Returns the checksum of all of them.
        """
        part, at = self._parts[index], 0
        bucket = part.stream.buckets[number]
        digest = host_checksum(seed_of(part.digest, version, part.stream.rank, number))
        changes = self._changes(part.stream, wire, number, delta) if delta else None
        for piece in bucket.pieces:
            block = part.stream.blocks[piece.block]
            with staging.place(block, piece.start, piece.stop) as memory:
                moved = changes.apply(memory, at) if changes else not delta
                if moved and self.changed is not None:
                    self.changed.add(block.name)
                if changes:
                    at += len(memory) // changes.steps.itemsize
                for start in range(0, len(memory), CHUNK):
                    data = memory[start : start + CHUNK]
                    if not delta:
                        wire.wait()  # for a slow trainer rank: others' bytes have the core
                    with self._spare:  # a core that decoding does not want
                        if not delta:
                            wire.receive(data)
                        digest.update(data)
        return digest.digest()

    @staticmethod
    def _changes(
        stream: WeightStream, wire: PeerConnection, number: int, delta: bytearray
    ) -> Changes | None:
        """What the next bytes of the wire, as many as `delta` has, say of a bucket; None where they
        cannot be read: then its checksum is wrong.
        """
        wire.receive(memoryview(delta))
        bucket = stream.buckets[number]
        each = itemsize(stream, bucket)
        try:
            return read(delta, payload(stream, bucket) // each, each)
        except ValueError as error:
            log.warning("%s: bucket %d: %s", wire.name, number, error)
            return None

    def _take_packed(
        self,
        version: int,
        index: int,
        wire: PeerConnection,
        link: BucketLink,
        beside: Beside,
        wanted: list[int],
        staging: Staging,
        inbox: "queue.SimpleQueue[Any]",
    ) -> set[int]:
        """The same for packed buckets: bytes from the link, each one's checksum from the wire."""
        stream = self._parts[index].stream
        theirs, good = bytearray(CHECKSUM_BYTES), set()
        with beside:
            for number in wanted:
                staging.reserve(index)
                use = partial(self._unpack, version, index, number, staging)
                ours = link.receive(stream.buckets[number].nbytes, use)
                wire.receive(memoryview(theirs))
                self._came[index] += payload(stream, stream.buckets[number])
                if theirs == ours:
                    good.add(number)
                    inbox.put((index, number))
                else:
                    staging.release(index)
        return good

    def _unpack(
        self, version: int, index: int, number: int, staging: Staging, message: torch.Tensor
    ) -> bytes:
        """The checksum of what came, and every piece in its place."""
        part = self._parts[index]
        ours = self._checksum.of(message, seed_of(part.digest, version, part.stream.rank, number))
        self._put(index, number, staging, message)
        return ours

    def _put(self, index: int, number: int, staging: Staging, message: torch.Tensor) -> None:
        part = self._parts[index]
        for piece in part.stream.buckets[number].pieces:
            block = part.stream.blocks[piece.block]
            size = (piece.stop - piece.start) * plans.row_bytes(block)
            staging.put(block, piece.start, piece.stop, message[piece.offset : piece.offset + size])
        settle(self.device)  # the consumer is another thread, with another stream

    def close(self) -> None:
        """Drop all wires; senders that still send notice at once. Only `connect` can follow."""
        self._info = None  # first: who sees it has seen all wires
        wires, self._wires, links, self._links = self._wires, [], self._links, []
        for wire in wires:
            wire.close()
        for link in filter(None, links):
            link.close()
        passing, self._passing = self._passing, None
        if passing is not None:
            passing.group.close()
