"""length_filter: keep rows whose text has a certain length."""

from typing import Any

UNITS = ("chars", "words")


class TextLengthFilter:
    """`field` holds a text, or chat messages, whose contents are counted together, in `unit` chars or words."""

    def __init__(self, field: str, min_length: int = 1, max_length: int | None = None, unit: str = "chars") -> None:
        if unit not in UNITS:
            raise ValueError(f"unit is {unit}; known are {', '.join(UNITS)}")
        self.field, self.unit = field, unit
        self.least, self.most = int(min_length), None if max_length is None else int(max_length)
        if self.most is not None and self.most < self.least:
            raise ValueError("max_length is below min_length")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [row for row in rows if self.least <= (n := self._length(row)) and (self.most is None or n <= self.most)]
        return kept, {"filtered_count": len(rows) - len(kept)}

    def _length(self, row: dict[str, Any]) -> int:
        text = text_of(row, self.field)
        return len(text.split()) if self.unit == "words" else len(text)


def text_of(row: dict[str, Any], field: str) -> str:
    """What a column says: a text, a number as text, or the contents of its messages."""
    if field not in row:
        raise KeyError(f"no column {field!r}; there are {', '.join(row)}")
    value = row[field]
    if isinstance(value, list):
        return "\n".join(str(message.get("content", "")) for message in value)
    return "" if value is None else str(value)
