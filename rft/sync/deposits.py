"""What trainer ranks have left for the engines in Ray's object store: references to buckets, stream by stream.

    ranks ── put(mark, stream, buckets) ──► complete(mark): all streams are here ──► one origin that engines take from

In: lists of (object reference, checksum). Out: an update's origin, when every stream of the plan has been left. Invariant: of one
version all streams are handed out or none; references are given up as soon as a newer version is served, and with the last one
that reads them the objects go.
"""

import asyncio
from collections import defaultdict
from typing import Any

from rft.sync.members import Mark


class Deposits:
    """Belongs to one synchronizer; `streams` of the plan that its trainer follows."""

    def __init__(self) -> None:
        self.streams = 0
        self._left: dict[Mark, dict[int, list[Any]]] = defaultdict(dict)
        self._changed = asyncio.Condition()

    def begin(self, streams: int) -> None:
        """A trainer attaches; what one before it has left, and nobody serves, is void."""
        self.streams = streams
        self._left.clear()

    async def put(self, mark: Mark, stream: int, buckets: list[Any]) -> None:
        self._left[mark][stream] = buckets
        async with self._changed:
            self._changed.notify_all()

    async def complete(self, mark: Mark, timeout: float) -> dict[str, Any]:
        """The update of `mark`; TimeoutError names the streams that have not come."""
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: len(self._left[mark]) == self.streams)
        except TimeoutError:
            missing = sorted(set(range(self.streams)) - set(self._left[mark]))
            raise TimeoutError(
                f"of version {mark[1]} stream(s) {missing} were not left in {timeout:g} s, {len(self._left[mark])} were"
            ) from None
        found = self._left.pop(mark)
        return {"method": "memory", "origin": {"streams": [found[index] for index in range(self.streams)]}}
