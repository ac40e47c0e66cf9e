"""How much processor time of a CPU engine's steps goes to its model and to its sampler.

In: vLLM's model runner, in the worker's process. Out: on the timeline, at most every PERIOD_S, the
counters "model" and "sampler": seconds of the computing thread since the start. What that thread
spends beyond the two is the rest of vLLM's step: its scheduler, its batch, its answers. Only hooks
that torch offers are used, and vLLM's modules compute what they did. On a card the same numbers
would be those of launching, so there is nothing of it.
"""

import time
from typing import Any

from rft.monitor import trace

PERIOD_S = 0.25


class DecodingTime:
    """Seconds of the thread that steps, by module; modules in each other count once."""

    def __init__(self, runner: Any):
        model = runner.get_model()
        head = getattr(model, "logits_processor", None)
        self.seconds = {"model": 0.0, "sampler": 0.0}
        self._began, self._open, self._told = 0.0, 0, 0.0
        for name, module in (("model", model), ("model", head), ("sampler", runner.sampler)):
            if module is not None:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(lambda *_, name=name: self._leave(name))

    def _enter(self, *_: Any) -> None:
        if not self._open:
            self._began = time.thread_time()
        self._open += 1

    def _leave(self, name: str) -> None:
        self._open -= 1
        if self._open:
            return
        self.seconds[name] += time.thread_time() - self._began
        if (now := time.monotonic()) - self._told > PERIOD_S:
            self._told = now
            for told, seconds in self.seconds.items():
                trace.count(told, round(seconds, 4))
