"""What is written down of steps: metrics and samples of each, the batch of one that was skipped, a
profile of those asked for.

    StepReporter    metrics to every sink, a few rollouts to samples.jsonl, evaluations as they
                    arrive; at rank 0, the one owner of the run's monitor
    SkippedSteps    <job>/failed_batches/step_<n>.msgpack
    Profiler        <job>/profile/steps_<first>_<last>_rank_<n>.json

In: the loop's metrics, the same on every rank, and at rank 0 the step's experiences; the loop's
word that a step begins and ends. Out: one record per policy version, and these files.
"""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rft.algorithm.advantages import total_reward
from rft.algorithm.credit import is_baseline
from rft.config import Config, ConfigError, TrainerConfig
from rft.ground import durable
from rft.ground.device import Device
from rft.ground.experience import Batch, EvalResult, Experience, encode
from rft.monitor import left_out
from rft.monitor.metrics import Speed
from rft.monitor.run_record import RunRecord
from rft.monitor.sinks import build

log = logging.getLogger(__name__)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KEPT = 10  # batches of skipped steps
WORK = ("tokens", "forward_flops")  # of one epoch, as `packing.work_of` tells them


class StepReporter:
    """`tokenizer` (of the model directory) turns sampled ids into text for the samples table;
    `speed` knows the devices, `pool` how many engines serve.
    """

    def __init__(
        self,
        config: Config,
        job: Path,
        step: int,
        tokenizer: Any,
        speed: Speed,
        pool: Callable[[], dict[str, float]],
    ):
        self.monitor = build(
            config.monitor, job, config.project, config.name, config.trainer.total_steps, step
        )
        self.epochs = config.trainer.ppo_epochs
        self.num_samples = config.monitor.num_samples
        self.detailed = config.monitor.detailed
        self.tokenizer = tokenizer
        self.speed = speed
        self.pool = pool
        sets = [
            f"eval/{taskset.name}/accuracy"
            for taskset in config.buffer.explorer_input.eval_tasksets
        ]
        # `build` has dropped those of later steps, unless the disk is full
        told = RunRecord(job).having(sets) if sets else []
        self.evaluated = {row["step"]: row for row in told if row["step"] <= step}

    def step(self, version: int, metrics: dict[str, float], experiences: list[Experience]) -> None:
        tokens = sum(len(e.tokens) for e in experiences)
        done = (self.epochs * metrics.get(f"packing/{name}", 0.0) for name in WORK)
        speed = self.speed.metrics(*done, metrics["time/train_s"])
        speed["tokens_per_s"] = tokens / metrics["time/step_s"]
        values = distributions(experiences, version - 1) if self.detailed else {}
        self.monitor.log({**metrics, **speed, **self.pool(), **quantiles(values)}, version)
        if values:
            self.monitor.histograms(values, version)
        if self.num_samples and experiences and experiences[0].group >= 0:
            self.monitor.table(
                "samples",
                [self._row(e) for e in representative(experiences, self.num_samples)],
                version,
            )

    def evaluation(self, result: EvalResult) -> None:
        metrics = {f"eval/{result.taskset}/{name}": value for name, value in result.metrics.items()}
        self.monitor.log(metrics, result.version)
        self.monitor.table(f"eval_{result.taskset}", result.samples, result.version)

    def close(self) -> None:
        self.monitor.close()

    def _row(self, experience: Experience) -> dict[str, Any]:
        return {
            "task": experience.task,
            "prompt": self.tokenizer.decode(experience.prompt_ids),
            "response": self.tokenizer.decode(experience.response_ids),
            "reward": total_reward(experience),
            "outcome": experience.reward_outcome,
            "stop": experience.stop,
            "versions": ",".join(f"{s.version}:{s.start}-{s.end}" for s in experience.versions),
        }


def distributions(experiences: list[Experience], step: int) -> dict[str, list[float]]:
    """What `monitor.detailed` adds: the values behind the means of a step.

    `step`: the policy version that trains on them.
    """
    experiences = [e for e in experiences if not is_baseline(e)]
    rollouts = [e for e in experiences if e.group >= 0]
    found = {
        "response_length": [float(e.response_length) for e in experiences],
        "reward": [total_reward(e) for e in rollouts if not e.failed],
        "staleness": [
            float(step - e.oldest_version) for e in rollouts if e.oldest_version is not None
        ],
        "logprob": [
            float(p)
            for e in rollouts
            for p, mask in zip(e.logprobs, e.action_mask, strict=False)
            if mask
        ],
    }
    return {name: values for name, values in found.items() if values}


def quantiles(values: dict[str, list[float]]) -> dict[str, float]:
    """`reward/p05` and its like, for whoever has no histograms."""
    import numpy as np

    return {
        f"{name}/p{round(100 * share):02d}": float(np.quantile(numbers, share))
        for name, numbers in values.items()
        for share in QUANTILES
    }


def representative(experiences: list[Experience], count: int) -> list[Experience]:
    """The best and the worst of the batch, `count` in all, by reward."""
    ordered = sorted(experiences, key=total_reward)
    low = count // 2
    return ordered[:low] + ordered[max(low, len(ordered) - (count - low)) :]


class NotFinite(RuntimeError):
    """`max_skipped_steps` steps in a row were skipped."""


class SkippedSteps:
    """Steps that changed nothing, for their loss or gradient was not finite: counted (the metric
    `skipped_steps`), kept for replay as the `Batch` of the step that metrics call n, the last KEPT
    written, and too many end the run. Invariant: a run that ends for this has its last batch on
    disk, and says where, whichever rank is heard first.

    `limit` in a row end the run; 0: none do. `lead`: this rank has the experiences and writes.
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
                try:
                    self.keep(Batch(step=step - 1, experiences=experiences))
                except OSError as error:
                    left_out.note("batches of skipped steps", error)
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


class Profiler:
    """Looks closely at some steps: a Chrome trace by torch's profiler, or named ranges for NVIDIA's
    Nsight Systems.

        trainer.profiler=torch    for chrome://tracing or Perfetto
        trainer.profiler=nsys     nsys profile --capture-range=cudaProfilerApi ... python -m
                                  rft.train ...

    Invariant: outside `trainer.profile_steps`, and on ranks not in `trainer.profile_ranks`, nothing
    is recorded and nothing is loaded.
    """

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
        path = self.directory / f"steps_{self.first}_{step}_rank_{self.rank}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            left_out.note("profiles", error)
        log.info("profile of steps %d to %d: %s", self.first, step, path)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A named part of a step, in the trace."""
        if not self.active:
            return contextlib.nullcontext()
        if self.kind == "nsys":
            return self.device.range(name)
        from torch.profiler import record_function

        return record_function(name)
