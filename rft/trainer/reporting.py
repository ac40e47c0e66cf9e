"""What rank 0 writes down each step: metrics to every sink, a few rollouts to samples.jsonl,
evaluations as they arrive.

In: the loop's metrics (already global) and the step's experiences. Out: one record per policy
version. The one owner of the run's monitor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.config import Config
from rft.ground.experience import EvalResult, Experience
from rft.monitor.metrics import Speed
from rft.monitor.records import RunRecord
from rft.monitor.sinks import build

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class StepReporter:
    """`tokenizer` (of the model directory) turns sampled ids into text for the samples table;
    `speed` knows what a token costs, `pool` how many engines serve.
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
        self.num_samples = config.monitor.num_samples
        self.detailed = config.monitor.detailed
        self.tokenizer = tokenizer
        self.speed = speed
        self.pool = pool
        sets = [
            f"eval/{taskset.name}/accuracy"
            for taskset in config.buffer.explorer_input.eval_tasksets
        ]
        # those of this step and before: `build` has dropped the rest
        rows = RunRecord(job).rows
        self.evaluated = {
            row["step"]: row for row in rows if sets and all(name in row for name in sets)
        }

    def step(self, version: int, metrics: dict[str, float], experiences: list[Experience]) -> None:
        tokens = sum(len(e.tokens) for e in experiences)
        trained = [len(e.tokens) for e in experiences if any(e.action_mask)]
        speed = self.speed.metrics(trained, metrics["time/train_s"])
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
            "prompt": self.tokenizer.decode(experience.tokens[: experience.prompt_length]),
            "response": self.tokenizer.decode(experience.tokens[experience.prompt_length :]),
            "reward": experience.reward,
            "outcome": experience.reward_outcome,
            "stop": experience.stop,
            "versions": ",".join(f"{s.version}:{s.start}-{s.end}" for s in experience.versions),
        }


def distributions(experiences: list[Experience], step: int) -> dict[str, list[float]]:
    """What `monitor.detailed` adds: the values behind the means of a step.

    `step`: the policy version that trains on them.
    """
    rollouts = [e for e in experiences if e.group >= 0]
    found = {
        "response_length": [float(e.response_length) for e in experiences],
        "reward": [float(e.reward) for e in rollouts],
        "staleness": [
            float(step - e.oldest_version) for e in rollouts if e.oldest_version is not None
        ],
        "logprob": [
            float(p)
            for e in rollouts
            for p, mask in zip(e.logprobs or [], e.action_mask, strict=False)
            if mask
        ],
    }
    return {name: values for name, values in found.items() if values}


def quantiles(values: dict[str, list[float]]) -> dict[str, float]:
    """`reward/p05` and its like, for whoever has no histograms."""
    import numpy as np

    return {
        f"{name}/p{round(100 * share):02d}": float(np.quantile(found, share))
        for name, found in values.items()
        for share in QUANTILES
    }


def representative(experiences: list[Experience], count: int) -> list[Experience]:
    """The best and the worst of the batch, `count` in all, by reward."""
    ordered = sorted(experiences, key=lambda e: e.reward)
    low = count // 2
    return ordered[:low] + ordered[len(ordered) - (count - low) :]
