"""Workflows that speak with the model: one prompt and its answers, or several turns, where an
environment answers until it has nothing more to say.

    prompt ids ──► model ── text ──► step ── messages ──► ids behind the turn ──► model ──► ...
            one such run per repeat
                                      └── None: over

In: a task; what a subclass of `MultiTurn` writes is `step`, and `reward` where the task's own
reward function does not judge it. Out: one experience per run, or per turn. Invariant: what was
sampled is never tokenized again: the ids of an experience are those that the engine saw and
produced, a turn's go on from the ids before it, those of the environment have action mask 0 and
log-probability 0, and version spans cover the model's tokens only.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from rft.ground.columns import Flags, Ids, LogProbs, behind, column
from rft.ground.experience import Completion, Experience, RoutedExperts, Task, VersionSpan
from rft.rollout.context import WorkflowContext
from rft.rollout.reward_worker import RewardResult, failure, judged
from rft.rollout.workflows.threads import called, together

Messages = list[dict[str, Any]]


class Workflow(Protocol):
    """Runs one task. Made anew for every attempt, so `self` may hold the state of an episode. `run`
    may also be a plain function: it then has a thread of its own, where the context's methods wait
    (`rft.rollout.workflows.threads`).

    A class may say `needs_judge = True`: it asks an auxiliary model, and is refused before the
    start where there is none; `needs_cell = True`: it runs foreign programs, and is refused where
    they cannot be isolated; `needs_template = True`: it speaks in chat messages; `needs_prompt =
    True`: it speaks the prompt of every row; `scores = True`: the task's reward function scores its
    answers; `ARGUMENTS`: the `workflow_args` that it reads, and their types. `compares_runs =
    True`: it judges the runs against each other, so part of them is never taken. `can_repeat =
    False`: it is called once per run of the task, all at the same time, each with `repeat_times` 1.
    `reward_unless_named`: its reward where none is named; `has_own_reward = True`: also where one
    is. `ARGUMENTS`: the `workflow_args` that it reads, and their types.
    """

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]: ...


def experience(
    task: Task,
    prompt: Sequence[int] | Ids,
    completion: Completion,
    result: RewardResult | None,
    sample: int = 0,
    turn: int = 0,
) -> Experience:
    """One experience of one turn; `result` None: there was nothing to score. A greedy answer is not
    trained, and any temperature fits it.
    """
    made = Experience(
        tokens=behind(prompt, completion.tokens),
        prompt_length=len(prompt),
        action_mask=completion.chosen(task.sampling),
        logprobs=completion.logprobs,
        versions=completion.versions,
        temperature=task.sampling.temperature or 1.0,
        stop=completion.stop,
        sample=sample,
        turn=turn,
        task=task.id,
        routed_experts=completion.routed_experts,
    )
    return made if result is None else rewarded(made, result)


def rewarded(made: Experience, result: RewardResult) -> Experience:
    made.reward, made.reward_outcome = result.reward, result.outcome
    made.metrics = {**made.metrics, **result.metrics}
    if result.message:
        made.info = {**made.info, "reward_message": result.message}
    return made


class SingleTurn:
    """`task.repeat_times` responses to the prompt, from one request, each scored on its own."""

    needs_prompt = True
    scores = True
    ARGUMENTS: ClassVar[dict[str, type]] = {}

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        task = self.asked(task)
        made, answered = await self.answers(task, ctx)
        texts = [ctx.decode(one.response_ids) for one in answered]
        results = await ctx.score(task, texts, [one.response_length for one in answered])
        for one, result in zip(answered, results, strict=True):
            rewarded(one, result)
        return made

    def asked(self, task: Task) -> Task:
        """The task as the model sees it, and as it is scored."""
        return task

    def prompt(self, task: Task, ctx: WorkflowContext) -> list[int]:
        return ctx.render(task)

    async def answers(
        self, task: Task, ctx: WorkflowContext
    ) -> tuple[list[Experience], list[Experience]]:
        """Every response, not scored yet, and those of them that there is something to score of."""
        prompt = self.prompt(task, ctx)
        completions = await ctx.generate(prompt, task.repeat_times, task.sampling)
        ids = column(Ids, prompt)  # once for all of them
        aborted = sum(completion.stop == "abort" for completion in completions)
        if aborted or len(completions) != task.repeat_times:
            raise RuntimeError(
                f"task {task.id}: asked for {task.repeat_times} responses, got {len(completions)}, "
                f"{aborted} aborted"
            )
        made = [experience(task, ids, one, None, sample) for sample, one in enumerate(completions)]
        return made, [one for one in made if one.stop != "prompt_too_long"]


class Math(SingleTurn):
    """`SingleTurn` whose reward is `math`, unless the task names one: there, texts are never
    compared as they stand.
    """

    reward_unless_named = "math"


class Dialogue:
    """The ids of one run so far. `whole` is one experience of all turns, `turns` one of each."""

    def __init__(self, task: Task, prompt: list[int], sample: int) -> None:
        self.task, self.sample = task, sample
        self.prompt, self.ids = prompt, list(prompt)
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.turns: list[Experience] = []
        self.stop = "stop"
        self.routes: RoutedExperts | None = None

    @property
    def said(self) -> int:
        """Tokens of the model, trained or not."""
        return sum(turn.response_length for turn in self.turns)

    def say(self, made: Completion) -> None:
        """The model's turn."""
        self.turns.append(experience(self.task, self.ids, made, None, self.sample, len(self.turns)))
        at = len(self.mask)
        moved = [
            VersionSpan(version=s.version, start=s.start + at, end=s.end + at)
            for s in made.versions
        ]
        self.versions += moved
        self.routes = RoutedExperts.joined(self.routes, made.routed_experts)
        self.ids += made.ids
        self.mask += made.chosen(self.task.sampling).tolist()
        self.logprobs += made.logprobs.tolist()
        self.stop = made.stop

    def hear(self, ids: list[int]) -> None:
        """What the environment adds.

        `ids` begin with the end of the model's turn, which it may have said itself.
        """
        self.add(ids[1:] if ids and self.ids[-1] == ids[0] else ids)

    def add(self, new: list[int]) -> None:
        """Ids that no model chose."""
        self.ids += new
        self.mask += [0] * len(new)
        self.logprobs += [0.0] * len(new)

    def whole(self) -> Experience:
        last = self.turns[-1]
        return msgspec.structs.replace(
            last,
            tokens=column(Ids, self.ids),
            prompt_length=len(self.prompt),
            action_mask=column(Flags, self.mask),
            logprobs=column(LogProbs, self.logprobs),
            versions=self.versions,
            stop=self.stop,
            turn=0,
            routed_experts=self.routes,
            metrics={},
            info={},
        )


class MultiTurn:
    """One experience per run of the task, scored at its end. Made anew for every run, so `self` is
    the environment.

    `max_step_num` turns at most; `workflow_args` of the same name wins. `per_turn`: an experience
    per turn, each with that reward.
    """

    max_step_num = 8
    per_turn = False
    ARGUMENTS: ClassVar[dict[str, type]] = {"max_step_num": int}

    @classmethod
    def most_experiences(cls, task: Task) -> int:
        """Of one run."""
        limit = int(task.workflow_args.get("max_step_num", cls.max_step_num))
        return max(limit, 1) if cls.per_turn else 1

    def begin(self, task: Task) -> None:
        """Before the first turn."""

    def step(self, answer: str) -> Messages | None:
        """The environment's answer as chat messages; None ends the run. May be async."""
        raise NotImplementedError(f"{type(self).__name__} has no `step(self, answer)`")

    def reward(self, answer: str) -> float | dict[str, float] | None:
        """Of the run, after its last answer; None: what the task's reward function says of that
        answer. May be async.
        """
        return None

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        runs = [type(self)() for _ in range(task.repeat_times)]
        made = await together(*(one.episode(task, ctx, sample) for sample, one in enumerate(runs)))
        return [experience for run in made for experience in run]

    async def episode(self, task: Task, ctx: WorkflowContext, sample: int) -> list[Experience]:
        """One run from begin to end."""
        self.task, self.ctx = task, ctx
        await called(self.begin, task)
        talk = Dialogue(task, ctx.render(self.opening(task)), sample)
        answer, limit = "", int(task.workflow_args.get("max_step_num", self.max_step_num))
        for turn in range(limit):
            (made,) = await ctx.generate(list(talk.ids), 1, task.sampling, len(talk.prompt), sample)
            if made.stop == "abort":
                raise RuntimeError(f"task {task.id}: turn {turn} of run {sample} was aborted")
            if made.stop == "prompt_too_long":
                if turn:  # no room for another turn: what was said so far counts, as cut
                    talk.stop = "length"
                    break
                return [experience(task, talk.prompt, made, None, sample)]
            talk.say(made)
            answer = ctx.decode(made.tokens)
            heard = await called(self.step, answer)
            await self.after(talk, answer)
            if heard is None or made.stop == "length" or turn == limit - 1:
                break
            talk.hear(ctx.follow(heard))
        return await self.finished(talk, answer)

    def opening(self, task: Task) -> Task:
        """The task as the model first sees it."""
        return task

    async def after(self, talk: Dialogue, answer: str) -> None:
        """After each turn; for those that reward it."""

    async def finished(self, talk: Dialogue, answer: str) -> list[Experience]:
        result = await self.rewarding(answer)
        if result is None:
            (result,) = await self.ctx.score(self.task, [answer], [talk.said])
        made = talk.turns if self.per_turn else [talk.whole()]
        turns = {"turns": float(len(talk.turns))}
        return [self.told(rewarded(one, result), turns) for one in made]

    async def rewarding(self, answer: str) -> RewardResult | None:
        """What `reward` says; where it raises, that is the outcome."""
        try:
            value = await called(self.reward, answer)
        except Exception as error:
            return failure(error)
        return None if value is None else judged(value)

    def told(self, made: Experience, metrics: dict[str, float]) -> Experience:
        made.metrics = {**made.metrics, **metrics}
        return made


class StepWiseReward(MultiTurn):
    """One experience per turn, each with its own reward: the subclass writes `step` and `reward`,
    which is asked every turn.
    """

    per_turn = True

    async def after(self, talk: Dialogue, answer: str) -> None:
        result = await self.rewarding(answer)
        if result is None:
            raise TypeError(
                f"{type(self).__name__}.reward must give each turn a number, or a dict of them"
            )
        rewarded(talk.turns[-1], result)

    async def finished(self, talk: Dialogue, answer: str) -> list[Experience]:
        return [self.told(one, {"turns": float(len(talk.turns))}) for one in talk.turns]


class RewardPropagation(MultiTurn):
    """One experience per turn, all of a run with the reward of its end."""

    per_turn = True
