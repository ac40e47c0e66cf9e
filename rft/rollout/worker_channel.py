"""How an engine's actor speaks to vLLM's workers about weights, beside vLLM's own calls: receive a
round while the engine decodes.

    engine actor ── StageOrder ──► worker's thread       a record each way, length first, over a
                                                         Unix socket that stays open
                 ◄─ StageReport ── when it has all, or failed

A worker is reached in two ways, and each is there for what the other cannot do:

- vLLM's `collective_rpc`, for what must happen *between two steps*: connect to a trainer, install
  (`rft_install`, `rft_install_adapter`), tell the state. vLLM's loop is the only one that knows
  when a step is over, and a pause, a sleep and a wake-up go the same way, in order with it.
- this channel, for what must happen *beside the steps*: to stage. A call of vLLM's waits for the
  step that is being decoded and holds up the next one, so neither the beginning nor the end of a
  stage is one: a round's control took 77 to 98 ms with them, 38 to 47 ms without
  (docs/measured.md).

In: one order per round. Out: every worker's report, or the first that tells of a failure.
Invariants: a report of an earlier round is not taken for one of this; a worker that dies closes its
connection, and that is a report too, as is one that says what cannot be; who does not begin with
the word that workers were told is none of them, and is left.
"""

import asyncio
import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rft.ground import node_file
from rft.ground.experience import Record, decode, encode
from rft.ground.process import AT_ONCE, HEADER, Frames, frame
from rft.ground.rounds import (
    BROKEN,
    UNREACHABLE,
    InFile,
    InSave,
    InStore,
    Received,
    Round,
    RoundFailed,
)

HELLO_S = 10.0  # for the word, from the connection to its last byte
HELLO_BYTES = 2**10
REPORT_BYTES = 2**20
UNREADABLE = (ConnectionError, ValueError, RecursionError)  # msgspec: no UTF-8 is a ValueError
log = logging.getLogger(__name__)

DIED = Received(error="a worker ended while it received weights", blame=BROKEN)


class Hello(Record):
    word: str


class StageOrder(Record):
    number: int
    round: Round


class StageReport(Record):
    """`number`: of the order that it answers; None: the worker is gone, and answers none."""

    received: Received
    number: int | None = None


class WorkerChannel:
    """Life:

    `open`, tell every worker the path and the word (each connects), `stage` as often as wanted,
    `close`.
    """

    def __init__(self, workers: int):
        self.workers = workers
        self._numbers = itertools.count(1)
        self._writers: list[asyncio.StreamWriter] = []
        self._reports: asyncio.Queue[StageReport] = asyncio.Queue()
        self._connected = asyncio.Condition()

    async def open(self) -> tuple[str, str]:
        """The path that workers connect to, and the word that each says first, as a `Hello`."""
        self._directory = tempfile.mkdtemp(prefix="rft-")  # readable by this user only
        path = str(Path(self._directory) / "orders")
        self._word = secrets.token_hex(16)
        self._server = await asyncio.start_unix_server(self._listen, path)
        return path, self._word

    async def stage(self, coming: Round) -> list[Received]:
        """The workers' reports; if one of them is a failure, that
        one alone: the others may never come.
        """
        number, reports = next(self._numbers), []
        order = frame(encode(StageOrder(number=number, round=coming)))
        async with asyncio.timeout(coming.timeout):
            async with self._connected:
                await self._connected.wait_for(lambda: len(self._writers) == self.workers)
            for writer in self._writers:
                if writer.is_closing():
                    return [DIED]
                writer.write(order)
            while len(reports) < self.workers:
                report = await self._reports.get()
                if report.number not in (number, None):
                    continue
                if report.received.error:
                    return [report.received]
                reports.append(report.received)
        return reports

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await self._is_worker(reader):
            writer.close()
            return
        async with self._connected:
            self._writers.append(writer)
            self._connected.notify_all()
        frames = Frames(REPORT_BYTES)
        try:
            while part := await reader.read(AT_ONCE):
                for body in frames.split(part):
                    self._reports.put_nowait(decode(body, StageReport))
        except UNREADABLE as error:  # its end, told below
            log.warning("a worker's connection ends: %s", error)
        writer.close()
        self._reports.put_nowait(StageReport(received=DIED))

    async def _is_worker(self, reader: asyncio.StreamReader) -> bool:
        """Whether who has connected begins with the word."""
        try:
            async with asyncio.timeout(HELLO_S):
                size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
                if size > HELLO_BYTES:
                    return False
                hello = decode(await reader.readexactly(size), Hello)
        except (TimeoutError, EOFError, *UNREADABLE):
            return False
        return secrets.compare_digest(hello.word.encode(), self._word.encode())

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        shutil.rmtree(self._directory)


@asynccontextmanager
async def within_reach(coming: Round) -> AsyncIterator[Round]:
    """The same round, with a location that workers can open: they are no processes of Ray's.

    What lies in Ray's object store is copied into one file in memory. It has no name of its own:
    workers reach it through this process, so nothing is left when this process is killed. It is
    there until the block is left; a bucket of the store is held no longer than its copy takes. Of a
    save there is such a file too, for all engines of the node: workers fill it.
    """
    if isinstance(save := coming.location, InSave):
        with node_file.held(f"{save.root}/{save.path}") as path:
            yield replace(coming, location=replace(save, node_file=path))
        return
    if not isinstance(coming.location, InStore):
        yield coming
        return
    file = os.memfd_create("weights")
    try:
        async with asyncio.timeout(coming.timeout):
            streams = [
                [await _copy(file, *bucket) for bucket in stream]
                for stream in coming.location.streams
            ]
        path = f"/proc/{os.getpid()}/fd/{file}"
        yield replace(coming, location=InFile(path=path, streams=streams))
    finally:
        os.close(file)


async def _copy(file: int, reference: Any, digest: str) -> tuple[int, int, str]:
    """Append one bucket; returns where it lies, its length and its checksum."""
    from ray.exceptions import RayError

    try:
        data = await reference
    except RayError as error:  # nothing is wrong with this engine
        raise RoundFailed(
            f"a bucket of weights is not in the object store any more: {error}", UNREACHABLE
        ) from error
    start = os.lseek(file, 0, os.SEEK_END)
    await asyncio.to_thread(_append, file, memoryview(data))
    return start, len(data), digest


def _append(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]
