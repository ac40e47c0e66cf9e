"""Numbers of a step: how long its parts took, how fast it was, and what metrics are called here and
elsewhere, so that a dashboard of another system can be pointed at a run of this one.

Speed. In: tokens and FLOPs of what was trained on, and the seconds of the training span (no waits:
`Timer` takes them out). Out: `perf/...`. A training step is counted as three forward
passes (the backward pass costs two); a model FLOPs utilisation counts no operation that is done
twice, so recomputed activations are in `perf/hfu` only, as a fourth pass.

Names. In: a step's metrics under their own names. Out, with `monitor.other_names=true`: the same
numbers also under the names in `ELSEWHERE`. Invariant: a number is copied, never computed: where
another system's metric means something else, it has no entry.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MODEL_PASSES, RECOMPUTED_PASSES = 3, 4
ELSEWHERE = {  # name in other systems -> name here
    "actor/final_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_frac",
    "actor/pg_clipfrac_lower": "clip_frac_dual",
    "actor/ppo_kl": "kl/old",
    "clip_frac/low": "clip_frac_low",
    "clip_frac/high": "clip_frac_high",
    "actor/kl_loss": "kl/reference",
    "actor/entropy_loss": "entropy/mean",
    "actor/lr": "lr",
    "critic/score/mean": "reward/mean",
    "critic/score/max": "reward/max",
    "critic/score/min": "reward/min",
    "critic/rewards/mean": "reward/mean",
    "critic/rewards/max": "reward/max",
    "critic/rewards/min": "reward/min",
    "kl/ref": "kl/reference",
    "zero_signal_groups": "reward/zero_signal_groups",
    "mfu": "perf/mfu",
    "perf/mfu/actor": "perf/mfu",
    "time/train_step": "time/train_s",
    "time/read_experience": "time/wait_batch_s",
    "time/sync_weight": "time/sync_wait_s",
    "time/save_checkpoint": "time/checkpoint_s",
    "time/wait_batch": "time/wait_batch_s",
    "time/score": "time/score_s",
    "time/train": "time/train_s",
    "time/sync": "time/sync_wait_s",
    "time/stage": "time/staging_wait_s",
    "time/eval": "time/eval_s",
    "time/step": "time/step_s",
    "engine/running": "pool/running",
    "ckpt/stage_s": "checkpoint/copy_s",
    "ckpt/write_s": "checkpoint/commit_s",
    "ckpt/bytes": "checkpoint/bytes",
    "ckpt/behind_steps": "checkpoint/behind_steps",
}


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


@dataclass(frozen=True)
class Speed:
    """`peak_tflops`: of one device, None where that is not known."""

    ranks: int
    peak_tflops: float | None
    recomputes: bool

    def metrics(self, tokens: float, forward: float, seconds: float) -> dict[str, float]:
        """`forward`: FLOPs of one forward pass over these tokens."""
        if not tokens or seconds <= 0:
            return {}
        tflops = forward / seconds / self.ranks / 1e12
        found = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/tflops_per_gpu": MODEL_PASSES * tflops,
        }
        if self.peak_tflops:
            found["perf/mfu"] = MODEL_PASSES * tflops / self.peak_tflops
            if self.recomputes:
                found["perf/hfu"] = RECOMPUTED_PASSES * tflops / self.peak_tflops
        return found


def with_other_names(metrics: dict[str, float]) -> dict[str, float]:
    """`metrics`, and each that is known elsewhere under that name too."""
    return metrics | {
        other: metrics[ours]
        for other, ours in ELSEWHERE.items()
        if ours in metrics and other not in metrics
    }
