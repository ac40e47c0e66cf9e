"""Runs one task: attempts of its workflow inside one total time.

In: a task, and the group that its experiences belong to. Out: experiences stamped with group and task, or the exception of
the last attempt. Invariants: all attempts together take at most the task's time, then the one that runs is cancelled, and with it
its requests to engines and its rewards; whatever a user's workflow raises, also what would end this process, comes out as an
`Exception`.
"""

import asyncio
import logging

from rft.config import ExplorerConfig
from rft.experience import Experience, Task
from rft.monitor import redact
from rft.rollout import workflows
from rft.rollout.context import Context, Shared
from rft.rollout.engine import EngineUnavailable

log = logging.getLogger(__name__)


class AllTasksFail(RuntimeError):
    """Not a task is to blame but the set-up: a workflow, an engine, a configuration."""


class Runner:
    """`greedy_baseline`: each task gets a greedy response beside the others, to compare them with."""

    def __init__(self, config: ExplorerConfig, shared: Shared, greedy_baseline: bool = False):
        self.config = config
        self.shared = shared
        self.greedy_baseline = greedy_baseline

    async def run(self, group: int, task: Task, start: int = 0) -> list[Experience]:
        """At most 1 + max_retry_times attempts, all together within max_timeout seconds (then cancelled: W33).

        `start`: how often the group was begun before; requests of different starts have different names.
        """
        limit = asyncio.timeout(self.config.max_timeout)
        try:
            async with limit:
                for attempt in range(self.config.max_retry_times + 1):
                    try:
                        return await self._once(group, task, start, attempt)
                    except EngineUnavailable:
                        raise
                    except Exception as error:
                        if attempt == self.config.max_retry_times:
                            raise
                        log.warning("task %s, attempt %d: %s", task.id, attempt + 1, one_line(error))
        except TimeoutError:
            if limit.expired():
                absence = self.shared.pool.absence()
                raise TimeoutError(
                    f"no result in {self.config.max_timeout:g} s (explorer.max_timeout){absence and ': ' + absence}"
                ) from None
            raise
        raise AssertionError("unreachable: the loop returns or raises")

    async def _once(self, group: int, task: Task, start: int, attempt: int) -> list[Experience]:
        request = f"{task.id}/g{group}/h{start}/a{attempt}"
        context = Context(self.shared, request, f"{self.shared.seed}/{task.id}/{attempt}")
        try:
            experiences = await workflows.run(task, context)
            workflows.numbered(task, experiences)
            if self.greedy_baseline:
                experiences += await workflows.greedy(task, context)
        except asyncio.CancelledError as error:
            job = asyncio.current_task()
            if job is None or job.cancelling():
                raise  # we were cancelled; otherwise the workflow raised it by itself
            raise RuntimeError(f"workflow {task.workflow!r} raised CancelledError") from error
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # would end the explorer
            raise RuntimeError(f"workflow {task.workflow!r} raised {one_line(error)}") from error
        for experience in experiences:
            experience.group, experience.task = group, task.id
        return experiences


def one_line(error: BaseException | None) -> str:
    """`KeyError: 'answer'`: type and first line of what was raised; of an error from another actor, what that one raised.
    Without secrets: it is kept in the journal."""
    inner = getattr(error, "cause", None) or error
    lines = str(inner).strip().splitlines()
    return redact.text(f"{type(inner).__name__}: {lines[0]}") if lines else type(inner).__name__
