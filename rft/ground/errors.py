"""The error that every part of rft raises for a config that cannot run, and how a user hears of it.

In: sentences, each naming a key and the fix. Out: one error with all of them, and exit code 2.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REFUSED = 2  # exit code


class Late(str):
    """A sentence that is said after all others: no word of the config is wrong, but what it asks
    for is not here, like a card, a service or a hub.
    """


def after(prefix: str, sentence: str) -> str:
    """The sentence behind a prefix, late if it was."""
    return type(sentence)(prefix + sentence)


class ConfigError(ValueError):
    """A config that cannot run; every sentence of `problems` names a key and the fix, and late ones
    are the last.
    """

    def __init__(self, *problems: str):
        ordered = tuple(sorted(problems, key=lambda one: isinstance(one, Late)))
        super().__init__("\n".join(ordered))
        self.problems = ordered


class Problem(NamedTuple):
    """A sentence of what is refused, and the key that cannot be read for it, or an empty one."""

    key: str
    sentence: str


def problems_of(check: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
    """What `check(*arguments)` refuses; empty where it passes."""
    try:
        check(*arguments)
    except ConfigError as error:
        return error.problems
    return ()


def all_of(sentences: Iterable[str]) -> Iterator[str]:
    """The sentences, and those of the error that ends them, if one does."""
    try:
        yield from sentences
    except ConfigError as error:
        yield from error.problems


def unreadable(path: str | Path) -> str:
    """What to say behind the key of a path that this user may not read, and `Path.exists` raises
    for; empty where nothing is there, or nothing is wrong.
    """
    try:
        wanted = os.R_OK | os.X_OK if Path(path).is_dir() else os.R_OK
        there = Path(path).exists()
    except OSError as error:
        reason = error.strerror
    else:
        reason = "" if not there or os.access(path, wanted) else "Permission denied"
    return reason and f"{path} cannot be read ({reason}): let this user read it, or give another"


def refuse_all(problems: Iterable[str]) -> None:
    """Raise one ConfigError of all problems, each said once; nothing where there are none."""
    if found := tuple(dict.fromkeys(problems)):
        raise ConfigError(*found)


def refuse(error: ConfigError) -> int:
    """Print why the config cannot run; returns the exit code."""
    if len(error.problems) == 1:
        print(f"rft: config refused: {error}", file=sys.stderr)
        return REFUSED
    print(f"rft: config refused, {len(error.problems)} problems:", file=sys.stderr)
    for number, problem in enumerate(error.problems, start=1):
        print(f"  {number}. {problem}", file=sys.stderr)
    return REFUSED
