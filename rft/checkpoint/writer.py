"""One rank's save on its way to disk: bytes of a staged slot ─► hashed chunks of `r<rank>.bin`
        ─► fsync ─► `r<rank>.json`.

No torch. Invariant: the receipt appears only after every byte that it vouches for is durable.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from rft.checkpoint.records import (
    CHUNK,
    FORMAT,
    Begin,
    CheckpointSettings,
    Output,
    Patch,
    Receipt,
    SavedPart,
    Window,
    decode_json,
    encode_json,
)
from rft.checkpoint.storage import VERSIONS, Sink, Storage
from rft.ground import durable

log = logging.getLogger(__name__)
STRATEGIES = ("unrestricted", "single_node", "single_process", "single_thread")
LOOK_S = 0.02  # between tries to pass the gate; nothing tells when another process's lock goes
PIECE = 2**23  # bytes per write call: small enough that a limit on the rate is kept evenly


def receipt_name(rank: int) -> str:
    return f"r{rank:05d}.json"


def file_name(rank: int) -> str:
    return f"r{rank:05d}.bin"


def abandoned_name(rank: int) -> str:
    return f"r{rank:05d}.abandoned"


class NoSpace(OSError):
    """Refused before the first byte."""


class ChunkHasher:
    """xxh3-128 of every CHUNK bytes of a stream."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._hash, self._left = xxhash.xxh3_128(), CHUNK

    def update(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self._left], data[self._left :]
            self._hash.update(part)
            self._left -= len(part)
            if not self._left:
                self._end_chunk()

    def finish(self) -> list[str]:
        if self._left < CHUNK:
            self._end_chunk()
        return self.digests

    def _end_chunk(self) -> None:
        self.digests.append(self._hash.hexdigest())
        self._hash, self._left = xxhash.xxh3_128(), CHUNK

    @classmethod
    def of(cls, data: memoryview) -> list[str]:
        """Of all of them at once."""
        hasher = cls()
        hasher.update(data)
        return hasher.finish()


class Stream(Protocol):
    """One output on its way to its file."""

    output: Output

    @property
    def chunks(self) -> list[str]: ...
    @property
    def patch(self) -> Patch | None: ...
    def write(self, piece: memoryview) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def done(self, begin: Begin) -> None:
        """The receipt is durable."""


# of a version, by what makes its file with so much room reserved
Keep = Callable[[Output, Callable[[int], Sink]], Stream]


@dataclass
class PlainStream:
    """Bytes as they are."""

    output: Output
    sink: Sink
    hasher: ChunkHasher = field(default_factory=ChunkHasher)
    patch: Patch | None = None

    def write(self, piece: memoryview) -> None:
        self.hasher.update(piece)
        self.sink.write(piece)

    def close(self) -> None:
        self.sink.close()

    def abort(self) -> None:
        self.sink.abort()

    @property
    def chunks(self) -> list[str]:
        return self.hasher.finish()

    def done(self, begin: Begin) -> None: ...


class Writer:
    """Writes the outputs of one `Begin`, window by window.

    `pace(bytes)` is called after each piece. A version that cannot be kept (`lose` hears why) costs
    the other outputs nothing.
    """

    def __init__(
        self,
        begin: Begin,
        settings: CheckpointSettings,
        storage: Storage,
        pace: Callable[[int], None],
        keep: Keep | None = None,
        lose: Callable[[Begin, Output, str], None] = lambda begin, output, cause: None,
    ):
        self.begin = begin
        self.settings = settings
        self.storage = storage
        self.pace = pace
        self.started = time.monotonic()
        self.lost: set[str] = set()  # collections of what could not be kept
        self.windows: list[Window] = []  # that were written
        self._keep = keep
        self._lose = lose
        self._streams: list[Stream] | None = None
        self._is_finished = False

    @property
    def outputs(self) -> list[Output]:
        """Those that may still be committed."""
        return [output for output in self.begin.outputs if output.collection not in self.lost]

    @property
    def chunks(self) -> list[str]:
        """Hashes of all that was staged, where a full checkpoint was written of it."""
        full = [stream for stream in self._open_streams if not stream.output.collection]
        return full[0].chunks if full and self._is_finished else []

    def window(self, data: memoryview, start: int) -> None:
        """Append bytes that lie at `start` of the file; windows come in order. Raises OSError."""
        if self._streams is None:
            self._streams = []
            for output in self.begin.outputs:
                with self._on_its_own(output):
                    if not self._is_done(output):
                        self._streams.append(self._open(output))
        for stream in self._open_streams:
            part = data[: max(0, stream.output.bytes - start)]
            with self._on_its_own(stream.output):
                for at in range(0, len(part), PIECE):
                    piece = part[at : at + PIECE]
                    stream.write(piece)
                    self.pace(len(piece))

    def finish(self) -> None:
        """Make every output durable and say so in its receipt."""
        for stream in self._open_streams:
            with self._on_its_own(stream.output):
                stream.close()
                receipt = self._receipt(stream)
                self.storage.put(
                    f"{stream.output.draft}/{receipt_name(self.settings.rank)}",
                    encode_json(receipt),
                )
                stream.done(self.begin)
        self._is_finished = True

    @property
    def _open_streams(self) -> list[Stream]:
        return [s for s in self._streams or [] if s.output.collection not in self.lost]

    @contextlib.contextmanager
    def _on_its_own(self, output: Output) -> Iterator[None]:
        """Whatever keeps a version from the disk, of the rest of the save it says nothing."""
        try:
            yield
        except Exception as error:
            if output.collection != VERSIONS:
                raise
            for stream in self._open_streams:
                if stream.output is output:
                    stream.abort()
            self.lost.add(output.collection)
            self._lose(self.begin, output, str(error))

    def abort(self) -> None:
        for stream in self._streams or []:
            stream.sink.abort()

    def _open(self, output: Output) -> Stream:
        self._check_room(output)
        if output.collection:
            self.storage.begin(output.collection)
        self.storage.begin(output.draft)
        path = f"{output.draft}/{file_name(self.settings.rank)}"
        self.storage.discard(path)  # of this rank's agent before it died and was started again
        if output.collection == VERSIONS:
            assert self._keep is not None
            return self._keep(output, lambda size: self.storage.create(path, size))
        return PlainStream(output, self.storage.create(path, output.bytes))

    def _check_room(self, output: Output) -> None:
        """Versions leave room for a checkpoint. Raises NoSpace."""
        free = self.storage.free_bytes()
        if free is None:
            return
        needs = f"{output.bytes / 1e9:.2f} GB"
        if output.collection == VERSIONS:
            if free < output.bytes + self.settings.reserve:
                raise NoSpace(
                    f"{self.storage.where}: {free / 1e9:.2f} GB are free, of which "
                    f"{self.settings.reserve / 1e9:.2f} GB are left to checkpoints, and a version "
                    f"may need {needs}; free some space, or set "
                    "trainer.checkpoint.versions=needed, or none"
                )
        elif free < output.bytes:
            raise NoSpace(
                f"{self.storage.where}: {free / 1e9:.2f} GB are free, this rank's part of a "
                f"checkpoint needs {needs}; free some space, or keep fewer with "
                "trainer.max_checkpoints_to_keep"
            )

    def _is_done(self, output: Output) -> bool:
        """An agent before this one, of the same run epoch, has got as far as the receipt."""
        try:
            data = self.storage.get(f"{output.draft}/{receipt_name(self.settings.rank)}")
        except FileNotFoundError:
            return False
        return decode_json(data, Receipt).id == self.begin.id

    def _receipt(self, stream: Stream) -> Receipt:
        output, begin = stream.output, self.begin
        if output.collection == VERSIONS:  # no run goes on from it
            begin = msgspec.structs.replace(begin, small={}, local={})
        return receipt_of(self.settings, begin, output, stream.chunks, stream.patch)


def receipt_of(
    settings: CheckpointSettings,
    begin: Begin,
    part: Output | SavedPart,
    chunks: list[str],
    patch: Patch | None = None,
) -> Receipt:
    """Of this rank's `part` of a save, whose bytes have these hashes."""
    return Receipt(
        format=FORMAT,
        id=begin.id,
        step=begin.step,
        epoch=settings.epoch,
        rank=settings.rank,
        world=settings.world,
        layout=part.layout,
        file=file_name(settings.rank),
        bytes=part.bytes,
        chunks=chunks,
        regions=part.regions,
        small=begin.small,
        local=begin.local,
        loop=begin.loop,
        about=begin.about,
        patch=patch,
    )


class Pacer:
    """Keeps a stream of bytes at or below `rate` bytes per second (0: as fast as it goes)."""

    def __init__(self, rate: float):
        self.rate = rate
        self._due = 0.0

    def __call__(self, count: int) -> None:
        if self.rate:
            now = time.monotonic()
            self._due = max(self._due, now) + count / self.rate
            time.sleep(max(0.0, self._due - now))


class Gate:
    """How many agents may write at the same time, by `save_strategy`: `with gate.passed():` around
    the writing of one save.

        unrestricted     all                        single_node       those of one node
        single_process   one agent in the system    single_thread
                one agent, one stream (an agent has one stream)

    Locks of files (flock) in the job's control directory: the kernel gives them back when a holder
    dies, so the gate cannot stay closed; one that stays closed because its holder hangs is passed,
    loudly, after `patience_s`. It delays writing, never staging.
    """

    def __init__(self, control: Path, strategy: str, patience_s: float, node: str = ""):
        self.directory = control / "gate"
        self.strategy = strategy
        self.patience_s = patience_s
        self.node = node or socket.gethostname()
        self.directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        held = self._wait() if self.strategy != "unrestricted" else []
        try:
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)

    def _wait(self) -> list[int]:
        end = time.monotonic() + self.patience_s
        while (held := self._try()) is None:
            if time.monotonic() > end:
                log.error(
                    "save_strategy=%s: waited %g s for another writer, going on",
                    self.strategy,
                    self.patience_s,
                )
                return []
            time.sleep(LOOK_S)
        return held

    def _try(self) -> list[int] | None:
        """Descriptors that hold the gate; None when it is somebody else's turn."""
        if self.strategy != "single_node":
            mine = durable.lock(self.directory / "writer")
            return [mine] if mine is not None else None
        # one at a time looks at who is inside
        door = durable.lock(self.directory / "door")
        if door is None:
            return None
        try:
            if any(
                durable.is_locked(path, by_anybody=True)
                for path in self.directory.glob("node-*")
                if path.name != f"node-{self.node}"
            ):
                return None
            mine = durable.lock(self.directory / f"node-{self.node}", shared=True)
            return [mine] if mine is not None else None
        finally:
            os.close(door)
