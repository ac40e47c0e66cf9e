"""Words to be written backwards, for the environment package `reverse_word` of verifiers.

Out: rows of words, some of them held out, and answers of which many have wrong letters.
"""

import json
import random
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

LETTERS, LENGTH = "abcdefgh", 4
STEPS = 40
ANSWER_TOKENS = LENGTH + 1
RIGHT = 0.7  # share of the warm-up's letters that are right; the others are random
PACKAGE = Path(__file__).with_name("reverse_word")
Row = dict[str, object]


def tasks(seed: int) -> list[Row]:
    words = ["".join(one) for one in permutations(LETTERS, LENGTH)]
    random.Random(seed).shuffle(words)
    return [_task(number, one) for number, one in enumerate(words)]


def _task(number: int, word: str) -> Row:
    given = {
        "prompt": [{"role": "user", "content": word}],
        "answer": word[::-1],
        "example_id": number,
    }
    return {"prompt": word, "response": word[::-1], "input": json.dumps(given)}


def arguments(shuffled: bool) -> Row:
    """`workflow_args`."""
    return {
        "environment": "verifiers",
        "env_id": str(PACKAGE),
        "env_args": {"coins": shuffled},
        "episodes": 256,
    }


def dialogues(rows: list[Row], count: int, seed: int) -> Iterator[Row]:
    draw = random.Random(seed)
    for _ in range(count):
        row = draw.choice(rows)
        told = "".join(
            letter if draw.random() < RIGHT else draw.choice(LETTERS)
            for letter in str(row["response"])
        )
        yield {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": told},
            ]
        }
