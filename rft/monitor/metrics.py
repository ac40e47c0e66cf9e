"""The timer of the parts of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Adds up named spans of a step: `with timer.span("train")`, then `pop()` gives `time/train_s`
    and starts anew.

    A span inside a span is taken out of the outer one, and `time/step_s` is the time since the last
    `pop`: the spans of a step and what no span covers add up to it, and nothing counts twice.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._inner: list[float] = []  # per open span: what the spans inside it took
        self._since = clock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - begin
            self.add(name, elapsed - self._inner.pop())
            if self._inner:
                self._inner[-1] += elapsed

    def add(self, name: str, seconds: float) -> None:
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        now = self._clock()
        spent = {f"time/{name}_s": seconds for name, seconds in self._spent.items()}
        spent["time/step_s"] = now - self._since
        self._spent, self._since = {}, now
        return spent
