"""Files that have columns, through `datasets`, which maps its own Arrow copy of them into memory.

In: files of one kind, and the names of the columns that a model reads or is to write. Out: rows by
number. Invariant: such a column says what the file says. A number in a .csv stays the text that is
written there (007, 1.50), and an object has no fields that Arrow adds because another row's has
them.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rft.config import ConfigError, FormatConfig, RowFormatConfig

TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # builders of `datasets`
# what pandas calls cells that stand before the first column that has a name
UNNAMED = "__index_level_0__"


def load_table(files: list[Path], key: str, text: Collection[str] = ()) -> Any:
    """A memory-mapped `datasets.Dataset`. `text`: columns of a .csv that are read as text, whatever
    they look like.
    """
    import datasets

    datasets.disable_progress_bars()
    names, kind = [str(file) for file in files], TABLES[files[0].suffix]
    try:
        found = datasets.load_dataset(
            kind, data_files={"train": names}, split="train", **_as_written(kind, text)
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:  # no rows at all
        raise ConfigError(
            f"{key}.path: `datasets` cannot read {names} together: {error.__cause__ or error}. "
            "Give every file rows, with the same columns and types."
        ) from error
    if kind == "csv" and UNNAMED in found.column_names:
        raise ConfigError(
            f"{key}.path: rows of {', '.join(names)} have more cells than the first line has "
            'names: put a cell that has a comma into "quotes", and no comma behind the last one'
        )
    return found


def _as_written(kind: str, text: Collection[str]) -> dict[str, Any]:
    """A cell of a .csv is what is written there: an answer may be None, NA or nothing."""
    if kind != "csv":
        return {}
    return {"keep_default_na": False, "converters": dict.fromkeys(sorted(text), str)}


class TableRows(Sequence[dict[str, Any]]):
    """The rows of a table, as a row of this format is meant, and as a journal gives them back:
    times and decimals are text. What a file says of how its columns are shown (that bytes are a
    picture) is left aside.
    """

    def __init__(self, table: Any, config: FormatConfig) -> None:
        self.table = table.with_format("arrow")
        is_learned = isinstance(config, RowFormatConfig)  # what a reward compares stays as it is
        self.objects = config.columns - (set() if is_learned else {config.response_column})

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        (found,) = self.table[row].to_pylist()
        return {
            name: without_nulls(value) if name in self.objects else value
            for name, value in msgspec.to_builtins(found, builtin_types=(bytes,)).items()
        }


def without_nulls(value: Any) -> Any:
    """Arrow gives every object the fields of all others: those that it does not have are null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
