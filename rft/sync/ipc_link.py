"""Packed buckets between two processes on one card: the receiver reads what the sender has packed, where it lies.

    sender                                   wire                                receiver
    pack into slot 0, then 1, then 0 ...  ── memory of a slot, once ──►  opens it
                                          ── "slot n is full" ────────►  uses the bytes in place
    packs into it again                   ◄── "slot n is free" ───────

In: the wire of the pair, and the card's memory (`rft.device.SharedCard`; a test and a benchmark have a stand-in over host memory).
Out: a `Link`. The handles that the driver makes of the memory travel as a plain record of bytes and numbers. Invariants: a slot is
packed again only after the receiver has said that it is free, and read only after the sender's stream has filled it; waiting for
the other end is waiting on the wire, so it has that one's deadline, and a death is an error at once.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rft.sync.wire import Lost, Wire

SLOTS = 2  # one is filled while the other is read
GRAIN = 2 * 2**20  # bytes: buckets differ a little in size, and the device's allocator gives no less


class CardMemory(Protocol):
    def room(self, size: int) -> torch.Tensor:
        """New memory: flat uint8."""

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        """What another process needs to open it."""

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        """The memory that another process shared."""

    def settle(self) -> None:
        """Return when all that this thread has asked of the device is done."""


class IpcLink:
    """One end; the same class on both."""

    def __init__(self, wire: Wire, memory: CardMemory):
        self.wire = wire
        self.memory = memory
        self.opened = 0  # memory of the other end, so far
        self._slots: dict[int, torch.Tensor] = {}
        self._under_way: deque[int] = deque()  # slots that were filled and not yet said to be free
        self._turn = 0

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        while slot in self._under_way:
            self._hear()
        made = fill(self._room(slot, size)[:size])
        self.memory.settle()
        self._under_way.append(slot)
        self.wire.send_record({"full": slot})
        return made

    def flush(self) -> None:
        while self._under_way:
            self._hear()

    def receive(self, size: int, use: Callable[[torch.Tensor], bytes]) -> bytes:
        record = self.wire.receive_record()
        while "memory" in record:
            self._slots[record["slot"]] = self._opened(record["memory"])
            record = self.wire.receive_record()
        slot = record.get("full")
        if slot not in self._slots or len(self._slots[slot]) < size:
            raise Lost(f"{self.wire.name}: expected a bucket of {size} bytes, got {sorted(record)} of slot {slot}")
        made = use(self._slots[slot][:size])
        self.memory.settle()
        self.wire.send_record({"free": slot})
        return made

    def close(self) -> None:
        self._slots.clear()

    def _opened(self, told: dict[str, Any]) -> torch.Tensor:
        try:
            memory = self.memory.open(told)
        except (RuntimeError, OSError) as error:  # the driver, or the kernel: it ended after it had said so
            raise Lost(f"{self.wire.name}: its memory cannot be opened: {error}") from error
        self.opened += 1
        return memory

    def _room(self, slot: int, size: int) -> torch.Tensor:
        """The slot's memory, which stays: made and shared when it is first used, or has become too small."""
        if slot not in self._slots or len(self._slots[slot]) < size:
            self._slots[slot] = self.memory.room(-(-size // GRAIN) * GRAIN)
            self.wire.send_record({"slot": slot, "memory": self.memory.share(self._slots[slot])})
        return self._slots[slot]

    def _hear(self) -> None:
        """One word of the receiver, which takes slots in the order in which they were filled."""
        record, expected = self.wire.receive_record(), self._under_way.popleft()
        if record.get("free") != expected:
            raise Lost(f"{self.wire.name}: expected slot {expected} to become free, heard {record}")
