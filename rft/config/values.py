"""The kinds of value that a key may hold, as the schema spells them.

In: a value as YAML, the command line or an environment variable gives it. Out: the value in the
key's own type, or one sentence. Text is taken from numbers (`name=123`), and numbers from text
that is one (`${oc.env:RANKS}`); nothing else is converted: 3.0 and true are no whole numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError, core_schema

_YES, _NO = ("yes", "y", "on", "true"), ("no", "n", "off", "false")


def _whole(value: Any) -> int:
    try:
        if type(value) in (int, str):
            return int(value)
    except ValueError:
        pass
    raise PydanticCustomError("rft", "give a whole number")


def _number(value: Any) -> float:
    try:
        if type(value) in (float, int, str):
            return float(value)
    except ValueError:
        pass
    raise PydanticCustomError("rft", "give a number")


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        word = value.lower()
        if word in _YES or word in _NO:
            return word in _YES
        value = int(word) if word.lstrip("+-").isdecimal() else None
    if isinstance(value, int):
        return value != 0
    raise PydanticCustomError("rft", "give true or false")


def _text(value: Any) -> str:
    if value is None or isinstance(value, list | tuple | dict | bytes):
        raise PydanticCustomError("rft", "give a text")
    return str(value)


@dataclass(frozen=True)
class Within:
    """A bound with a sentence of its own: `shown` is what pages say of it, `said` stands behind the
    key of a value that is outside.
    """

    shown: str
    holds: Callable[[Any], bool]
    said: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self._inside, handler(source))

    def _inside(self, value: Any) -> Any:
        if not self.holds(value):
            raise PydanticCustomError("within", self.said.format(value=value))  # type: ignore[arg-type]
        return value


NO_PORT = "={value} is no port: give one from 1 to 65535, or "
Int = Annotated[int, Strict(), BeforeValidator(_whole)]
Float = Annotated[float, Strict(), BeforeValidator(_number)]
Bool = Annotated[bool, Strict(), BeforeValidator(_flag)]
Str = Annotated[str, Strict(), BeforeValidator(_text)]
PosInt = Annotated[Int, Field(gt=0)]
PosFloat = Annotated[Float, Field(gt=0)]
NonNegInt = Annotated[Int, Field(ge=0)]
NonNegFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[
    Float,
    Within(
        "> 0 and <= 1",
        lambda value: 0 < value <= 1,
        "={value:g}: give a share above 0, at most 1",
    ),
]
Parts = Annotated[
    Float,
    Within(
        "1.3 to 2", lambda value: 1.3 <= value <= 2, "={value:g}: give parts of a rank, 1.3 to 2"
    ),
]
SharePart = Annotated[
    Float,
    Within(
        ">= 0 and < 1",
        lambda value: 0 <= value < 1,
        "={value:g}: the share of a step's tasks that is not waited for; 0 to below 1",
    ),
]
AnyPort = Annotated[
    Int, Within("0 to 65535", lambda value: 0 <= value < 65536, NO_PORT + "0 for any")
]
RunPort = Annotated[
    NonNegInt, Within("and <= 65535", lambda value: value < 65536, NO_PORT + "0 for any")
]
FreePort = Annotated[
    Int,
    Within("1 to 65535", lambda value: 0 < value < 65536, NO_PORT + "leave it out for a free one"),
]
TopRows = Annotated[
    Int,
    Within(
        "> 0 or -1",
        lambda value: value > 0 or value == -1,
        "={value}: give 1 or more, or -1 for all rows",
    ),
]
FinitePosFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
FiniteNonNegFloat = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Seconds = FinitePosFloat  # a clock or a lock that waits takes no infinity


class Section:
    """A part of the config; its fields are `name: Annotated[type, meaning] = default`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
