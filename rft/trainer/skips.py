"""Steps that changed nothing, for their loss or gradient was not finite: counted, kept for replay,
and too many end the run.

In: the metrics of every step, which are the same on every rank, and at rank 0 the step's
experiences. Out: the metric `skipped_steps`, and `<job>/failed_batches/step_<n>.msgpack`: the
`Batch` of the step that metrics call n, the last KEPT written. Invariant: a run that ends for this
has its last batch on disk, and says where, whichever rank is heard first.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from rft.ground import durable
from rft.ground.experience import Batch, Experience, encode

log = logging.getLogger(__name__)
KEPT = 10


class NotFinite(RuntimeError):
    """`max_skipped_steps` steps in a row were skipped."""


class SkippedSteps:
    """`limit` in a row end the run; 0: none do.

    `lead`: this rank has the experiences and writes.
    """

    def __init__(self, directory: Path, limit: int, lead: bool, barrier: Callable[[str], None]):
        self.directory = directory
        self.limit = limit
        self.lead = lead
        self.barrier = barrier
        self.total = 0
        self.in_a_row = 0

    def after(
        self, step: int, metrics: dict[str, float], experiences: list[Experience]
    ) -> dict[str, float]:
        """Called by every rank after each step; `step` is the one that
        its metrics will be recorded under.
        """
        if not metrics["skipped"]:
            self.in_a_row = 0
        else:
            self.total += 1
            self.in_a_row += 1
            path = self._path(step)
            what = f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}"
            if "critic/loss" in metrics:
                what += (
                    f", the critic's {metrics['critic/loss']:g} and {metrics['critic/grad_norm']:g}"
                )
            if self.lead:
                self.keep(Batch(step=step - 1, experiences=experiences))
                log.warning("step %d skipped: %s; its batch is in %s", step, what, path)
            if self.limit and self.in_a_row >= self.limit:
                self.barrier("saving the batch of a skipped step")
                raise NotFinite(
                    f"{self.in_a_row} steps in a row were not finite and changed nothing, the last "
                    f"of them step {step} ({what}); "
                    f"its batch is saved in {path}. Look at it (docs/configure.md says how), lower "
                    "algorithm.optimizer.lr, or "
                    "raise trainer.max_skipped_steps"
                )
        return {"skipped_steps": float(self.total)}

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.msgpack"

    def keep(self, batch: Batch) -> Path:
        """Write down a batch of a step that came to nothing; of many the last ones stay."""
        path = self._path(batch.step + 1)
        self.directory.mkdir(parents=True, exist_ok=True)
        durable.put(path, encode(batch))
        others = [old for old in self.directory.glob("step_*.msgpack") if old != path]
        for old in sorted(others, key=lambda old: old.stat().st_mtime_ns)[: -(KEPT - 1)]:
            old.unlink()
        return path

    def state(self) -> list[int]:
        return [self.total, self.in_a_row]

    def restore(self, state: list[int]) -> None:
        self.total, self.in_a_row = state
