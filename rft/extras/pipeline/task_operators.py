"""Operators of the task pipeline: classes whose `process` gets rows (dicts), and gives back rows
and metrics. One class each, and one entry in `TASK_OPERATORS` (`rft.extras.pipeline.operators`).
"""

import asyncio
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rft.extras.pipeline.experience_operators import is_number
from rft.ground.errors import ConfigError, Late

UNITS = ("chars", "words")
LLM_COLUMN = "llm_difficulty_score"
LLM_QUESTION = (
    "You judge how difficult a task is for a capable student. Give one whole number from 1 "
    "(trivial) to 5 (only an expert "
    'solves it). Answer with JSON only: {{"difficulty": N}}.\n\n{task}'
)
LLM_ANSWER = re.compile(r'"difficulty"\s*:\s*([1-5])(?:\.0+)?(?![\d.])')
LLM_RETRIES = 3
BUSY = (408, 429)  # of HTTP, beside 5xx: later it may answer
MOST_PAUSE_S = 60.0  # that a server may ask for
FAILED = ("timeout", "error")  # as `Experience.failed`


class LLMDifficulty:
    """llm_difficulty_score_filter: a language model judges how hard a task is.

    Keep rows whose difficulty, the model's number / 5, lies from `min_score` to `max_score`; it
    goes into a column.

    The model `api_or_hf_model` is asked through an OpenAI-compatible endpoint: `api_endpoint`, else
    $OPENAI_BASE_URL, with the key in the variable that `api_key_env` names. It is shown the columns
    `input_keys` under the names `field_names`. An answer that is none is asked for again, `retries`
    times, of a server that is busy a little later; then the pipeline fails, and no row is guessed.
    """

    def __init__(
        self,
        api_or_hf_model: str,
        input_keys: list[str],
        field_names: list[str] | None = None,
        min_score: float = 0.0,
        max_score: float = 1.0,
        api_endpoint: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 8,
        request_timeout: float = 60.0,
        retries: int = LLM_RETRIES,
    ) -> None:
        self.model, self.keys, self.names = (
            api_or_hf_model,
            list(input_keys),
            list(field_names or input_keys),
        )
        self.least, self.most = float(min_score), float(max_score)
        if not self.keys or len(self.keys) != len(self.names):
            raise ValueError(
                "input_keys and field_names must have as many entries each, at least one"
            )
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError(
                "min_score and max_score must lie in 0 to 1, the first at most the second"
            )
        if int(concurrency) < 1 or float(request_timeout) <= 0 or int(retries) < 0:
            raise ValueError(
                "concurrency must be 1 or more, request_timeout above 0 and retries 0 or more"
            )
        self.concurrency, self.request_timeout, self.retries = (
            int(concurrency),
            float(request_timeout),
            int(retries),
        )
        url = api_endpoint or os.environ.get("OPENAI_BASE_URL")
        if not url:
            raise ConfigError(
                Late(
                    "no endpoint: give args.api_endpoint, or set OPENAI_BASE_URL to an "
                    "OpenAI-compatible server"
                )
            )
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

    async def process(
        self, rows: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._score(row)) for row in rows]
        scores = [one.result() for one in asked]
        scored = [row | {LLM_COLUMN: score} for row, score in zip(rows, scores, strict=True)]
        kept = [row for row in scored if self.least <= row[LLM_COLUMN] <= self.most]
        mean = {f"{LLM_COLUMN}/mean": sum(scores) / len(scores)} if scores else {}
        return kept, {"filtered_count": len(rows) - len(kept), **mean}

    async def _score(self, row: dict[str, Any]) -> float:
        task = "\n".join(
            f"{name}: {text_of(row, key)}" for key, name in zip(self.keys, self.names, strict=True)
        )
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": LLM_QUESTION.format(task=task)}],
            "temperature": 0.0,
        }
        said = ""
        for tried in range(self.retries + 1):
            said, pause = await self._ask(question, 2.0**tried)
            if pause is None and (found := LLM_ANSWER.search(said)):
                return int(found[1]) / 5
            if pause and tried < self.retries:
                await asyncio.sleep(pause)
        raise RuntimeError(
            f"{self.model} at {self.url} gave no difficulty in {self.retries + 1} tries; last: "
            f"{said[:200]!r}"
        )

    async def _ask(self, question: dict[str, Any], pause: float) -> tuple[str, float | None]:
        """The model's words, and None; or why there are none, and the seconds to wait before it is
        asked again: what a busy server asks for, or else `pause`.
        """
        import httpx

        async with self.free:
            try:
                answer = await self.client.post(self.url, json=question)
                answer.raise_for_status()
                return str(answer.json()["choices"][0]["message"]["content"]), None
            except httpx.HTTPStatusError as error:
                code, after = error.response.status_code, error.response.headers.get("Retry-After")
                if after and after.isdecimal():
                    pause = min(float(after), MOST_PAUSE_S)
                return str(error), pause if code in BUSY or code >= 500 else 0.0
            except httpx.HTTPError as error:
                return f"{type(error).__name__}: {error}", pause
            except (ValueError, LookupError, TypeError) as error:
                return f"{type(error).__name__}: {error}", 0.0


class DifficultyFilter:
    """difficulty_filter: keep rows whose number, a difficulty or any other, lies in a range.

    Keep rows with `min_value` <= row[field] <= `max_value`; a row without that number is an error,
    not easy or hard.
    """

    def __init__(
        self, field: str, min_value: float | None = None, max_value: float | None = None
    ) -> None:
        if min_value is None and max_value is None:
            raise ValueError("neither min_value nor max_value is given")
        self.field = field
        self.least = float("-inf") if min_value is None else float(min_value)
        self.most = float("inf") if max_value is None else float(max_value)
        if self.most < self.least:
            raise ValueError("max_value is below min_value")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [row for row in rows if self.least <= number_of(row, self.field) <= self.most]
        return kept, {"filtered_count": len(rows) - len(kept)}


class Curriculum:
    """difficulty_curriculum: order rows from easy to hard.

    By row[field], small numbers first; `hard_is_low` for numbers like a pass rate. Rows of one
    number keep their order.

    Only a taskset that is read in the order of its file keeps this one: preflight asks for
    `shuffle: false`.
    """

    whole = True
    ordered = True

    def __init__(self, field: str = "llm_difficulty_score", hard_is_low: bool = False) -> None:
        self.field, self.sign = field, -1 if hard_is_low else 1

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        ordered = sorted(rows, key=lambda row: self.sign * number_of(row, self.field))
        return ordered, {}


class TextLengthFilter:
    """length_filter: keep rows whose text has a certain length.

    `field` holds a text, or chat messages, whose contents are counted together, in `unit` chars or
    words.
    """

    def __init__(
        self, field: str, min_length: int = 1, max_length: int | None = None, unit: str = "chars"
    ) -> None:
        if unit not in UNITS:
            raise ValueError(f"unit is {unit}; known are {', '.join(UNITS)}")
        self.field, self.unit = field, unit
        self.least, self.most = int(min_length), None if max_length is None else int(max_length)
        if self.most is not None and self.most < self.least:
            raise ValueError("max_length is below min_length")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [
            row
            for row in rows
            if self.least <= (n := self._length(row)) and (self.most is None or n <= self.most)
        ]
        return kept, {"filtered_count": len(rows) - len(kept)}

    def _length(self, row: dict[str, Any]) -> int:
        text = text_of(row, self.field)
        return len(text.split()) if self.unit == "words" else len(text)


class PassRateFilter:
    """pass_rate_filter: keep the tasks that an earlier run solved sometimes, as its samples tell.

    `samples`: what `experience_pipeline.save_input` wrote, or JSON lines with a `prompt` and a
    `reward` each. Rows are matched by `field`, the text of the prompt, so the data file may have
    changed since. The rate goes into the column `pass_rate`; rows without a sample stay if
    `keep_unseen`.
    """

    def __init__(
        self,
        samples: str,
        field: str = "prompt",
        min_rate: float = 0.0,
        max_rate: float = 1.0,
        keep_unseen: bool = True,
    ) -> None:
        self.path, self.field, self.keep_unseen = Path(samples), field, bool(keep_unseen)
        self.least, self.most = float(min_rate), float(max_rate)
        if not self.path.is_file():
            raise ValueError(f"samples={samples}: no such file")
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError("min_rate and max_rate must be shares, the first at most the second")

    async def prepare(self) -> None:
        groups: dict[Any, list[tuple[str, float]]] = {}
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        told = json.loads(line)
                        # a group that ran again after a crash is there twice: the last line counts
                        groups[group_of(told, number)] = samples_of(told)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    if not line.endswith(b"\n"):  # what a killed run was about to write
                        continue
                    raise ValueError(
                        f"{self.path} line {number} is no prompt with a reward, and no recorded "
                        f"group: {type(error).__name__}: {error}"
                    ) from error
        rewards: dict[str, list[float]] = defaultdict(list)
        for found in groups.values():
            for prompt, reward in found:
                rewards[prompt.strip()].append(reward)
        self.rates = {prompt: min(1.0, max(0.0, fmean(given))) for prompt, given in rewards.items()}

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept, unseen = [], 0
        for row in rows:
            rate = self.rates.get(text_of(row, self.field).strip())
            unseen += rate is None
            if self.keep_unseen if rate is None else self.least <= rate <= self.most:
                kept.append(row if rate is None else row | {"pass_rate": rate})
        return kept, {"filtered_count": len(rows) - len(kept), "unseen_count": unseen}


def group_of(line: dict[str, Any], number: int) -> Any:
    """What a line is of: a group of a run, or only itself."""
    return (line["group"], line["prompt"]) if "experiences" in line else number


def samples_of(line: dict[str, Any]) -> list[tuple[str, float]]:
    """(prompt, reward) of one line, or of the experiences of a recorded group, but for those whose
    reward function failed.
    """
    if "experiences" not in line:
        return [(text_of(line, "prompt"), float(line["reward"]))]
    judged = (made for made in line["experiences"] if made.get("reward_outcome") not in FAILED)
    told = (made.get("reward", 0.0) for made in judged)
    return [(line["prompt"], float(reward)) for reward in told if reward is not None]


class DropSameRows:
    """dedupe: of rows that are equal in some columns, keep the first.

    `fields` are compared together; with `normalize`, without regard to case, punctuation and white
    space.
    """

    whole = True

    def __init__(self, fields: list[str], normalize: bool = True) -> None:
        self.fields, self.normalize = list(fields), bool(normalize)
        if not self.fields:
            raise ValueError("fields is empty")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in rows:
            found.setdefault(tuple(self._form(text_of(row, field)) for field in self.fields), row)
        return list(found.values()), {"filtered_count": len(rows) - len(found)}

    def _form(self, text: str) -> str:
        """What is compared. The signs of mathematics stay: 3 + 4 is not 3 - 4."""
        if not self.normalize:
            return text
        return " ".join("".join(c for c in text.casefold() if c not in ",.;:!?\"'`").split())


class RequiredFields:
    """required_fields: keep rows that have something in every one of these columns.

    A column counts as empty when it is missing, null, or a text, list or object without content. 0
    and false are content.
    """

    def __init__(self, fields: list[str]) -> None:
        self.fields = list(fields)
        if not self.fields:
            raise ValueError("fields is empty")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [row for row in rows if not any(is_empty(row.get(field)) for field in self.fields)]
        return kept, {"filtered_count": len(rows) - len(kept)}


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def number_of(row: dict[str, Any], field: str) -> float:
    value = row.get(field)
    if not is_number(value):
        raise ValueError(
            f"a row has {value!r} as {field!r}, which must be a number; its columns are "
            f"{', '.join(row)}"
        )
    return float(value)  # type: ignore[arg-type]


def text_of(row: dict[str, Any], field: str) -> str:
    """What a column says: a text, a number as text, or the contents of its messages."""
    if field not in row:
        raise KeyError(f"no column {field!r}; there are {', '.join(row)}")
    value = row[field]
    if isinstance(value, list):
        return "\n".join(str(message.get("content", "")) for message in value)
    return "" if value is None else str(value)
