"""What a judging model said: its answer in, the JSON value that was asked for out. Pure text."""

import json
from typing import Any


def entry(reply: str, key: str) -> Any:
    """What the last JSON object of `reply` that has `key` holds there.

    ValueError: there is none.
    """
    decoder, found, some = json.JSONDecoder(), None, False
    for place, character in enumerate(reply):
        if character != "{":
            continue
        try:
            value, _ = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and key in value:
            found, some = value[key], True
    if not some:
        raise ValueError(
            f"the judge's answer has no JSON object with `{key}`: it ends in {reply[-200:]!r}"
        )
    return found


def entries(reply: str, key: str, count: int) -> list[Any]:
    """A list of exactly `count` entries under `key`."""
    found = entry(reply, key)
    if not isinstance(found, list) or len(found) != count:
        said = f"{len(found)} entries" if isinstance(found, list) else f"{found!r:.100}"
        raise ValueError(f"the judge's `{key}` must be a list of {count}; it has {said}")
    return found


def share(value: Any) -> float:
    """A score from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"the judge's score {value!r:.100} is no number from 0 to 1")
    return float(value)
