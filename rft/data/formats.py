"""What the columns of a row mean: `format.prompt_type`, of tasks and of rows to learn.

    plaintext   a prompt, and an answer, in columns of their own
    messages    chat messages in one column

In: rows as they lie in a file or table. Out: the same rows; one of a plug-in's format has beside
its own columns those that the plug-in's function makes of it. Invariant: whatever a row format is
called, its rows are read, checked and tokenised as one of these two, by the same keys.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.config import ConfigError, FormatConfig

Row = dict[str, Any]


def as_it_is(row: Row) -> Row:
    return {}


@dataclass(frozen=True)
class RowFormat:
    """`function(row)` gives columns of a row; they are what `base` reads: by default `messages`."""

    function: Callable[[Row], Row]
    base: Literal["plaintext", "messages"] = "messages"

    @property
    def translates(self) -> bool:
        return self.function is not as_it_is


ROW_FORMATS = {
    "plaintext": RowFormat(as_it_is, "plaintext"),
    "messages": RowFormat(as_it_is, "messages"),
}


def of(config: FormatConfig, key: str = "") -> RowFormat:
    """Raises ConfigError for a format that nobody has; `key`: of what has it."""
    name = config.prompt_type or _implied(config)
    if name not in ROW_FORMATS:
        near = difflib.get_close_matches(name, ROW_FORMATS, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(
            f"{key}.format.prompt_type is {name!r}: use {' or '.join(ROW_FORMATS)}{hint}"
        )
    return ROW_FORMATS[name]


def has_messages(config: FormatConfig) -> bool:
    """False for a format that nobody has, which is refused where its rows are looked at."""
    found = ROW_FORMATS.get(config.prompt_type or _implied(config))
    return found is not None and found.base == "messages"


def _implied(config: FormatConfig) -> str:
    """By what is named; what rows of tasks have may be the other one."""
    return "plaintext" if config.prompt_key or config.response_key else "messages"


class Translated(Sequence[Row]):
    """Rows of a plug-in's format. It is known by its name, so this goes to any process."""

    def __init__(self, rows: Sequence[Row], config: FormatConfig, key: str, where: str):
        self.rows, self.config, self.key, self.where = rows, config, key, where

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        raw = self.rows[row]
        try:
            return {**raw, **of(self.config).function(dict(raw))}
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"{self.key}.format.prompt_type={self.config.prompt_type}: row {row + 1} of "
                f"{self.where}: the plug-in raised {type(error).__name__}: {error}; correct it, or "
                "the row"
            ) from error


def translated(rows: Sequence[Row], config: FormatConfig, key: str, where: str) -> Sequence[Row]:
    """`key`: of what has the format; `where` the rows lie."""
    return Translated(rows, config, key, where) if of(config, key).translates else rows
