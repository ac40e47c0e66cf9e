"""An agent as a user writes it: the real `openai` client, told where to ask and with which key, and
nothing of the trainer.
"""

from typing import Any

from openai import AsyncOpenAI

from rft.ground.experience import Task


async def agent(task: Task, base_url: str, api_key: str, judge: str = "") -> float:
    """Asks, shows the answer, asks again; even a model that knows nothing earns something, and
    never always the same.
    """
    said: list[Any] = [{"role": "user", "content": task.prompt}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(2):
            made = await client.chat.completions.create(model="gpt-4o", messages=said, max_tokens=6)
            said += [
                {"role": "assistant", "content": made.choices[0].message.content},
                {"role": "user", "content": "sure?"},
            ]
        if judge:  # of other weights, by its name; what it says is not learned from
            made = await client.chat.completions.create(
                model=judge, messages=said, max_tokens=6, temperature=0
            )
            assert made.system_fingerprint == "version-0" and made.model == judge
    answers = "".join(one["content"] for one in said if one["role"] == "assistant")
    return [0.0, 0.5, 1.0][sum(map(ord, answers)) % 3]
