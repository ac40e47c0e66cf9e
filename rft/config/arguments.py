"""Arguments of a function that a config names: which there are, and what is wrong with a value.

In: a function or class of a table, rft's own or a plug-in's (`rft.ground.plugins`), and what the
config gives it. Out: its options by name, and sentences. Invariant: what a function takes is said
by its signature and nowhere else: arguments with a default may be given, those behind a `*` without
one must be, and `Positive` and the like say in which range a number makes sense.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rft.config.hints import nearest
from rft.config.values import Within

Options = Mapping[str, inspect.Parameter]
Positive = Annotated[float, Within("> 0", lambda x: x > 0, "={value:g}: must be greater than 0")]
NonNegative = Annotated[float, Within(">= 0", lambda x: x >= 0, "={value:g}: must be 0 or more")]
AboveOne = Annotated[float, Within("> 1", lambda x: x > 1, "={value:g}: must be greater than 1")]
Fraction = Annotated[
    float, Within("0 to 1", lambda x: 0 <= x <= 1, "={value:g}: give a share, 0 to 1")
]
Smoothing = Annotated[
    float,
    Within(
        ">= 0 and < 0.5",
        lambda x: 0 <= x < 0.5,
        "={value:g}: 0 to below 0.5, from which on labels say nothing, or the opposite",
    ),
]


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
    elif value is not None:
        bounds = [one for one in _kinds(kind) if isinstance(one, Within)]
        yield from (key + one.said.format(value=value) for one in bounds if not one.holds(value))


def _wants_number(option: inspect.Parameter) -> bool:
    kinds = list(_kinds(option.annotation))
    return isinstance(option.default, int | float) or int in kinds or float in kinds


def _kinds(kind: Any) -> Iterator[Any]:
    """A type, and what it is one of, with what is said about them."""
    yield kind
    if get_origin(kind) in (Annotated, Union, UnionType):
        for inner in get_args(kind):
            yield from _kinds(inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
