"""The kinds of value that a key may hold, as the schema spells them.

In: a value as YAML, the command line or an environment variable gives it. Out: the value in the
key's own type, or one sentence. Text is taken from numbers (`name=123`), and numbers from text
that is one (`${oc.env:RANKS}`); nothing else is converted: 3.0 and true are no whole numbers.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

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


Int = Annotated[int, Strict(), BeforeValidator(_whole)]
Float = Annotated[float, Strict(), BeforeValidator(_number)]
Bool = Annotated[bool, Strict(), BeforeValidator(_flag)]
Str = Annotated[str, Strict(), BeforeValidator(_text)]
PosInt = Annotated[Int, Field(gt=0)]
PosFloat = Annotated[Float, Field(gt=0)]
NonNegInt = Annotated[Int, Field(ge=0)]
NonNegFloat = Annotated[Float, Field(ge=0)]
FinitePosFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
FiniteNonNegFloat = Annotated[Float, Field(ge=0, allow_inf_nan=False)]


class Section:
    """A part of the config; its fields are `name: Annotated[type, meaning] = default`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
