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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rft.checkpoint.chunks import AT_ONCE, ChunkFile, Damaged, Range
from rft.checkpoint.peers import AgentRefused, Offer, PeerLine, RunKey, dial
from rft.checkpoint.records import Receipt
from rft.checkpoint.replicas import End, Fetch, Held, Look, PartTaken

if TYPE_CHECKING:
    from rft.checkpoint.rank_files import Found
    from rft.checkpoint.reader import RankBytes

log = logging.getLogger(__name__)
NO_RANK = -1
AT_WORK_S = 60.0  # for an agent that still writes to come to rest
AGAIN_S = 0.2


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


class HeldFile(ChunkFile):
    """One rank's part in an agent's memory: `reader.RankBytes`.

    `fetch`: fills these places with what lies there from a byte on, one behind the other, or raises
    OSError; it is given `at_once` bytes at most. `where`: of messages.
    """

    def __init__(
        self,
        receipt: Receipt,
        where: str,
        fetch: Callable[[int, list[memoryview]], object],
        at_once: int = AT_ONCE,
    ):
        super().__init__(receipt.bytes, receipt.chunks, at_once)
        self.receipt, self._where, self._get = receipt, where, fetch

    def _fetch(self, at: int, places: list[memoryview]) -> object:
        return self._get(at, places)

    def _changed(self, number: int) -> Damaged:
        return Damaged(
            f"{self._where}: chunk {number} was changed (of rank {self.receipt.rank}'s part of "
            f"step {self.receipt.step})"
        )


class Sources:
    """One rank's part, wherever it lies: the first that gives it as its receipt says."""

    def __init__(self, receipt: Receipt):
        self.receipt, self.bytes = receipt, receipt.bytes
        self._open: list[Callable[[], RankBytes]] = []
        self._file: RankBytes | None = None

    def add(self, open_file: "Callable[[], RankBytes]") -> None:
        self._open.append(open_file)

    def fill(self, ranges: list[Range]) -> None:
        """Where one gives only a part, the next gives all. Raises Damaged where nobody is left."""
        self._by_first(lambda file: file.fill(ranges))

    def forget(self) -> None:
        if self._file is not None:
            self._file.forget()

    def _by_first(self, act: "Callable[[RankBytes], Found]") -> "Found":
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
