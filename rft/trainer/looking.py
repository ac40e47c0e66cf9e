"""The next step's rows, made in a thread while this step trains.

    Feed.next(step) ──► ReadAhead.begin(step + 1): source.look, then what `prepare` makes of it
    Feed.next(step + 1): ReadAhead.end ──► source.take ──► the same experiences? then all is made

In: a source that can show what a step will take, and leases nothing by that. Out: what was made of
it, for whoever takes the same. Invariant: which experiences a step trains on is decided by `take`
alone, when the step begins; a look that fails, or saw other experiences, has cost time only.
"""

import logging
import operator
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar, runtime_checkable

from rft.ground.experience import Batch

T = TypeVar("T")

log = logging.getLogger(__name__)


@runtime_checkable
class ShowsNext(Protocol):
    """A `feed.BatchSource` that can be looked into; not while it is asked for a batch."""

    def begin_look(self, step: int) -> None:
        """Ask what `take` would give, once all of it is there."""

    def look(self) -> Batch:
        """The answer; runs in another thread. Empty: there is nothing to see. Of experiences that
        it has, a `take` behind it gives the same objects.
        """

    def look_away(self) -> None:
        """Let a `look` that waits end: it may raise."""


class ReadAhead(Generic[T]):
    def __init__(self, source: ShowsNext, prepare: Callable[[Batch], T]):
        self.source = source
        self.prepare = prepare
        self.over: Callable[[], None] = lambda: None  # told, in that thread, behind each look
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._looking: Future[tuple[Batch, T] | None] | None = None

    def begin(self, step: int) -> None:
        self.source.begin_look(step)
        self._looking = self._thread.submit(self._look)
        self._looking.add_done_callback(lambda _: self.over())

    def end(self) -> Callable[[Batch], T | None]:
        """Wait no longer for what is not there. Returns what tells of a batch what was made of it,
        where it is the one that was seen.
        """
        looking, self._looking = self._looking, None
        if looking is None:
            return lambda batch: None
        self.source.look_away()
        if error := looking.exception():  # whoever takes the batch will meet it, too
            log.info("the next batch could not be read ahead: %s", error)
        seen = None if error else looking.result()
        return lambda batch: seen[1] if seen and is_same(seen[0], batch) else None

    def close(self) -> None:
        self.end()
        self._thread.shutdown()

    def _look(self) -> tuple[Batch, T] | None:
        batch = self.source.look()
        return (batch, self.prepare(batch)) if batch.experiences else None


def is_same(one: Batch, other: Batch) -> bool:
    """Of the same objects, in the same order."""
    return (
        one.step == other.step
        and one.replayed == other.replayed
        and len(one.experiences) == len(other.experiences)
        and all(map(operator.is_, one.experiences, other.experiences))
    )
