"""Evaluation: whole tasksets through the runner, and what their answers add up to.

In: evaluation tasksets and the version that the engines serve. Out: one `EvalResult` per set.
Invariant: every task of a set counts: one that fails for good is wrong, and a set of which all fail
is no result but `AllTasksFail`. Beside tasks of training an evaluation takes a small part of the
engines only, so that steps take no longer for it, and as much as there is when it is alone. An
engine that is free between two batches is not: the next one comes with the publication that the
evaluation came with. So it is alone where no task of training was ever begun, and where none was
under way, and none began, for as long as an evaluated one took.

With `repeat_times` n above 1 a set also has, for reward and each of its parts, `mean@n`, `std@n`,
and for k = 2, 4, ..., n what the best and the worst of k answers are expected to be (`best@k`,
`worst@k`, by bootstrap), and `pass@k`, without bias.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from math import comb, inf
from typing import Any

import numpy as np

from rft.data.taskset import Taskset
from rft.ground.experience import PEERS, EvalResult, Experience, Task
from rft.rollout.engine import EngineUnavailable
from rft.rollout.pool import ResizableSemaphore
from rft.rollout.runner import AllTasksFail, Runner, one_line

log = logging.getLogger(__name__)
SAMPLES = 8  # rollouts of each evaluation kept for reading
AT_ONCE = 256  # tasks per engine
# beside training: of the responses that it has under way, so many evaluated tasks, and the least
BESIDE, LEAST = 1 / 8, 8
BOOTSTRAP, BOOTSTRAP_SEED = 1000, 42
RIGHT = 1  # a response with this reward, or more, is right


class Evaluator:
    def __init__(self, runner: Runner, tasksets: list[Taskset]):
        self.runner = runner
        self.tasksets = tasksets

    async def run(self, version: int) -> list[EvalResult]:
        """Every set once, one after the other."""
        limit = self.runner.shared.pool.slots(self._at_once(since=0))
        return [await self._evaluate(taskset, version, limit) for taskset in self.tasksets]

    async def _evaluate(
        self, taskset: Taskset, version: int, limit: ResizableSemaphore
    ) -> EvalResult:
        taskset.seek({"epoch": 0, "index": 0})
        tasks = list(taskset)

        async def run(number: int, task: Task) -> list[Experience] | Exception:
            async with limit:
                since = self.runner.begun
                try:
                    return await self.runner.run(-1 - number, task)
                except EngineUnavailable:
                    raise
                except Exception as error:  # costs this task, counted as wrong, not the evaluation
                    log.warning(
                        "evaluation of task %s failed for good: %s", task.id, one_line(error)
                    )
                    return error
                finally:
                    limit.each = self._at_once(since)
                    limit.resize(len(self.runner.shared.pool.open()))

        outcomes = await asyncio.gather(*(run(i, t) for i, t in enumerate(tasks)))
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(failed) == len(tasks):
            raise AllTasksFail(
                f"all {len(tasks)} tasks of {taskset.name} failed, the last with "
                f"{one_line(failed[-1])}"
            )
        done = [
            (t, outcome)
            for t, outcome in zip(tasks, outcomes, strict=True)
            if not isinstance(outcome, Exception)
        ]
        return summarise(taskset.name, version, len(tasks), done, self.runner.shared.tokenizer)

    def _at_once(self, since: int) -> int:
        """Tasks of one engine, now. `since`: how many of training had begun when a task began that
        has ended now; 0 before the first.
        """
        runner = self.runner
        others = sum(one.task.repeat_times for one in runner.under_way if one.group >= 0)
        if not others and runner.begun == since:
            return AT_ONCE
        each = others / max(1, len(runner.shared.pool.open()))
        places = runner.config.rollout_model.max_num_seqs or inf
        # what an engine has no place for waits inside it, and is not beside anything yet
        return max(LEAST, int(BESIDE * min(each, places / (1 + BESIDE))))


def summarise(
    name: str, version: int, asked: int, done: list[tuple[Task, list[Experience]]], tokenizer: Any
) -> EvalResult:
    """Accuracy (share of all responses asked for that are right; a failed task's are not), and of
    those that came mean reward, length, and a few samples to read.
    """
    done = [(task, [e for e in group if PEERS not in e.info]) for task, group in done]
    flat = [e for _, group in done for e in group]
    rewards = np.array([e.reward for e in flat])
    metrics = {
        "accuracy": float(np.mean([is_right(e) for e in flat])) * len(done) / asked,
        "reward/mean": float(rewards.mean()),
        "response_length/mean": float(np.mean([e.response_length for e in flat])),
        "truncated_frac": float(np.mean([e.stop == "length" for e in flat])),
        "failed_frac": 1 - len(done) / asked,
        **versions_of(flat, version),
        **repeated([group for _, group in done], asked - len(done)),
    }
    samples = [sample_row(task, group[0], tokenizer) for task, group in done[:SAMPLES]]
    return EvalResult(
        taskset=name, version=version, num_tasks=asked, metrics=metrics, samples=samples
    )


def repeated(groups: list[list[Experience]], failed: int) -> dict[str, float]:
    """What n answers to every task tell together; names as in Trinity-RFT.

    Of `failed` tasks no answer was right.
    """
    values: dict[str, list[list[float]]] = defaultdict(list)
    right = list[list[bool]]()
    for group in groups:
        runs = list(by_run(group))
        right.append([is_right(run[-1]) for run in runs])
        values["reward"].append([run[-1].reward for run in runs])
        for part in sorted({name for run in runs for name in run[-1].metrics}):
            values[part].append([run[-1].metrics.get(part, 0.0) for run in runs])
    found = {}
    for name, tasks in values.items():
        n = max(map(len, tasks))
        found |= {f"{name}/mean@{n}": mean([np.mean(task) for task in tasks])}
        if n > 1:
            found |= {f"{name}/std@{n}": mean([np.std(task) for task in tasks])}
        for k in sizes(n):
            best, worst = zip(*(extremes(task, k) for task in tasks), strict=True)
            found |= {f"{name}/best@{k}": mean(best), f"{name}/worst@{k}": mean(worst)}
    n = max(map(len, values["reward"]))
    for k in {1, *sizes(n)} if n > 1 else ():
        rates = [pass_at(k, len(task), sum(task)) for task in right]
        found[f"pass@{k}"] = mean([*rates, *[0.0] * failed])
    return found


def is_right(one: Experience) -> bool:
    """By the part `accuracy` of its reward, or veRL's `acc`, where there is one: what the form or a
    length adds or takes off makes no answer right or wrong.
    """
    return one.metrics.get("accuracy", one.metrics.get("acc", one.reward)) >= RIGHT


def by_run(group: list[Experience]) -> Iterator[list[Experience]]:
    """The experiences of each run; the last turn has its reward."""
    runs: dict[int, list[Experience]] = defaultdict(list)
    for experience in group:
        runs[experience.sample].append(experience)
    yield from runs.values()


def sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n itself."""
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n] if n > 1 else []


def extremes(values: list[float], k: int) -> tuple[float, float]:
    """Expected best and worst of k of these, drawn with replacement: a bootstrap of BOOTSTRAP
    draws, always the same ones.
    """
    draws = np.array(values)[
        np.random.RandomState(BOOTSTRAP_SEED).randint(0, len(values), size=(BOOTSTRAP, k))
    ]
    return float(draws.max(axis=1).mean()), float(draws.min(axis=1).mean())


def pass_at(k: int, n: int, right: int) -> float:
    """The chance that one of k answers is right: 1 - C(n - c, k) / C(n, k), without bias (Chen et
    al. 2021, arXiv:2107.03374).
    """
    k = min(k, n)
    return 1.0 - comb(n - right, k) / comb(n, k)


def mean(values: Any) -> float:
    return float(np.mean(values))


def versions_of(experiences: list[Experience], version: int) -> dict[str, float]:
    """Who was really evaluated as `version`: newer weights may
    come while an evaluation is under way.
    """
    found = [span.version for experience in experiences for span in experience.versions] or [
        version
    ]
    return {"oldest_version": float(min(found)), "newest_version": float(max(found))}


def sample_row(task: Task, experience: Experience, tokenizer: Any) -> dict[str, Any]:
    return {
        "task": task.id,
        "prompt": tokenizer.decode(experience.prompt_ids),
        "response": tokenizer.decode(experience.response_ids),
        "truth": task.truth,
        "reward": experience.reward,
        "outcome": experience.reward_outcome,
        "stop": experience.stop,
    }
