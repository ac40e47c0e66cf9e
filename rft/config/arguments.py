"""Arguments of a function that a config names: which there are, and what is wrong with a value.

In: a function or class of a table, rft's own or a plug-in's (`rft.ground.plugins`), and what the
config gives it. Out: its options by name, and sentences. Invariant: what a function takes is said
by its signature and nowhere else: arguments with a default may be given, those behind a `*` without
one must be.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, Literal, get_args, get_origin

from rft.config.hints import nearest

Options = Mapping[str, inspect.Parameter]


def options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Arguments of `function` that a config may set."""
    return {
        one.name: one
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY
        or (one.kind is one.POSITIONAL_OR_KEYWORD and one.default is not one.empty)
    }


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a config may set this argument; one with ** takes every name."""
    parameters = inspect.signature(function).parameters.values()
    return name in options(function) or any(one.kind is one.VAR_KEYWORD for one in parameters)


def missing(given: Mapping[str, Any], known: Options) -> list[str]:
    """Names that a function has no default for, and that are not given."""
    return [name for name, one in known.items() if one.default is one.empty and name not in given]


def wrong_value(key: str, value: Any, option: inspect.Parameter) -> Iterator[str]:
    """What is wrong with the value of an argument, by its default and what is written behind it."""
    default, kind = option.default, option.annotation
    if get_origin(kind) is Literal:
        if str(value) not in get_args(kind):
            yield nearest(str(value), get_args(kind), key)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            yield f"{key}={value}: give true or false"
    elif _wants_number(option) and not (
        _is_number(value) or (value is None and option.default is None)
    ):
        like = default if isinstance(default, int | float) and default else 1
        yield f"{key}={value}: give a number, like {like}"


def _wants_number(option: inspect.Parameter) -> bool:
    kinds = {option.annotation, *get_args(option.annotation)}
    return isinstance(option.default, int | float) or bool({int, float} & kinds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
