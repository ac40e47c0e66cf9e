"""Workflows: one task in, its finished experiences out.

    task ── ctx.render ──► prompt ids ── ctx.generate ──► completions ── ctx.decode, ctx.score
            ──► experiences

A workflow is a class with `run(task, ctx)`, or just that function, `async` or not. `WORKFLOWS` is
the whole table; instead of a name from it users give their own `package.module:name` or
`path/to/file.py:name`, or register one in a plug-in (`rft.ground.plugins`).

Invariants: a workflow returns all its experiences or raises: what becomes of part of a group is for
`rft.rollout.runner` to say; what the trainer could not learn from is refused, by name (`check`),
also of a user's workflow.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rft.ground.experience import LARGEST_REWARD, Experience, Task, is_reward
from rft.ground.plugins import lookup
from rft.rollout.context import WorkflowContext as WorkflowContext
from rft.rollout.workflows.dialogue import Math
from rft.rollout.workflows.dialogue import MultiTurn as MultiTurn
from rft.rollout.workflows.dialogue import RewardPropagation as RewardPropagation
from rft.rollout.workflows.dialogue import SingleTurn as SingleTurn
from rft.rollout.workflows.dialogue import StepWiseReward as StepWiseReward
from rft.rollout.workflows.dialogue import Workflow as Workflow
from rft.rollout.workflows.dialogue import experience as experience
from rft.rollout.workflows.environment import EnvironmentWorkflow
from rft.rollout.workflows.judges import (
    LearnToAsk,
    MathRuler,
    Rating,
    RubricJudge,
    Ruler,
    TrainableRuler,
)
from rft.rollout.workflows.maths import (
    BotsMathBoxed,
    MathBoxed,
    MathEval,
    MathQuestion,
    MathThink,
    Sudoku,
    ThinkingBudget,
    ToolCallRow,
    Unrewarded,
)
from rft.rollout.workflows.threads import called
from rft.rollout.workflows.tools import Tool as Tool
from rft.rollout.workflows.tools import ToolUse as ToolUse

UNNAMED = "exact_match"  # the reward of a config that names none
WORKFLOWS: dict[str, Callable[..., Any] | str] = {
    "single_turn": SingleTurn,
    "math": Math,
    "tool_use": ToolUse,
    "rubric_judge": RubricJudge,
    "ruler": Ruler,
    "environment": EnvironmentWorkflow,
    "math_think": MathThink,
    "math_boxed": MathBoxed,
    "bots_math_boxed": BotsMathBoxed,
    "math_question": MathQuestion,
    "math_eval": MathEval,
    "math_ruler": MathRuler,
    "trainable_ruler": TrainableRuler,
    "rating": Rating,
    "learn_to_ask": LearnToAsk,
    "tool_call": ToolCallRow,
    "sudoku": Sudoku,
    "thinking_budget": ThinkingBudget,
    "unrewarded": Unrewarded,
    "agent": "rft.agents.workflow:AgentWorkflow",  # a floor above: by path, as a user's own
}


def resolve(name: str) -> Callable[..., Any]:
    """The class, or the function, called `name`. Raises ConfigError."""
    found: Callable[..., Any] = lookup("workflow", name, WORKFLOWS)
    return found


def flag(name: str, which: str, default: bool) -> bool:
    """What the workflow `name` says of itself."""
    return bool(getattr(lookup("workflow", name, WORKFLOWS), which, default))


def said(name: str) -> Any:
    """The most experiences of one run of the workflow `name`, as it says itself, by
    `most_experiences`: a number, None where it does not know, or a function of the task; 1 where it
    says nothing.
    """
    return getattr(lookup("workflow", name, WORKFLOWS), "most_experiences", 1)


def most(task: Task) -> int | None:
    """The most experiences that a group of this task may have beside a baseline; None: nobody
    knows.
    """
    of_run = said(task.workflow)
    of_run = of_run(task) if callable(of_run) else of_run
    return None if of_run is None else task.repeat_times * int(of_run)


async def greedy(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """What the workflow makes of one greedy response: only its reward is of use, so no token of it
    is trained on.
    """
    sampling = msgspec.structs.replace(task.sampling, temperature=0.0, top_p=1.0, top_k=-1)
    made = await run(msgspec.structs.replace(task, repeat_times=1, sampling=sampling), ctx)
    for one in made:
        one.action_mask = np.zeros(one.response_length, dtype=bool)
        one.info = {**one.info, "baseline": True}
    return made


def reward_of(workflow: str, reward: str) -> str:
    """The reward that the workflow's responses have, where the config says `reward`."""
    flow = lookup("workflow", workflow, WORKFLOWS)
    own = getattr(flow, "reward_unless_named", None)
    return own if own and (reward == UNNAMED or getattr(flow, "has_own_reward", False)) else reward


async def run(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """Run the task's workflow and hold it to the contract."""
    found = resolve(task.workflow)
    task = msgspec.structs.replace(task, reward=reward_of(task.workflow, task.reward))
    made: list[Experience] = await called(
        found().run if inspect.isclass(found) else found, task, ctx
    )
    if listed := check(task, made):
        told = (
            f"workflow {task.workflow!r} gives {', '.join(listed)} as lists, or of another dtype: "
            "they are made columns here (rft.ground.columns), which takes time"
        )
        ctx.shared.count("lists_as_columns", told)
    return made


def check(task: Task, experiences: list[Experience]) -> list[str]:
    """Refuse, by name, what the trainer could not learn from or would learn wrongly from; returns
    the names of fields that were no columns, and are now.
    """
    if not experiences:
        raise ValueError(f"workflow {task.workflow!r} returned no experience for task {task.id}")
    if not isinstance(experiences, list) or not all(
        isinstance(made, Experience) for made in experiences
    ):
        raise TypeError(
            f"workflow {task.workflow!r} must return a list of Experience, not {experiences!r:.80}"
        )
    listed: set[str] = set()
    for position, made in enumerate(experiences):
        where = f"workflow {task.workflow!r}, experience {position}"
        try:
            listed |= set(made.as_columns())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if wrong := problem(made):
            raise ValueError(f"{where}: {wrong}")
    return sorted(listed)


def problem(made: Experience) -> str | None:
    """What of an experience contradicts itself."""
    if not 0 < made.prompt_length <= len(made.tokens):
        return f"prompt_length {made.prompt_length}"
    per_token = {"action_mask": made.action_mask, "logprobs": made.logprobs}
    if len(made.token_rewards):
        per_token["token_rewards"] = made.token_rewards
    for name, values in per_token.items():
        if len(values) != made.response_length:
            return f"{len(values)} entries of {name} for {made.response_length} response tokens"
    rewards = {"reward": [made.reward], "token_rewards": made.token_rewards.tolist()}
    for name, numbers in rewards.items():
        if not all(map(math.isfinite, numbers)):
            return f"{name} is not finite"
        if not all(map(is_reward, numbers)):
            return f"{name} is larger than {LARGEST_REWARD:g}"
    if not np.isfinite(made.logprobs).all():
        return "logprobs is not finite"
    for span in made.versions:
        if not 0 <= span.start <= span.end <= made.response_length:
            return (
                f"version {span.version} of tokens {span.start} to {span.end}, but the response "
                f"has {made.response_length}"
            )
    routes = made.routed_experts
    if routes is not None and routes.positions > len(made.tokens):
        return f"routed_experts of {routes.positions} tokens, where there are {len(made.tokens)}"
    return None


def numbered(task: Task, experiences: list[Experience]) -> None:
    """Which run of the task each belongs to: what the workflow said, or, where it said nothing, its
    place in the list.
    """
    if not any(made.sample or made.turn for made in experiences):
        for number, made in enumerate(experiences):
            made.sample = number
    places = [(made.sample, made.turn) for made in experiences]
    if double := next((place for place in places if places.count(place) > 1), None):
        raise ValueError(
            f"workflow {task.workflow!r} returned two experiences with sample {double[0]} and turn "
            f"{double[1]}: number the runs "
            "of a task by sample, and what one run made by turn"
        )
