"""Values against the schema: every problem of a config in one go, each in a sentence of rft's own.

In: plain data by the keys of the schema, all of it or a part. Out: a `Config` whose values have
their keys' types, or a ConfigError with a sentence for each key that cannot be what it is given; or
both, the sentences and the data without those keys. What is still an interpolation (`${...}`) is
passed over: it is looked at when it is resolved.
"""

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from rft.config import trinity as trinity_keys
from rft.config.derived import get
from rft.config.foreign import localized
from rft.config.hints import closest, nearest
from rft.config.keys import choices, hint_at, is_optional, item_keys, known_keys, shown
from rft.config.schema import Config
from rft.ground.errors import ConfigError, Problem, refuse_all

Place = tuple[str | int, ...]
UNKNOWN = "unexpected_keyword_argument"  # pydantic's error for a key that there is not


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def parsed(data: dict[str, Any]) -> Config:
    """A config out of plain data, missing keys by their defaults; raises ConfigError."""
    try:
        return _adapter().validate_python(data)
    except ValidationError as error:
        raise ConfigError(*map(_sentence, error.errors(include_url=False))) from None


def converted(key: str, value: Any) -> Any:
    """What `key` becomes when it is given `value`; raises ConfigError."""
    return get(parsed(nested(key, value)), key)


def nested(key: str, value: Any) -> dict[str, Any]:
    for word in reversed(key.split(".")):
        value = {word: value}
    return value


def examined(data: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """(`data` without what its keys cannot hold, a problem for each of that), also in the stages,
    whose keys begin with `every_stage.` or `stages.<number>.`.
    """
    data = copy.deepcopy(data)
    parts: list[tuple[str, str, Any]] = [("", "", data)]
    stages = data.get("stages")
    if isinstance(stages, list) and stages:  # without them every_stage means nothing
        parts += [("every_stage: ", "every_stage.", data.get("every_stage"))]
        parts += [("stages: ", f"stages.{n}.", stage) for n, stage in enumerate(stages)]
    problems = []
    for where, prefix, part in parts:
        for error in _errors(part) if isinstance(part, dict) else ():
            place = removed(part, error["loc"])
            key = ".".join(map(str, place))
            if error["type"] == UNKNOWN and (hint := meant(_name(error))):
                section, _, word = hint.rpartition(".")
                inside = trinity_keys.canonical(_name(error)).rpartition(".")[0] == section
                key = ".".join(map(str, (*place[:-1], word))) if inside else hint
            problems.append(Problem(prefix + key, where + _sentence(error)))
    return data, problems


def problems_in(data: dict[str, Any]) -> list[str]:
    """A sentence for each value or name that is wrong, also in the stages."""
    return [problem.sentence for problem in examined(data)[1]]


def removed(data: dict[str, Any], place: Place) -> Place:
    """Take away what stands at `place`, or the whole list that it is an item of; returns the place
    of what is gone.
    """
    while isinstance(place[-1], int) or place[-1] == "[key]":
        place = place[:-1]
    node: Any = data
    for part in place[:-1]:
        inside = part in node if isinstance(node, dict) else isinstance(part, int)
        if not inside:
            return place
        node = node[part]
    if isinstance(node, dict):
        node.pop(place[-1], None)
    return place


def completed(data: dict[str, Any]) -> DictConfig:
    """Data that is right, with every key of the schema and each value in its key's type."""
    data = with_own_references(data)
    return OmegaConf.create(
        _with_interpolations(asdict(parsed(_without_interpolations(data))), data)
    )


def with_own_references(data: dict[str, Any]) -> dict[str, Any]:
    """`data` where references inside a block of another system's keys mean keys of that block."""
    trainer = data.get("trainer")
    block = trainer.get("trainer_config") if isinstance(trainer, dict) else None
    if not isinstance(block, dict):
        return data
    own = localized(block, block, "trainer.trainer_config")
    return {**data, "trainer": {**trainer, "trainer_config": own}}


def normalized(raw: DictConfig) -> DictConfig:
    """`raw` with every key of the schema, and each value in its key's type; raises ConfigError with
    every problem.
    """
    data: dict[str, Any] = OmegaConf.to_container(raw, resolve=False)  # type: ignore[assignment]
    refuse_all(problems_in(data))
    return completed(data)


def without_unknown(raw: DictConfig) -> DictConfig:
    """`raw` without the keys that the schema does not have."""
    data: dict[str, Any] = OmegaConf.to_container(raw, resolve=False)  # type: ignore[assignment]
    for error in list(_errors(data)):
        if error["type"] == UNKNOWN:
            removed(data, error["loc"])
    return OmegaConf.create(data)


def meant(key: str) -> str | None:
    """The key that one that the schema does not have was probably meant to be."""
    name = trinity_keys.canonical(key)
    if trinity_keys.instead(name) is not None:
        return trinity_keys.KEYS[name].to if name in trinity_keys.KEYS else None
    found = _nearest(name)
    return trinity_keys.KEYS[found].to if found in trinity_keys.KEYS else found


def unknown(key: str, place: str | None = None) -> str:
    """What to say of a key that the schema does not have; `place`: its path where it stands, if
    that has numbers of items.
    """
    if (other := trinity_keys.instead(key)) is not None:
        return f"{place or key} is no key of rft: {other}"
    hint, said = _nearest(trinity_keys.canonical(key)), f"unknown key `{place or key}`"
    if hint in trinity_keys.KEYS:
        return f"{said}; did you mean `{hint}`? Of that: {trinity_keys.KEYS[hint].instead}"
    return said + (f"; did you mean `{hint}`?" if hint else "; see docs/configure.md")


def _nearest(name: str) -> str | None:
    """The key of either vocabulary that is spelt most like this one."""
    return closest(name, [*known_keys(), *item_keys(), *trinity_keys.KEYS])


def _errors(data: dict[str, Any]) -> Iterator[Any]:
    """pydantic's errors, as it calls them."""
    try:
        _adapter().validate_python(_without_interpolations(data))
    except ValidationError as error:
        yield from error.errors(include_url=False)


def _name(error: Any) -> str:
    """The key that is unknown, without numbers of items."""
    return ".".join(part for part in error["loc"] if isinstance(part, str))


def _sentence(error: Any) -> str:
    """One of pydantic's errors in rft's words."""
    kind, place, value = error["type"], error["loc"], error["input"]
    if kind == UNKNOWN:
        return unknown(_name(error))
    key = ".".join(map(str, place)).removesuffix(".[key]")
    said = "null" if value is None else shown(value)
    if kind == "within":
        return key + error["msg"]
    if kind == "literal_error":
        return nearest(said, choices(hint_at(place)), key)
    return f"{key}={said}: {_wanted(kind, value, error['msg'], place)}"


def _wanted(kind: str, value: Any, said: str, place: tuple[str | int, ...]) -> str:
    if kind == "finite_number" or (isinstance(value, float) and math.isnan(value)):
        return "give a finite number"
    if kind == "greater_than":
        can_be_left_out = value == 0 and is_optional(hint_at(place))
        return "must be greater than 0" + (", or left out" if can_be_left_out else "")
    fixed = {
        "greater_than_equal": "must be 0 or more",
        "dataclass_type": "give a section of keys",
        "dict_type": "give a section of keys",
        "list_type": "give a list",
        "string_type": "a name of a key is a text",
    }
    return fixed.get(kind, said)


def _is_interpolation(value: Any) -> bool:
    """Whether a value, or a part of a list, is known only when the config is resolved."""
    if isinstance(value, list):
        return any(_is_interpolation(item) for item in value)
    return isinstance(value, str) and "${" in value


def _without_interpolations(node: Any) -> Any:
    """`node` without interpolations."""
    if isinstance(node, dict):
        return {k: _without_interpolations(v) for k, v in node.items() if not _is_interpolation(v)}
    return [_without_interpolations(item) for item in node] if isinstance(node, list) else node


def _with_interpolations(full: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`full` with those of `given` in their places."""
    for name, value in given.items():
        if _is_interpolation(value):
            full[name] = value
        elif isinstance(value, dict):
            _with_interpolations(full[name], value)
        elif isinstance(value, list):
            for inner, item in zip(full[name], value, strict=True):
                if isinstance(item, dict):
                    _with_interpolations(inner, item)
    return full
