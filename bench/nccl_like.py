"""A stand-in for NCCL, as torch's `ProcessGroupNCCL` shows it, over sockets of one machine
(`rft.sync.communicator.Transport`). What makes NCCL hard is here:

- every call returns a work at once and is done in order by a thread, NCCL's own stream;
- it is done when the peer has posted its side, however long that takes;
- there is no end of a file: when a peer has died, whoever waits for it waits for ever;
- `abort` is the only way out, from another thread; the works are then done as after a success;
- a broadcast goes through all members one after the other: root may be done while others have
  nothing; all members must post the same ones in the same order, else they wait for ever;
- a watchdog kills the process when a work takes longer than the timeout, unless the environment
  said otherwise when the group was made.
"""

import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import Store

HEADER = struct.Struct("<cQQQ")  # kind, how many before, root, bytes
SEND, BROADCAST = b"s", b"b"
TEARS_DOWN = ("1", "3")
SETTING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LONG = timedelta(days=1)


class Aborted(Exception):
    pass


class LikeWork:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> bool:
        self.done.wait()
        return True


class NcclLike:
    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta = LONG, name: str = "group"
    ):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.prefix = name
        self.tears_down = os.environ.get(SETTING, "3") in TEARS_DOWN
        self.count = 0
        self.works: list[LikeWork] = []
        self.posted: queue.SimpleQueue[tuple[Callable[[], None], LikeWork]] = queue.SimpleQueue()
        self.here = threading.Condition()
        self.incoming: dict[int, socket.socket] = {}
        self.outgoing: dict[int, socket.socket] = {}
        self.is_aborted = threading.Event()
        self.waker, self.woken = socket.socketpair()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("")
        self.listener.listen(64)
        store.set(f"{name}/{rank}", self.listener.getsockname().hex())
        for body in (self._accept, self._work, self._watch):
            threading.Thread(target=body, name="nccl-like", daemon=True).start()

    # --- what torch's backends offer --------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> LikeWork:
        data = _bytes(tensors[0])

        def run() -> None:
            wire = self._to(peer)
            self._write(wire, HEADER.pack(SEND, 0, self.rank, len(data)))
            self._read(wire, bytearray(1))  # the peer has posted
            self._write(wire, data)

        return self._post(run)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> LikeWork:
        data = _bytes(tensors[0])

        def run() -> None:
            wire = self._from(peer)
            self._expect(wire, HEADER.pack(SEND, 0, peer, len(data)))
            self._write(wire, b"+")
            self._read(wire, data)

        return self._post(run)

    def broadcast(self, tensor: torch.Tensor, root: int) -> LikeWork:
        data, number = _bytes(tensor), self.count
        self.count += 1

        def run() -> None:
            before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
            header = HEADER.pack(BROADCAST, number, root, len(data))
            if self.rank != root:
                self._expect(self._from(before), header)
                self._read(self._from(before), data)
            if after != root:
                self._write(self._to(after), header)
                self._write(self._to(after), data)

        return self._post(run)

    def abort(self) -> None:
        self.is_aborted.set()
        self.waker.close()
        with self.here:
            self.here.notify_all()
            for wire in (*self.incoming.values(), *self.outgoing.values(), self.listener):
                wire.close()
        for work in list(self.works):
            work.done.set()

    # --- inside -----------------------------------------------------------------------------------

    def _post(self, run: Callable[[], None]) -> LikeWork:
        if self.is_aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on this rank")
        work = LikeWork()
        self.works.append(work)
        self.posted.put((run, work))
        if self.is_aborted.is_set():
            work.done.set()
        return work

    def _work(self) -> None:
        try:
            while not self.is_aborted.is_set():
                run, work = self.posted.get()
                run()
                self.works.remove(work)
                work.done.set()
        except Aborted:
            pass

    def _watch(self) -> None:
        while not self.is_aborted.wait(0.05):
            late = time.monotonic() - self.timeout.total_seconds()
            if any(work.began < late for work in list(self.works)):
                if self.tears_down:
                    print("the watchdog takes the entire process down", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGABRT)
                return

    def _accept(self) -> None:
        try:
            while True:
                wire, _ = self.listener.accept()
                (peer,) = struct.unpack("<Q", wire.recv(8, socket.MSG_WAITALL))
                with self.here:
                    self.incoming[peer] = wire
                    self.here.notify_all()
        except (OSError, struct.error):  # it was aborted, or a peer ended at once
            return

    def _from(self, peer: int) -> socket.socket:
        with self.here:
            self.here.wait_for(lambda: peer in self.incoming or self.is_aborted.is_set())
            if self.is_aborted.is_set():
                raise Aborted
            return self.incoming[peer]

    def _to(self, peer: int) -> socket.socket:
        if peer not in self.outgoing:
            wire = socket.socket(socket.AF_UNIX)
            try:
                where = bytes.fromhex(self.store.get(f"{self.prefix}/{peer}").decode())
                wire.connect(where)
                wire.sendall(struct.pack("<Q", self.rank))
            except (OSError, RuntimeError):  # nobody is there, nor at the store
                self._hang()
            with self.here:
                self.outgoing[peer] = wire
        return self.outgoing[peer]

    def _hang(self) -> None:
        self.is_aborted.wait()
        raise Aborted

    def _expect(self, wire: socket.socket, header: bytes) -> None:
        theirs = bytearray(HEADER.size)
        self._read(wire, theirs)
        if bytes(theirs) != header:
            print(f"{HEADER.unpack(theirs)}, not {HEADER.unpack(header)}", file=sys.stderr)
            self._hang()

    def _read(self, wire: socket.socket, data: bytearray | memoryview) -> None:
        view, got = memoryview(data), 0
        while got < len(view):
            self._ready([wire, self.woken], [])
            size = self._moved(partial(wire.recv_into, view[got:], 0, socket.MSG_DONTWAIT))
            if size == 0:
                self._hang()
            got += max(size, 0)

    def _write(self, wire: socket.socket, data: bytes | memoryview) -> None:
        view, sent = memoryview(data), 0
        while sent < len(view):
            self._ready([self.woken], [wire])
            sent += max(self._moved(partial(wire.send, view[sent:], socket.MSG_DONTWAIT)), 0)

    def _ready(self, readers: list[socket.socket], writers: list[socket.socket]) -> None:
        with suppress(OSError, ValueError):  # closed by `abort`
            select.select(readers, writers, [])
        if self.is_aborted.is_set():
            raise Aborted

    def _moved(self, call: Callable[[], int]) -> int:
        """Bytes; -1: none yet."""
        try:
            return call()
        except BlockingIOError:
            return -1
        except OSError:
            self._hang()
            raise


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def nccl_like(store: Store, rank: int, size: int, device: torch.device, blocks: int) -> NcclLike:
    return NcclLike(store, rank, size)
