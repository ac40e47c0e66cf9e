"""An engine worker as a source of what it has staged: a link of the chain by which a version goes
from engine to engine (`rft.sync.fanout`).

    Receiver: begin(v) ─► good(stream, bucket) ... ─► complete, or failed
                                  │
    worker behind this one ── asks for v of a stream ──► each bucket as soon as it is good here,
                              with the checksum under which it came, or the delta, if it came as one

The words on the wire are those of `rft.sync.sender`, and two more: "wait" tells every few seconds
that this worker lives and has nothing new, and "lost" that it will get nothing, and through whom.
So the worker behind can tell a slow chain from a dead link, and the synchronizer hears of the one
that broke it, not of its neighbour. Invariants: no byte leaves before its bucket's checksum was
right here; memory that somebody still reads is not overwritten; workers of two generations never
wait for each other: what is not complete goes to the present one only.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from rft.ground import device as devices
from rft.ground.experience import Record
from rft.sync.buckets import Staging
from rft.sync.connection import Listener, PeerConnection, PeerLost
from rft.sync.groups import Meeting
from rft.sync.history import Told, WeightRequest, WrongBuckets, payload
from rft.sync.plan import Share, StreamPart

log = logging.getLogger(__name__)
# From an engine nothing comes for so long, not even "wait": it is lost. It may be slow where it
# decodes on all cores, but then it gets some of their time.
SILENCE_S = 30.0
WAIT_S = 2.0  # between two words of one that lives


class StreamHello(Record):
    """First words of a worker behind this one."""

    peer: str
    epoch: int
    digest: str
    part: str
    share: Share
    stream: int
    generation: int


class NotComing(RuntimeError):
    """This worker will not have it. `lost`: the engine that it should have come from."""

    def __init__(self, message: str, lost: str):
        super().__init__(message)
        self.lost = lost


class Relay:
    """Life: listening ──► (follow ──► (begin ──► good* ──► complete | fail)*)* ──► closed."""

    def __init__(self, address: str):
        self.sent = 0  # bytes of payload
        self._changed = threading.Condition()
        self._key: tuple[int, str] | None = None  # epoch and plan
        self._generation = 0
        self._name = ""  # of this engine
        self._parts: dict[int, tuple[int, StreamPart]] = {}  # by stream: its place in `staging`
        self._share = Share()
        self._staging: Staging | None = None
        self._version: int | None = None
        self._good: dict[tuple[int, int], Told] = {}  # by place and bucket
        self._is_complete = False
        self._failure: NotComing | None = None
        self._readers: dict[PeerConnection, int] = {}  # and what they read
        self._wires: dict[PeerConnection, tuple[int, str]] = {}  # and what they follow
        self.meeting = Meeting()
        self.listener = Listener(address, SILENCE_S, self._admit, self._serve)

    @property
    def endpoint(self) -> dict[str, Any]:
        """Where workers of other engines connect."""
        return self.listener.endpoint

    # --- the receiver's side ----------------------------------------------------------------------

    def follow(
        self,
        name: str,
        key: tuple[int, str],
        generation: int,
        parts: dict[int, StreamPart],
        share: Share,
    ) -> None:
        """Engine `name` takes these streams from now on, of epoch and plan `key`. What was complete
        stays so, if it is of the same.
        """
        with self._changed:
            if key != self._key or not self._is_complete:
                self._version, self._is_complete = None, False
            for wire in [one for one, theirs in list(self._wires.items()) if theirs[0] < key[0]]:
                wire.close()
            self._name, self._key, self._generation, self._share = name, key, generation, share
            self._parts = {stream: (at, parts[stream]) for at, stream in enumerate(parts)}
            self._changed.notify_all()

    def begin(self, version: int, staging: Staging) -> None:
        """From now on the memory is that of `version`. Waits for who reads the one before, but no
        longer than for one that is lost.
        """
        with self._changed:
            self._version, self._is_complete = None, False
            self._changed.wait_for(lambda: not self._readers, SILENCE_S)
            for wire in self._readers:
                log.warning("%s did not take version %d in time", wire.name, self._readers[wire])
                wire.close()
            self._version, self._staging, self._failure = version, staging, None
            self._good.clear()
            self._changed.notify_all()

    def good(self, place: int, number: int, told: Told, staging: Staging) -> None:
        """Bucket `number` of the stream at `place` is in its place in `staging`, and this was said
        of it. What has not ended of a round that was given up says nothing of another one.
        """
        with self._changed:
            if staging is not self._staging:
                return
            self._good[place, number] = told
            self._changed.notify_all()

    def complete(self) -> None:
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The version does not come; those behind hear through whom."""
        lost = error.lost if isinstance(error, PeerLost) else self._name
        with self._changed:
            if self._version is not None and not self._is_complete:
                self._failure = NotComing(str(error), lost)
                self._changed.notify_all()

    def close(self) -> None:
        self.listener.close()
        for wire in list(self._wires):
            wire.close()

    # --- the side of the worker behind ------------------------------------------------------------

    def _admit(self, hello: dict[str, Any]) -> str:
        if "group" in hello:
            return self.meeting.admit(hello)
        said = msgspec.convert(hello, StreamHello)
        return f"stream {said.stream} to {said.peer}"

    def _serve(self, wire: PeerConnection, hello: dict[str, Any]) -> None:
        """Body of a thread: answers what one worker asks, until one of the two goes."""
        if "group" in hello:
            self.meeting.serve(wire, hello)
            return
        devices.yield_to_others()
        key = (hello["epoch"], hello["digest"])
        self._wires[wire] = key
        try:
            while True:
                asked = wire.receive_as(WeightRequest, patient=True)
                try:
                    place, part = self._known(wire, hello, key)
                    self._answer(wire, place, part, asked, hello["generation"])
                except NotComing as why:
                    wire.send_record({"lost": why.lost, "why": str(why)})
        except PeerLost as gone:
            log.info("%s", gone)
        finally:
            self._wires.pop(wire, None)
            wire.close()

    def _known(
        self, wire: PeerConnection, hello: dict[str, Any], key: tuple[int, str]
    ) -> tuple[int, StreamPart]:
        """The stream that is asked for, when this engine follows the same trainer: it may be busy
        with a version of the one before.
        """

        def follows() -> bool:
            return self._key is not None and (self._key == key or self._key[0] > key[0])

        self._wait(wire, follows)
        with self._changed:
            theirs = msgspec.convert(hello["share"], Share)
            place, part = self._parts.get(hello["stream"], (0, None))
            if self._key != key:
                raise NotComing(f"{self._name} follows {self._key}, not {key}", self._name)
            if part is None or (theirs, hello["part"]) != (self._share, part.digest):
                raise NotComing(
                    f"{self._name} takes {self._share} of the weights, {hello['peer']} {theirs}",
                    self._name,
                )
            return place, part

    def _answer(
        self,
        wire: PeerConnection,
        place: int,
        part: StreamPart,
        asked: WeightRequest,
        generation: int,
    ) -> None:
        version, base = asked.version, asked.base

        def is_decided() -> bool:
            here = self._version
            if here is not None and here >= version:
                return here > version or self._is_complete or self._generation >= generation
            return self._generation > generation

        try:
            self._wait(wire, is_decided)
            with self._changed:
                if self._version is not None and self._version > version:
                    raise NotComing(f"{self._name} has gone on to {self._version}", self._name)
                is_whole = self._version == version and self._is_complete
                if not is_whole and self._generation != generation:
                    raise NotComing(f"{self._name} is in another group now", self._name)
                self._readers[wire] = version
            wire.send_record({"version": version})
            count = len(part.stream.buckets)
            wanted = list(range(count))
            while wanted:
                for number in wanted:
                    self._send(wire, place, part, number, base)
                wanted, base = wire.receive_as(WrongBuckets).check(count, wire), None
        finally:
            with self._changed:
                self._readers.pop(wire, None)
                self._changed.notify_all()

    def _send(
        self, wire: PeerConnection, place: int, part: StreamPart, number: int, base: Any
    ) -> None:
        self._wait(wire, lambda: (place, number) in self._good or self._failure is not None)
        told, staging = self._good.get((place, number)), self._staging
        if told is None:
            assert self._failure is not None
            raise self._failure
        assert staging is not None
        bucket, blocks = part.stream.buckets[number], part.stream.blocks
        chunks = (
            data
            for piece in bucket.pieces
            for data in staging.chunks(blocks[piece.block], piece.start, piece.stop)
        )
        size = payload(part.stream, bucket)
        with self._changed:
            self.sent += len(told.delta) if told.is_from(base) else size
        told.send(wire, number, base, size, chunks)

    def _wait(self, wire: PeerConnection, ready: Callable[[], bool]) -> None:
        """Until `ready`, telling the other end that this one lives."""
        while True:
            with self._changed:
                if self._changed.wait_for(ready, WAIT_S):
                    return
            wire.send_record({"wait": True})
