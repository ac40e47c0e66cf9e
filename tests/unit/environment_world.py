"""A runner with the workflow `environment` over an engine that answers as it is told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.config import ExplorerConfig, ModelConfig
from rft.ground.experience import Sampling, Task
from rft.rollout.context import Shared, TokenLimits
from rft.rollout.runner import Runner
from rft.rollout.workflows import numbered
from tests.unit.scripted import TOKENIZER, Pool, listening


def task(environment: str, repeat: int = 1, raw: Any = None, row: int = 3, **args: Any) -> Task:
    return Task(
        id="t/0/3",
        taskset="t",
        row=row,
        prompt="6*7=",
        workflow="environment",
        repeat_times=repeat,
        sampling=Sampling(temperature=0.9),
        raw={"seed": 3} if raw is None else raw,
        workflow_args={"environment": environment, **args},
    )


class World:
    """A runner over a scripted engine, and what it counted."""

    def __init__(
        self,
        script: Callable[[str, int], Any],
        directory: Path,
        room: int = 1600,
        **config: Any,
    ) -> None:
        self.room = room
        settings = ExplorerConfig(**{"max_retry_times": 0, "max_timeout": 60.0, **config})
        self.shared = Shared(settings, ModelConfig(), {}, None)
        self.pool, self.directory = Pool(script), directory
        self.shared.pool, self.shared.tokenizer = self.pool, TOKENIZER  # type: ignore[assignment]
        self.shared.limits = TokenLimits(room // 2, room)
        self.shared.stop_token = TOKENIZER.eos_token_id
        self.runner = Runner(settings, self.shared)

    def run(self, *tasks: Task, beside: Callable[[], Any] | None = None) -> list[Any]:
        """Of each what it made, or what it raised; all at the same time."""

        async def whole() -> list[Any]:
            async with (
                asyncio.timeout(100),
                listening(self.pool, self.directory, context=self.room) as endpoint,
            ):
                self.shared.endpoint = endpoint
                jobs = [self.runner.run(number, one) for number, one in enumerate(tasks)]
                other = [beside()] if beside else []
                found, *_ = await asyncio.gather(
                    asyncio.gather(*jobs, return_exceptions=True), *other
                )
                await self.shared.environments.close()
                return list(found)

        found = asyncio.run(whole())
        for one, made in zip(tasks, found, strict=True):
            if isinstance(made, list):
                numbered(one, made)
        return found
