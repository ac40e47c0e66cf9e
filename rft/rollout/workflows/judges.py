"""Rewards by an auxiliary model: each response against a rubric, or a whole group against each
other.

In: a task, its responses, and `ctx.ask`. Out: experiences as of `SingleTurn`. Invariant: what the
judge says is a reward only when it has the form that was asked for, with as many entries as were
asked for; anything else, and a judge that does not answer, is the outcome "error" with its reason,
never a number.
"""

import json
from abc import ABC, abstractmethod
from typing import ClassVar

from rft.ground.experience import Experience, Sampling, Task
from rft.rollout.context import WorkflowContext
from rft.rollout.reward_worker import RewardResult, failure, number
from rft.rollout.rewards.judge import entries, share
from rft.rollout.workflows.dialogue import SingleTurn, rewarded
from rft.rollout.workflows.threads import together

JUDGE_TOKENS = 1024
RUBRIC = """You judge a response to a task by criteria. Say of each criterion, in order, \
whether the response meets it.
{{"task": {task}, "reference": {truth}, "response": {response}, "criteria": {criteria}}}
End with one JSON object and nothing behind it: {{"met": [true or false for each of the {count} \
criteria]}}"""
RULER = """You compare {count} responses to one task. Give each a score from 0 (worst) to 1 \
(best). Scores are relative: what
reaches the task's goal is above what does not, what is more complete or takes a shorter way is \
above the rest, equals are equal.
{{"task": {task}, "reference": {truth}, "responses": {responses}}}
End with one JSON object and nothing behind it: {{"scores": [the {count} scores, in the order \
of the responses]}}"""


class JudgedSingleTurn(SingleTurn, ABC):
    """`workflow_args`:

    `judge`, its name under explorer.auxiliary_models (default: the first), and `judge_tokens`.
    """

    needs_judge = True
    scores = False
    ARGUMENTS: ClassVar[dict[str, type]] = {"judge": str, "judge_tokens": int}

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        made, answered = await self.answers(task, ctx)
        texts = [ctx.decode(one.tokens[one.prompt_length :]) for one in answered]
        for one, result in zip(answered, await self.judge(task, ctx, texts), strict=True):
            rewarded(one, result)
        return made

    @abstractmethod
    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        """A result for every response."""

    async def said(self, task: Task, ctx: WorkflowContext, question: str) -> str:
        args = task.workflow_args
        sampling = Sampling(temperature=0.0, max_tokens=int(args.get("judge_tokens", JUDGE_TOKENS)))
        return await ctx.ask(
            [{"role": "user", "content": question}], str(args.get("judge", "")), sampling
        )


class RubricJudge(JudgedSingleTurn):
    """The reward is the weight of the criteria that a response meets, of 1. They are the row's
    `rubric` (or the column that `workflow_args.rubric_key` names), else `workflow_args.rubric`:
    texts, or objects with `description` and `weight`.
    """

    ARGUMENTS: ClassVar[dict[str, type]] = JudgedSingleTurn.ARGUMENTS | {
        "rubric": list,
        "rubric_key": str,
    }

    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        criteria = rubric_of(task)
        return await together(*(self.one(task, ctx, criteria, response) for response in responses))

    async def one(
        self, task: Task, ctx: WorkflowContext, criteria: list[tuple[str, float]], response: str
    ) -> RewardResult:
        question = RUBRIC.format(
            **quoted(task),
            response=json.dumps(response),
            criteria=json.dumps([text for text, _ in criteria]),
            count=len(criteria),
        )
        try:
            met = entries(await self.said(task, ctx, question), "met", len(criteria))
            if not all(isinstance(one, bool) for one in met):
                raise ValueError(
                    f"the judge's `met` has something else than true and false: {met!r:.200}"
                )
        except Exception as error:  # of the judge: no word on the response
            return failure(error)
        total = sum(weight for _, weight in criteria)
        parts = {f"rubric/{place}": float(one) for place, one in enumerate(met)}
        return RewardResult(
            reward=sum(weight for one, (_, weight) in zip(met, criteria, strict=True) if one)
            / total,
            metrics=parts,
        )


class Ruler(JudgedSingleTurn):
    """All responses of the group in one question; the reward is the judge's relative score."""

    compares_runs = True

    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        if not responses:
            return []
        question = RULER.format(
            **quoted(task), responses=json.dumps(responses), count=len(responses)
        )
        try:
            scores = [
                share(one)
                for one in entries(await self.said(task, ctx, question), "scores", len(responses))
            ]
        # one failure for the whole group: scores mean something only beside each other
        except Exception as error:
            return [failure(error)] * len(responses)
        return [RewardResult(reward=score) for score in scores]


def rubric_of(task: Task) -> list[tuple[str, float]]:
    args = task.workflow_args
    given = task.raw.get(str(args.get("rubric_key", "rubric"))) or args.get("rubric")
    if not given or isinstance(given, str):
        raise ValueError(
            f"task {task.id} has no rubric: give the row, or workflow_args, a `rubric`: a list of "
            "criteria"
        )
    found = [
        (one, 1.0) if isinstance(one, str) else (one["description"], number(one.get("weight", 1.0)))
        for one in given
    ]
    if sum(weight for _, weight in found) <= 0:
        raise ValueError(f"task {task.id}: the weights of its rubric must have a sum above 0")
    return found


def quoted(task: Task) -> dict[str, str]:
    return {"task": json.dumps(task.prompt), "truth": json.dumps(task.truth)}
