"""What this process could not write down beside its work: counted, told, and never raised.

In: the word of a writer of side data (metrics, samples, timeline, logs, a service) that it had to
leave something out, and why. Out: `count()`, the metric `monitor/left_out`; the first of each kind
in the log as it happens, all of them in one line at the end. Invariant: a full disk, a broken one
or a damaged file costs side data, not the run.
"""

import logging
import threading
from collections import Counter

log = logging.getLogger(__name__)
_left_out: Counter[str] = Counter()
_lock = threading.Lock()


def note(what: str, error: BaseException) -> None:
    """One more of `what` is lost. Raises nothing: the log itself may lie on the full disk."""
    with _lock:
        _left_out[what] += 1
        first = _left_out[what] == 1
    if first:
        unexpected = None if isinstance(error, OSError) else error
        said = f"{type(error).__name__}: {error}"
        log.warning("left out, and the run goes on: %s: %s", what, said, exc_info=unexpected)


def count() -> int:
    with _lock:
        return sum(_left_out.values())


def told() -> str:
    """For the end: how much of what, empty where nothing was left out."""
    with _lock:
        return ", ".join(f"{what} {number}" for what, number in sorted(_left_out.items()))
