"""llm_difficulty_score_filter: a language model judges how hard a task is."""

import asyncio
import os
import re
from typing import Any

from rft.pipeline.task_operators.length import text_of

COLUMN = "llm_difficulty_score"
ASKED = (
    "You judge how difficult a task is for a capable student. Give one whole number from 1 (trivial) to 5 (only an expert "
    'solves it). Answer with JSON only: {{"difficulty": N}}.\n\n{task}'
)
ANSWER = re.compile(r'"difficulty"\s*:\s*([1-5])(?:\.0+)?\b')
RETRIES = 3


class LLMDifficulty:
    """Keep rows whose difficulty, the model's number / 5, lies from `min_score` to `max_score`; it goes into a column.

    The model `api_or_hf_model` is asked through an OpenAI-compatible endpoint: `api_endpoint`, else $OPENAI_BASE_URL, with the key
    in the variable that `api_key_env` names. It is shown the columns `input_keys` under the names `field_names`.
    An answer that is none is asked for again, `retries` times; then the pipeline fails, and no row is guessed.
    """

    def __init__(
        self, api_or_hf_model: str, input_keys: list[str], field_names: list[str] | None = None, min_score: float = 0.0,
        max_score: float = 1.0, api_endpoint: str | None = None, api_key_env: str = "OPENAI_API_KEY", concurrency: int = 8,
        request_timeout: float = 60.0, retries: int = RETRIES,
    ) -> None:  # fmt: skip
        self.model, self.keys, self.names = api_or_hf_model, list(input_keys), list(field_names or input_keys)
        self.least, self.most = float(min_score), float(max_score)
        if not self.keys or len(self.keys) != len(self.names):
            raise ValueError("input_keys and field_names must have as many entries each, at least one")
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError("min_score and max_score must lie in 0 to 1, the first at most the second")
        if int(concurrency) < 1 or float(request_timeout) <= 0 or int(retries) < 0:
            raise ValueError("concurrency must be 1 or more, request_timeout above 0 and retries 0 or more")
        self.concurrency, self.request_timeout, self.retries = int(concurrency), float(request_timeout), int(retries)
        url = api_endpoint or os.environ.get("OPENAI_BASE_URL")
        if not url:
            raise ValueError("no endpoint: give api_endpoint, or set OPENAI_BASE_URL to an OpenAI-compatible server")
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.api_key_env = api_key_env

    async def prepare(self) -> None:
        import httpx

        key = os.environ.get(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.AsyncClient(timeout=self.request_timeout, headers=headers)
        self.free = asyncio.Semaphore(self.concurrency)

    async def close(self) -> None:
        await self.client.aclose()

    async def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._score(row)) for row in rows]
        scores = [one.result() for one in asked]
        scored = [row | {COLUMN: score} for row, score in zip(rows, scores, strict=True)]
        kept = [row for row in scored if self.least <= row[COLUMN] <= self.most]
        mean = {f"{COLUMN}/mean": sum(scores) / len(scores)} if scores else {}
        return kept, {"filtered_count": len(rows) - len(kept), **mean}

    async def _score(self, row: dict[str, Any]) -> float:
        import httpx

        task = "\n".join(f"{name}: {text_of(row, key)}" for key, name in zip(self.keys, self.names, strict=True))
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": ASKED.format(task=task)}],
            "temperature": 0.0,
        }
        said = ""
        for _ in range(self.retries + 1):
            async with self.free:
                try:
                    answer = await self.client.post(self.url, json=question)
                    answer.raise_for_status()
                    said = str(answer.json()["choices"][0]["message"]["content"])
                except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                    said = f"{type(error).__name__}: {error}"
                    continue
            if found := ANSWER.search(said):
                return int(found[1]) / 5
        raise RuntimeError(
            f"{self.model} at {self.url} gave no difficulty in {self.retries + 1} tries; last: {said[:200]!r}"
        )
