"""`rft view SOURCE [--model DIR] [--port 8502]`: the experiences of a run in the browser, down to
the single token.

In: a job directory, a JSON-lines file of experiences, like those of `rft debug`, or the URL of a
database, and the tokenizer of its model. Out: a page with a list that can be searched, and for each
experience its tokens, coloured by log-probability, with mask, version and reward. Invariant: it
only reads, also next to a run that is under way; what it shows is what the trainer gets, token by
token.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rft import config as configs
from rft.buffer.store import read_experiences
from rft.config import ConfigError
from rft.ground.errors import refuse
from rft.ground.experience import Experience, decode
from rft.tools import local_page
from rft.tools.buffer import NAME, from_database

PAGE = Path(__file__).with_name("view.html")
AT_ONCE = 100  # rows of the list
PREVIEW = 160  # characters


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft view", description="Browse the experiences of a run."
    )
    parser.add_argument(
        "source", help="a job directory, a .jsonl file of experiences, or a database's URL"
    )
    parser.add_argument(
        "--model", help="directory of the tokenizer; default: that of the run's resolved.yaml"
    )
    parser.add_argument("--port", type=int, default=8502, help="0: any free one (default: 8502)")
    options = parser.parse_args(argv)
    try:
        view = View(list(found(options.source)), tokenizer_of(Path(options.source), options.model))
    except ConfigError as error:
        return refuse(error)
    print(f"{len(view.found)} experiences", file=sys.stderr)
    return local_page.serve(
        "rft view", options.port, PAGE, {"/api/list": view.listed, "/api/one": view.one}
    )


def found(source: str) -> Iterator[Experience]:
    if "://" not in source:
        yield from read_experiences(Path(source))
        return
    for part in from_database(source, NAME):
        yield from decode(part.experiences, list[Experience])


def tokenizer_of(source: Path, model: str | None) -> Any:
    from transformers import AutoTokenizer

    directory = source if source.is_dir() else source.parent
    resolved = next(
        (
            path
            for path in (
                directory / "resolved.yaml",
                directory / "bench" / "resolved.yaml",
                *sorted(directory.glob("explorers/*/resolved.yaml")),
            )
            if path.is_file()
        ),
        None,
    )
    if model is None and resolved is None:
        raise ConfigError(
            f"--model: {directory} has no resolved.yaml that names a model: "
            "give the directory of its tokenizer"
        )
    path = model or configs.as_written(resolved).model.model_path
    if not (Path(path) / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"--model: {path} has no tokenizer_config.json: "
            "give the directory of the model's tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"--model: {path} has no tokenizer that can be read: {said}") from error


@dataclass(frozen=True)
class Wanted:
    """What the list is narrowed to; an empty text or None says nothing."""

    words: str = ""
    least: float | None = None  # reward
    most: float | None = None
    outcome: str = ""
    order: str = "stored"  # stored | newest | reward | length


class View:
    def __init__(self, found: list[Experience], tokenizer: Any):
        self.found = found
        self.tokenizer = tokenizer
        self.texts = [self.texts_of(one) for one in found]

    def texts_of(self, one: Experience) -> tuple[str, str]:
        return self.tokenizer.decode(one.prompt_ids), self.tokenizer.decode(one.response_ids)

    def listed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """{wanted, offset} to {total, matching, rows, mean}: a page of those that match, in the
        order asked for.
        """
        wanted = msgspec.convert(asked.get("wanted", {}), Wanted)
        offset = int(asked.get("offset", 0))
        matching = [number for number in range(len(self.found)) if self._matches(number, wanted)]
        rewards = [self.found[number].reward for number in matching]
        keys = {
            "newest": lambda n: -n,
            "reward": lambda n: -self.found[n].reward,
            "length": lambda n: -self.found[n].response_length,
        }
        if wanted.order in keys:
            matching.sort(key=keys[wanted.order])
        rows = [self._row(number) for number in matching[offset : offset + AT_ONCE]]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        return {"total": len(self.found), "matching": len(matching), "mean": mean, "rows": rows}

    def _matches(self, number: int, wanted: Wanted) -> bool:
        one, texts = self.found[number], self.texts[number]
        least, most = wanted.least, wanted.most
        if least is not None and one.reward < least or most is not None and one.reward > most:
            return False
        if wanted.outcome and one.reward_outcome != wanted.outcome:
            return False
        words = wanted.words.casefold()
        return (
            not words
            or words in one.task.casefold()
            or any(words in text.casefold() for text in texts)
        )

    def _row(self, number: int) -> dict[str, Any]:
        one = self.found[number]
        return {
            "number": number,
            "task": one.task,
            "group": one.group,
            "sample": one.sample,
            "turn": one.turn,
            "reward": one.reward,
            "outcome": one.reward_outcome,
            "length": one.response_length,
            "stop": one.stop,
            "response": self.texts[number][1][:PREVIEW],
            "versions": sorted({span.version for span in one.versions}),
        }

    def one(self, asked: dict[str, Any]) -> dict[str, Any]:
        """{number} to everything of one experience."""
        number = int(asked["number"])
        if not 0 <= number < len(self.found):
            raise ConfigError(f"there are experiences 0 to {len(self.found) - 1}, and no {number}")
        one = self.found[number]
        metrics = {name: str(value) for name, value in {**one.metrics, **one.info}.items()}
        return self._row(number) | {
            "prompt": self.texts[number][0],
            "metrics": metrics,
            "tokens": list(self._tokens(one)),
        }

    def _tokens(self, one: Experience) -> Iterator[dict[str, Any]]:
        versions = one.token_versions
        for place, token in enumerate(one.response_ids):
            yield {
                "id": token,
                "text": self.tokenizer.decode([token]),
                "trained": bool(one.action_mask[place]),
                "logprob": in_json(float(one.logprobs[place])) if len(one.logprobs) else None,
                "version": versions[place],
                "reward": in_json(float(one.token_rewards[place]))
                if len(one.token_rewards)
                else None,
            }


def in_json(value: float) -> float | str:
    """JSON has no NaN: what somebody may be looking for is told as a word."""
    return value if math.isfinite(value) else str(value)
