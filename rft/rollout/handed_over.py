"""Weights that lie in Ray's object store, handed to an engine's workers, which are no processes of Ray's.

    object references ──get──► views of the store ──► one file in memory ──path──► workers map it and check every bucket

In: an update whose origin lists (reference, checksum) per bucket of every stream. Out: the same with a path and places in it. The
file has no name of its own: workers reach it through this process, so nothing is left when this process is killed. Invariant: it
is there until the block is left, and a bucket of the store is held no longer than its copy takes.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class NotThere(RuntimeError):
    """The object store has lost what it was given. `kind`: nothing is wrong with this engine."""

    kind = "unreachable"


@asynccontextmanager
async def handed_over(update: dict[str, Any], timeout: float) -> AsyncIterator[dict[str, Any] | None]:
    """The origin for workers. What does not lie in the object store is passed on as it is."""
    if update.get("method") != "memory":
        yield update.get("origin")
        return
    file = os.memfd_create("weights")
    try:
        async with asyncio.timeout(timeout):
            streams = [[await _copy(file, *bucket) for bucket in stream] for stream in update["origin"]["streams"]]
        yield {"path": f"/proc/{os.getpid()}/fd/{file}", "streams": streams}
    finally:
        os.close(file)


async def _copy(file: int, reference: Any, digest: str) -> tuple[int, int, str]:
    """Append one bucket; returns where it lies, its length and its checksum."""
    from ray.exceptions import RayError

    try:
        data = await reference
    except RayError as error:
        raise NotThere(f"a bucket of weights is not in the object store any more: {error}") from error
    start = os.lseek(file, 0, os.SEEK_END)
    await asyncio.to_thread(_append, file, memoryview(data))
    return start, len(data), digest


def _append(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]
