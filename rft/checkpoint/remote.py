"""A rank that comes back reads parts that agents hold, of other nodes or of its own.

In: where an agent of another node listens, and what proves that this rank is of its run; a slot of
one of this node. Out: the receipts that it tells, and bytes of its parts; of a part that several
hold, from the first that gives what it should be. Invariant: whoever asked does not go on before
each byte was compared with the hash in the receipt; whoever gives another one is told of, and not
asked again.
"""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import xxhash

from rft.checkpoint.peers import AgentRefused, Offer, PeerLine, RunKey, dial
from rft.checkpoint.records import CHUNK, Receipt, by_chunk, of_chunks
from rft.checkpoint.replicas import End, Fetch, Held, Look, PartTaken

if TYPE_CHECKING:
    from rft.checkpoint.reader import Found, Range, RankBytes

log = logging.getLogger(__name__)
NO_RANK = -1
AT_WORK_S = 60.0  # for an agent that still writes to come to rest
AGAIN_S = 0.2
MOST_PLACES = 512  # of one read: the system takes 1,024


@dataclass
class RemoteAgent:
    """One that has answered; at rest, it does not change what it holds."""

    at: tuple[str, int]
    line: PeerLine
    held: Held
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def asked(cls, at: tuple[str, int], run: RunKey) -> "RemoteAgent | None":
        """None, and a line in the log, where nobody answers who is of this run."""
        end = time.monotonic() + AT_WORK_S
        try:
            line, _ = dial(at, run, "read", NO_RANK, 0)
            while True:
                line.send(Look())
                held = line.receive(Held)
                if held.is_resting:
                    return cls(at, line, held)
                if time.monotonic() > end:
                    raise TimeoutError(f"it still works after {AT_WORK_S:g} s")
                time.sleep(AGAIN_S)
        except OSError as error:
            log.warning("the agent at %s:%d is not asked for its memory: %s", *at, error)
            return None

    @property
    def receipts(self) -> list[Receipt]:
        return [*self.held.receipts, *self.held.others]

    def offers(self) -> list[Offer]:
        own = [Offer.of(receipt, True, self.at) for receipt in self.held.receipts]
        return own + [Offer.of(receipt, False, self.at) for receipt in self.held.others]

    def fetch(self, receipt: Receipt, start: int, places: list[memoryview]) -> None:
        """Raises OSError."""
        with self._lock:
            self.line.send(Fetch(receipt.id, receipt.rank, start, sum(map(len, places))))
            if refused := self.line.receive(PartTaken).refused:
                raise AgentRefused(refused)
            for place in places:
                self.line.receive_into(place)

    def end(self) -> None:
        with contextlib.suppress(OSError), self._lock:  # it has ended by itself
            self.line.send(End())
            self.line.receive(PartTaken)
        self.line.close()


class HeldFile:
    """One rank's part in an agent's memory: `reader.RankBytes`.

    `fetch`: fills these places with what lies there from a byte on, one behind the other, or raises
    OSError; it is given `at_once` bytes at most. `where`: of messages.
    """

    def __init__(
        self,
        receipt: Receipt,
        where: str,
        fetch: Callable[[int, list[memoryview]], object],
        at_once: int,
    ):
        self.receipt, self.bytes = receipt, receipt.bytes
        self._where, self._fetch, self._at_once = where, fetch, at_once
        self._room = memoryview(bytearray(min(CHUNK, self.bytes)))
        self._kept = -1  # the chunk that lies there

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Raises Damaged or OSError."""
        return of_chunks(self._chunk, start, count)

    def fill(self, ranges: "list[Range]") -> None:
        """Straight into their places, but where only a small part of a chunk is asked for.

        Raises Damaged, when places may have been filled, or OSError.
        """
        parts = defaultdict[int, list[tuple[int, memoryview]]](list)
        for start, place in ranges:
            for at, end in by_chunk(start, start + len(place)):
                parts[at // CHUNK].append((at, place[at - start : end - start]))
        for number, inside in parts.items():
            direct = self._direct(number, inside)
            if direct is not None:
                self._kept = -1
                self._take(number, direct)
                continue
            for start, place in inside:
                place[:] = self.read(start, len(place))

    def _direct(self, number: int, inside: "list[Range]") -> list[memoryview] | None:
        """Places of a whole chunk, in order, with room of our own where nobody asks for it; None
        where that is the larger part, or something is asked for twice.
        """
        begin = at = number * CHUNK
        stop, asked = min(begin + CHUNK, self.bytes), 0
        places = list[memoryview]()
        for start, place in sorted(inside, key=itemgetter(0)):
            if start < at:
                return None
            places += [self._room[at - begin : start - begin], place]
            at = start + len(place)
            asked += len(place)
        places.append(self._room[at - begin : stop - begin])
        return places if 2 * asked > stop - begin else None

    def _chunk(self, number: int) -> memoryview:
        size = min(CHUNK, self.bytes - number * CHUNK)
        if self._kept != number:
            self._kept = -1
            self._take(number, [self._room[:size]])
            self._kept = number
        return self._room[:size]

    def _take(self, number: int, places: list[memoryview]) -> None:
        """A chunk, block by block: the processor's cache still has what is hashed."""
        from rft.checkpoint.reader import Damaged  # with numpy, which an agent has no use for

        digest, at = xxhash.xxh3_128(), number * CHUNK
        for some in blocks(places, self._at_once):
            self._fetch(at, some)
            for place in some:
                digest.update(place)
                at += len(place)
        if digest.hexdigest() != self.receipt.chunks[number]:
            raise Damaged(
                f"{self._where}: chunk {number} was changed (of rank {self.receipt.rank}'s part of "
                f"step {self.receipt.step})"
            )


def blocks(places: list[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The same places in order, of so many bytes together, cut where they must be."""
    found, size = list[memoryview](), 0
    for place in places:
        while len(place):
            part, place = place[: most - size], place[most - size :]
            found.append(part)
            size += len(part)
            if size == most or len(found) == MOST_PLACES:
                yield found
                found, size = [], 0
    if found:
        yield found


class Sources:
    """One rank's part, wherever it lies: the first that gives it as its receipt says."""

    def __init__(self, receipt: Receipt):
        self.receipt, self.bytes = receipt, receipt.bytes
        self._open: list[Callable[[], RankBytes]] = []
        self._file: RankBytes | None = None

    def add(self, open_file: "Callable[[], RankBytes]") -> None:
        self._open.append(open_file)

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Raises Damaged where nobody is left."""
        return self._by_first(lambda file: file.read(start, count))

    def fill(self, ranges: "list[Range]") -> None:
        """The same: where one gives only a part, the next gives all."""
        self._by_first(lambda file: file.fill(ranges))

    def _by_first(self, act: "Callable[[RankBytes], Found]") -> "Found":
        from rft.checkpoint.reader import Damaged

        why = ""
        while self._open:
            try:
                self._file = self._file or self._open[0]()
                return act(self._file)
            except (Damaged, OSError) as error:
                why = str(error)
                self._open.pop(0)
                self._file = None
                if self._open:
                    log.error("%s; it is taken from elsewhere", why)
        raise Damaged(why or f"nobody holds the part of rank {self.receipt.rank}")
