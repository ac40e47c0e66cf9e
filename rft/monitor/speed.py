"""How fast a step was: tokens and floating-point operations over the time that the ranks computed.

In: the lengths of the sequences that were trained on and the seconds of the training span (no
waits: `Timer` takes them out). Out: `perf/...`. A training step is counted as three forward passes
(the backward pass costs two); a model FLOPs utilisation counts no operation that is done twice, so
recomputed activations are in `perf/hfu` only, as a fourth pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MODEL_PASSES, RECOMPUTED_PASSES = 3, 4


@dataclass(frozen=True)
class Speed:
    """`cost`:

    FLOPs of one forward pass by length; `peak_tflops`: of one device, None where that is not known.
    """

    cost: Callable[[Any], Any]
    ranks: int
    peak_tflops: float | None
    recomputes: bool

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        import numpy as np

        if not len(lengths) or seconds <= 0:
            return {}
        forward = float(self.cost(np.array(lengths, dtype=np.float64)).sum())
        tflops = forward / seconds / self.ranks / 1e12
        found = {
            "perf/tokens_per_s": sum(lengths) / seconds,
            "perf/tflops_per_gpu": MODEL_PASSES * tflops,
        }
        if self.peak_tflops:
            found["perf/mfu"] = MODEL_PASSES * tflops / self.peak_tflops
            if self.recomputes:
                found["perf/hfu"] = RECOMPUTED_PASSES * tflops / self.peak_tflops
        return found
