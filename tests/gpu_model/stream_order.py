"""What comes before what on GPUs, as vector clocks, over the product's own code and memory of the
host: no value waits here, but every read, write and free of memory is put in its place.

    process     a card's number: its threads are those that have called `torch.cuda.set_device`
    timelines   a process' host (what its threads do, one after another), each of its streams, and
                the stream of each NCCL group
    edges       asking a stream to do something; streams that wait for streams and events; the host
                that waits for a stream; bytes on a wire, and what NCCL carried

A race is two uses of the same memory, one of which writes it, with no way of edges between them; or
memory that went back to the stream it was made on while another one might still use it, as torch's
allocator gives it out again at once (`record_stream` tells it of the other one). Whether real time
would have shown it does not matter. No race, but told with them: what waits on a stream for another
process, for other streams may be in the same queue of the card behind it. Also counted: bytes of
each card that are alive.

Assumed: threads of one process order themselves, what the host does with memory of the host is done
at once, and torch orders what is asked of one stream.
"""

import queue
import re
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rft.sync.connection import PeerConnection

Clock = Counter[str]  # of each timeline, how far it is known to be
aten = torch.ops.aten
IS_CUDA, DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
PATIENCE_S = 20.0


@dataclass
class Piece:
    """Memory of one storage. `pool`: the stream that it was made on, on a card; `used`: the last
    read and the last write of each timeline; `told`: streams of which the allocator was told.
    """

    size: int
    card: int
    pool: str | None
    used: dict[bool, Clock] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    told: set[str] = field(default_factory=set)


class Model:
    def __init__(self) -> None:
        self.races: list[str] = []
        self.alive: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._pieces: dict[int, Piece] = {}
        self._pinned: list[tuple[int, int]] = []
        self._wires: defaultdict[tuple[int, int], list[tuple[int, Clock]]] = defaultdict(list)
        self._lock = threading.RLock()
        self._made: Counter[int] = Counter()
        self.here = threading.local()  # card, and its current stream

    # --- time -------------------------------------------------------------------------------------

    def host(self) -> str:
        return f"host {self.here.card}"

    def stream(self) -> str:
        return str(self.here.streams[-1])

    def tick(self, line: str) -> Clock:
        """Something is done there, after all that it has waited for."""
        with self._lock:
            if line != self.host():
                self.join(line, self.tick(self.host()))
            self._clocks[line][line] += 1
            return Counter(self._clocks[line])

    def join(self, line: str, clock: Clock) -> None:
        with self._lock:
            self._clocks[line] |= clock

    def now(self, line: str) -> Clock:
        with self._lock:
            return Counter(self._clocks[line])

    def settle(self, line: str) -> None:
        """The host waits."""
        self.join(self.host(), self.now(line))

    # --- memory -----------------------------------------------------------------------------------

    def piece(self, tensor: torch.Tensor, on_card: bool = False) -> Piece:
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._pieces:
                card = self.here.card
                one = Piece(storage.nbytes(), card, self.stream() if on_card else None)
                self._pieces[storage._cdata] = one
                weakref.finalize(storage, self._free, storage._cdata)
                if on_card:
                    self.alive[card] += one.size
                    self.peak[card] = max(self.peak[card], self.alive[card])
            return self._pieces[storage._cdata]

    def use(self, what: str, one: Piece, line: str, writes: bool) -> None:
        with self._lock:
            clock = self._clocks[line]
            for other in [True, False] if writes else [True]:
                for where, when in one.used[other].items():
                    if clock[where] < when:
                        words = [f"{'written' if done else 'read'}" for done in (writes, other)]
                        self._race(f"{what}: {words[0]} on {line}, {words[1]} on {where} before")
            one.used[writes][line] = clock[line]

    def _free(self, key: int) -> None:
        with self._lock:
            one = self._pieces.pop(key)
            if one.pool is None:
                return
            self.alive[one.card] -= one.size
            known = self._clocks[one.pool] | self._clocks[f"host {one.card}"]
            for where, when in (one.used[True] | one.used[False]).items():
                if known[where] < when and where not in one.told:
                    self._race(f"{one.size} bytes freed on {one.pool}, {where} still uses them")

    def _race(self, words: str) -> None:
        if words not in self.races:
            self.races.append(words)

    def queued(self, words: str) -> None:
        """Something stands in a queue of the card until another process has done its part."""
        self._race(f"{words} in a queue that others share")

    def streams_of(self, card: int) -> int:
        """How many were made."""
        return self._made[card]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in self._pinned)

    # --- torch.cuda -------------------------------------------------------------------------------

    def set_device(self, device: Any) -> None:
        """Of a thread; what it does is seen from here on."""
        if not hasattr(self.here, "card"):
            _Elsewhere(self).__enter__()
            _Seen(self).__enter__()
        self.here.card = torch.device(device).index
        self.here.streams = [f"default {self.here.card}"]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        model = self

        class Stream:
            def __init__(self, device: Any = None, name: str = ""):
                card = torch.device(device).index
                model._made[card] += not name
                self.name = name or f"stream {model._made[card]} of {card}"

            def wait_stream(self, other: "Stream") -> None:
                model.join(self.name, model.now(other.name) | model.tick(model.host()))

            def wait_event(self, event: "Event") -> None:
                model.join(self.name, event.clock)

            def synchronize(self) -> None:
                model.settle(self.name)

        class Event:
            def __init__(self) -> None:
                self.clock: Clock = Counter()

            def record(self, stream: Stream) -> None:
                self.clock = model.tick(stream.name)

            def synchronize(self) -> None:
                model.join(model.host(), self.clock)

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            model.here.streams.append(stream.name)
            try:
                yield
            finally:
                model.here.streams.pop()

        def lock(address: int, size: int, _flags: int) -> int:
            model._pinned.append((address, size))
            return 0

        driver = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=lambda address: None)
        for name, stand_in in {
            "Stream": Stream,
            "Event": Event,
            "stream": on,
            "set_device": self.set_device,
            "current_stream": lambda device=None: Stream(device or 0, model.stream()),
            "default_stream": lambda device: Stream(device, f"default {device.index}"),
            "cudart": lambda: driver,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            model.piece(tensor).told.add(stream.name)

        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(torch.distributed, "ProcessGroupNCCL", self._group(), raising=False)
        self._listen(patch)

    def _group(self) -> type:
        """`store`: of a pair, shared by both."""
        model = self

        class Group:
            class Options:
                def __init__(self) -> None:
                    self.config = SimpleNamespace()

            def __init__(self, store: "Pair", side: int, _size: int, _options: Any):
                self.pair, self.side = store, side
                self.line = f"nccl of {model.here.card} in {store.name}"
                self.last: Work | None = None

            def send(self, tensors: list[torch.Tensor], _peer: int, _tag: int) -> "Work":
                self._use("send", tensors[0], writes=False)
                with _disable_current_modes():
                    data = tensors[0].clone()
                self.pair.ways[self.side].put((data, model.now(self.line)))
                return self._posted()

            def recv(self, tensors: list[torch.Tensor], _peer: int, _tag: int) -> "Work":
                data, clock = self.pair.ways[1 - self.side].get(timeout=PATIENCE_S)
                model.join(self.line, clock)
                self._use("recv", tensors[0], writes=True)
                with _disable_current_modes():
                    tensors[0].copy_(data)
                return self._posted()

            def abort(self) -> None: ...

            def _posted(self) -> "Work":
                if self.last is not None and not self.last.is_known:
                    model.queued(f"{self.line} waits for itself")
                self.last = Work(self.line)
                return self.last

            def _use(self, what: str, tensor: torch.Tensor, writes: bool) -> None:
                model.join(self.line, model.now(model.stream()))
                model.tick(self.line)
                model.use(f"nccl {what}", model.piece(tensor), self.line, writes)

        class Work:
            def __init__(self, line: str):
                self.line, self.clock = line, model.now(line)
                self.is_known = False  # to the host, to be done

            def is_completed(self) -> bool:
                model.join(model.host(), self.clock)
                self.is_known = True
                return True

            def wait(self) -> None:
                if not self.is_known:
                    model.queued(f"{model.stream()} waits for {self.line}")
                model.join(model.stream(), self.clock)

        return Group

    def _listen(self, patch: pytest.MonkeyPatch) -> None:
        """Bytes on wires are edges; engine n is on card n + 1, the trainer on card 0."""
        send, receive = PeerConnection.send, PeerConnection.receive

        def ends(wire: PeerConnection) -> tuple[int, int] | None:
            """This process, and the other one."""
            if found := re.search(r"to engine_(\d+)", wire.name):
                return 0, int(found[1]) + 1
            return (self.here.card, 0) if "from trainer" in wire.name else None

        def sends(wire: Any, data: memoryview) -> None:
            if not hasattr(wire, "sent") and "from trainer" in wire.name:
                wire.sent = 0  # first words, which a listener reads before it has a connection
                send(wire, data)
                return
            at = getattr(wire, "sent", 0)
            wire.sent = at + len(data)
            if (way := ends(wire)) is not None:
                self._wires[way].append((at, self.now(f"host {way[0]}")))
            send(wire, data)

        def receives(wire: Any, into: memoryview) -> None:
            receive(wire, into)
            wire.got = getattr(wire, "got", 0) + len(into)
            if (way := ends(wire)) is not None and hasattr(self.here, "card"):
                for at, clock in list(self._wires[way[::-1]]):
                    if at < wire.got:
                        self.join(self.host(), clock)

        patch.setattr(PeerConnection, "send", sends)
        patch.setattr(PeerConnection, "receive", receives)


@dataclass
class Pair:
    """What two ends of an NCCL group have in common."""

    name: str
    ways: tuple["queue.Queue[Any]", "queue.Queue[Any]"] = field(
        default_factory=lambda: (queue.Queue(), queue.Queue())
    )


class CardMemory:
    """`rft.sync.links.CardMemory`: what one process shares the other one opens, by its number."""

    shared: dict[int, torch.Tensor] = {}

    def __init__(self, device: torch.device, settle: Callable[[torch.device], None]):
        self.device, self._settle = device, settle

    def room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        self.shared[memory.data_ptr()] = memory
        return {"number": memory.data_ptr()}

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        return self.shared[told["number"]]

    def settle(self) -> None:
        self._settle(self.device)


class _Elsewhere(TorchFunctionMode):
    """What is asked for on a card is made on the host and counted as the card's."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        model, kwargs, name = self.model, dict(kwargs or {}), getattr(func, "__name__", "")
        if func in (IS_CUDA, DEVICE):
            one = model.piece(args[0])
            if one.pool is None:
                return func(*args)
            return True if func is IS_CUDA else torch.device("cuda", one.card)
        if name == "is_pinned":
            return model.is_pinned(args[0])
        if name == "cpu":
            model.use(name, model.piece(args[0]), model.stream(), writes=False)
            model.tick(model.stream())
            model.settle(model.stream())
            with _disable_current_modes():
                return args[0].clone()
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            assert torch.device(device).index == model.here.card, f"{name} on another card"
            with _disable_current_modes():
                made = func(*args, **{**kwargs, "device": "cpu"})
            model.piece(made, on_card=True)
            return made
        return func(*args, **kwargs)


class _Seen(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Seconds of imports, to keep a compiler away that is not asked."""
        return False

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, model = kwargs or {}, self.model
        uses = [] if func.is_view else list(_uses(func, args, kwargs))
        pieces = [(model.piece(tensor), writes) for tensor, writes in uses]
        on_card = any(one.pool is not None for one, _ in pieces)
        line = model.stream() if on_card else model.host()
        if pieces:
            model.tick(line)
        for one, writes in pieces:
            model.use(str(func.overloadpacket.__name__), one, line, writes)
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                one = model.piece(made, on_card)
                if not any(one is known for known, _ in pieces):
                    model.use(str(func.overloadpacket.__name__), one, line, writes=True)
        if func.overloadpacket is aten.copy_ and on_card:
            self._wait_for_copy(args, kwargs, [tensor for tensor, _ in uses])
        if func.overloadpacket in (aten._local_scalar_dense, aten.equal):
            model.settle(line)
        return result

    def _wait_for_copy(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """To and from the host; without waiting only where that is page-locked."""
        on_host = [tensor for tensor in tensors if self.model.piece(tensor).pool is None]
        is_free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if on_host and not (is_free and all(map(self.model.is_pinned, on_host))):
            self.model.settle(self.model.stream())


def _uses(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors that go in, and whether they are written."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes


def process(model: Model, card: int, work: Callable[[], Any]) -> Any:
    """Do `work` in a thread of this process; what it raises is raised here."""
    found: list[Any] = []

    def body() -> None:
        model.set_device(torch.device("cuda", card))
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
