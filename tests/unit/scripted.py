"""An engine pool that answers as it is told, behind the real endpoint: what tests of sessions and
agents speak to.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rft.agents.endpoint.registry import Registry
from rft.agents.endpoint.served_models import Model
from rft.agents.endpoint.server import OpenAIEndpoint
from rft.ground.experience import Completion, Experience, GenerateRequest, VersionSpan
from rft.rollout.served import ServedGroup
from rft.tools.toy import character_tokenizer

TOKEN = "the-owner-of-the-run"
TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


class Pool:
    """`script(prompt text, number)` is the text of answer `number`, or (text, stop).

    No two log-probabilities are equal.
    """

    def __init__(self, script: Callable[[str, int], Any]):
        self.script = script
        self.asked: list[GenerateRequest] = []
        self.answered: list[Completion] = []
        self.version = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up: list[str] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.asked.append(request)
        number = len(self.asked)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up.append(request.request_id)
            raise
        made = []
        for n in range(request.n):
            told = self.script(TOKENIZER.decode(request.prompt), n)
            text, stop = told if isinstance(told, tuple) else (told, "stop")
            tokens = TOKENIZER.encode(text, add_special_tokens=False) + (
                [END] if stop == "stop" else []
            )
            logprobs = [-(number + n / 10 + at / 1000) for at in range(len(tokens))]
            spans = [VersionSpan(version=self.version, start=0, end=len(tokens))]
            made.append(Completion(tokens=tokens, logprobs=logprobs, versions=spans, stop=stop))
        self.answered += made
        return made

    def absence(self) -> str:
        return ""

    def stats(self) -> dict[str, float]:
        return {"pool/engines": 1.0}


class Kept:
    """What mode=serve stored."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Experience]] = {}

    async def store(self, group: ServedGroup) -> None:
        self.groups[group.task] = group.experiences


def policy(
    pool: Any, context: int = 512, template: str | None = None, name: str = "policy"
) -> Model:
    return Model(name, TOKENIZER, template, pool, context)


@asynccontextmanager
async def listening(
    pool: Any,
    directory: Path,
    kept: Kept | None = None,
    group_size: int = 1,
    others: tuple[Model, ...] = (),
    timeout: float = 60.0,
    **model: Any,
) -> AsyncIterator[OpenAIEndpoint]:
    """The endpoint on a free port of this machine."""
    registry = Registry(TOKEN, timeout, kept.store if kept else None, group_size)
    endpoint = OpenAIEndpoint(
        registry, [policy(pool, **model), *others], directory / "endpoint.json"
    )
    await endpoint.start("127.0.0.1", 0)
    try:
        yield endpoint
    finally:
        await endpoint.close()
