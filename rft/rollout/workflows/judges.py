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

import msgspec

from rft.ground.experience import PEERS, Experience, Sampling, Task
from rft.rollout.context import WorkflowContext, seed_of
from rft.rollout.reward_worker import RewardResult, failure, number
from rft.rollout.rewards.judge import entries, entry, share
from rft.rollout.workflows.dialogue import SingleTurn, rewarded
from rft.rollout.workflows.maths import MathThink, with_system
from rft.rollout.workflows.threads import together

TRUTH_SHARE = 0.2
STOP = "<stop />"
REASONED = "Answer the user's question: first reason about it, then give the answer."
ASK = """You talk with somebody who needs help, as a professional who takes down what matters. Say \
the one thing that helps most to learn what is still unknown: one short question at a time."""
STOPS = f" When nothing that matters is left to ask, say {STOP} and nothing else."
ASKED = """You judge the last words of a dialogue, which should ask for something that is still \
unknown.
{{"dialogue": {task}, "to_be_asked_for": {wanted}, "words": {response}}}
End with one JSON object and nothing behind it: {{"content": from 0 (asks for nothing of it) to 1 \
(asks for it), "form": from 0 to 1, 1 for one short question}}"""
RATING = """You rate how well a response to a task meets all criteria together, from 1 (worst) to \
10 (best). Who breaks several criteria is rated low, who meets all is rated high.
{{"task": {task}, "reference": {truth}, "response": {response}, "criteria": {criteria}}}
End with one JSON object and nothing behind it: {{"rating": a number from 1 to 10}}"""
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

    `judge`, its name under explorer.auxiliary_models (default: the first), and `judge_tokens`, how
    long its answer may be (default: its max_response_tokens, else what its length leaves).
    """

    needs_judge = True
    scores = False
    ARGUMENTS: ClassVar[dict[str, type]] = {"judge": str, "judge_tokens": int}

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        task = self.asked(task)
        made, answered = await self.answers(task, ctx)
        texts = [ctx.decode(one.response_ids) for one in answered]
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
        sampling = Sampling(temperature=0.0, max_tokens=int(args.get("judge_tokens", 0)))
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


class Rating(JudgedSingleTurn):
    """The judge rates each response as a whole from 1 to 10, by the row's `rubric` (objects with
    `description` and `weight`) if it has one; the reward is (rating - 1) / 9.
    """

    def asked(self, task: Task) -> Task:
        return with_system(task, REASONED)

    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        return await together(*(self.one(task, ctx, response) for response in responses))

    async def one(self, task: Task, ctx: WorkflowContext, response: str) -> RewardResult:
        criteria = json.dumps(task.raw.get("rubric") or [])
        question = RATING.format(**quoted(task), response=json.dumps(response), criteria=criteria)
        try:
            rating = entry(await self.said(task, ctx, question), "rating")
            if isinstance(rating, bool) or not isinstance(rating, int | float):
                raise ValueError(f"the judge's rating {rating!r:.100} is no number")
            if not 1 <= rating <= 10:
                raise ValueError(f"the judge's rating {rating} is not from 1 to 10")
        except Exception as error:  # of the judge: no word on the response
            return failure(error)
        return RewardResult(reward=(rating - 1) / 9)


class MathRuler(Ruler):
    """`ruler` for questions that `math_think` asks; what its reward would have been is the metric
    `gold_reward`.
    """

    reward_unless_named = "math_reward"
    scores = True

    def asked(self, task: Task) -> Task:
        return MathThink().asked(task)

    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        gold = await ctx.score(task, responses)
        found = await super().judge(task, ctx, responses)
        for one, known in zip(found, gold, strict=True):
            if known.outcome == "ok":
                one.metrics = {**one.metrics, "gold_reward": known.reward}
        return found


class TrainableRuler(MathThink):
    """The policy itself compares its responses, and learns to. For a share of the tasks the truth
    is used: responses have their true reward, and as many judgements are made and trained on, each
    with 1 less its mean error, 0 if it cannot be read. The other tasks have the scores of one
    judgement, which is not trained on. Judgements are compared with each other only.
    """

    compares_runs = True
    needs_template = True
    ARGUMENTS: ClassVar[dict[str, type]] = {"truth_share": float}  # default 0.2

    @staticmethod
    def most_experiences(task: Task) -> int:
        return 2 * task.repeat_times

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        task = self.asked(task)
        made, answered = await self.answers(task, ctx)
        if not answered:
            return made
        texts = [ctx.decode(one.response_ids) for one in answered]
        gold = await ctx.score(task, texts, [one.response_length for one in answered])
        share = float(task.workflow_args.get("truth_share", TRUTH_SHARE))
        known = seed_of(f"truth/{task.id}") / 2**63 < share and all(
            one.outcome == "ok" for one in gold
        )
        judging = self.judging(task, texts)
        told, _ = await self.answers(
            msgspec.structs.replace(judging, repeat_times=task.repeat_times if known else 1), ctx
        )
        scores = [self.scores_in(ctx, one, len(texts)) for one in told]
        if not known:
            results = self.by_judgement(scores[0], gold)
        else:
            results = gold
        for one, result in zip(answered, results, strict=True):
            rewarded(one, result)
        return [*made, *(self.judgements(task, told, scores, gold) if known else ())]

    def judging(self, task: Task, texts: list[str]) -> Task:
        said = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
        question = RULER.format(
            task=json.dumps(said),
            truth="null",
            responses=json.dumps(texts),
            count=len(texts),
        )
        return msgspec.structs.replace(task, prompt=[{"role": "user", "content": question}])

    def scores_in(
        self, ctx: WorkflowContext, told: Experience, count: int
    ) -> list[float] | Exception:
        try:
            return [share(one) for one in entries(ctx.decode(told.response_ids), "scores", count)]
        except ValueError as error:
            return error

    def by_judgement(
        self, scores: list[float] | Exception, gold: list[RewardResult]
    ) -> list[RewardResult]:
        if isinstance(scores, Exception):
            return [failure(scores)] * len(gold)
        return [
            RewardResult(reward=score, metrics={"gold_reward": one.reward})
            for score, one in zip(scores, gold, strict=True)
        ]

    def judgements(
        self,
        task: Task,
        told: list[Experience],
        scores: list[list[float] | Exception],
        gold: list[RewardResult],
    ) -> list[Experience]:
        """Runs of their own, behind those of the responses."""
        truth = [(one.reward + 0.1) / 1.2 for one in gold]  # from -0.1 .. 1.1
        for place, (one, said) in enumerate(zip(told, scores, strict=True)):
            reward = 0.0
            if not isinstance(said, Exception):
                wrong = sum(abs(a - b) for a, b in zip(said, truth, strict=True)) / len(truth)
                reward = 1.0 - wrong
            rewarded(one, RewardResult(reward=reward, metrics={"judge_reward": reward}))
            one.sample, one.info = task.repeat_times + place, {**one.info, PEERS: "judge"}
        return told


class LearnToAsk(JudgedSingleTurn):
    """A dialogue's next words: a question, or `<stop />` when enough was said. Columns:
    `decision_truth` (continue or stop) and `info_truth`, what is still to be asked for.
    """

    ARGUMENTS: ClassVar[dict[str, type]] = JudgedSingleTurn.ARGUMENTS | {
        "train_mode": str,  # Ra+Rs (default), Ra, Rs
        "fusion_mode": str,  # default, sum
    }

    def asked(self, task: Task) -> Task:
        stops = "" if task.workflow_args.get("train_mode") == "Ra" else STOPS
        said = [{"role": "user", "content": task.prompt}]
        messages = said if isinstance(task.prompt, str) else list(task.prompt)
        system = {"role": "system", "content": f"{ASK}{stops}"}
        return msgspec.structs.replace(task, prompt=[system, *messages])

    async def judge(
        self, task: Task, ctx: WorkflowContext, responses: list[str]
    ) -> list[RewardResult]:
        return await together(*(self.one(task, ctx, response) for response in responses))

    async def one(self, task: Task, ctx: WorkflowContext, response: str) -> RewardResult:
        wanted = task.raw.get("decision_truth", "continue")
        action = wanted == ("stop" if STOP in response else "continue")
        content = form = 0.0
        if action and wanted != "continue":
            content, form = 1.0, float(response == STOP)
        elif action:
            question = ASKED.format(
                task=json.dumps(task.prompt),
                wanted=json.dumps(task.raw.get("info_truth", "None")),
                response=json.dumps(response),
            )
            try:
                said = await self.said(task, ctx, question)
                content, form = (float(entry(said, name)) for name in ("content", "form"))
            except Exception as error:  # of the judge: no word on the response
                return failure(error)
        mode = task.workflow_args.get("train_mode", "Ra+Rs")
        if mode == "Ra":
            reward = 2 * content + form
        elif mode == "Rs":
            reward = 3.0 * action + form
        elif task.workflow_args.get("fusion_mode") == "sum":
            reward = action + content + form
        else:
            reward = action * (1 + 2 * content) + form
        parts = {"action_score": float(action), "content_score": content, "format_score": form}
        return RewardResult(reward=reward, metrics=parts)


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
