"""The trainer end of the weight stream: one `WeightSender` on each rank that owns blocks.

    open(v) ──► whoever asks for v gets this rank's stream
            ──► close_version: the weights may change again
                (one thread per engine worker; bytes go from the weights' own memory to the socket)

In: the rank's `WeightSource` and the plan. Out: its stream, to every engine worker that asks while
a version is open, however often and from whenever on: an engine that comes back is served like the
others. A tensor-parallel worker gets its part of the stream. Contract: the weights must not change
between `open` and the end of `close_version`. Invariants: every bucket is followed by its checksum,
seeded with plan, version, stream and bucket; a worker that is slow, wrong or gone costs the others
nothing but the time until its deadline.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from rft.ground.protocols import WeightSource
from rft.ground.streams import Beside, enter_thread
from rft.sync.buckets import Blocks, Checksum, host_checksum, largest, pack, seed_of
from rft.sync.connection import Listener, PeerConnection, PeerLost, PeerRefused
from rft.sync.history import BucketHead, History, WeightRequest, WrongBuckets, payload
from rft.sync.links import BucketLink, LinkSide, MakeLink, mismatch
from rft.sync.plan import Share, StreamPart, StreamPlan, part_of

log = logging.getLogger(__name__)


class WeightSender:
    """Life: hosting ──► planned ──► (open ──► close_version)* ──► closed.

    `make_link`: how packed buckets travel, if they must. `device`: where the weights lie.
    `full_interval`: whoever has the version before gets what has changed since (`rft.sync.history`,
    weights in host memory only), but for every so many versions; None: all bytes, always.
    """

    def __init__(
        self,
        source: WeightSource,
        epoch: int,
        timeout: float,
        address: str = "127.0.0.1",
        make_link: MakeLink | None = None,
        device: str = "cpu",
        full_interval: int | None = None,
    ):
        self.source = source
        self.epoch = epoch
        self.timeout = timeout
        self.make_link = make_link
        self.device = torch.device(device)
        self.side = LinkSide.of(make_link, device)
        self._checksum = Checksum(self.device)
        self._besides: list[Beside] = []  # of links that have ended: the next ones take them
        self._making = threading.Lock()
        self.window = VersionWindow(timeout)
        self.failure: Exception | None = None
        self.sent = 0  # bytes of payload, to all workers together
        self._counting = threading.Lock()
        self.full_interval = full_interval
        self._opened: list[int] = []  # versions since the last one that goes in full, that too
        self._histories: dict[str, History] = {}  # by the digest of a part
        self._planned = threading.Event()
        self._parts: dict[Share, StreamPart] = {}
        self._wires: set[PeerConnection] = set()
        self.listener = Listener(address, timeout, self._admit, self._serve)

    @property
    def endpoint(self) -> dict[str, Any]:
        """Where engine workers connect."""
        return self.listener.endpoint

    def follow(self, plan: StreamPlan, index: int) -> None:
        """Serve stream `index` of `plan` from now on.

        Raises ValueError when its blocks are not this rank's.
        """
        stream = plan.streams[index]
        if tuple(self.source.blocks()) != stream.blocks:
            raise ValueError(
                f"trainer rank {stream.rank}: the plan's blocks are not those of this rank's policy"
            )
        self.plan, self.index, self.stream = plan, index, stream
        self._planned.set()

    def open(self, version: int) -> None:
        """The current weights are `version`: serve them.

        They must not change until `close_version` returns.
        """
        if version not in self._opened:
            again = self.full_interval is not None and len(self._opened) < self.full_interval
            self._opened = [*(self._opened if again else ()), version]
        self.window.open(version)

    def close_version(self) -> dict[str, float]:
        """Serve nobody new; return when those who are being served have everything, or their
        deadline has passed.

        Raises what kept this rank from reading its own weights; what became of an engine is not its
        business.
        """
        late = self.window.close()
        for wire in [wire for wire in self._wires if wire.name in late]:
            log.warning(
                "%s did not take its weights in %g s and is cut off", wire.name, self.timeout
            )
            wire.close()
        if self.failure is not None:
            raise RuntimeError(
                f"weight stream {self.index} could not be read: {self.failure}"
            ) from self.failure
        return {"send_s": self.window.seconds}

    def close(self) -> None:
        self.listener.close()
        for wire in list(self._wires):
            wire.close()

    def _admit(self, hello: dict[str, Any]) -> str:
        if not self._planned.wait(self.timeout):
            raise PeerRefused(f"this trainer rank has had no plan for {self.timeout:g} s")
        theirs = msgspec.convert(hello["link"], LinkSide)
        if why := mismatch(self.stream.rank, self.side, hello["peer"], theirs):
            raise PeerRefused(why)
        if (hello["epoch"], hello["digest"]) != (self.epoch, self.plan.digest):
            raise PeerRefused(
                f"stream {self.index} is of epoch {self.epoch} and plan {self.plan.digest}, "
                f"{hello['peer']} was told epoch "
                f"{hello['epoch']} and plan {hello['digest']}"
            )
        if self._part(hello).digest != hello["part"]:
            raise PeerRefused(
                f"stream {self.index}: {hello['peer']} would cut its part of the blocks otherwise; "
                "use one rft"
            )
        return f"stream {self.index} to {hello['peer']}"

    def _part(self, hello: dict[str, Any]) -> StreamPart:
        """What this worker needs; engines of one shape ask for the same parts."""
        share = msgspec.convert(hello["share"], Share)
        if share not in self._parts:
            self._parts[share] = part_of(self.plan, self.index, share)
        return self._parts[share]

    def _serve(self, wire: PeerConnection, hello: dict[str, Any]) -> None:
        """Body of a worker's thread: answers what it asks until one of the two goes."""
        enter_thread(self.device)
        self._wires.add(wire)
        link, part, beside = None, self._part(hello), self._stream()
        try:
            with beside:  # the link's memory is its stream's alone
                link = self.make_link(wire) if self.make_link else None
                if link is not None:
                    workers = msgspec.convert(hello["share"], Share).workers  # each has a link
                    link.room_to_send(largest(part), workers)
                    self._checksum.make()
            while True:
                asked = wire.receive_as(WeightRequest, patient=True)
                self._answer(wire, link, part, asked, beside)
        except PeerLost as gone:
            log.info("%s", gone)
        except Exception as error:
            log.exception("%s", wire.name)
            self.failure = error
        finally:
            self._wires.discard(wire)
            wire.close()
            if link is not None:
                link.close()
            self._besides.append(beside)

    def _stream(self) -> Beside:
        with self._making:
            return self._besides.pop() if self._besides else Beside(self.device)

    def _answer(
        self,
        wire: PeerConnection,
        link: BucketLink | None,
        part: StreamPart,
        asked: WeightRequest,
        beside: Beside,
    ) -> None:
        version, base = asked.version, asked.base
        count = len(part.stream.buckets)
        wanted = list(range(count)) if asked.buckets is None else asked.buckets
        WrongBuckets(again=wanted).check(count, wire)
        try:
            with self.window.reading(version, wire.name), beside:
                wire.send_record({"version": version})
                while wanted:
                    if link is not None:
                        self._send_packed(wire, link, part, version, wanted)
                    elif self.full_interval is not None:
                        self._send_changes(wire, part, version, base, wanted)
                    else:
                        self._send(wire, part, version, wanted)
                    wanted, base = wire.receive_as(WrongBuckets).check(count, wire), None
                    if wanted:
                        log.warning(
                            "%s: buckets %s of version %d arrived wrong, again",
                            wire.name,
                            wanted,
                            version,
                        )
        except PeerRefused as no:
            wire.send_record({"refused": str(no)})

    def _send(
        self, wire: PeerConnection, part: StreamPart, version: int, wanted: list[int]
    ) -> None:
        """Buckets from where they lie in host memory."""
        blocks = Blocks(self.stream, part, self.source)
        for number in wanted:
            bucket = part.stream.buckets[number]
            wire.send_record(BucketHead(bucket=number, size=payload(part.stream, bucket)))
            digest = host_checksum(seed_of(part.digest, version, self.stream.rank, number))
            for piece in bucket.pieces:
                for data in blocks.chunks(piece.block, piece.start, piece.stop):
                    digest.update(data)
                    wire.send(data)
            wire.send(memoryview(digest.digest()))
            self._count(payload(part.stream, bucket))

    def _send_changes(
        self, wire: PeerConnection, part: StreamPart, version: int, base: Any, wanted: list[int]
    ) -> None:
        """The same, of each bucket what has changed since `base`, where that can be."""
        history = self._histories.setdefault(part.digest, History(part.stream, part.digest))
        blocks, is_full = Blocks(self.stream, part, self.source), version == self._opened[0]
        for number in wanted:
            told = history.told(number, version, blocks, is_full)
            kept = history.all_of(number)
            self._count(told.send(wire, number, base, len(kept), [kept]))

    def _send_packed(
        self,
        wire: PeerConnection,
        link: BucketLink,
        part: StreamPart,
        version: int,
        wanted: list[int],
    ) -> None:
        """Buckets from device memory: packed one while another one
        travels; checksums go over the wire.
        """
        blocks = Blocks(self.stream, part, self.source)
        for number in wanted:
            size = part.stream.buckets[number].nbytes
            wire.send(
                memoryview(link.send(size, partial(self._fill, blocks, part, version, number)))
            )
            self._count(size)
        link.flush()

    def _count(self, size: int) -> None:
        with self._counting:
            self.sent += size

    def _fill(
        self, blocks: Blocks, part: StreamPart, version: int, number: int, message: torch.Tensor
    ) -> bytes:
        pack(part.stream.buckets[number], blocks, message)
        return self._checksum.of(message, seed_of(part.digest, version, self.stream.rank, number))


class VersionWindow:
    """Which version may be read now, and who reads.

    Versions only grow here: a trainer that goes back is another epoch.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.seconds = 0.0  # from the last opening to the end of the last reading
        self._now: int | None = None
        self._newest: int | None = None
        # a name is here twice when a worker has come back before its end was noticed
        self._readers: list[str] = []
        self._changed = threading.Condition()

    def open(self, version: int) -> None:
        with self._changed:
            assert self._now is None, f"version {self._now} is still open"
            assert self._newest is None or version >= self._newest, (
                f"version {version} after {self._newest}"
            )
            self._now = self._newest = version
            self._opened, self.seconds = time.monotonic(), 0.0
            self._changed.notify_all()

    def close(self) -> list[str]:
        """Wait for the readers; returns those that are not through when the timeout is over."""
        with self._changed:
            self._now = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers, self.timeout)
            return list(self._readers)

    @contextmanager
    def reading(self, version: int, name: str) -> Iterator[None]:
        """Wait until `version` is open and keep it so.

        Raises PeerRefused when it is over, or does not come in time.
        """
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._now == version or not self._may_come(version), self.timeout
            )
            if self._now != version:
                newest = "nothing yet" if self._newest is None else f"version {self._newest}"
                raise PeerRefused(
                    f"version {version} is {'over' if here else 'not here'}: this trainer offers "
                    f"{newest}"
                )
            self._readers.append(name)
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(name)
                self.seconds = time.monotonic() - self._opened
                self._changed.notify_all()

    def _may_come(self, version: int) -> bool:
        return self._newest is None or version > self._newest
