"""The explorer: tasks in, scored experiences out, and evaluation on the same path.

    taskset --Task--> admit (waits for a slot) --group--> workflow --Experience--> buffer.put
    (durable)
                            ^ slots are counted by the buffer
                                    |  engine pool, reward pool
                            '--- freed when a published version covers the group

Consumes tasks from its cursor on; waits for a slot (the buffer's staleness rule) and for a runner
(its own concurrency limit). Where there is a pipeline, a group goes through it on its way to the
buffer. Invariant: the buffer knows a group before its first token is sampled and has it durably
before it counts as done, so a group is either finished, or failed and counted, or handed out again
after a restart.

What happens to one task is `rft.rollout.runner`, what its workflow may do `context`, and
evaluations are `evaluation`.

`hold` ends what is being sampled before a trainer that came back publishes its weights: those may
be older than what a group was admitted with, and its step too late for them. So each sample of a
group is of versions that its step may train, and in a deterministic run has the same seed however
often the group starts. What was answered before is kept (`rft.rollout.answers`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from rft.buffer.calls import CallBatcher, answered
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExplorerConfig, ModelConfig
from rft.data.taskset import Taskset, for_journal, from_journal
from rft.ground.device import YOUNG, freeze_loaded
from rft.ground.experience import (
    Experience,
    GenerateRequest,
    Task,
    decode,
    encode,
)
from rft.ground.protocols import RETURN_S, ActorHandle
from rft.ground.rounds import InSave
from rft.monitor import trace
from rft.rollout import workflows
from rft.rollout.answers import AnswerKeeper, Kept
from rft.rollout.context import Endpoint, Shared
from rft.rollout.engine import EngineUnavailable, RolloutEngine
from rft.rollout.evaluation import Evaluator
from rft.rollout.pool import EngineHandle, EnginePool, EngineSource
from rft.rollout.reward_worker import Named
from rft.rollout.runner import AllTasksFail, GroupCancelled, Runner, one_line
from rft.rollout.served import ServedGroups

log = logging.getLogger(__name__)
# until a group is durable, or given up: beyond that the buffer's disk or database hangs
STORE_S = RETURN_S
# the buffer's own max_read_timeout ends its long waits; this is only in case it cannot
READ_MARGIN_S = RETURN_S


class BufferSilent(RuntimeError):
    """It lives, or Ray would say so, and has not answered in time."""


class Processed(Protocol):
    experiences: list[Experience]
    dropped_by: str


class Pipeline(Protocol):
    """What groups go through between their workflow and the buffer:

    `rft.extras.pipeline.experiences`.
    """

    room: asyncio.Semaphore  # how many groups it takes while others are sampled

    async def start(self, decode: Callable[[list[int]], str]) -> None: ...
    async def process(self, group: int, task: Task, experiences: list[Experience]) -> Processed: ...
    def pop_metrics(self) -> dict[str, float]: ...
    async def close(self) -> None: ...


class EndpointFactory(Protocol):
    """How the explorer opens its address of OpenAI's API; `rft.agents.endpoint` has it."""

    async def start(
        self,
        config: ExplorerConfig,
        model: ModelConfig,
        tokenizer: Any,
        pool: EnginePool,
        groups: ServedGroups,
    ) -> Endpoint: ...


class Explorer:
    """Runs as one Ray actor; every method is a coroutine on its event loop."""

    def __init__(
        self,
        config: ExplorerConfig,
        model: ModelConfig,
        taskset: Taskset | None,
        eval_tasksets: list[Taskset],
        engines: dict[str, EngineHandle],
        buffer: ActorHandle[ExperienceBuffer] | None,
        batch_size: int,
        seed: int | None = None,
        synchronizer: ActorHandle[EngineSource] | None = None,
        greedy_baseline: bool = False,
        api: EndpointFactory | None = None,
        make_pipeline: Callable[[], Pipeline] | None = None,
        counts_experiences: bool = False,
        max_read_timeout: float = 1800.0,
        quick_rewards: bool = False,
        slow_rewards: Sequence[Named] = (),
    ):
        """`counts_experiences`: they fill a step, not groups, so that none may have more than its
        workflow says. `max_read_timeout`: the buffer's own, for what may take long there.
        `quick_rewards`: no task is foreseen whose reward needs a process. `slow_rewards`: those
        that are, and do.
        """
        self.config = config
        self.counts_experiences = counts_experiences
        self.taskset = taskset
        self.eval_tasksets = eval_tasksets
        self.buffer = buffer
        self.quick_rewards, self.slow_rewards = quick_rewards, slow_rewards
        self.patience_s = max_read_timeout + READ_MARGIN_S
        self.synchronizer = synchronizer  # says which engines there are, unless `engines` does
        self.api = api  # where agents reach the engines as OpenAI's API
        self.shared = Shared(config, model, engines, seed)
        self.pool = self.shared.pool
        self.runner = Runner(config, self.shared, batch_size, greedy_baseline)
        # through which groups go to the buffer
        self.pipeline = make_pipeline() if make_pipeline is not None else None
        self.evaluator = Evaluator(self.runner, eval_tasksets)
        # Tasks admitted in one call: of a step's never more than a quarter, or other explorers on
        # the buffer would get none.
        self.at_most, self.a_few = max(1, batch_size // 4), config.runner_per_model // 8
        self.put = CallBatcher(self._put, lambda: len(self.groups))
        self.keeper = AnswerKeeper(self._answered)
        self.max_failures = max(3 * batch_size, 8)  # in a row: then it is the set-up, not the tasks
        self.failures = 0
        self.runners = self.pool.slots(config.runner_per_model)
        self.broken: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self.groups: set[asyncio.Task[None]] = set()
        self.sampling: dict[
            asyncio.Task[list[Experience]], None
        ] = {}  # what `hold` ends, oldest first: nothing of it is stored
        self.holds = 0  # a group that was admitted before the last one has to be admitted again
        self.may_sample = asyncio.Event()
        self.exploring: asyncio.Task[None] | None = None
        self.learned = asyncio.Event()  # the task selector was told of one more group
        self.cut: set[int] = set()  # groups that their step went on without
        self.background: list[asyncio.Task[None]] = []
        self.is_open = asyncio.Event()
        self.prepared = asyncio.Event()
        self.heard: int | None = None  # the last group that the buffer told of
        self.phase = "starting"

    async def prepare(self) -> dict[str, Any]:
        """Load the tokenizer, start the reward workers where they are foreseen to be needed, and
        follow the engines that are admitted.

        One in the place of an explorer that died while it was exploring goes on with that.
        """
        await self.shared.load(self.quick_rewards, self.slow_rewards)
        if self.api is not None:
            served = ServedGroups(
                self.config.name, self._ask, self.put, self.patience_s, self._break
            )
            model, tokenizer = self.shared.model, self.shared.tokenizer
            opened = await self.api.start(self.config, model, tokenizer, self.pool, served)
            self.shared.endpoint = opened
        if self.pipeline is not None:
            await self.pipeline.start(
                partial(self.shared.tokenizer.decode, skip_special_tokens=True)
            )
        if self.synchronizer is not None:
            self._keep(self.pool.follow(self.synchronizer))
        if self.buffer is not None:
            self._keep(self.keeper.follow(self.pool))
        if self.config.runner_state_report_interval > 0:
            self._keep(self._report())
        freeze_loaded(YOUNG)
        self.phase = "ready"
        await self.resume()
        return {
            "taskset": len(self.taskset) if self.taskset else 0,
            "eval": {t.name: len(t) for t in self.eval_tasksets},
        }

    async def resume(self) -> None:
        """Go on with what the process before was let do, before anybody hears that this one is
        there: it would be told that nothing is under way.
        """
        name = self.config.name
        if self.buffer is not None and await self._ask(ExperienceBuffer.is_let_go, name):
            await self._begin()
        self.prepared.set()

    async def attempt(self, task: bytes) -> list[bytes]:
        """The experiences of one task, kept nowhere: for whoever looks at every token of them."""
        return [encode(experience) for experience in await self.runner.run(-1, decode(task, Task))]

    async def open(self) -> None:
        """The supervisor says that every part of the run serves."""
        self.is_open.set()

    async def opened(self) -> None:
        """Return once it has said so: a trainer that is ready earlier waits here."""
        await self.is_open.wait()

    # --- exploring --------------------------------------------------------------------------------

    async def explore(self) -> None:
        """Start exploring in the background; calling it again (a
        trainer that came back) changes nothing.
        """
        await self.prepared.wait()
        await self._begin()

    async def _begin(self) -> None:
        assert self.buffer is not None, "explore needs a buffer"
        await self._ask(ExperienceBuffer.let_go, self.config.name)
        self.may_sample.set()
        if self.exploring is None:
            self.exploring = asyncio.create_task(self._explore())
            self.exploring.add_done_callback(self._settle)
            if self.config.over_rollout.ratio > 0:
                self._keep(self._follow_cuts())

    async def hold(self) -> None:
        """End all sampling until `explore` is called: a trainer attached to the buffer and will
        publish what it resumed from.

        The groups stay unfinished; each waits until the buffer admits it again, at the version that
        it belongs to, and keeps what was answered.
        """
        self.may_sample.clear()
        self.holds += 1
        ended = list(self.sampling)
        for job in ended:
            job.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def finished(self) -> None:
        """Return when the taskset is exhausted and every group is stored or failed."""
        await self.prepared.wait()
        if self.exploring is not None:
            await asyncio.shield(self.exploring)

    async def _explore(self) -> None:
        assert self.taskset is not None and self.buffer is not None, (
            "explore needs a taskset and a buffer"
        )
        self.phase = "exploring"
        start = await self._ask(
            ExperienceBuffer.attach_explorer, self.config.name, within_s=self.patience_s
        )
        unfinished = [(group, from_journal(task)) for group, task in start["reissue"]]
        self.heard = start["heard"]
        if start["cursor"] is not None:
            self.taskset.seek(start["cursor"])
        if self.taskset.learns:
            self.taskset.recall(start["told"], [task for _, task in unfinished])
        # left by an earlier process: the same numbers, and only what is missing is sampled
        for group, task in unfinished:
            holds, kept = await self._readmit(group)
            await self._launch(group, task, holds, kept)
        tasks, found = iter(self.taskset), []
        while found := found or await self._next(tasks):
            holds, asked = self.holds, [(for_journal(task), cursor) for task, cursor in found]
            most = [workflows.most(task) for task, _ in found]
            groups = await self._ask(
                *(ExperienceBuffer.admit_some, self.config.name, asked, most, self.heard),
                within_s=self.patience_s,
            )
            if not groups:  # enough groups for the last step were admitted
                break
            self.heard = groups[-1] if self.heard is not None else None
            for group, (task, _) in zip(groups, found, strict=False):
                await self._launch(group, task, holds)
            found = found[len(groups) :]
        await asyncio.gather(*self.groups)
        await self._ask(ExperienceBuffer.input_done, self.config.name)
        self.phase = "done"

    async def _next(self, tasks: Iterator[Task]) -> list[tuple[Task, dict[str, Any]]]:
        """The next tasks, a few or as many as runners are free, each with the cursor behind it;
        none: the taskset is exhausted.

        A selector gives each once it has heard of all groups that it chooses by.
        """
        assert self.taskset is not None
        found: list[tuple[Task, dict[str, Any]]] = []
        count = max(1, min(self.at_most, max(self.a_few, self.runners.free)))
        while len(found) < count:
            while self.taskset.learns and self.taskset.is_waiting():
                if found:
                    return found
                self.learned.clear()
                await self.learned.wait()
            if (task := next(tasks, None)) is None:
                break
            found.append((task, self.taskset.cursor))
        return found

    async def _follow_cuts(self) -> None:
        while True:
            for group in await self._ask(
                ExperienceBuffer.cuts, self.config.name, within_s=self.patience_s
            ):
                self.cut.add(group)
                self.runner.cut(group)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self.config.runner_state_report_interval)
            for line in self.runner.report():
                log.info("runners: %s", line)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        job.add_done_callback(self._settle)
        self.background.append(job)

    async def _readmit(self, group: int) -> tuple[int, list[bytes]]:
        """Wait until an unfinished group may start anew; returns the number of holds before that,
        and what engines have answered to it.
        """
        while True:
            await self.may_sample.wait()
            holds = self.holds
            kept = await self._ask(
                *(ExperienceBuffer.readmit, self.config.name, group), within_s=self.patience_s
            )
            if holds == self.holds:
                return holds, kept

    async def _launch(self, group: int, task: Task, holds: int, kept: Sequence[bytes] = ()) -> None:
        await self.runners.acquire()
        job = asyncio.create_task(self._run_group(group, task, holds, kept))
        self.groups.add(job)
        trace.count("groups", len(self.groups))
        job.add_done_callback(self._group_done)

    def _group_done(self, job: "asyncio.Task[None]") -> None:
        self.groups.discard(job)
        trace.count("groups", len(self.groups))
        self._settle(job)

    def _settle(self, job: "asyncio.Task[None]") -> None:
        if not job.cancelled() and job.exception() is not None:
            self._break(job.exception())

    def _break(self, error: BaseException | None) -> None:
        """`watch` raises this: the supervisor ends the run."""
        if not self.broken.done():
            self.broken.set_exception(
                error if isinstance(error, AllTasksFail) else RuntimeError(one_line(error))
            )

    async def _run_group(self, group: int, task: Task, holds: int, kept: Sequence[bytes]) -> None:
        """Run one task with retries inside one total time; store
        what came out or count the failure. `kept`: answers to it from before a restart.
        """
        self.keeper.begin(group, kept)
        try:
            await self._finish(group, task, holds)
        finally:
            self.keeper.end(group)
            self.cut.discard(group)

    async def _finish(self, group: int, task: Task, holds: int) -> None:
        try:
            experiences, dropped_by, value = await self._make(group, task, holds)
        except EngineUnavailable:  # of fixed engines: the task is the next attempt's at the run
            raise
        except GroupCancelled as error:
            await self._abandon(group, task, one_line(error))
            return
        except AllTasksFail:  # says the pipeline
            raise
        # of a user's workflow or operator: it costs its own group, counted, not the run
        except Exception as error:
            log.warning("task %s failed for good: %s", task.id, one_line(error))
            # others may fail while this one is told to the buffer
            self.failures = failures = self.failures + 1
            await self._abandon(group, task, one_line(error))
            if failures >= self.max_failures:
                raise AllTasksFail(
                    f"{failures} tasks in a row failed, the last with {one_line(error)}"
                ) from error
            return
        self.failures = 0
        if dropped_by:  # the buffer admits another task in its place
            await self._abandon(group, task, dropped_by)
            return
        lesson = None if value is None else self.taskset.lesson(task, value)
        await self.put((group, encode(experiences), lesson))
        self._tell(task, value)

    async def _ask(
        self, method: Callable[..., Any], *arguments: Any, within_s: float | None = None
    ) -> Any:
        """What the buffer answers; BufferSilent when it does not in `within_s` (STORE_S)."""
        assert self.buffer is not None
        within_s = STORE_S if within_s is None else within_s
        try:
            async with asyncio.timeout(within_s) as limit:
                return await answered(lambda: self.buffer.ask(method, *arguments))
        except TimeoutError as error:
            if not limit.expired():  # the buffer's own
                raise
            raise BufferSilent(
                f"the buffer did not answer {method.__name__!r} within {within_s:g} s: does the "
                "disk or the database that it writes to hang?"
            ) from error

    async def _put(self, puts: list[tuple[int, bytes, list[Any] | None]]) -> None:
        await self._ask(ExperienceBuffer.put_some, puts)

    async def _answered(self, answers: list[Kept]) -> None:
        await self._ask(ExperienceBuffer.answered, answers)

    async def _abandon(self, group: int, task: Task, cause: str) -> None:
        trace.instant("task failed", task=task.id, cause=cause)
        await self._ask(ExperienceBuffer.abandon, group, cause)
        self._tell(task, None)

    def _tell(self, task: Task, value: float | None) -> None:
        """The selector hears of a group only after the journal has it,
        so that a restart finds it as wise.
        """
        if self.taskset.learns:
            self.taskset.tell(task, value)
            self.learned.set()

    async def _make(
        self, group: int, task: Task, holds: int
    ) -> tuple[list[Experience], str, float | None]:
        """What of a group is to be stored, or who dropped it, and its mean reward as it was
        sampled. Its runner is free for another group once it is sampled.
        """
        try:
            experiences = await self._sample(group, task, holds)
            value = judged(experiences) if self.taskset.learns else None
            if self.pipeline is None:
                self._check_count(task, experiences)
                return experiences, "", value
            await self.pipeline.room.acquire()
        finally:
            self.runners.release()
        try:
            processed = await self.pipeline.process(group, task, experiences)
            self._check_count(task, processed.experiences)
            return processed.experiences, processed.dropped_by, value
        finally:
            self.pipeline.room.release()

    def _check_count(self, task: Task, experiences: list[Experience]) -> None:
        """A group that fills more steps than it was admitted for would make others too stale."""
        made, most = sum("baseline" not in e.info for e in experiences), workflows.most(task)
        if self.counts_experiences and most is not None and made > most:
            raise ValueError(
                f"workflow {task.workflow!r} made {made} experiences of {task.repeat_times} runs, "
                f"and says that it makes {most} at most: set its most_experiences (of one run), or "
                "set that to None"
            )

    async def _sample(self, group: int, task: Task, holds: int) -> list[Experience]:
        """Run it, from the start again after each `hold`, but for what was answered.

        `holds`: how many there were when the group was admitted.
        """
        while True:
            answers = self.keeper.of(group)
            if holds != self.holds:
                await answers.keep()
                holds, kept = await self._readmit(group)
                answers = self.keeper.begin(group, kept)
            if group in self.cut:  # before it began
                raise GroupCancelled(
                    "never begun: its step had enough other tasks (explorer.over_rollout)"
                )
            job = asyncio.create_task(self.runner.run(group, task, answers))
            self.sampling[job] = None
            try:
                return await job
            except asyncio.CancelledError:
                if holds == self.holds or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            finally:
                del self.sampling[job]

    # --- serving ----------------------------------------------------------------------------------

    async def base_url(self) -> str:
        """Of the OpenAI API, which answers since `prepare`."""
        await self.prepared.wait()
        assert self.shared.endpoint is not None, "base_url of a run without the API"
        return f"{self.shared.endpoint.url}/v1"

    async def sample(self, requests: list[bytes], served: int | None = None) -> list[bytes]:
        """The answers of the engines to encoded `GenerateRequest`s, kept nowhere: for whoever
        judges the engines. `served` as of `evaluate`.
        """
        await self.prepared.wait()
        asked = [decode(request, GenerateRequest) for request in requests]
        return [encode(a) for a in await asyncio.gather(*map(self.pool.generate, asked))]

    # --- evaluating -------------------------------------------------------------------------------

    async def evaluate(self, version: int, served: int | None = None) -> list[bytes]:
        """Run every evaluation set once; encoded `EvalResult`s labelled with `version`.

        `served`: what the synchronizer said when the engines had it, so that this is not called
        earlier.
        """
        await self.prepared.wait()
        try:
            with trace.overlapping("evaluate", version=version):
                return [encode(result) for result in await self.evaluator.run(version)]
        except AllTasksFail as error:
            self._break(error)
            raise

    async def load_weights(self, place: str | InSave, version: int) -> None:
        """Bench mode: every engine loads a Hugging Face directory, or a committed save."""
        await asyncio.gather(
            *(
                m.handle.ask(RolloutEngine.load_weights_from, place, version)
                for m in self.pool.open()
            )
        )

    # --- life -------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """The numbers of engine pool, runners and endpoint, and how idle the engines were and what
        the pipeline did since the last call, for the metrics of a step.
        """
        kept = {"rollout/samples_kept": float(self.keeper.again)}
        piped = self.pipeline.pop_metrics() if self.pipeline is not None else {}
        idle = await self.pool.idleness()
        return self.pool.stats() | idle | self.runner.stats() | kept | self.shared.stats() | piped

    async def drain(self, engine: str) -> None:
        """Ask this engine for nothing more; return when it has
        answered all that it was asked for.
        """
        await self.pool.drain(engine)

    async def watch(self) -> None:
        """Never returns while the explorer is healthy; raises what broke it."""
        await asyncio.shield(self.broken)

    async def shutdown(self) -> None:
        running = [*self.groups, *self.background, *([self.exploring] if self.exploring else [])]
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.shared.close()
        if self.pipeline is not None:
            await self.pipeline.close()


ExplorerHandle = ActorHandle[Explorer]


def judged(experiences: list[Experience]) -> float | None:
    """The mean reward of a group, of those that have one."""
    rewards = [e.reward for e in experiences if e.reward_outcome in ("ok", "none")]
    return sum(rewards) / len(rewards) if rewards else None
