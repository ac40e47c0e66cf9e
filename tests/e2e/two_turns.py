"""A user's own workflow: two requests to the engine, and, where a test wants it, a pause between
them.

While the file named by `workflow_args.gate` exists, groups whose first request was answered by the
policy version in it wait, and leave the file `gate.reached`: a test then knows that a group is
under way, with some of its tokens sampled.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from rft.ground.experience import Completion, Experience, Task, VersionSpan
from rft.rollout.workflows import WorkflowContext, experience


async def run(task: Task, ctx: WorkflowContext) -> list[Experience]:
    prompt = ctx.render(task)
    half = msgspec.structs.replace(task.sampling, max_tokens=task.sampling.max_tokens // 2)
    begun = await ctx.generate(prompt, task.repeat_times, half)
    await passed(Path(task.workflow_args["gate"]), begun[0].versions[0].version)
    made = [
        joined(first, (await ctx.generate([*prompt, *first.tokens], 1, half))[0]) for first in begun
    ]
    results = await ctx.score(task, [ctx.decode(whole.tokens) for whole in made])
    return [
        experience(task, prompt, whole, result) for whole, result in zip(made, results, strict=True)
    ]


async def passed(gate: Path, version: int) -> None:
    """The explorer's `max_timeout` ends a wait that lasts too long."""
    while held(gate) == str(version):
        gate.with_suffix(".reached").touch()
        await asyncio.sleep(0.02)


def held(gate: Path) -> str:
    try:
        return gate.read_text()
    except FileNotFoundError:
        return ""


def joined(first: Completion, second: Completion) -> Completion:
    at = len(first.tokens)
    later = [
        VersionSpan(version=s.version, start=s.start + at, end=s.end + at) for s in second.versions
    ]
    return Completion(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=first.versions + later,
        stop=second.stop,
    )
