"""What a misspelt key or value was probably meant to be.

Pure text, no imports but the table of the reference's names.
"""

import difflib
from typing import Any

from rft.config import trinity as trinity_keys


def closest(key: str, keys: list[str]) -> str | None:
    """The valid key that `key` was probably meant to be: the most similar spelling, else the same
    last word elsewhere.
    """
    match = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if match:
        return match[0]
    last = key.rsplit(".", 1)[-1]
    by_word = {k.rsplit(".", 1)[-1]: k for k in reversed(keys)}
    word = difflib.get_close_matches(last, list(by_word), n=1, cutoff=0.7)
    return by_word[word[0]] if word else None


def nearest(value: str, choices: Any, key: str) -> str:
    """Error text for a value outside `choices`."""
    known = f"Known: {', '.join(sorted(choices))}."
    if other := trinity_keys.of_value(key, value):
        return f"{key}={value} is refused: {other}. {known}"
    match = difflib.get_close_matches(value, list(choices), n=1)
    hint = f"; did you mean `{match[0]}`?" if match else "."
    return f"{key}={value} is unknown{hint} {known}"
