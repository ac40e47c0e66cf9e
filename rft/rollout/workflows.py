"""Workflows: one task in, its finished experiences out.

    task ── ctx.render ──► prompt ids ── ctx.generate ──► completions ── ctx.decode, ctx.score ──► experiences

A workflow is a class with `async def run(task, ctx)`, or just that function. `WORKFLOWS` is the whole table; instead of
a name from it users give their own `package.module:name` or `path/to/file.py:name`.

Invariant: the ids of an experience are those the engine saw and produced, the action mask is made here, where the
tokens are, and per-token lists have the length of the response (`check` says so, for user workflows too). A workflow
returns all its experiences or raises: what becomes of part of a group is for `rft.rollout.runner` to say.
"""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from math import isfinite
from typing import Any, Protocol

import msgspec

from rft.experience import Completion, Experience, Sampling, Task
from rft.rollout.agents import Access, Agent, AgentSession
from rft.rollout.reward_worker import RewardResult
from rft.rollout.rewards import lookup


class WorkflowContext(Protocol):
    """What a workflow may ask for; the explorer makes one per attempt at a task."""

    def render(self, task: Task) -> list[int]:
        """Token ids of the task's prompt, chat template applied."""

    async def generate(self, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """`n` continuations of the same ids, from one request. A prompt that is too long comes back with that stop."""

    def decode(self, tokens: list[int]) -> str:
        """Text of response tokens, without special ones."""

    async def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        """Run the task's reward function on each response, in killable processes."""

    async def ask(self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None) -> str:
        """The answer of an auxiliary model (`explorer.auxiliary_models`; the first, unless one is named)."""

    def openai(self, model: str = "") -> Access:
        """`base_url` and `api_key` for a client of OpenAI's API: of the policy, or of an auxiliary model."""

    def extract_experience_from_history(self, clear: bool = True) -> list[Experience]:
        """With `explorer.rollout_model.enable_history`: all model calls of this attempt so far, as experiences without reward."""

    def open_session(self, sampling: Sampling) -> AgentSession:
        """A session of the endpoint for one run of an agent, until the end of this attempt."""

    def agent_slot(self) -> AbstractAsyncContextManager[None]:
        """Held while a process of an agent runs: `explorer.agent_processes`."""


class Workflow(Protocol):
    """Runs one task. Made anew for every attempt, so `self` may hold the state of an episode.

    Flags that a class may set: `can_repeat = False`: it is called once per run of the task, all at the same time, each with
    `repeat_times` 1. `compares_runs = True`: it judges the runs against each other, so part of them is never taken.
    """

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]: ...


class SingleTurn:
    """`task.repeat_times` responses to the prompt, from one request, each scored on its own."""

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        prompt = ctx.render(task)
        completions = await ctx.generate(prompt, task.repeat_times, task.sampling)
        aborted = sum(completion.stop == "abort" for completion in completions)
        if aborted or len(completions) != task.repeat_times:
            raise RuntimeError(
                f"task {task.id}: asked for {task.repeat_times} responses, got {len(completions)}, {aborted} aborted"
            )
        answered = [sample for sample, made in enumerate(completions) if made.stop != "prompt_too_long"]
        scored = await ctx.score(task, [ctx.decode(completions[sample].tokens) for sample in answered])
        results = dict(zip(answered, scored, strict=True))
        return [experience(task, prompt, made, results.get(sample), sample) for sample, made in enumerate(completions)]


class Math(SingleTurn):
    """`SingleTurn` whose reward is `math`, unless the task names one: there, texts are never compared as they stand."""

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        if task.reward == "exact_match":
            task = msgspec.structs.replace(task, reward="math")
        return await super().run(task, ctx)


WORKFLOWS: dict[str, type[Workflow]] = {"single_turn": SingleTurn, "math": Math, "agent": Agent}


def resolve(name: str) -> Callable[[], Workflow]:
    """What makes a workflow called `name`: its class, or a wrapper of the user's function. Raises ConfigError."""
    found = lookup("workflow", name, WORKFLOWS)
    return found if inspect.isclass(found) else lambda: _Function(name, found)


def flag(name: str, which: str, default: bool) -> bool:
    """What the workflow `name` says of itself."""
    return bool(getattr(lookup("workflow", name, WORKFLOWS), which, default))


async def run(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """Run the task's workflow and hold it to the contract."""
    experiences = await resolve(task.workflow)().run(task, ctx)
    check(task, experiences)
    return experiences


async def greedy(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """What the workflow makes of one greedy response: only its reward is of use, so no token of it is trained on."""
    sampling = msgspec.structs.replace(task.sampling, temperature=0.0, top_p=1.0, top_k=-1)
    made = await run(msgspec.structs.replace(task, repeat_times=1, sampling=sampling), ctx)
    for one in made:
        one.action_mask = [0] * one.response_length
        one.info = {**one.info, "baseline": True}
    return made


def experience(
    task: Task, prompt: list[int], completion: Completion, result: RewardResult | None, sample: int = 0
) -> Experience:
    """One experience of one turn; `result` None: there was nothing to score."""
    scored = result or RewardResult()
    return Experience(
        tokens=[*prompt, *completion.tokens],
        prompt_length=len(prompt),
        action_mask=[1] * len(completion.tokens),
        logprobs=completion.logprobs,
        versions=completion.versions,
        temperature=task.sampling.temperature,
        reward=scored.reward,
        reward_outcome=scored.outcome if result else "none",
        stop=completion.stop,
        sample=sample,
        task=task.id,
        routed_experts=completion.routed_experts,
        metrics=scored.metrics,
        info={"reward_message": scored.message} if scored.message else {},
    )


def check(task: Task, experiences: list[Experience]) -> None:
    """Refuse, by name, what the trainer could not learn from or would learn wrongly from."""
    if not experiences:
        raise ValueError(f"workflow {task.workflow!r} returned no experience for task {task.id}")
    if not isinstance(experiences, list) or not all(isinstance(made, Experience) for made in experiences):
        raise TypeError(f"workflow {task.workflow!r} must return a list of Experience, not {experiences!r:.80}")
    for position, made in enumerate(experiences):
        numbers = {"reward": [made.reward], "logprobs": made.logprobs, "token_rewards": made.token_rewards}
        for name, found in numbers.items():
            if not all(map(isfinite, found)):
                raise ValueError(f"workflow {task.workflow!r}, experience {position}: {name} is not finite")
        if not 0 < made.prompt_length <= len(made.tokens):
            raise ValueError(f"workflow {task.workflow!r}, experience {position}: prompt_length {made.prompt_length}")
        per_token = {"action_mask": made.action_mask, "logprobs": made.logprobs}
        if made.token_rewards:
            per_token["token_rewards"] = made.token_rewards
        for name, values in per_token.items():
            if len(values) != made.response_length:
                raise ValueError(
                    f"workflow {task.workflow!r}, experience {position}: {len(values)} entries of {name} "
                    f"for {made.response_length} response tokens"
                )
        for span in made.versions:
            if not 0 <= span.start <= span.end <= made.response_length:
                raise ValueError(
                    f"workflow {task.workflow!r}, experience {position}: version {span.version} of tokens {span.start} to "
                    f"{span.end}, but the response has {made.response_length}"
                )


class _Function:
    """A user's plain `async def f(task, ctx)` as a workflow."""

    def __init__(self, name: str, function: Callable[[Task, WorkflowContext], Awaitable[list[Experience]]]) -> None:
        self._name, self._function = name, function

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        made: Any = self._function(task, ctx)
        if not inspect.isawaitable(made):
            raise TypeError(f"workflow {self._name!r} must be an async function")
        return await made
