"""Copy a rank's pieces into leased slots of shared memory while training goes on, and hand them to
the agent.

    save() ─► snapshot (references) ─► [copy thread / CUDA stream] ─► slot ─► Window message
                                            ▲
              before the optimizer changes weights: `await_copies`

In: tensors by reference, valid until the next update. Out: windows of bytes in the order of the
rank's file. Invariant: no byte is read after `await_copies` has returned; no slot is written before
its agent has given it back. An agent that gives nothing back costs one wait, of `patience_s` where
it is silent and of `deadline_s` where it works: until a slot is back, later saves fail at once.
"""

import ctypes
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from operator import is_
from typing import TYPE_CHECKING, Any

from rft.checkpoint.records import Region, Window
from rft.checkpoint.sharding import extent
from rft.config import CheckpointConfig
from rft.ground.device import Device
from rft.ground.process import NamedThread
from rft.ground.streams import Copier, Copies, enter_thread

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
BUSY = "both slots were still being written"
# at most, from a save to its copies, where a rank has more to do at once than to compute
LATE_S = 0.05
LEAST_PARTS = 1.3  # of `trainer.checkpoint.memory`
PAGE = 2**21  # slots are made of whole ones
RELEASE_S = 0.5  # for an agent that is not busy to give a slot back that was released
TRIALS = 3  # saves of each kind that `auto` looks at


def slot_size(total: int, budget_gb: float | None) -> int:
    """Bytes of each of two slots: for all of a save, or what the budget allows."""
    size = max(1, -(-total // PAGE)) * PAGE
    return size if budget_gb is None else min(size, int(budget_gb * 1e9) // 2 // PAGE * PAGE)


def slot_of_parts(regions: list[Region], total: int, parts: float) -> int:
    """Bytes of each of two slots that have room for `parts` saves together, and each for the
    largest region.
    """
    half = int(parts * total) // 2 // PAGE * PAGE
    largest = max((region.bytes for region in regions), default=0)
    return min(slot_size(total, None), max(half, slot_size(largest, None)))


@dataclass(frozen=True)
class Room:
    """Host memory of this node, for a rank's `regions`. `free`: bytes, before any rank has taken
    its slots; `beside`: what each needs for something else.
    """

    regions: list[Region]
    free: int
    beside: int = 0
    neighbours: int = field(default_factory=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def slot_size(self, config: CheckpointConfig, there: int, is_whole: bool) -> int:
        """Bytes of each slot. Where nothing is said: a whole part (`is_whole`: in any case), if
        this node has room for two of each rank, or slots of that size are `there` already.
        """
        total = extent(self.regions)
        whole, least = slot_size(total, None), slot_of_parts(self.regions, total, LEAST_PARTS)
        if config.host_memory_gb is not None:
            return slot_size(total, config.host_memory_gb)
        if config.memory is not None:
            return slot_of_parts(self.regions, total, config.memory)
        if is_whole or there == whole:
            return whole
        if there != least and (2 * whole + self.beside) * self.neighbours <= self.free:
            return whole
        log.warning(
            "two parts of each of %d rank(s) take %.2f GB of this node's memory: "
            "trainer.checkpoint.memory=%g, which takes %.2f GB",
            self.neighbours,
            2 * whole * self.neighbours / 1e9,
            LEAST_PARTS,
            2 * least * self.neighbours / 1e9,
        )
        return least

    def check(self, size: int) -> None:
        """Pages are touched at once: too little memory for two slots of that size must be an error
        now, and not the end of some process. In a container what counts is its own limit, for memfd
        too. Raises ValueError.
        """
        wanted, count = 2 * size + self.beside, self.neighbours
        if wanted * count <= self.free:
            return
        fixes, left = [], self.free / count - self.beside
        least = 2 * slot_of_parts(self.regions, extent(self.regions), LEAST_PARTS)
        tensor = 2 * slot_size(max((one.bytes for one in self.regions), default=0), None)
        if self.beside and 2 * size * count <= self.free:
            fixes.append(f"trainer.checkpoint.versions=none ({2 * size * count / 1e9:.2f} GB)")
        if least < 2 * size and least <= left:
            total = (least + self.beside) * count / 1e9
            fixes.append(f"trainer.checkpoint.memory={LEAST_PARTS:g} ({total:.2f} GB)")
        if size and tensor <= left / 1.1:
            fixes.append(f"trainer.checkpoint.host_memory_gb to at most {left / 1.1e9:.2f}")
        beside = f", {self.beside / 1e9:.2f} of it for versions" if self.beside else ""
        raise ValueError(
            f"staging checkpoints takes {wanted / 1e9:.2f} GB of host memory for each of "
            f"{count} rank(s) of this node{beside}, {wanted * count / 1e9:.2f} GB, and "
            f"{self.free / 1e9:.2f} GB are free: "
            + (f"set {', or '.join(fixes)}" if fixes else "start fewer ranks on a node")
        )

    def check_whole(self, size: int, memory_interval: int) -> None:
        """Raises ValueError where states are kept in memory and a slot has no room for one."""
        total = extent(self.regions)
        if memory_interval and size < total:
            raise ValueError(
                f"trainer.memory_interval={memory_interval} keeps this rank's whole part in "
                f"memory, {total / 1e9:.3f} GB, and trainer.checkpoint.host_memory_gb, or memory, "
                f"has room for {2 * size / 1e9:.3f}: set at least "
                f"{2 * slot_size(total, None) / 1e9:.3f}, or trainer.memory_interval=0"
            )


class Slot:
    """Host memory of one staged save (memfd), mapped here and in the agent; `number` is what
    messages call it.

    memfd instead of /dev/shm, whose size is a limit of its own; nothing is left when every holder
    dies. It counts as memory of the container, like any other. Pages are touched at once, so that
    the first save costs what the others cost; on a GPU they are pinned, once, with their exact
    size.
    """

    def __init__(self, number: int, size: int, device: Device, descriptor: int | None = None):
        """`descriptor`: of a slot that an agent before had; its pages are there already."""
        self.number = number
        self.size = size
        self.device = device
        if descriptor is None:
            descriptor = os.memfd_create(f"rft-checkpoint-slot-{number}", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._map = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if device.pin_memory:
            device.pin(self.address, size)

    @cached_property
    def bytes(self) -> "torch.Tensor":
        """A uint8 tensor over this memory."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Give back the descriptor; the mapping goes with the last tensor over it."""
        if self.device.pin_memory:
            self.device.unpin(self.address)
        os.close(self.descriptor)


class SlotPool:
    """Which slots are free. Leased by the stager, given back by reports of the agent.

    `idle_s`: how long the agent, or its disk, has not got on; beyond `patience_s` nobody waits.
    """

    def __init__(
        self,
        slots: list[Slot],
        patience_s: float = inf,
        idle_s: Callable[[], float] = lambda: 0.0,
    ):
        self.all = slots
        self.patience_s = patience_s
        self._idle_s = idle_s
        self._free = list(slots)
        self._is_overdue = False  # a lease was waited for in vain, and nothing has come back since
        self._changed = threading.Condition()  # may be entered twice

    def lease(self, deadline_s: float) -> Slot | None:
        with self._changed:
            end = time.monotonic() + (0.0 if self._is_overdue else deadline_s)
            while not self._free:
                left = min(end - time.monotonic(), self.patience_s - self._idle_s())
                if left <= 0:
                    self._is_overdue = True
                    return None
                self._changed.wait(left)
            return self._free.pop(0)

    def lease_soon(self, within_s: float) -> Slot | None:
        """Nothing is said of the agent where there is none."""
        with self._changed:
            return self._free.pop(0) if self.is_free(within_s) else None

    def take(self, number: int) -> None:
        """It holds what was staged before this process began."""
        self._free = [slot for slot in self._free if slot.number != number]

    def give_back(self, number: int) -> None:
        with self._changed:
            self._is_overdue = False
            if all(slot.number != number for slot in self._free):
                self._free.append(self.all[number])
            self._changed.notify_all()

    def is_free(self, within_s: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._free), within_s)


def windows_of(
    regions: list[Region], slot_bytes: int, total: int
) -> list[tuple[int, int, list[int]]]:
    """Cut a file into (start, stop, positions of its regions), each at most a slot.

    Raises ValueError for a larger region.
    """
    windows: list[tuple[int, int, list[int]]] = []
    start, inside = 0, []
    for position, region in enumerate(regions):
        if region.bytes > slot_bytes:
            least = 2 * -(-region.bytes // PAGE) * PAGE
            raise ValueError(
                f"trainer.checkpoint.host_memory_gb is too small: {region.key} alone takes "
                f"{region.bytes / 1e9:.3f} GB "
                f"and must fit into half of it; set at least {ceil(least / 1e6) / 1e3:.3f}"
            )
        if region.at + region.bytes - start > slot_bytes:
            windows.append((start, region.at, inside))
            start, inside = region.at, []
        inside.append(position)
    windows.append((start, total, inside))
    return windows


@dataclass
class StagedCopy:
    """One save being staged.

    `due`: nobody else has the cores first; `issued`: the device knows of all copies; `done`: the
    bytes are in the slots.
    """

    due: threading.Event = field(default_factory=threading.Event)
    issued: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0


class Stager:
    """One save at a time: the next one begins after the copies of the one before. All are copied by
    one thread: to start another one takes until it runs, which on busy cores is long.
    """

    def __init__(
        self,
        slots: SlotPool,
        regions: list[Region],
        windows: list[tuple[int, int, list[int]]],
        copier: Copier,
        deadline_s: float,
    ):
        self.slots = slots
        self.regions = regions
        self.windows = windows
        self.copier = copier
        self.deadline_s = deadline_s
        self.current = StagedCopy()
        self.current.issued.set()
        self.current.done.set()
        self._made: dict[tuple[int, int, int], Copies] = {}
        self._saves: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        NamedThread(target=self._serve, name="checkpoint-copy", daemon=True).start()

    def start(
        self,
        identity: str,
        tensors: "list[torch.Tensor]",
        send: Callable[[Window], None],
        give_up: Callable[[str, str], None],
        windows: list[tuple[int, int, list[int]]] | None = None,
        patience_s: float | None = None,
        later: bool = False,
    ) -> StagedCopy:
        """Begin to copy; returns at once.

        `give_up(identity, why)` is called when this save cannot be staged. `windows`: of a save of
        fewer regions than all. `patience_s`: it is given up where no slot is free by then. `later`:
        not before `make_due`, or somebody waits for it, or LATE_S.
        """
        self.copier.begin()
        self.current = StagedCopy()
        if not later:
            self.make_due()
        windows = windows or self.windows
        self._saves.put((self.current, identity, tensors, send, give_up, windows, patience_s))
        return self.current

    def close(self) -> None:
        """Nothing more is begun."""
        self._saves.put(None)

    def make_due(self) -> None:
        """Whoever had the cores first is done."""
        self.current.due.set()

    def await_copies(self) -> float:
        """Until the weights may change; seconds waited. On a GPU it is the device that waits."""
        if self.current.issued.is_set() and self.current.done.is_set():
            return 0.0
        before = time.monotonic()
        self._await(self.current.issued)
        self.copier.fence()
        return time.monotonic() - before

    def await_done(self) -> None:
        """Until the next save may begin."""
        self._await(self.current.done)

    def _await(self, event: threading.Event) -> None:
        """Raises TimeoutError: the copying thread waits for no agent longer than `deadline_s`, so
        it is the copy that hangs.
        """
        self.make_due()
        if not event.wait(2 * self.deadline_s):
            raise TimeoutError(
                "thread checkpoint-copy has not copied the last save within "
                f"{2 * self.deadline_s:g} s: the device hangs"
            )

    def _serve(self) -> None:
        """Between two saves the tensors of the last one are held, and after the end none."""
        enter_thread(self.copier.device)
        while (save := self._saves.get()) is not None:
            self._stage(*save)
        self._made.clear()

    def _stage(
        self,
        copying: StagedCopy,
        identity: str,
        tensors: "list[torch.Tensor]",
        send: Callable[[Window], None],
        give_up: Callable[[str, str], None],
        windows: list[tuple[int, int, list[int]]],
        patience_s: float | None,
    ) -> None:
        copying.due.wait(LATE_S)
        before = time.monotonic()
        slot: Slot | None = None
        try:
            for number, (start, stop, inside) in enumerate(windows):
                last = number == len(windows) - 1
                left_s = max(0.0, before + self.deadline_s - time.monotonic())
                slot = (
                    self.slots.lease(left_s)
                    if patience_s is None
                    else self.slots.lease_soon(patience_s)
                )
                if slot is None and patience_s is not None:
                    give_up(identity, BUSY)
                    return
                if slot is None:
                    raise TimeoutError(
                        f"no slot came back within {self.deadline_s:g} s, or the agent or its disk "
                        f"has hung for {self.slots.patience_s:g} s"
                    )
                self.copier.copy(self._copies(slot, start, inside, tensors))
                if last:
                    copying.issued.set()
                self.copier.finish()
                copying.seconds = time.monotonic() - before
                window = Window(id=identity, slot=slot.number, start=start, stop=stop, last=last)
                slot = None  # the agent's, from here on
                send(window)
                if last:  # told before weights change, for then older states are released
                    copying.done.set()
        # the training thread waits for this one: it must hear of anything
        except Exception as error:
            log.exception("staging failed")
            if slot is not None:
                self.copier.finish()
                self.slots.give_back(slot.number)
            give_up(identity, str(error))
        finally:
            copying.issued.set()
            copying.done.set()

    def _copies(
        self, slot: Slot, start: int, inside: list[int], tensors: "list[torch.Tensor]"
    ) -> Copies:
        """Made once for tensors that come again: the computing thread waits for what is done here
        for each tensor, which needs the interpreter's lock.
        """
        sources = [tensors[position] for position in inside]
        key = (slot.number, start, len(inside))
        if key in self._made and not all(map(is_, self._made[key].sources, sources)):
            self._made.clear()  # those of the other slot have become others as well
        if key not in self._made:
            targets = [
                _view(slot, self.regions[position], source, start)
                for position, source in zip(inside, sources, strict=True)
            ]
            self._made[key] = Copies(targets, sources)
        return self._made[key]


def _view(slot: Slot, region: Region, tensor: "torch.Tensor", start: int) -> "torch.Tensor":
    if tensor.nbytes != region.bytes:
        raise ValueError(
            f"{region.key} has {tensor.nbytes} bytes, {region.bytes} were planned at the start"
        )
    place = slot.bytes[region.at - start :][: region.bytes]
    return place.view(tensor.dtype).view(tensor.shape)


class StagingTuner:
    """`auto`: three saves lazy, three eager, then lazy, unless each eager step was shorter than
    each lazy one. Steps differ for many reasons, and eager taken by mistake costs every step a
    whole copy; lazy taken by mistake costs what an eager copy could have saved, which is little.

    Times are between two updates; of those of a kind the least and the most are known.
    """

    def __init__(self, staging: str):
        self.staging = staging
        self._times: dict[str, list[float]] = {"lazy": [], "eager": []}
        self._last: float | None = None
        self._running = ""

    def next(self) -> str:
        """How to stage the save that begins now."""
        chosen = self.staging
        if chosen == "auto":
            tried = [kind for kind, times in self._times.items() if len(times) < TRIALS]
            chosen = tried[0] if tried else self._best()
        self._running = chosen
        return chosen

    def updated(self) -> None:
        """Called once per optimizer update."""
        now = time.monotonic()
        if self._running and self._last is not None:
            times = self._times[self._running]
            times[:] = sorted([*times, now - self._last])
            del times[1 : len(times) - TRIALS + 1]
        self._last, self._running = now, ""

    def _best(self) -> str:
        return "eager" if max(self._times["eager"]) < min(self._times["lazy"]) else "lazy"
