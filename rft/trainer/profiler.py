"""Looking closely at some steps: a Chrome trace by torch's profiler, or named ranges for NVIDIA's
Nsight Systems.

    trainer.profiler=torch    <job>/profile/steps_<first>_<last>_rank_<n>.json, for chrome://tracing
                              or Perfetto
    trainer.profiler=nsys     nsys profile --capture-range=cudaProfilerApi ... python -m rft.train
                              ...

In: the loop's word that a step begins and ends, and the names of its parts. Invariant: outside
`trainer.profile_steps`, and on ranks not in `trainer.profile_ranks`, nothing is recorded and
nothing is loaded.
"""

import contextlib
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rft.config import ConfigError, TrainerConfig
from rft.ground.device import Device

log = logging.getLogger(__name__)


class Profiler:
    def __init__(self, config: TrainerConfig, rank: int, device: Device, directory: Path):
        self.kind = config.profiler if rank in config.profile_ranks else None
        if self.kind == "nsys" and device.kind != "cuda":
            raise ConfigError("trainer.profiler=nsys needs CUDA, and there is none here: use torch")
        self.first, self.last = config.profile_steps
        self.rank = rank
        self.device = device
        self.directory = directory
        self.active = False
        self._torch: Any = None

    def begin(self, step: int) -> None:
        """Step number `step`, as metrics count, is about to begin."""
        if self.kind is None or self.active or not self.first <= step <= self.last:
            return
        self.active = True
        self.first = step  # later than asked for where a run was resumed
        if self.kind == "torch":
            from torch.profiler import profile

            self._torch = profile()
            self._torch.start()
        else:
            self.device.capture(True)

    def end(self, step: int) -> None:
        """Step number `step` is over."""
        if self.active and step >= self.last:
            self.close(step)

    def close(self, step: int) -> None:
        """Write what there is: `step` was the last one."""
        if not self.active:
            return
        self.active = False
        if self.kind == "nsys":
            self.device.capture(False)
            return
        self._torch.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"steps_{self.first}_{step}_rank_{self.rank}.json"
        self._torch.export_chrome_trace(str(path))
        log.info("profile of steps %d to %d: %s", self.first, step, path)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A named part of a step, in the trace."""
        if not self.active:
            return contextlib.nullcontext()
        if self.kind == "nsys":
            return self.device.range(name)
        from torch.profiler import record_function

        return record_function(name)
