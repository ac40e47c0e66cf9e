"""The explorer: tasks in, scored experiences out, and evaluation on the same path.

    taskset --Task--> admit (waits for a slot) --group--> workflow --Experience--> buffer.put (durable)
                            ^ slots are counted by the buffer              |  engine pool, reward pool
                            '--- freed when a published version covers the group

Consumes tasks from its cursor on; waits for a slot (the buffer's staleness rule) and for a runner (its own concurrency
limit). Invariant: the buffer knows a group before its first token is sampled and has it durably before it counts as done,
so a group is either finished, or failed and counted, or handed out again after a restart.

A deterministic run adds: every request has a seed of its own, made of the run's seed, the task and the request's number, and
`hold` ends what is being sampled before a trainer that came back publishes its weights: each group is sampled whole, from
one version, with the same seeds however often it starts.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.buffer.render import end_of_turn, render_follow_up, render_prompt
from rft.buffer.taskset import Taskset
from rft.config import ExplorerConfig, ModelConfig
from rft.experience import Completion, EvalResult, Experience, GenerateRequest, Sampling, Task, decode, encode
from rft.monitor import trace
from rft.rollout import workflows
from rft.rollout.engine import EngineUnavailable
from rft.rollout.pool import EnginePool
from rft.rollout.reward_pool import RewardPool
from rft.rollout.reward_worker import UNKNOWN, RewardResult

log = logging.getLogger(__name__)
EVAL_SAMPLES = 8  # rollouts of each evaluation kept for reading
EVALUATED_AT_ONCE = 256  # tasks per engine


@dataclass(frozen=True)
class Limits:
    """Lengths that a prompt and a response must keep, in tokens."""

    max_prompt_tokens: int
    max_model_len: int


class AllTasksFail(RuntimeError):
    """Not a task is to blame but the set-up: a workflow, an engine, a configuration."""


class Explorer:
    """Runs as one Ray actor; every method is a coroutine on its event loop."""

    def __init__(
        self, config: ExplorerConfig, model: ModelConfig, taskset: Taskset | None, eval_tasksets: list[Taskset],
        engines: dict[str, Any], buffer: Any | None, batch_size: int, seed: int | None = None, synchronizer: Any | None = None,
    ):  # fmt: skip
        self.config = config
        self.model = model
        self.taskset = taskset
        self.eval_tasksets = eval_tasksets
        self.buffer = buffer
        self.seed = seed  # of a deterministic run
        self.synchronizer = synchronizer  # says which engines there are, unless `engines` does
        self.pool = EnginePool(engines)
        self.rewards = RewardPool(config.reward_workers, config.reward_timeout)
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
        self.following: asyncio.Task[None] | None = None
        self.is_open = asyncio.Event()
        self.phase = "starting"

    async def prepare(self) -> dict[str, Any]:
        """Load the tokenizer, start the reward workers, and follow the engines that are admitted."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(
            self.model.model_path, trust_remote_code=self.model.trust_remote_code
        )
        self.stop_token = end_of_turn(self.tokenizer, self.model.custom_chat_template)
        self.limits = Limits(self.model.max_prompt_tokens or 0, self.model.max_model_len or 0)
        await self.rewards.start()
        if self.synchronizer is not None:
            self.following = asyncio.create_task(self.pool.follow(self.synchronizer))
            self.following.add_done_callback(self._settle)
        self.phase = "ready"
        return {
            "taskset": len(self.taskset) if self.taskset else 0,
            "eval": {t.name: len(t) for t in self.eval_tasksets},
        }

    async def open(self) -> None:
        """The supervisor says that every part of the run serves."""
        self.is_open.set()

    async def opened(self) -> None:
        """Return once it has said so: a trainer that is ready earlier waits here."""
        await self.is_open.wait()

    # --- exploring ----------------------------------------------------------------------------------------------

    async def explore(self) -> None:
        """Start exploring in the background; calling it again (a trainer that came back) changes nothing."""
        self.may_sample.set()
        if self.exploring is None:
            self.exploring = asyncio.create_task(self._explore())
            self.exploring.add_done_callback(self._settle)

    async def hold(self) -> None:
        """End all sampling until `explore` is called: a trainer attached to the buffer and will publish what it resumed from.

        The groups stay unfinished; each waits until the buffer admits it again, at the version that it belongs to.
        """
        self.may_sample.clear()
        self.holds += 1
        ended = list(self.sampling)
        for job in ended:
            job.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def finished(self) -> None:
        """Return when the taskset is exhausted and every group is stored or failed."""
        if self.exploring is not None:
            await asyncio.shield(self.exploring)

    async def _explore(self) -> None:
        assert self.taskset is not None and self.buffer is not None, "explore needs a taskset and a buffer"
        self.phase = "exploring"
        start = await self.buffer.attach_explorer.remote(self.config.name)
        for group, task in start["reissue"]:  # left unfinished by an earlier process: the same numbers, sampled again
            await self._launch(group, decode(task, Task), await self._readmit(group))
        if start["cursor"] is not None:
            self.taskset.seek(start["cursor"])
        for task in self.taskset:
            holds = self.holds
            group = await self.buffer.admit.remote(self.config.name, encode(task), self.taskset.cursor)
            if group is None:  # enough groups for the last step were admitted
                break
            await self._launch(group, task, holds)
        await asyncio.gather(*self.groups)
        await self.buffer.input_done.remote(self.config.name)
        self.phase = "done"

    async def _readmit(self, group: int) -> int:
        """Wait until an unfinished group may start anew; returns the number of holds before that."""
        while True:
            await self.may_sample.wait()
            holds = self.holds
            await self.buffer.readmit.remote(self.config.name, group)
            if holds == self.holds:
                return holds

    async def _launch(self, group: int, task: Task, holds: int) -> None:
        await self.runners.acquire()
        job = asyncio.create_task(self._run_group(group, task, holds))
        self.groups.add(job)
        trace.count("groups", len(self.groups))
        job.add_done_callback(self._group_done)

    def _group_done(self, job: "asyncio.Task[None]") -> None:
        self.groups.discard(job)
        trace.count("groups", len(self.groups))
        self.runners.release()
        self._settle(job)

    def _settle(self, job: "asyncio.Task[None]") -> None:
        if not job.cancelled() and job.exception() is not None:
            self._break(job.exception())

    def _break(self, error: BaseException | None) -> None:
        """`watch` raises this: the supervisor ends the run."""
        if not self.broken.done():
            self.broken.set_exception(error if isinstance(error, AllTasksFail) else RuntimeError(one_line(error)))

    async def _run_group(self, group: int, task: Task, holds: int) -> None:
        """Run one task with retries inside one total time; store what came out or count the failure."""
        try:
            experiences = await self._sample(group, task, holds)
        except (
            EngineUnavailable
        ):  # of engines that are fixed: the task stays unfinished for the next attempt at the run
            raise
        except Exception as error:  # a user's workflow may raise anything: it costs its own group, counted, not the run
            log.warning("task %s failed for good: %s", task.id, one_line(error))
            trace.instant("task failed", task=task.id, cause=one_line(error))
            self.failures += 1
            await self.buffer.abandon.remote(group, one_line(error))
            if self.failures >= self.max_failures:
                raise AllTasksFail(f"{self.failures} tasks in a row failed, the last with {one_line(error)}") from error
            return
        self.failures = 0
        await self.buffer.put.remote(group, encode(experiences))

    async def _sample(self, group: int, task: Task, holds: int) -> list[Experience]:
        """`_attempts`, from the start again after each `hold`. `holds`: how many there were when the group was admitted."""
        while True:
            if holds != self.holds:
                holds = await self._readmit(group)
            job = asyncio.create_task(self._attempts(group, task))
            self.sampling[job] = None
            try:
                return await job
            except asyncio.CancelledError:
                if holds == self.holds or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            finally:
                del self.sampling[job]

    async def _attempts(self, group: int, task: Task) -> list[Experience]:
        """At most 1 + max_retry_times attempts, all together within max_timeout seconds (then cancelled: W33)."""
        limit = asyncio.timeout(self.config.max_timeout)
        try:
            async with limit:
                for attempt in range(self.config.max_retry_times + 1):
                    try:
                        return await self._run_workflow(group, task, attempt)
                    except EngineUnavailable:
                        raise
                    except Exception as error:
                        if attempt == self.config.max_retry_times:
                            raise
                        log.warning("task %s, attempt %d: %s", task.id, attempt + 1, one_line(error))
        except TimeoutError:
            if limit.expired():
                absence = self.pool.absence()
                raise TimeoutError(
                    f"no result in {self.config.max_timeout:g} s (explorer.max_timeout){absence and ': ' + absence}"
                ) from None
            raise
        raise AssertionError("unreachable: the loop returns or raises")

    async def _run_workflow(self, group: int, task: Task, attempt: int) -> list[Experience]:
        context = Context(self, f"{task.id}/g{group}/h{self.holds}/a{attempt}", f"{self.seed}/{task.id}/{attempt}")
        try:
            experiences = await workflows.run(task, context)
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

    # --- evaluating ---------------------------------------------------------------------------------------------

    async def evaluate(self, version: int, served: int | None = None) -> list[bytes]:
        """Run every evaluation set once; encoded `EvalResult`s labelled with `version`.

        `served`: what the synchronizer said when the engines had it, so that this is not called earlier.
        """
        try:
            with trace.overlapping("evaluate", version=version):
                return [encode(await self._evaluate_set(taskset, version)) for taskset in self.eval_tasksets]
        except AllTasksFail as error:
            self._break(error)
            raise

    async def _evaluate_set(self, taskset: Taskset, version: int) -> EvalResult:
        taskset.seek({"epoch": 0, "index": 0})
        tasks = list(taskset)
        limit = self.pool.slots(EVALUATED_AT_ONCE)

        async def run(number: int, task: Task) -> list[Experience] | Exception:
            async with limit:
                try:
                    return await self._attempts(-1 - number, task)
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
        return summarise(taskset.name, version, len(tasks), done, self.tokenizer)

    async def load_weights(self, path: str, version: int) -> None:
        """Bench mode: every engine loads a Hugging Face directory."""
        await asyncio.gather(*(m.handle.load_weights_from.remote(path, version) for m in self.pool.open()))

    # --- life ---------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """The engine pool's numbers, for the metrics of a step."""
        return self.pool.stats()

    async def drain(self, engine: str) -> None:
        """Ask this engine for nothing more; return when it has answered all that it was asked for."""
        await self.pool.drain(engine)

    async def watch(self) -> None:
        """Never returns while the explorer is healthy; raises what broke it."""
        await asyncio.shield(self.broken)

    async def shutdown(self) -> None:
        running = [*self.groups, *(job for job in (self.exploring, self.following) if job)]
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.rewards.close()


class Context:
    """What a workflow may do: render, generate, decode, score. One per attempt at a task."""

    def __init__(self, explorer: Explorer, request: str, stream: str):
        self.explorer = explorer
        self.request = request
        self.stream = stream  # of seeds: the same for every run, engine and start of this attempt
        self.calls = 0

    def render(self, task: Task) -> list[int]:
        return render_prompt(self.explorer.tokenizer, task, self.explorer.model.custom_chat_template)

    def follow(self, messages: list[dict[str, Any]]) -> list[int]:
        return render_follow_up(self.explorer.tokenizer, messages, self.explorer.model.custom_chat_template)

    async def generate(
        self, prompt: list[int], n: int, sampling: Sampling, prompt_length: int | None = None
    ) -> list[Completion]:
        """n continuations; a prompt over the limit comes back as n empty ones with stop "prompt_too_long"."""
        limits = self.explorer.limits
        if (prompt_length or len(prompt)) > limits.max_prompt_tokens or len(prompt) >= limits.max_model_len:
            return [Completion(tokens=[], logprobs=[], versions=[], stop="prompt_too_long") for _ in range(n)]
        self.calls += 1
        if self.explorer.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=seed_of(f"{self.stream}/{self.calls}"))
        return await self.explorer.pool.generate(
            GenerateRequest(
                request_id=f"{self.request}/{self.calls}",
                prompt=prompt,
                n=n,
                sampling=sampling,
                stop_token_ids=[self.explorer.stop_token],
            )
        )

    def decode(self, tokens: list[int]) -> str:
        return self.explorer.tokenizer.decode(tokens, skip_special_tokens=True)

    async def score(self, task: Task, responses: list[str], tokens: list[int] | None = None) -> list[RewardResult]:
        counts = tokens or [UNKNOWN] * len(responses)
        return await self.explorer.rewards.score([(task, r, n) for r, n in zip(responses, counts, strict=True)])


def seed_of(text: str) -> int:
    """Unlike Python's own hash, the same in every process; fits a signed 64-bit number."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


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
    samples = [sample_row(task, group[0], tokenizer) for task, group in done[:EVAL_SAMPLES]]
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


def one_line(error: BaseException | None) -> str:
    """`KeyError: 'answer'`: type and first line of what was raised; of an error from another actor, what that one raised."""
    inner = getattr(error, "cause", None) or error
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__
