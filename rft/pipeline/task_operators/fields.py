"""required_fields: keep rows that have something in every one of these columns."""

from typing import Any


class RequiredFields:
    """A column counts as empty when it is missing, null, or a text, list or object without content. 0 and false are content."""

    def __init__(self, fields: list[str]) -> None:
        self.fields = list(fields)
        if not self.fields:
            raise ValueError("fields is empty")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [row for row in rows if not any(is_empty(row.get(field)) for field in self.fields)]
        return kept, {"filtered_count": len(rows) - len(kept)}


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})
