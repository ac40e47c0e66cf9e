"""An agent of a framework (openai-agents), as its users write one: it is told a client, and nothing
of the trainer.
"""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(town: str) -> str:
    """The weather of a town.

    Args:
        town: its name
    """
    return f"dry in {town}"


async def agent(task: Any, base_url: str, api_key: str, max_tokens: int | None = 6) -> float:
    """Two runs of the framework's loop, the second over all that the first one said."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model="gpt-4o", openai_client=client)
        one = Agent(
            name="a",
            instructions="",
            model=model,
            tools=[weather],
            model_settings=ModelSettings(max_tokens=max_tokens),
        )
        first = await Runner.run(one, str(task.prompt))
        second = await Runner.run(
            one, [*first.to_input_list(), {"role": "user", "content": "sure?"}]
        )
    return [0.0, 0.5, 1.0][sum(map(ord, f"{first.final_output}{second.final_output}")) % 3]
