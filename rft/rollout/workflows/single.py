"""One prompt, one answer: `repeat_times` of them from one request."""

import msgspec

from rft.ground.experience import Experience, Task
from rft.rollout.workflows.base import WorkflowContext, experience, rewarded


class SingleTurn:
    """`task.repeat_times` responses to the prompt, from one request, each scored on its own."""

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        made, answered = await self.answers(task, ctx)
        texts = [ctx.decode(one.tokens[one.prompt_length :]) for one in answered]
        results = await ctx.score(task, texts, [one.response_length for one in answered])
        for one, result in zip(answered, results, strict=True):
            rewarded(one, result)
        return made

    async def answers(
        self, task: Task, ctx: WorkflowContext
    ) -> tuple[list[Experience], list[Experience]]:
        """Every response, not scored yet, and those of them that there is something to score of."""
        prompt = ctx.render(task)
        completions = await ctx.generate(prompt, task.repeat_times, task.sampling)
        aborted = sum(completion.stop == "abort" for completion in completions)
        if aborted or len(completions) != task.repeat_times:
            raise RuntimeError(
                f"task {task.id}: asked for {task.repeat_times} responses, got {len(completions)}, "
                f"{aborted} aborted"
            )
        made = [
            experience(task, prompt, one, None, sample) for sample, one in enumerate(completions)
        ]
        return made, [one for one in made if one.stop != "prompt_too_long"]


class Math(SingleTurn):
    """`SingleTurn` whose reward is `math`, unless the task names one: there, texts are never
    compared as they stand.
    """

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        if task.reward == "exact_match":
            task = msgspec.structs.replace(task, reward="math")
        return await super().run(task, ctx)
