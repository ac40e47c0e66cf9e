"""Versions that lie somewhere, as the synchronizer finds them: left by trainer ranks in Ray's
object store, or saved where no trainer need be.

This is the one place where weight synchronization looks again and again: a shared directory or an
object store tells nobody of a change. A medium that does not answer is asked again, and after
`patience` seconds it is an error.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rft.checkpoint.catalog import list_entries, read_manifest, weights_of
from rft.checkpoint.storage import WEIGHTS, open_storage
from rft.ground.rounds import InStore
from rft.sync.members import Mark

log = logging.getLogger(__name__)
LOOK_S = 2.0


class VersionLost(RuntimeError):
    """Some of it was left with a synchronizer that died, and cannot be left again."""


class Deposits:
    """What trainer ranks have left for the engines in Ray's object store: (reference, checksum) of
    every bucket, stream by stream.

        ranks ── put(mark, stream, number, bucket) ──► complete(mark): all are here ──► location

    Belongs to one synchronizer; `sizes`: buckets of each stream of the plan that its trainer
    follows. Of one version all streams are handed out or none; references are given up as soon as a
    newer version is served, and with the last one that reads them the objects go. Of a version that
    is given up nothing is kept, also of what comes later.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._left: dict[Mark, dict[tuple[int, int], tuple[Any, str]]] = defaultdict(dict)
        self._lost: set[Mark] = set()
        self._done: Mark | None = None  # handed out last
        self._changed = asyncio.Condition()

    def begin(self, sizes: list[int]) -> None:
        """A trainer attaches; what one before it has left, and nobody serves, is void."""
        self.sizes, self._done = sizes, None
        self._left.clear()

    async def put(self, mark: Mark, stream: int, number: int, bucket: tuple[Any, str]) -> None:
        if mark in self._lost or (self._done is not None and mark <= self._done):
            return  # nobody takes it, or it was left twice
        self._left[mark][stream, number] = bucket
        async with self._changed:
            self._changed.notify_all()

    async def give_up(self, mark: Mark) -> None:
        """Some of `mark` never comes."""
        self._lost.add(mark)
        self._left.pop(mark, None)
        async with self._changed:
            self._changed.notify_all()

    async def complete(self, mark: Mark, timeout: float) -> InStore:
        """Where `mark` lies; TimeoutError names the streams that are not whole, and VersionLost
        is raised when some never will be.
        """

        def is_decided() -> bool:
            return mark in self._lost or len(self._left[mark]) == sum(self.sizes)

        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(is_decided)
        except TimeoutError:
            here = Counter(stream for stream, _ in self._left[mark])
            late = [
                f"{here[i]} of {size} buckets of stream {i}"
                for i, size in enumerate(self.sizes)
                if here[i] < size
            ]
            raise TimeoutError(
                f"version {mark[1]}: after {timeout:g} s there are {', '.join(late)}"
            ) from None
        if mark in self._lost:
            raise VersionLost(f"version {mark[1]} was left with a synchronizer that died")
        buckets = self._left.pop(mark)
        self._done = mark
        streams = [
            [buckets[index, number] for number in range(size)]
            for index, size in enumerate(self.sizes)
        ]
        return InStore(streams=streams)


@dataclass(frozen=True, order=True)
class Saved:
    """A committed save of the weights alone. `digest`: the seal of its manifest."""

    epoch: int
    version: int
    path: str
    digest: str


class Refusal(RuntimeError):
    """No engine could take a version, for a reason that lies in the version."""


def find(root: str, version: int | None = None) -> list[Saved]:
    """All of them, newest first; or that of one `version`, wherever its weights are. Raises OSError
    when the medium does not answer.
    """
    storage = open_storage(root)
    if version is not None:
        path = weights_of(storage, version)
        if path is None:
            return []
        manifest = read_manifest(storage, path)
        return [Saved(manifest.epoch, version, path, manifest.seal)]
    found = []
    for entry in list_entries(storage, WEIGHTS):
        try:
            found.append(
                Saved(entry.epoch, entry.step, entry.path, read_manifest(storage, entry.path).seal)
            )
        except FileNotFoundError:  # retention was faster
            log.info("%s is gone", entry.path)
    return sorted(found, reverse=True)


class SavedVersions:
    """What a trainer saves, seen from where there is no trainer.

        look, every LOOK_S seconds ─► committed saves, newest first ─► the first that can be
                                      published, is

    A save that no engine can take is left out from then on, and the one before it tried. What was
    published last is never older than what was published before, in the order of (run epoch,
    version). `publish` brings one to the engines; it raises Refusal when none can take it.
    """

    def __init__(
        self,
        root: str,
        publish: Callable[[Saved], Awaitable[None]],
        patience: float,
        version: int | None = None,
    ):
        """`version`: that one alone."""
        self.root = root
        self.version = version
        self.patience = patience
        self.last: Saved | None = None  # published
        self._publish = publish
        self._refused: dict[str, str] = {}  # why, by digest
        self._heard = time.monotonic()

    async def first(self) -> int | None:
        """The version that engines serve after the first look; None: nothing is saved.

        Raises when nothing of it is good.
        """
        if await self.look() is None and self.version is not None and not self._refused:
            raise RuntimeError(f"{self.root} has no weights of version {self.version}")
        if self.last is None and self._refused:
            raise RuntimeError(
                f"of the weights saved at {self.root} none can be served: {self._reasons()}"
            )
        return self.last.version if self.last else None

    async def follow(self) -> None:
        """Go on looking, for ever, unless it is one version alone: that is there. Raises what keeps
        good versions from the engines.
        """
        while self.version is None:
            await asyncio.sleep(LOOK_S)
            try:
                found = await asyncio.to_thread(find, self.root, self.version)
            except OSError as error:
                if time.monotonic() - self._heard > self.patience:
                    raise TimeoutError(
                        f"{self.root} has not answered for {self.patience:g} s: {error}"
                    ) from error
                log.warning("%s does not answer, asked again in %g s: %s", self.root, LOOK_S, error)
                continue
            await self._take(found)

    async def look(self) -> Saved | None:
        """One look: publish the newest good version, if it is newer than the last; returns it."""
        return await self._take(await asyncio.to_thread(find, self.root, self.version))

    async def _take(self, found: list[Saved]) -> Saved | None:
        self._heard = time.monotonic()
        for saved in found:
            if self.last is not None and saved <= self.last:
                return None
            if saved.digest in self._refused:
                continue
            try:
                await self._publish(saved)
            except Refusal as why:
                log.error("%s", why)
                self._refused[saved.digest] = str(why)
                continue
            self.last = saved
            return saved
        return None

    def _reasons(self) -> str:
        return "; ".join(self._refused.values())
