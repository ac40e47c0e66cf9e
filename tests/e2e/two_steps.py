"""A user's own workflow of runs with two steps: each step is an experience of its own, and says in
which state it began.
"""

import asyncio
from dataclasses import dataclass

from rft.ground.experience import Experience, Task
from rft.rollout.workflows import WorkflowContext, experience


@dataclass
class TwoSteps:
    """All runs of a task begin in one state; where they are
    after the first step, its reward says.
    """

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        runs = await asyncio.gather(
            *(self.one(task, ctx, sample) for sample in range(task.repeat_times))
        )
        return [step for run in runs for step in run]

    async def one(self, task: Task, ctx: WorkflowContext, sample: int) -> list[Experience]:
        prompt, state, steps = ctx.render(task), "start", []
        for turn in range(2):
            (made,) = await ctx.generate(prompt, 1, task.sampling)
            (result,) = await ctx.score(task, [ctx.decode(made.tokens)])
            step = experience(task, prompt, made, result, sample)
            step.turn, step.info = turn, {"env_state_hash": state, "step_reward": result.reward}
            steps.append(step)
            prompt, state = ctx.render(task)[: 8 + sample % 2], f"after {result.reward}"
        return steps
