"""Packed buckets of one round through a group: each goes from its trainer rank to one worker, the
root, and from there to all.

    links of the streams that this worker is root of ──feeder, a thread──► two messages, in turn
    walker, a thread: every bucket of every stream, in an order that all members work out alike
        root: the feeder's message  ──group──►  everybody: checksum, then into its place

A message is a bucket and behind it its checksum as the trainer rank made it, and whether it was
right when it came to the root. One that was wrong there travels all the same, so that the order
stays; everybody passes over it, and after the last bucket the wrong ones come again, in the same
order: no word is lost on what all can see. One that is wrong at a single member is fetched by that
one from the trainer rank, alone. While the group moves one bucket, the feeder takes in the next,
and the walker puts the one before into its place.

In: parts, links, the group. Out: (part, bucket) of each that is right and in its place, or what
ended it. Invariants: all members start the same broadcasts in the same order; a bucket counts only
when its own checksum fits here; whoever fails ends the group, so nobody waits for it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rft.ground.streams import Beside, enter_thread, settle
from rft.sync.buckets import CHECKSUM_BYTES, Checksum, seed_of
from rft.sync.connection import PeerConnection, PeerLost, PeerRefused, told
from rft.sync.groups import WorkerGroup
from rft.sync.links import BucketLink
from rft.sync.plan import StreamPart

log = logging.getLogger(__name__)
GOOD, WRONG = b"rft: it was good", b"rft: it is wrong"
TAIL = CHECKSUM_BYTES + len(GOOD)
Bucket = tuple[int, int]  # place of the part, number
Free = queue.SimpleQueue["torch.Tensor | None"]
Fed = queue.SimpleQueue["tuple[Bucket, torch.Tensor] | Exception"]


@dataclass(frozen=True)
class Passed:
    """A stream's part in the group. `wire` and `link`: at its root."""

    part: StreamPart
    root: int
    wire: PeerConnection | None = None
    link: BucketLink | None = None


@dataclass(frozen=True)
class Use:
    """What becomes of buckets, by the place of their part and number. `put`: one that is right.
    `wrong`: some that come again, in words. `fetch`: get some alone.
    """

    put: Callable[[int, int, torch.Tensor], None]
    wrong: Callable[[int, list[int]], str]
    fetch: Callable[[int, list[int]], None]


def order(streams: Sequence[Passed]) -> list[Bucket]:
    """All streams move at a time: the first bucket of each, then the second ones."""
    most = max((len(one.part.stream.buckets) for one in streams), default=0)
    return [
        (place, number)
        for number in range(most)
        for place, one in enumerate(streams)
        if number < len(one.part.stream.buckets)
    ]


def by_place(buckets: Sequence[Bucket]) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for place, number in buckets:
        found.setdefault(place, []).append(number)
    return sorted(found.items())


class Passing:
    """One worker's part in the rounds of one group. `messages`: two that come in, and two more
    where it is root of any stream.
    """

    def __init__(
        self,
        streams: list[Passed],
        group: WorkerGroup,
        room: Callable[[int], torch.Tensor],
        device: torch.device,
        checksum: Checksum,
        tries: int,
    ):
        self.streams = streams
        self.group = group
        self.device = device
        self.tries = tries
        self._checksum = checksum
        self._walking, self._feeding = Beside(device), Beside(device)
        self.order = order(streams)
        self.mine = {place for place, one in enumerate(streams) if one.root == group.place}
        largest = max((self._size(bucket) for bucket in self.order), default=0)
        with self._walking:
            self._incoming = [room(largest) for _ in range(2)]
            self._fed = [room(largest) for _ in range(2)] if self.mine else []
            checksum.make()

    def run(self, version: int, use: Use) -> None:
        """Body of the walker's thread: returns when every bucket is in its place."""
        free: Free = queue.SimpleQueue()
        fed: Fed = queue.SimpleQueue()
        for message in self._fed:
            free.put(message)
        arguments = (version, free, fed)
        feeder = threading.Thread(target=self._feed, args=arguments, name="feeder", daemon=True)
        if self.mine:
            feeder.start()
        try:
            with self._walking:
                missed = self._walk(version, free, fed, use)
            if self.mine:
                feeder.join()  # it has said so to its trainer ranks
            for place, numbers in by_place(missed):
                use.fetch(place, numbers)
        except Exception as error:
            self._end(version, error)
            raise
        finally:
            free.put(None)

    def _end(self, version: int, error: Exception) -> None:
        if not isinstance(error, PeerLost | PeerRefused):
            error = PeerLost(f"an engine of the group could not take version {version}: {error}")
        self.group.abort(error)

    def _walk(self, version: int, free: Free, fed: Fed, use: Use) -> list[Bucket]:
        """Returns what was wrong here alone."""
        wanted, missed = self.order, list[Bucket]()
        for _ in range(self.tries):
            wrong: list[Bucket] = []
            done: tuple[Bucket, torch.Tensor] | None = None  # not yet looked at

            def look(done: tuple[Bucket, torch.Tensor] | None, wrong: list[Bucket]) -> None:
                if done is None:
                    return
                bucket, message = done
                found = self._use(version, bucket, message, use)
                if found is not None:
                    (wrong if found == WRONG else missed).append(bucket)
                if bucket[0] in self.mine:
                    free.put(message)

            for turn, bucket in enumerate(wanted):
                message = self._incoming[turn % 2]
                if bucket[0] in self.mine:
                    message = self._next(fed, bucket)
                root = self.streams[bucket[0]].root
                started = self.group.start(message[: self._size(bucket)], root)
                look(done, wrong)
                self.group.finish(started)
                done = bucket, message
            look(done, wrong)
            wanted = wrong
            if not wanted:
                return missed
            words = [use.wrong(place, numbers) for place, numbers in by_place(wanted)]
            log.warning("%s", "; ".join(words))
        raise ValueError(f"{words[0]}, {self.tries} times")

    def _use(self, version: int, bucket: Bucket, message: torch.Tensor, use: Use) -> bytes | None:
        """None: it is in its place. WRONG: it was wrong at the root. GOOD: it was not, but is."""
        size = self._size(bucket) - TAIL
        tail = message[size : size + TAIL].cpu().numpy().tobytes()
        theirs, mark = tail[:CHECKSUM_BYTES], tail[CHECKSUM_BYTES:]
        if mark == WRONG:
            return WRONG
        if mark != GOOD:  # whether it comes again for the others cannot be known
            raise PeerLost(f"{self.group.name}: a message of bucket {bucket} came without its end")
        # where it was fed, the feeder has looked
        is_fed = bucket[0] in self.mine
        if not is_fed and self._sum(version, bucket, message[:size]) != theirs:
            return GOOD
        use.put(*bucket, message[:size])
        return None

    def _next(self, fed: Fed, bucket: Bucket) -> torch.Tensor:
        came = fed.get()
        if isinstance(came, Exception):
            raise came
        assert came[0] == bucket, "the feeder goes in the same order"
        return came[1]

    def _feed(self, version: int, free: Free, fed: Fed) -> None:
        enter_thread(self.device)
        try:
            for place in sorted(self.mine):
                wire, _ = self._source(place)
                wire.send_record({"version": version})
            for place in sorted(self.mine):
                told(self._source(place)[0])
            with self._feeding:
                self._feed_all(version, free, fed)
        except Exception as error:
            if isinstance(error, PeerLost | PeerRefused):
                self.group.abort(error)  # before the walker comes to it: others wait
            fed.put(error)

    def _feed_all(self, version: int, free: Free, fed: Fed) -> None:
        wanted = [bucket for bucket in self.order if bucket[0] in self.mine]
        for _ in range(self.tries):
            wrong: list[Bucket] = []
            for bucket in wanted:
                message = free.get()
                if message is None:
                    return
                if not self._take(version, bucket, message):
                    wrong.append(bucket)
                fed.put((bucket, message))
            again = dict(by_place(wrong))
            for place, _ in by_place(wanted):
                self._source(place)[0].send_record({"again": again.get(place, [])})
            wanted = wrong

    def _take(self, version: int, bucket: Bucket, message: torch.Tensor) -> bool:
        """One bucket from its trainer rank, with its end."""
        wire, link = self._source(bucket[0])
        size = self._size(bucket) - TAIL

        def use(lent: torch.Tensor) -> bytes:
            message[:size].copy_(lent)
            return self._sum(version, bucket, message[:size])

        ours, theirs = link.receive(size, use), bytearray(CHECKSUM_BYTES)
        wire.receive(memoryview(theirs))
        is_good = ours == theirs
        tail = torch.frombuffer(theirs + (GOOD if is_good else WRONG), dtype=torch.uint8)
        message[size : size + TAIL].copy_(tail)
        settle(self.device)  # the walker is another thread, with another stream
        return is_good

    def _sum(self, version: int, bucket: Bucket, data: torch.Tensor) -> bytes:
        place, number = bucket
        part = self.streams[place].part
        return self._checksum.of(data, seed_of(part.digest, version, part.stream.rank, number))

    def _source(self, place: int) -> tuple[PeerConnection, BucketLink]:
        one = self.streams[place]
        assert one.wire is not None and one.link is not None
        return one.wire, one.link

    def _size(self, bucket: Bucket) -> int:
        """Of its message."""
        place, number = bucket
        return self.streams[place].part.stream.buckets[number].nbytes + TAIL
