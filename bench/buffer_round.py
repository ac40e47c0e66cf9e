"""One round of a buffer, in a process of its own, of whatever rft is on the path: `bench.buffer`
starts it for this checkout and for another one in turn.

    PYTHONPATH=CHECKOUT python bench/buffer_round.py STORE WHERE STEPS

In: a store (`queue`, `sql`), its directory or URL, a number of steps. Out: a line of JSON:
experiences per second, per second of this process's processor time, and where rft came from.
Explorers admit and put groups, 64 at a time; a trainer takes batches, decodes them, says consumed,
and lets go of what it has saved now and then; each call is durable. Only the standard library and
rft are imported, and of rft only what other commits have too.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import rft
from rft.buffer.delivery import opened
from rft.config import ExperienceBufferConfig
from rft.ground.experience import Experience, VersionSpan, encode

TOKENS, PROMPT, VOCABULARY = 1024, 256, 151_936
REPEATS, TASKS, AT_ONCE = 8, 32, 64
SAVES = 5  # steps between two


def group(seed: int, tokens: int = TOKENS, prompt: int = PROMPT) -> bytes:
    """One group as an explorer sends it."""
    draw, response = random.Random(seed), tokens - prompt
    return encode(
        [
            Experience(
                tokens=[draw.randrange(VOCABULARY) for _ in range(tokens)],
                prompt_length=prompt,
                action_mask=[1] * response,
                logprobs=[-draw.random() for _ in range(response)],
                reward=float(sample % 2),
                sample=sample,
                task="task",
                versions=[VersionSpan(version=0, start=0, end=response)],
                reward_outcome="ok",
            )
            for sample in range(REPEATS)
        ]
    )


def made(store: str, where: str) -> Any:
    if store == "queue":
        from rft.buffer.experience_buffer import ExperienceBuffer

        return ExperienceBuffer(ExperienceBufferConfig(), where, TASKS, REPEATS, None, None)
    from rft.buffer.sql_buffer import SqlBuffer

    config = ExperienceBufferConfig(storage_type="sql", path=where)
    return SqlBuffer(config, "p/run", TASKS, REPEATS, None, None)


async def seconds(buffer: Any, groups: list[bytes], steps: int) -> float:
    """For so many steps' groups, from `admit` to `consumed`."""
    await buffer.attach_trainer(0, 1)
    await buffer.attach_explorer("explorer")
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with free:
            admitted = await buffer.admit("explorer", b"task", {"next": number})
            assert admitted is not None
            await buffer.put(admitted, groups[number % len(groups)])

    async def train() -> None:
        for step in range(steps):
            batch = await asyncio.to_thread(opened, await buffer.take(step))
            assert len(batch.experiences) == TASKS * REPEATS
            await buffer.consumed(step)
            if step % SAVES == SAVES - 1:
                await buffer.retain(await buffer.position(), step - 1)

    began = time.perf_counter()
    await asyncio.gather(train(), *(one(number) for number in range(steps * TASKS)))
    found = time.perf_counter() - began
    await buffer.shutdown()
    return found


def main() -> None:
    store, where, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    groups = [group(seed) for seed in range(TASKS)]
    before = time.process_time()
    took = asyncio.run(seconds(made(store, where), groups, steps))
    cpu, count = time.process_time() - before, steps * TASKS * REPEATS
    print(json.dumps({"per_s": count / took, "per_cpu_s": count / cpu, "rft": rft.__file__}))


if __name__ == "__main__":
    main()
