"""An event loop whose clock only moves when nothing else is left to do: hours of timeouts pass in
no time, in their order.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Work in threads (the journal's fsync) takes no time on this clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.in_threads = 0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> Any:
        self.in_threads += 1
        future = super().run_in_executor(executor, function, *arguments)
        future.add_done_callback(self._back)
        return future

    def _back(self, _: Any) -> None:
        self.in_threads -= 1

    def _run_once(self) -> None:
        timers = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and not self.in_threads and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, min(timer.when() for timer in timers))
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
