"""Versions that a trainer saves, seen from where there is no trainer: a directory or URL in, one call per new version out.

    look, every LOOK_S seconds ─► committed saves, newest first ─► the first that can be published, is
                                  a save that no engine can take is left out from then on, and the one before it tried

This is the one place where weight synchronization looks again and again: a shared directory or an object store tells nobody of a
change. A medium that does not answer is asked again, and after `patience` seconds it is an error. Invariant: what was published
last is never older than what was published before, in the order of (run epoch, version).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rft.checkpoint.commit import list_entries, read_manifest
from rft.checkpoint.storage import WEIGHTS, open_storage

log = logging.getLogger(__name__)
LOOK_S = 2.0


@dataclass(frozen=True, order=True)
class Saved:
    """A committed save of the weights alone. `digest`: the seal of its manifest."""

    epoch: int
    version: int
    path: str
    digest: str


class Refusal(RuntimeError):
    """No engine could take a version, for a reason that lies in the version."""


def find(root: str) -> list[Saved]:
    """All of them, newest first. Raises OSError when the medium does not answer."""
    storage = open_storage(root)
    found = []
    for entry in list_entries(storage, WEIGHTS):
        try:
            found.append(Saved(entry.epoch, entry.step, entry.path, read_manifest(storage, entry.path).seal))
        except FileNotFoundError:  # retention was faster
            log.info("%s is gone", entry.path)
    return sorted(found, reverse=True)


class SavedVersions:
    """`publish` brings one to the engines; it raises Refusal when none can take it."""

    def __init__(self, root: str, publish: Callable[[Saved], Awaitable[None]], patience: float):
        self.root = root
        self.patience = patience
        self.last: Saved | None = None  # published
        self._publish = publish
        self._refused: dict[str, str] = {}  # why, by digest
        self._heard = time.monotonic()

    async def first(self) -> int | None:
        """The version that engines serve after the first look; None: nothing is saved. Raises when nothing of it is good."""
        if await self.look() is None and self._refused:
            raise RuntimeError(f"of the weights saved at {self.root} none can be served: {self._reasons()}")
        return self.last.version if self.last else None

    async def follow(self) -> None:
        """Go on looking; never returns. Raises what keeps good versions from the engines."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await asyncio.to_thread(find, self.root)
            except OSError as error:
                if time.monotonic() - self._heard > self.patience:
                    raise TimeoutError(f"{self.root} has not answered for {self.patience:g} s: {error}") from error
                log.warning("%s does not answer, asked again in %g s: %s", self.root, LOOK_S, error)
                continue
            await self._take(found)

    async def look(self) -> Saved | None:
        """One look: publish the newest good version, if it is newer than the last; returns it."""
        return await self._take(await asyncio.to_thread(find, self.root))

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
