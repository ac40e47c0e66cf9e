"""Agents as workflows: a program of the user's that speaks to OpenAI's API, run once per response;
its answers become experiences.

    task ──► `repeat_times` sessions ──► agent(task, base_url, api_key), or a command ──► reward
            ──► experiences of each session

`workflow_args`: `agent` (`module:function`, `file.py:function`) or `command`; `args` of the
function; `reward`; `merge`; `timeout`. An async function runs here, as any workflow; a plain
function or a command is a process of its own (`rft.agents.agent_process`). Its reward is what it
returns or posts, or else the task's reward function says it of the last answer. Invariants: a run
has a key that opens its own session only; after the workflow no process of an agent is left and no
session of it is open; a run of a group that fails fails the group.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rft.agents.agent_process import run_command, run_function
from rft.ground.experience import Experience, Task
from rft.ground.plugins import lookup
from rft.rollout.context import Access, AgentSession, WorkflowContext
from rft.rollout.reward_worker import RewardResult, number
from rft.rollout.settings import settings_of

REWARDS = ("auto", "posted", "task")


@dataclass(frozen=True)
class AgentSettings:
    """`workflow_args` of the workflow `agent`."""

    agent: str = ""  # package.module:function or path/to/file.py:function
    command: list[Any] = field(default_factory=list)  # a program and its arguments
    args: dict[str, Any] = field(default_factory=dict)  # of the function, by name
    # auto: returned, or posted, or else by the task's reward | posted: waited for | task
    reward: str = "auto"
    # the agent's own key posts it, too; false: only the run's, which an agent is not told
    agent_posts_reward: bool = False
    reward_timeout: float = 60.0  # seconds that a posted one may come after the agent's end
    merge: bool = True  # one experience per token sequence that only grew; false: one per answer
    # seconds of one run; default: explorer.max_timeout is the limit of all
    timeout: float | None = None

    @classmethod
    def of(cls, given: dict[str, Any], key: str = "workflow_args") -> "AgentSettings":
        """AgentSettings out of `workflow_args`; raises ConfigError for all that is wrong, naming
        `key`.
        """
        return settings_of(cls, "agent", given, key)

    def problems(self, key: str, unread: set[str]) -> Iterator[str]:
        if not unread & {"agent", "command"} and bool(self.agent) == bool(self.command):
            yield (
                f"{key}: the workflow agent needs one of agent=file.py:function and "
                "command=[program, ...]"
            )
        if self.reward not in REWARDS:
            yield (f"{key}.reward={self.reward}: choose one of {', '.join(REWARDS)}")
        for name in ("reward_timeout", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield (f"{key}.{name}={value}: give seconds, greater than 0")
        if self.agent and ":" not in self.agent:
            yield (
                f"{key}.agent={self.agent}: give 'package.module:function' or "
                "'path/to/file.py:function'"
            )

    def function(self) -> Callable[..., Any]:
        return lookup("agent", self.agent, {})


class AgentWorkflow:
    """A program of yours, or a function, speaks to the model over OpenAI's API."""

    has_settings = True
    ARGUMENTS: ClassVar[dict[str, Any]] = AgentSettings.__annotations__

    most_experiences = None  # what an agent asks is its own business

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        settings = AgentSettings.of(dict(task.workflow_args))
        runs = [
            asyncio.ensure_future(self._run(settings, task, ctx, n))
            for n in range(task.repeat_times)
        ]
        try:
            return [experience for made in await asyncio.gather(*runs) for experience in made]
        finally:
            for one in runs:
                one.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run(
        self, settings: AgentSettings, task: Task, ctx: WorkflowContext, sample: int
    ) -> list[Experience]:
        opened = ctx.open_session(task.sampling, may_reward=settings.agent_posts_reward)
        limit = asyncio.timeout(settings.timeout)
        try:
            async with limit:
                returned = await self._agent(settings, task, ctx, opened.access)
        except Exception as error:
            if limit.expired():
                raise TimeoutError(
                    f"the agent ran longer than {settings.timeout:g} s (workflow_args.timeout)"
                ) from error
            # the context was full, and the agent said so: that is an ending
            if opened.session.too_long is None:
                raise
            returned = None
        result = await self._reward(settings, task, ctx, opened, returned)
        return opened.experiences(f"the agent of task {task.id}", sample, result, settings.merge)

    async def _agent(
        self, settings: AgentSettings, task: Task, ctx: WorkflowContext, access: Access
    ) -> Any:
        """What it returns; None of a command."""
        if settings.command:
            async with ctx.agent_slot():
                return await run_command(settings.command, task, *access)
        function = settings.function()
        if inspect.iscoroutinefunction(function):
            return await function(task, *access, **settings.args)
        async with ctx.agent_slot():
            return await run_function(settings.agent, task, *access, settings.args)

    async def _reward(
        self,
        settings: AgentSettings,
        task: Task,
        ctx: WorkflowContext,
        opened: AgentSession,
        returned: Any,
    ) -> RewardResult | None:
        """Into the session's feedback; the result of the task's
        reward function, where that was asked.
        """
        session = opened.session
        if settings.reward == "posted" and not session.feedback:
            try:
                async with asyncio.timeout(settings.reward_timeout):
                    await opened.was_rewarded.wait()
            except TimeoutError:
                raise TimeoutError(
                    f"no reward was posted for session {session.id} "
                    f"in {settings.reward_timeout:g} s"
                ) from None
        if settings.reward == "auto" and returned is not None:
            parts = (
                {str(k): number(v) for k, v in returned.items()}
                if isinstance(returned, dict)
                else {}
            )
            session.feedback.reward = (
                sum(parts.values()) if isinstance(returned, dict) else number(returned)
            )
            session.feedback.metrics = {**session.feedback.metrics, **parts}
        elif settings.reward == "task" or not session.feedback:
            if not session.calls:
                return None
            [result] = await ctx.score(task, [session.calls[-1].text])
            return opened.take_score(result)
        return None
