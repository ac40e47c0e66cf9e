"""How often what has died may be started again: a budget within any hour, and the first cause.

In: a death, with its cause. Out: whether it may be started again; where not, why, with the cause of
the first death of that hour, which the later ones only follow, and how long to wait before one
that is broken begins anew. Pure, but for the clock, and for a file in which processes that follow
each other count on.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rft.ground import durable, redact

HOUR_S = 3600.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Restarts:
    """The budget of one part. `limit`: 0 means that its first death is final. `kept`: a file with
    the deaths that others have counted, of this boot of the machine, and for these.
    """

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        kept: Path | None = None,
    ):
        self.limit = limit
        self.clock = clock
        self.kept = kept
        self._deaths: deque[tuple[float, str]] = deque()
        if kept is not None and kept.exists():
            told = json.loads(kept.read_text(encoding="utf-8"))
            self._deaths.extend((at, cause) for at, cause in told)

    def allow(self, cause: str) -> bool:
        """Count a death. False: it was one too many."""
        now = self.clock()
        while self._deaths and now - self._deaths[0][0] >= HOUR_S:
            self._deaths.popleft()
        self._deaths.append((now, cause))
        self._keep()
        return len(self._deaths) <= self.limit

    def _keep(self) -> None:
        if self.kept is None:
            return
        with contextlib.suppress(OSError):  # a full disk costs the count, and no run
            durable.put(self.kept, redact.text(json.dumps(list(self._deaths))))

    @property
    def first(self) -> str:
        """The cause of the first death within the hour before the last."""
        return self._deaths[0][1]

    def told(self) -> str:
        """How much of the budget is spent."""
        return f"{self.used} of {self.limit} within an hour"

    @property
    def used(self) -> int:
        """Of the budget, as it is now."""
        return len(self._deaths)

    def cause(self) -> str:
        """Of the end, once nothing is left of the budget."""
        first = self.first
        if self.limit == 0:
            return first
        last = self._deaths[-1][1]
        told = f"it died {len(self._deaths)} times within an hour; the first cause: {first}"
        return told if last == first else f"{told}; the last: {last}"


def pause_s(times: int) -> float:
    """Before one that has broken so many times begins anew: twice as long each time."""
    return min(PAUSE_S * 2 ** max(0, times - 1), LONGEST_PAUSE_S)
