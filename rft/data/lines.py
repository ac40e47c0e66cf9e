"""Files of JSON: an object in each line, or one array of them.

In: a file. Out: its rows, decoded when asked for, or each with its columns still encoded, for who
looks at all of them. Invariant: a row is what is written there; what is no JSON, no UTF-8, or has
what no journal can keep, is refused by file and line.
"""

import bisect
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rft.config import ConfigError

LONG = re.compile(rb"\d{19}")  # perhaps a number that no journal keeps
_row_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonRows(Sequence[dict[str, Any]]):
    """The objects of JSON-lines files, decoded when asked for.

    Holds offsets only, so it pickles small.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._starts: list[int] = []  # number of the first row of each file
        self._offsets = array("Q")
        for file in files:
            self._starts.append(len(self._offsets))
            offset = 0
            with file.open("rb") as lines:
                for line in lines:
                    if not line.isspace():
                        self._offsets.append(offset)
                    offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: Any) -> Any:
        offset = self._offsets[row]
        with self.files[bisect.bisect_right(self._starts, row % len(self)) - 1].open("rb") as lines:
            lines.seek(offset)
            return json.loads(lines.readline())


def is_array(file: Path) -> bool:
    """Whether a .json file is one array and not lines."""
    with file.open("rb") as data:
        return file.suffix == ".json" and data.read(1) == b"["


def json_rows(file: Path, key: str) -> Iterator[tuple[str, dict[str, msgspec.Raw]]]:
    """(where it is, columns still encoded) of every row; refuses
    what is no UTF-8 or no JSON object.
    """
    if is_array(file):
        yield from array_rows(file, key)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file} line {number}"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{key}.path: {where} is not UTF-8 (byte {error.start + 1} of the line is "
                    f"0x{line[error.start]:02x}): save the file as UTF-8"
                ) from error
            if line.startswith(b"\xef\xbb\xbf"):
                raise ConfigError(
                    f"{key}.path: {where} begins with a byte-order mark: "
                    "save the file as UTF-8 without BOM"
                )
            if not line.isspace():
                yield where, parse_row(line, where, key)


def parse_row(line: bytes, where: str, key: str) -> dict[str, msgspec.Raw]:
    try:
        row = _row_decoder.decode(line)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{key}.path: {where} is no JSON object but {line[:40]!r}: write one object per line"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{key}.path: {where} is malformed JSON ({error}): "
            f"each line must be one whole JSON object, and this one is {line[:60]!r}"
        ) from error
    if LONG.search(line):
        check_numbers(row, where, key)
    return row


def check_numbers(row: dict[str, msgspec.Raw], where: str, key: str) -> None:
    for column, value in row.items():
        try:
            msgspec.msgpack.encode(json.loads(bytes(value)))
        except OverflowError as error:
            raise ConfigError(
                f"{key}.path: {where} has a whole number of more than 64 bits as {column!r}: "
                'write it as text, in "quotes"'
            ) from error


def as_line(row: Any, where: str, key: str) -> bytes:
    """The row as a file of JSON lines would have it."""
    try:
        return msgspec.json.encode(row)
    except (UnicodeEncodeError, TypeError) as error:
        raise ConfigError(f"{key}.path: {where} has what no JSON text has: {error}") from error


def array_rows(file: Path, key: str) -> Iterator[tuple[str, dict[str, msgspec.Raw]]]:
    data = file.read_bytes()
    try:
        rows = json.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{key}.path: {file} line {line} is not UTF-8: save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{key}.path: {file} line {error.lineno} is malformed JSON ({error.msg})"
        ) from error
    for number, row in enumerate(rows, 1):
        where = f"{file} row {number}"
        yield where, parse_row(as_line(row, where, key), where, key)
