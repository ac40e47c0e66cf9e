"""Evaluation: whole tasksets through the runner, and what their answers add up to.

In: evaluation tasksets and the version that the engines serve. Out: one `EvalResult` per set. Invariant: every task of a set
counts: one that fails for good is wrong, and a set of which all fail is no result but `AllTasksFail`.
"""

import asyncio
import logging
from typing import Any

import numpy as np

from rft.buffer.taskset import Taskset
from rft.experience import EvalResult, Experience, Task
from rft.rollout.engine import EngineUnavailable
from rft.rollout.runner import AllTasksFail, Runner, one_line

log = logging.getLogger(__name__)
SAMPLES = 8  # rollouts of each evaluation kept for reading
AT_ONCE = 256  # tasks per engine


class Evaluator:
    def __init__(self, runner: Runner, tasksets: list[Taskset]):
        self.runner = runner
        self.tasksets = tasksets

    async def run(self, version: int) -> list[EvalResult]:
        """Every set once, one after the other."""
        return [await self._evaluate(taskset, version) for taskset in self.tasksets]

    async def _evaluate(self, taskset: Taskset, version: int) -> EvalResult:
        taskset.seek({"epoch": 0, "index": 0})
        tasks = list(taskset)
        limit = self.runner.shared.pool.slots(AT_ONCE)

        async def run(number: int, task: Task) -> list[Experience] | Exception:
            async with limit:
                try:
                    return await self.runner.run(-1 - number, task)
                except EngineUnavailable:
                    raise
                except Exception as error:  # costs this task, counted as wrong, not the evaluation
                    log.warning("evaluation of task %s failed for good: %s", task.id, one_line(error))
                    return error

        outcomes = await asyncio.gather(*(run(i, t) for i, t in enumerate(tasks)))
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(failed) == len(tasks):
            raise AllTasksFail(f"all {len(tasks)} tasks of {taskset.name} failed, the last with {one_line(failed[-1])}")
        done = [(t, outcome) for t, outcome in zip(tasks, outcomes, strict=True) if not isinstance(outcome, Exception)]
        return summarise(taskset.name, version, len(tasks), done, self.runner.shared.tokenizer)


def summarise(
    name: str, version: int, asked: int, done: list[tuple[Task, list[Experience]]], tokenizer: Any
) -> EvalResult:
    """Accuracy (share of all responses asked for with reward >= 1; a failed task's are wrong), and of those that came mean
    reward, length, and a few samples to read."""
    flat = [e for _, group in done for e in group]
    rewards = np.array([e.reward for e in flat])
    metrics = {
        "accuracy": float(np.mean(rewards >= 1)) * len(done) / asked,
        "reward/mean": float(rewards.mean()),
        "response_length/mean": float(np.mean([e.response_length for e in flat])),
        "truncated_frac": float(np.mean([e.stop == "length" for e in flat])),
        "failed_frac": 1 - len(done) / asked,
        **versions_of(flat, version),
    }
    samples = [sample_row(task, group[0], tokenizer) for task, group in done[:SAMPLES]]
    return EvalResult(taskset=name, version=version, num_tasks=asked, metrics=metrics, samples=samples)


def versions_of(experiences: list[Experience], version: int) -> dict[str, float]:
    """Who was really evaluated as `version`: newer weights may come while an evaluation is under way."""
    found = [span.version for experience in experiences for span in experience.versions] or [version]
    return {"oldest_version": float(min(found)), "newest_version": float(max(found))}


def sample_row(task: Task, experience: Experience, tokenizer: Any) -> dict[str, Any]:
    return {
        "task": task.id,
        "prompt": tokenizer.decode(experience.tokens[: experience.prompt_length]),
        "response": tokenizer.decode(experience.tokens[experience.prompt_length :]),
        "truth": task.truth,
        "reward": experience.reward,
        "outcome": experience.reward_outcome,
        "stop": experience.stop,
    }
