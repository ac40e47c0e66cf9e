"""Where the rows of a taskset come from: files (`rft.data.files`) or a table of an SQLite file; and
what their columns say.

In: a taskset's config. Out: its rows by number, their count, or a `ConfigError` for the first one
that cannot be used. Invariant: a table is read only, in the order of its row ids, and a row is the
same whichever of the two it came from.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rft.config import ConfigError, FormatConfig, TasksetConfig
from rft.data import formats
from rft.data.files import (
    MISSING,
    at,
    check_formed,
    check_made,
    count_rows,
    data_files,
    load_rows,
    task_needs,
)
from rft.data.lines import json_rows
from rft.data.tables import TABLES, load_table
from rft.ground.errors import unreadable

RAW = "raw_task"  # a column of whole rows as JSON, as Trinity-RFT writes its tables
STORAGES = ("file", "sql")


def check_storage(config: TasksetConfig, key: str) -> None:
    if config.storage_type not in STORAGES:
        raise ConfigError(
            f"{key}.storage_type={config.storage_type}: tasks are rows of files or of a table, "
            "and nobody fills a queue of them; set file, or sql with the path of an SQLite file"
        )


def is_table(config: TasksetConfig) -> bool:
    """Whether its rows are asked of a database instead of read from files."""
    return config.storage_type == "sql"


def load(config: TasksetConfig, key: str) -> Sequence[dict[str, Any]]:
    check_storage(config, key)
    rows = (
        SqlRows(config, key)
        if is_table(config)
        else load_rows(files_of(config, key), key, config.format)
    )
    return formats.translated(rows, config.format, key, str(config.path))


def count(config: TasksetConfig, key: str) -> int:
    """Rows, counted without loading them."""
    check_storage(config, key)
    return len(SqlRows(config, key)) if is_table(config) else count_rows(files_of(config, key), key)


def check(config: TasksetConfig, key: str, prompt: bool = True, answer: bool = True) -> int:
    """Refuse the first row that cannot be used; returns the number of rows. `prompt`, `answer`: as
    in `task_needs`.
    """
    check_storage(config, key)
    needs = task_needs(config.format, key, prompt, answer)
    if config.storage_type == "file":
        return check_formed(files_of(config, key), needs, key, config.format)
    rows = SqlRows(config, key)
    made = formats.translated(rows, config.format, key, str(config.path))
    return check_made(made, rows.where, needs, key)


def truth(row: dict[str, Any], config: FormatConfig) -> str | None:
    """The answer of a row as text; objects, lists and flags as JSON."""
    value = at(row, config.response_column)
    if value is MISSING or value is None:
        return None
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def column(config: TasksetConfig, name: str, key: str) -> Iterator[tuple[str, Any]]:
    """(where it is, its value or None) of one column in every row."""
    if is_table(config):
        rows = SqlRows(config, key)
        yield from (
            (f"{rows.where} row {number + 1}", row.get(name)) for number, row in enumerate(rows)
        )
        return
    for file in files_of(config, key):
        if file.suffix in TABLES:
            yield from _of_table(file, name, key)
        else:
            yield from (
                (where, msgspec.json.decode(row[name]) if name in row else None)
                for where, row in json_rows(file, key)
            )


def _of_table(file: Path, name: str, key: str) -> Iterator[tuple[str, Any]]:
    rows = load_table([file], key)
    if name not in rows.column_names:
        yield str(file), None
        return
    for batch in rows.select_columns([name]).with_format("arrow").iter(1000):
        yield from ((str(file), value) for value in batch.column(name).to_pylist())


def features(config: TasksetConfig, key: str) -> list[list[float]]:
    """The numbers in `task_selector.feature_keys`, row by row."""
    found = [list(_numbers(config, name, key)) for name in config.task_selector.feature_keys]
    return [list(row) for row in zip(*found, strict=True)]


def _numbers(config: TasksetConfig, name: str, key: str) -> Iterator[float]:
    for where, value in column(config, name, key):
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(
                f"{key}.task_selector.feature_keys: "
                f"{where} has {value!r} as {name!r}, which must be a number"
            )
        yield float(value)


def not_allowed(name: str | None, config: FormatConfig) -> str:
    """Why a row may not name this workflow or reward; "" where it may. A row is data: which code of
    the user's is run says the config.
    """
    if not name or ":" not in name or name in config.allowed_functions:
        return ""
    return (
        f"{name!r}, and a row names only what rft and plug-ins know: if this function is meant, "
        "add it to format.allowed_functions"
    )


def names_in(config: TasksetConfig, which: str, key: str) -> set[str]:
    """The different names in the column that `format.workflow_key` or `format.reward_fn_key`
    (`which`) means.
    """
    name = getattr(config.format, which)
    found: set[str] = set()
    for where, value in column(config, name, key) if name else ():
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{key}.format.{which}: {where} has {value!r} as {name!r}, "
                "which must be a name or null"
            )
        if why := not_allowed(value, config.format):
            raise ConfigError(f"{key}.format.{which}: {where} has {why}")
        found |= {value} if value else set()
    if name and not found:
        raise ConfigError(
            f"{key}.format.{which}: no row has a {name!r}: leave it out, or name the right column"
        )
    return found


def files_of(config: TasksetConfig, key: str) -> list[Path]:
    return data_files(config.path, config.split, config.subset_name, key)


class SqlRows(Sequence[dict[str, Any]]):
    """The rows of one table:

    `subset_name`, else the one called like the taskset, else the only one. Pickles small.
    """

    def __init__(self, config: TasksetConfig, key: str):
        self.path = str(config.path).removeprefix("sqlite:///")
        self.messages = config.format.messages_key if formats.has_messages(config.format) else None
        self._connection: sqlite3.Connection | None = None
        if said := unreadable(self.path):
            raise ConfigError(f"{key}.path: {said}")
        if not Path(self.path).is_file():
            raise ConfigError(
                f"{key}.path: {self.path} does not exist; storage_type=sql reads an SQLite file"
            )
        try:
            tables = [
                name
                for (name,) in self._ask(
                    "select name from sqlite_master where type in ('table', 'view')"
                )
            ]
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{key}.path: {self.path} is no SQLite file ({error}); set storage_type=file"
            ) from error
        named = [name for name in (config.subset_name, config.name) if name in tables]
        if config.subset_name not in (None, *tables) or not (named or len(tables) == 1):
            raise ConfigError(
                f"{key}.subset_name={config.subset_name}: "
                f"{self.path} has the tables {', '.join(tables) or 'none'}; name one"
            )
        self.table = named[0] if named else tables[0]
        self.where = f"{self.path} table {self.table}"
        self._ids = [
            number for (number,) in self._ask(f"select rowid from {self._quoted} order by rowid")
        ]

    @property
    def _quoted(self) -> str:
        return '"' + self.table.replace('"', '""') + '"'

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: Any) -> Any:
        cursor = self._ask(f"select * from {self._quoted} where rowid = ?", self._ids[row])
        names = [description[0] for description in cursor.description]
        found = dict(zip(names, cursor.fetchone(), strict=True))
        if RAW in found:
            found = json.loads(found[RAW])
        if self.messages and isinstance(found.get(self.messages), str):
            try:
                found[self.messages] = json.loads(found[self.messages])
            except json.JSONDecodeError:
                return found  # the check of rows says what is wrong with it
        return found

    def _ask(self, question: str, *values: Any) -> sqlite3.Cursor:
        if self._connection is None:
            address = f"{Path(self.path).resolve().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
        return self._connection.execute(question, values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}
