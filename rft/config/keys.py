"""The keys of the schema by their dotted names, and what it says of each.

In: the dataclasses of `rft.config.schema`. Out: names, and one `Setting` per key that holds a
value: type, allowed values, bounds, default and meaning as a reader wants them. Pages, the studio
and error messages are made of these.
"""

import functools
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt
from omegaconf import MISSING
from pydantic.fields import FieldInfo

from rft.config.schema import Config
from rft.config.values import Within


@dataclass(frozen=True)
class Setting:
    """One key that holds a value, a list or a free dictionary.

    `choices`: the only words that it takes; `bound`: of a number, like `> 0`; `is_optional`: null
    means that it is not set.
    """

    key: str
    type: str
    default: str
    meaning: str
    choices: tuple[str, ...]
    bound: str
    is_optional: bool

    @property
    def takes(self) -> str:
        """Type, allowed values and bounds in one cell."""
        words = " | ".join(self.choices) or f"{self.type} {self.bound}".strip()
        return f"{words}, or null" if self.is_optional else words


def plain(hint: Any) -> Any:
    """A type without what is said beside it, and without None."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType):
            hint = next(part for part in get_args(hint) if part is not NoneType)
        else:
            return hint


def is_optional(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return NoneType in get_args(hint)


def choices(hint: Any) -> tuple[str, ...]:
    hint = plain(hint)
    return get_args(hint) if get_origin(hint) is Literal else ()


def bound(hint: Any) -> str:
    """The bound of a number, which may stand beside the type or inside its optional part."""
    if get_origin(hint) in (Union, UnionType):
        return "".join(bound(part) for part in get_args(hint))
    if get_origin(hint) is not Annotated:
        return ""
    inner, *beside = get_args(hint)
    limits = [limit for info in beside if isinstance(info, FieldInfo) for limit in info.metadata]
    said = [f"> {limit.gt}" for limit in limits if isinstance(limit, Gt)]
    said += [f">= {limit.ge}" for limit in limits if isinstance(limit, Ge)]
    said += [info.shown for info in beside if isinstance(info, Within)]
    return " ".join(filter(None, (bound(inner), *said)))


def spelled(hint: Any) -> str:
    """A type as a page shows it: `int`, `list[str]`."""
    hint = plain(hint)
    parts = [spelled(part) for part in get_args(hint)] if get_origin(hint) is not Literal else []
    return f"{hint.__name__}[{', '.join(parts)}]" if parts else getattr(hint, "__name__", str(hint))


@functools.cache
def hints(section: Any) -> dict[str, Any]:
    """Types of a section's keys, with what is said beside them."""
    return get_type_hints(section, include_extras=True)


def hint_at(place: tuple[str | int, ...]) -> Any:
    """The type of a key, or of an item of a list or dictionary; None where there is none."""
    hint: Any = Config
    for part in place:
        inner = plain(hint)
        if is_dataclass(inner):
            hint = hints(inner).get(str(part))
        else:
            hint = get_args(inner)[-1] if get_args(inner) else None
    return hint


def sections(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(prefix of its keys, dataclass) of every section, parents first."""
    yield prefix, section
    for name, hint in hints(section).items():
        if is_dataclass(plain(hint)):
            yield from sections(plain(hint), f"{prefix}{name}.")


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key, sections too; items of lists and free dictionaries have no names here."""
    return tuple(prefix + item.name for prefix, cls in sections() for item in fields(cls))


@functools.cache
def leaf_keys() -> tuple[str, ...]:
    """Those that hold a value, a list or a free dictionary, and no section."""
    return tuple(setting.key for _, settings in tables() for setting in settings)


@functools.cache
def item_keys() -> tuple[str, ...]:
    """Keys of a list's items, without their number, where no section has the same keys."""
    named = {cls for _, cls in sections()}
    lists = [(key, get_args(plain(hint_at(tuple(key.split(".")))))) for key in leaf_keys()]
    return tuple(
        f"{key}.{item.name}"
        for key, (*_, cls) in [pair for pair in lists if pair[1]]
        if is_dataclass(cls) and cls not in named
        for item in fields(cls)
    )


@functools.cache
def tables() -> tuple[tuple[str, tuple[Setting, ...]], ...]:
    """(prefix, keys that hold a value) of every section, in the order of the schema."""
    return tuple(
        (
            prefix,
            tuple(
                _setting(prefix + item.name, hints(cls)[item.name], item)
                for item in fields(cls)
                if not is_dataclass(plain(hints(cls)[item.name]))
            ),
        )
        for prefix, cls in sections()
    )


def setting(key: str) -> Setting | None:
    return next((one for _, settings in tables() for one in settings if one.key == key), None)


def _setting(key: str, hint: Any, item: Any) -> Setting:
    *_, meaning = get_args(hint)
    default = item.default if item.default is not NO_DEFAULT else item.default_factory()
    return Setting(
        key, spelled(hint), shown(default), meaning, choices(hint), bound(hint), is_optional(hint)
    )


def shown(value: Any) -> str:
    """A value as YAML has it; a default that must be given as `required`, none as nothing."""
    if value is None:
        return ""
    if value == MISSING:
        return "required"
    return str(value).lower() if isinstance(value, bool) else str(value)
