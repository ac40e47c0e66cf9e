"""A communicator of device memory that a process leaves within seconds when another member has
gone: one of torch's process groups, of two or of many, and the thread that watches over it.

    transport   what moves bytes: `send`, `recv`, `broadcast`, each returning a work to wait for;
                it blocks until the others have posted theirs, and knows no end of a file
    Guard       one thread per process: the end of a member's connection, a word on one, a deadline
                ──► `Communicator.abort` ──► whoever is blocked inside gets a `PeerLost` by name

Invariants: no operation outlasts the timeout; a member's death ends it at once; no thread of the
transport's ever kills the process. A transport that returned proves nothing: after an abort its
works are done as after a success, so `lost` is asked before and after each, and only a bucket's
checksum says that its bytes are here.

What torch 2.13 would do of its own (`ProcessGroupNCCL.cpp`): its watchdog tears the process down at
an error or a timeout, unless told otherwise when the group is made (`QUIET`). Apart from that, an
error that any group's watchdog sees makes the monitor of the *first* group of the process end it
eight minutes later. That monitor is not ours, so ranks and engines are started without it looking
(`rft.ground.device.quiet_environment`).
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.distributed import Store, TCPStore

from rft.ground.device import collective_timeout, hosted_store
from rft.ground.streams import enter_thread, settle
from rft.sync.connection import PeerConnection, PeerLost, PeerRefused

GRACE_S = 1.0  # for the word of whom it was, where only a neighbour's end was seen
TICK_S = 0.5  # how late a deadline may be seen
LOOK_S = 0.0002  # between two looks at whether a message is there: 64 MiB take a millisecond
# Of torch's own watchdog, which has nothing to do: the guard's deadline is the one that counts.
NEVER = timedelta(days=1)
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # an error ends the communicator, not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog that is slow
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else it sleeps a minute before it frees anything
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_making = threading.Lock()
Ended = PeerLost | PeerRefused
Gone = Callable[[PeerLost], None]
Hear = Callable[[dict[str, Any]], None]


class Posted(Protocol):
    def is_completed(self) -> bool:
        """Whether there is nothing to wait for, asked without putting anything on a stream."""

    def wait(self) -> Any:
        """This thread's stream goes on behind it; where there are no streams, this thread."""


class Broadcasts(Protocol):
    """What a group needs of it."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Posted: ...

    def abort(self) -> None:
        """From any thread: all works are done, one way or the other."""


class Transport(Broadcasts, Protocol):
    """What torch's backends offer of it."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Posted: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Posted: ...


T = TypeVar("T", bound=Broadcasts)


# (store, rank, size, device, thread blocks): as few of these as move tens of GB/s. Several
# communicators have to be on a GPU at a time, beside what computes there, and the memory of each
# grows with them (`rft.sync.transfer`); NCCL takes the fewest that any member says.
MakeTransport = Callable[[Store, int, int, torch.device, int], Transport]


def nccl(store: Store, rank: int, size: int, device: torch.device, blocks: int) -> Transport:
    # missing in a torch that was built without NCCL
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.max_ctas = blocks
    return ProcessGroupNCCL(store, rank, size, options)


def hosted(name: str, address: str, timeout: float) -> TCPStore:
    """A store of one communicator alone, at `address`."""
    with lost_by(name):
        return hosted_store(address, 0, collective_timeout(timeout))


def joined(name: str, where: Mapping[str, Any], timeout: float) -> TCPStore:
    with lost_by(name):
        return TCPStore(
            where["host"],
            where["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=collective_timeout(timeout),
        )


@contextmanager
def lost_by(name: str) -> Iterator[None]:
    """Errors of a store become those of a wire: the other end is lost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{name}: {error}") from error


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Of this process, for as long as something reads it that takes no arguments."""
    with _making:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def await_posted(work: Posted) -> None:
    """Return when it is done. It is this thread that waits, and no stream: a card takes what is
    asked of it from a few queues, a rank's from one (`CUDA_DEVICE_MAX_CONNECTIONS`), and what waits
    there for another process holds up all that is behind it, of every stream. Two ranks of which
    each has in front what the other one's next sum, behind such a wait, must come before would
    stand for ever.
    """
    while not work.is_completed():
        time.sleep(LOOK_S)
    work.wait()


class Watch:
    """One connection under guard. `gone`: told once, when it has ended. `hear`: told each record
    that comes; without it whatever comes is not touched.
    """

    def __init__(self, wire: PeerConnection, gone: Gone, hear: Hear | None):
        self.wire, self.gone, self.hear = wire, gone, hear
        try:
            # of its own: the wire may be closed by anyone, and its number be another one's by then
            self.descriptor = os.dup(wire.fileno())
        except OSError as error:
            raise PeerLost(f"{wire.name}: it was closed", wire.engine) from error

    def happened(self, events: int) -> bool:
        """Whether that was the end."""
        try:
            if events & select.EPOLLIN and self.hear is not None:
                self.hear(self.wire.receive_record())
            elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                raise PeerLost(f"{self.wire.name}: the other end closed", self.wire.engine)
        except PeerLost as lost:
            self.gone(lost)
            return True
        return False


class Guard:
    """The thread that is never blocked where the others are."""

    def __init__(self) -> None:
        self._poll: select.epoll | None = None  # not before it is used: a fork would share it
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._timed: set[Communicator[Any]] = set()

    def watch(self, wire: PeerConnection, gone: Gone, hear: Hear | None = None) -> Watch:
        one = Watch(wire, gone, hear)
        with self._lock:
            self._watches[one.descriptor] = one
            words = select.EPOLLIN if hear is not None else 0
            self._started().register(one.descriptor, select.EPOLLRDHUP | words)
        return one

    def forget(self, one: Watch) -> None:
        with self._lock:
            if self._watches.pop(one.descriptor, None) is one:
                self._started().unregister(one.descriptor)
                os.close(one.descriptor)

    def time(self, one: "Communicator[Any]") -> None:
        """Abort it when its deadline has passed."""
        with self._lock:
            self._timed.add(one)
            self._started()

    def leave(self, one: "Communicator[Any]") -> None:
        with self._lock:
            self._timed.discard(one)

    def _started(self) -> select.epoll:
        if self._poll is None:
            self._poll = select.epoll()
            arguments = (self._poll,)
            threading.Thread(target=self._run, args=arguments, name="guard", daemon=True).start()
        return self._poll

    def _run(self, poll: select.epoll) -> None:
        while True:
            for descriptor, events in poll.poll(TICK_S):
                with self._lock:
                    one = self._watches.get(descriptor)
                if one is not None and one.happened(events):
                    self.forget(one)
            with self._lock:
                timed = list(self._timed)
            for communicator in timed:
                communicator.look_at(time.monotonic())


GUARD = Guard()


class Communicator(Generic[T]):
    """Life: built ──► (`running` ──► ...)* ──► lost, or closed; each of them once.

    `ended`: told once, why, before the transport is aborted.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        device: torch.device,
        ended: Callable[[Ended], None] = lambda _: None,
    ):
        self.name = name
        self.timeout = timeout
        self.device = device
        self.ended = ended
        self.lost: Ended | None = None
        self.transport: T | None = None
        self._watches: list[Watch] = []
        self._until = math.inf
        self._lock = threading.Lock()
        self._changed = threading.Event()  # built, or lost
        self._over = threading.Event()
        GUARD.time(self)

    def watch(self, wire: PeerConnection, hear: Hear | None = None) -> None:
        """The end of `wire` is the end of this."""
        self._watches.append(GUARD.watch(wire, self.abort, hear))

    def build(self, make: Callable[[], T], first: Callable[[T], Sequence[Posted]]) -> None:
        """`make` and `first`, which uses it for the first time, run in a thread of their own:
        neither takes a deadline. What this thread has asked of the device is done before.
        """
        settle(self.device)
        arguments = (make, first)
        threading.Thread(
            target=self._build, args=arguments, name="communicator", daemon=True
        ).start()
        if not self._changed.wait(self.timeout):
            self.abort(PeerLost(f"{self.name}: not all came together within {self.timeout:g} s"))
        self.check()

    def _build(self, make: Callable[[], T], first: Callable[[T], Sequence[Posted]]) -> None:
        enter_thread(self.device)
        try:
            with environment(QUIET):
                transport = make()
            with self._lock:
                self.transport, is_over = transport, self.lost is not None
            if is_over:
                transport.abort()
                return
            for work in first(transport):
                await_posted(work)
        except PeerLost as lost:
            self._over.wait(GRACE_S)
            self.abort(lost)
        except Exception as error:
            self.abort(PeerLost(f"{self.name}: {error!r}"))
        self._changed.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """What blocks in here is let go when another member is lost, or when it has taken longer
        than the timeout.
        """
        self.check()
        self._until = time.monotonic() + self.timeout
        try:
            yield
        except RuntimeError as error:  # of a stream whose communicator was aborted
            self.check(error)
            raise
        except PeerLost as error:  # of a wire: the guard may hear a better reason
            self._over.wait(GRACE_S)
            self.check(error)
            raise
        finally:
            self._until = math.inf
        self.check()

    @contextmanager
    def talking(self) -> Iterator[T]:
        """What the transport or its store raise is about the members, and no failure of this one's
        own.
        """
        assert self.transport is not None
        try:
            yield self.transport
        except RuntimeError as error:
            self.check(error)
            raise PeerLost(f"{self.name}: {error}") from error

    def finish(self, work: Posted) -> None:
        """Return when it is done, as far as this member can see."""
        with self.talking():
            await_posted(work)

    def check(self, cause: BaseException | None = None) -> None:
        if isinstance(self.lost, PeerLost):
            raise PeerLost(str(self.lost), self.lost.lost) from cause
        if self.lost is not None:
            raise PeerRefused(str(self.lost)) from cause

    def look_at(self, now: float) -> None:
        if now > self._until:
            self.abort(PeerLost(f"{self.name}: nothing moved for {self.timeout:g} s"))

    def abort(self, why: Ended) -> None:
        """From any thread; the first reason stays."""
        with self._lock:  # who comes second may close the wires, but not before it was told there
            if self.lost is not None:
                return
            self.lost, transport = why, self.transport
            self.ended(why)
        self._over.set()
        self._changed.set()
        GUARD.leave(self)
        if transport is not None:  # it may take its time, which the guard has not
            arguments = (transport,)
            threading.Thread(target=self._end, args=arguments, name="abort", daemon=True).start()

    def _end(self, transport: T) -> None:
        enter_thread(self.device)
        transport.abort()

    def close(self) -> None:
        self.abort(PeerLost(f"{self.name}: closed"))
        watches, self._watches = self._watches, []
        for watch in watches:
            GUARD.forget(watch)
