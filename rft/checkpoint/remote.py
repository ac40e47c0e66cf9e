"""A rank that comes back reads parts that agents of other nodes hold.

In: where an agent listens, and what proves that this rank is of its run. Out: the receipts that it
tells, and bytes of its parts; of a part that several hold, from the first that gives what it should
be. Invariant: no byte is handed out that was not compared with the hash in the receipt; whoever
gives another one is told of, and not asked again.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from rft.checkpoint.peers import AgentRefused, Offer, PeerLine, RunKey, dial
from rft.checkpoint.records import CHUNK, Receipt, of_chunks
from rft.checkpoint.replicas import End, Fetch, Held, Look, PartTaken

if TYPE_CHECKING:
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

    def fetch(self, receipt: Receipt, start: int, count: int) -> bytearray:
        """Raises OSError."""
        data = bytearray(count)
        with self._lock:
            self.line.send(Fetch(receipt.id, receipt.rank, start, count))
            if refused := self.line.receive(PartTaken).refused:
                raise AgentRefused(refused)
            self.line.receive_into(memoryview(data))
        return data

    def end(self) -> None:
        with contextlib.suppress(OSError), self._lock:  # it has ended by itself
            self.line.send(End())
            self.line.receive(PartTaken)
        self.line.close()


class RemoteFile:
    """One rank's part in the memory of another node: `reader.RankBytes`; the last chunk stays."""

    def __init__(self, agent: RemoteAgent, receipt: Receipt):
        self.agent, self.receipt, self.bytes = agent, receipt, receipt.bytes
        self._kept: tuple[int, bytearray] = (-1, bytearray())

    def read(self, start: int, count: int) -> bytearray:
        """Raises Damaged or OSError."""
        return of_chunks(self._chunk, start, count)

    def _chunk(self, number: int) -> bytearray:
        from rft.checkpoint.reader import Damaged  # with numpy, which an agent has no use for

        if self._kept[0] != number:
            begin = number * CHUNK
            data = self.agent.fetch(self.receipt, begin, min(CHUNK, self.bytes - begin))
            if xxhash.xxh3_128_hexdigest(data) != self.receipt.chunks[number]:
                host, port = self.agent.at
                raise Damaged(
                    f"the agent at {host}:{port} gives another chunk {number} of rank "
                    f"{self.receipt.rank}'s part of step {self.receipt.step} than its hash says"
                )
            self._kept = (number, data)
        return self._kept[1]


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
        from rft.checkpoint.reader import Damaged

        why = ""
        while self._open:
            try:
                self._file = self._file or self._open[0]()
                return self._file.read(start, count)
            except (Damaged, OSError) as error:
                why = str(error)
                self._open.pop(0)
                self._file = None
                if self._open:
                    log.error("%s; it is taken from elsewhere", why)
        raise Damaged(why or f"nobody holds the part of rank {self.receipt.rank}")
