"""Runs one task: attempts of its workflow inside one total time.

    run(group, task) ──► attempt 1 ──fails──► attempt 2 ... ──► experiences
        │ max_timeout, or what dynamic_timeout makes of it, for all of them together
        └ cut(group): the step that wanted it goes on without it

In: a task, and the group that its experiences belong to. Out: experiences stamped with group,
sample and task, or the exception of the last attempt. Invariants: when time is up or the group is
cut, the attempt that runs is cancelled, and with it its requests to engines and its rewards, and a
workflow that refuses to end can ask for nothing more; whatever a user's workflow raises, also what
would end this process, comes out as an `Exception`.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from rft.config import ExplorerConfig
from rft.ground import redact
from rft.ground.experience import Experience, Task
from rft.rollout import workflows
from rft.rollout.answers import GroupAnswers, RunAnswers
from rft.rollout.context import Shared, WorkflowContext
from rft.rollout.engine import EngineUnavailable

log = logging.getLogger(__name__)
CANCEL_S = 5.0  # for a cancelled workflow to end; one that does not is left behind
COUNTS = (
    "finished_task_count",
    "failed_task_count",
    "retry_count",
    "timeout_count",
    "cut_task_count",
    "partial_task_count",
)
Made = list[Experience]
Called = Callable[[Task, WorkflowContext], Awaitable[Made]]


class AllTasksFail(RuntimeError):
    """Not a task is to blame but the set-up: a workflow, an engine, a configuration."""


class GroupCancelled(RuntimeError):
    """A step goes on without this group (explorer.over_rollout)."""


@dataclass(eq=False)
class UnderWay:
    """A task that runs now.

    `name`: what no other start of a task is called, of this process or another: engines and pools
    know requests by it, and one of a process that died may still be under way. `finished`: the runs
    of its attempt that are done, by number, where it has several.
    """

    group: int
    task: Task
    began: float
    limit: float
    name: str
    cut: asyncio.Future[None]
    answers: GroupAnswers | None = None
    attempt: int = 0
    contexts: list[WorkflowContext] = field(default_factory=list)
    finished: dict[int, Made] = field(default_factory=dict)
    given_up: bool = False

    def line(self, now: float) -> str:
        what = ", ".join(
            f"{n} {doing}" for doing, n in Counter(c.doing for c in self.contexts).items()
        )
        return (
            f"{self.task.id}: attempt {self.attempt + 1}, {what}; {now - self.began:.1f} s of "
            f"at most {self.limit:g}"
        )


class Runner:
    """`warmup`: tasks that must have succeeded before `dynamic_timeout` knows what a task takes.
    `greedy_baseline`: each task of training gets a greedy response beside the others, to compare
    them with.
    """

    def __init__(
        self, config: ExplorerConfig, shared: Shared, warmup: int = 1, greedy_baseline: bool = False
    ):
        self.config = config
        self.shared = shared
        self.warmup = warmup
        self.greedy_baseline = greedy_baseline
        self.counts: Counter[str] = Counter()  # of training tasks
        self.seconds = 0.0  # of those that succeeded, together
        self.under_way: set[UnderWay] = set()
        self.begun = 0  # tasks of training, ever
        self.life, self.starts = f"{secrets.token_hex(3)}-", count()

    async def run(self, group: int, task: Task, answers: GroupAnswers | None = None) -> Made:
        """At most 1 + max_retry_times attempts, all together within `limit` seconds (then
        cancelled: W33).

        `group` below 0: an evaluation. `answers`: what of it was answered in another start.
        """
        loop = asyncio.get_running_loop()
        limit = self.limit() if group >= 0 else self.config.max_timeout
        name = f"{task.id}/g{group}/{self.life}{next(self.starts)}"
        here = UnderWay(group, task, loop.time(), limit, name, loop.create_future(), answers)
        self.under_way.add(here)
        self.begun += group >= 0
        job = asyncio.create_task(self._attempts(here))
        try:
            await asyncio.wait({job, here.cut}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            made = job.result() if job.done() else await self._out_of_time(here, job)
        except Exception:
            self._count(group, "failed_task_count")
            raise
        finally:
            await end(job, here)
            self.under_way.discard(here)
        if group >= 0:
            self.seconds += loop.time() - here.began
        self._count(group, "finished_task_count")
        return made

    def limit(self) -> float:
        """Seconds for a task of training: max_timeout, or less
        where tasks have shown what they take.
        """
        dynamic, done = self.config.dynamic_timeout, self.counts["finished_task_count"]
        if not dynamic.enable or done < self.warmup:
            return self.config.max_timeout
        return min(self.config.max_timeout, dynamic.ratio * self.seconds / done)

    def cut(self, group: int) -> None:
        """Its time is up now; `run` ends with what there is of it, or with `GroupCancelled`."""
        for here in self.under_way:
            if here.group == group and not here.cut.done():
                here.cut.set_result(None)

    def stats(self) -> dict[str, float]:
        found = {f"rollout/{name}": float(self.counts[name]) for name in COUNTS}
        found |= {f"rollout/{name}": float(count) for name, count in self.shared.counts.items()}
        done = self.counts["finished_task_count"]
        return found | {
            "rollout/timeout_s": self.limit(),
            **({"rollout/task_s": self.seconds / done} if done else {}),
        }

    def report(self) -> list[str]:
        """What every runner does, in lines."""
        now = asyncio.get_running_loop().time()
        told = ", ".join(f"{self.counts[name]} {name.removesuffix('_count')}" for name in COUNTS)
        return [
            f"{len(self.under_way)} tasks under way; {told}",
            *(here.line(now) for here in sorted(self.under_way, key=lambda here: here.began)),
        ]

    async def _out_of_time(self, here: UnderWay, job: "asyncio.Task[Made]") -> Made:
        """Runs that are finished are taken, if partial tasks are;
        otherwise this says what was not kept.
        """
        await end(job, here)
        was_cut = here.cut.done()
        self._count(here.group, "cut_task_count" if was_cut else "timeout_count")
        partial = self.config.over_rollout.return_partial_tasks and not self.greedy_baseline
        if partial and here.finished:  # the baseline comes last
            self._count(here.group, "partial_task_count")
            return stamped(here)
        if was_cut:
            raise GroupCancelled(
                "cancelled: its step had enough other tasks (explorer.over_rollout)"
            )
        key = "max_timeout" if here.limit == self.config.max_timeout else "dynamic_timeout"
        absence = self.shared.pool.absence()
        raise TimeoutError(
            f"no result in {here.limit:g} s (explorer.{key}){absence and ': ' + absence}"
        )

    async def _attempts(self, here: UnderWay) -> Made:
        task = here.task
        for here.attempt in range(self.config.max_retry_times + 1):
            here.contexts, here.finished = [], {}
            try:
                return await self._once(here)
            except EngineUnavailable:
                raise
            except Exception as error:
                if here.attempt == self.config.max_retry_times:
                    raise
                self._count(here.group, "retry_count")
                log.warning("task %s, attempt %d: %s", task.id, here.attempt + 1, one_line(error))
        raise AssertionError("unreachable: the loop returns or raises")

    async def _once(self, here: UnderWay) -> Made:
        made = await self._runs(here)
        if not self.greedy_baseline or here.group < 0:
            return made
        baseline = await self._call(here, here.task, "/greedy", workflows.greedy)
        return made + _of(here, here.task.repeat_times, baseline)

    async def _runs(self, here: UnderWay) -> Made:
        """One call for the whole task; or one per run, at the same time, where the workflow wants
        it or part of them will do.
        """
        task, partial = here.task, self.config.over_rollout.return_partial_tasks and here.group >= 0
        if workflows.flag(task.workflow, "can_repeat", True) and (
            not partial or workflows.flag(task.workflow, "compares_runs", False)
        ):
            made = await self._call(here, task, "")
            workflows.numbered(task, made)
            for experience in made:
                _of(here, experience.sample, [experience])
            return made
        one, errors = msgspec.structs.replace(task, repeat_times=1), []

        async def run(number: int) -> None:
            try:
                here.finished[number] = await self._call(here, one, f"/r{number}")
            except Exception as error:
                errors.append(error)
                if not partial or isinstance(error, EngineUnavailable):
                    raise

        try:
            async with asyncio.TaskGroup() as runs:
                for number in range(task.repeat_times):
                    runs.create_task(run(number))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if not here.finished:
            raise errors[0]
        self._count(here.group, "partial_task_count", len(errors) > 0)
        return stamped(here)

    async def _call(self, here: UnderWay, task: Task, run: str, what: Called | None = None) -> Made:
        request = f"{here.name}/a{here.attempt}{run}"
        stream = f"{self.shared.seed}/{task.id}/{here.attempt}{run}"
        answers = None
        if here.answers is not None:
            answers = RunAnswers(here.answers, self.shared.pool, f"a{here.attempt}{run}")
        context = WorkflowContext(self.shared, request, stream, answers)
        here.contexts.append(context)
        try:
            return await (what or workflows.run)(task, context)
        except asyncio.CancelledError as error:
            job = asyncio.current_task()
            if job is None or job.cancelling():
                raise  # we were cancelled; otherwise the workflow raised it by itself
            raise RuntimeError(f"workflow {task.workflow!r} raised CancelledError") from error
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # would end the explorer
            raise RuntimeError(f"workflow {task.workflow!r} raised {one_line(error)}") from error
        finally:
            context.doing = "done"
            context.end_sessions()

    def _count(self, group: int, name: str, count: int = 1) -> None:
        self.counts[name] += count if group >= 0 else 0


def stamped(here: UnderWay) -> Made:
    """The finished runs as one group, in the order of their numbers."""
    return [
        experience
        for number, run in sorted(here.finished.items())
        for experience in _of(here, number, run)
    ]


def _of(here: UnderWay, number: int, run: Made) -> Made:
    """The experiences of run `number`, as parts of their group."""
    for experience in run:
        experience.group, experience.sample, experience.task = here.group, number, here.task.id
    return run


async def end(job: "asyncio.Task[Any]", here: UnderWay) -> None:
    """Cancel what runs; a workflow that catches that and goes on is left to itself, without engines
    and rewards.
    """
    if job.done() or here.given_up:
        return
    here.given_up = True
    job.cancel()
    await asyncio.wait({job}, timeout=CANCEL_S)
    if not job.done():
        log.warning(
            "workflow %r of task %s does not end when it is cancelled",
            here.task.workflow,
            here.task.id,
        )
        for context in here.contexts:
            context.close()
        job.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    elif not job.cancelled():
        job.exception()  # seen: what it raised on its way out is not what happened


def one_line(error: BaseException | None) -> str:
    """`KeyError: 'answer'`: type and first line of what was raised; of an error from another actor,
    what that one raised. Without secrets: it is kept in the journal.
    """
    inner = getattr(error, "cause", None) or error
    lines = str(inner).strip().splitlines()
    return redact.text(f"{type(inner).__name__}: {lines[0]}") if lines else type(inner).__name__
