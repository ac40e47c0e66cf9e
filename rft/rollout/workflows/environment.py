"""The workflow `environment`: the model acts, an environment in a process of its own answers, until
it is done.

    task ──► reset ──► messages, tools ──► model ── text, calls ──► step ──► messages, reward, done
                                             ▲                         │
                                             └─────────────────────────┘
    or, where the environment asks the model itself: drive(a session's OpenAI address) ──► reward

In: a task and `workflow_args` (`EnvironmentSettings`). Out: experiences of `MultiTurn`, or those of
the session. Invariant: an episode has the rewards that its environment gave, or the attempt fails:
nothing else is taken for a reward. How to write an environment: docs/environments.md.
"""

import asyncio

import msgspec

from rft.ground.experience import Experience, Task
from rft.rollout.context import WorkflowContext
from rft.rollout.environments import EnvironmentFailed, EnvironmentSettings, Episode, drives
from rft.rollout.reward_worker import RewardResult
from rft.rollout.workflows.dialogue import Dialogue, Messages, MultiTurn, rewarded
from rft.rollout.workflows.tools import SYSTEM, calls


class EnvironmentWorkflow(MultiTurn):
    """One run is one episode."""

    needs_template = True
    has_settings = True
    ARGUMENTS = EnvironmentSettings.__annotations__

    @classmethod
    def most_experiences(cls, task: Task) -> int | None:  # type: ignore[override]
        """Of one run. An environment that asks the policy itself has its own rounds."""
        settings = EnvironmentSettings.of(dict(task.workflow_args))
        if drives(settings.environment):
            return None
        return max(settings.max_step_num, 1) if settings.per_turn else 1

    async def episode(self, task: Task, ctx: WorkflowContext, sample: int) -> list[Experience]:
        self.settings = EnvironmentSettings.of(dict(task.workflow_args))
        self.max_step_num, self.per_turn = self.settings.max_step_num, self.settings.per_turn
        self.rewards: list[float] = []
        self.done, self.metrics = False, {}
        limit = asyncio.timeout(self.settings.timeout)
        try:
            async with limit, ctx.shared.environments.episode(self.settings) as self.place:
                if self.place.drives:
                    return await driven(self.settings, self.place, task, ctx, sample)
                return await super().episode(task, ctx, sample)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"the episode ran longer than {self.settings.timeout:g} s (workflow_args.timeout)"
            ) from None

    async def begin(self, task: Task) -> None:  # type: ignore[override]
        seen = await self.place.reset(task)
        self.known, self.seen = seen.tools, seen.messages

    def opening(self, task: Task) -> Task:
        """The task's system message, the tools, and what the environment shows first."""
        given = [] if isinstance(task.prompt, str) else task.prompt
        system = [one["content"] for one in given if one["role"] == "system"]
        system += [one["content"] for one in self.seen if one["role"] == "system"]
        if self.known:
            described = [
                msgspec.json.encode({"type": "function", "function": one}) for one in self.known
            ]
            system.append(SYSTEM.format(tools="\n".join(one.decode() for one in described)))
        opening = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        shown = [one for one in self.seen if one["role"] != "system"]
        return msgspec.structs.replace(task, prompt=[*opening, *shown])

    async def step(self, answer: str) -> Messages | None:  # type: ignore[override]
        action = [msgspec.to_builtins(one) for one in calls(answer)] if self.known else []
        told = await self.place.step(action or answer)
        if told.reward is not None:
            self.rewards.append(told.reward)
        self.done, self.metrics = told.done, {**self.metrics, **told.metrics}
        self.last = told.reward
        return None if told.done else told.messages

    async def after(self, talk: Dialogue, answer: str) -> None:
        if self.settings.step_rewards:
            if self.last is None:
                raise EnvironmentFailed("it gave a step no reward (workflow_args.step_rewards)")
            rewarded(talk.turns[-1], RewardResult(reward=self.last))

    def reward(self, answer: str) -> float | None:  # type: ignore[override]
        """None, of an environment that gave no reward at all: the task's reward function judges."""
        if not self.rewards:
            return None
        return sum(self.rewards) if self.settings.reward == "sum" else self.rewards[-1]

    async def finished(self, talk: Dialogue, answer: str) -> list[Experience]:
        told = {"environment/done": float(self.done), "turns": float(len(talk.turns))}
        told |= {f"environment/{name}": value for name, value in self.metrics.items()}
        made = talk.turns if self.settings.step_rewards else await super().finished(talk, answer)
        return [self.told(one, told) for one in made]


async def driven(
    settings: EnvironmentSettings, place: Episode, task: Task, ctx: WorkflowContext, sample: int
) -> list[Experience]:
    """The environment asks the model over OpenAI's API; its answers are in the session."""
    opened = ctx.open_session(task.sampling)
    access = {**opened.access._asdict(), "sampling": msgspec.to_builtins(task.sampling)}
    told = await place.drive(task, access, settings.timeout)
    session, result = opened.session, None
    session.feedback.reward, session.feedback.metrics = told.reward, told.metrics
    if told.reward is None and session.calls:
        [scored] = await ctx.score(task, [session.calls[-1].text])
        result = opened.take_score(scored)
    who = f"the environment of task {task.id}"
    return opened.experiences(who, sample, result, not settings.per_turn)
