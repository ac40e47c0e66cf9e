"""A user's own workflow whose responses are mostly short and now and then many times as long: one
task in eight is a straggler.
"""

import msgspec

from rft.ground.experience import Experience, Task
from rft.rollout.workflows import SingleTurn, WorkflowContext

SHORT, LONG = 4, 400


async def run(task: Task, ctx: WorkflowContext) -> list[Experience]:
    """Every response has exactly as many tokens as its task's row says."""
    count = LONG if task.row % 8 == 0 else SHORT
    sampling = msgspec.structs.replace(task.sampling, max_tokens=count, min_tokens=count)
    return await SingleTurn().run(msgspec.structs.replace(task, sampling=sampling), ctx)
