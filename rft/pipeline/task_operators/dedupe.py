"""dedupe: of rows that are equal in some columns, keep the first."""

from typing import Any

from rft.pipeline.task_operators.length import text_of


class DropSameRows:
    """`fields` are compared together; with `normalize`, without regard to case, punctuation and white space."""

    whole = True

    def __init__(self, fields: list[str], normalize: bool = True) -> None:
        self.fields, self.normalize = list(fields), bool(normalize)
        if not self.fields:
            raise ValueError("fields is empty")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in rows:
            found.setdefault(tuple(self._form(text_of(row, field)) for field in self.fields), row)
        return list(found.values()), {"filtered_count": len(rows) - len(found)}

    def _form(self, text: str) -> str:
        """What is compared. The signs of mathematics stay: 3 + 4 is not 3 - 4."""
        if not self.normalize:
            return text
        return " ".join("".join(c for c in text.casefold() if c not in ",.;:!?\"'`").split())
