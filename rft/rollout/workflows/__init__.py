"""Workflows: one task in, its finished experiences out.

    task ── ctx.render ──► prompt ids ── ctx.generate ──► completions ── ctx.decode, ctx.score
            ──► experiences

A workflow is a class with `run(task, ctx)`, or just that function, `async` or not. `WORKFLOWS` is
the whole table; instead of a name from it users give their own `package.module:name` or
`path/to/file.py:name`, or register one in a plug-in (`rft.ground.plugins`).

Invariant: a workflow returns all its experiences or raises: what becomes of part of a group is for
`rft.rollout.runner` to say.
"""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from rft.ground.experience import Experience, Task
from rft.rollout.rewards import lookup
from rft.rollout.workflows.base import Workflow as Workflow
from rft.rollout.workflows.base import WorkflowContext as WorkflowContext
from rft.rollout.workflows.base import check as check
from rft.rollout.workflows.base import experience as experience
from rft.rollout.workflows.base import numbered as numbered
from rft.rollout.workflows.base import problem as problem
from rft.rollout.workflows.dialogue import MultiTurn as MultiTurn
from rft.rollout.workflows.dialogue import RewardPropagation as RewardPropagation
from rft.rollout.workflows.dialogue import StepWiseReward as StepWiseReward
from rft.rollout.workflows.judges import RubricJudge, Ruler
from rft.rollout.workflows.single import Math
from rft.rollout.workflows.single import SingleTurn as SingleTurn
from rft.rollout.workflows.threads import called
from rft.rollout.workflows.tools import Tool as Tool
from rft.rollout.workflows.tools import ToolUse as ToolUse

WORKFLOWS: dict[str, Callable[..., Any] | str] = {
    "single_turn": SingleTurn,
    "math": Math,
    "tool_use": ToolUse,
    "rubric_judge": RubricJudge,
    "ruler": Ruler,
    "agent": "rft.agents.workflow:Agent",  # a floor above: by path, as a user's own
}


def resolve(name: str) -> Callable[..., Any]:
    """The class, or the function, called `name`. Raises ConfigError."""
    found: Callable[..., Any] = lookup("workflow", name, WORKFLOWS)
    return found


def flag(name: str, which: str, default: bool) -> bool:
    """What the workflow `name` says of itself."""
    return bool(getattr(lookup("workflow", name, WORKFLOWS), which, default))


async def greedy(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """What the workflow makes of one greedy response: only its reward is of use, so no token of it
    is trained on.
    """
    sampling = msgspec.structs.replace(task.sampling, temperature=0.0, top_p=1.0, top_k=-1)
    made = await run(msgspec.structs.replace(task, repeat_times=1, sampling=sampling), ctx)
    for one in made:
        one.action_mask = [0] * one.response_length
        one.info = {**one.info, "baseline": True}
    return made


async def run(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """Run the task's workflow and hold it to the contract."""
    found = resolve(task.workflow)
    made: list[Experience] = await called(
        found().run if inspect.isclass(found) else found, task, ctx
    )
    check(task, made)
    return made
