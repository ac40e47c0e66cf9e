"""What trainer ranks have left for the engines in Ray's object store: references to buckets, stream by stream.

    ranks ── put(mark, stream, number, bucket) ──► complete(mark): all are here ──► one origin that engines take from

In: (object reference, checksum) of every bucket. Out: an update's origin, when every stream of the plan is whole. Invariant: of one
version all streams are handed out or none; references are given up as soon as a newer version is served, and with the last one
that reads them the objects go.
"""

import asyncio
from collections import Counter, defaultdict
from typing import Any

from rft.sync.members import Mark


class Deposits:
    """Belongs to one synchronizer; `sizes`: buckets of each stream of the plan that its trainer follows."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._left: dict[Mark, dict[tuple[int, int], Any]] = defaultdict(dict)
        self._changed = asyncio.Condition()

    def begin(self, sizes: list[int]) -> None:
        """A trainer attaches; what one before it has left, and nobody serves, is void."""
        self.sizes = sizes
        self._left.clear()

    async def put(self, mark: Mark, stream: int, number: int, bucket: Any) -> None:
        self._left[mark][stream, number] = bucket
        async with self._changed:
            self._changed.notify_all()

    async def complete(self, mark: Mark, timeout: float) -> dict[str, Any]:
        """The update of `mark`; TimeoutError names the streams that are not whole."""
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: len(self._left[mark]) == sum(self.sizes))
        except TimeoutError:
            here = Counter(stream for stream, _ in self._left[mark])
            late = [f"{here[i]} of {size} buckets of stream {i}" for i, size in enumerate(self.sizes) if here[i] < size]
            raise TimeoutError(f"version {mark[1]}: after {timeout:g} s there are {', '.join(late)}") from None
        found = self._left.pop(mark)
        streams = [[found[index, number] for number in range(size)] for index, size in enumerate(self.sizes)]
        return {"method": "memory", "origin": {"streams": streams}}
