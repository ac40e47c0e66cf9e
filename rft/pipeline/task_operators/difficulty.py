"""difficulty_filter: keep rows whose number, a difficulty or any other, lies in a range."""

from typing import Any

from rft.pipeline.experience_operators.reward_shaping import is_number


class DifficultyFilter:
    """Keep rows with `min_value` <= row[field] <= `max_value`; a row without that number is an error, not easy or hard."""

    def __init__(self, field: str, min_value: float | None = None, max_value: float | None = None) -> None:
        if min_value is None and max_value is None:
            raise ValueError("neither min_value nor max_value is given")
        self.field = field
        self.least = float("-inf") if min_value is None else float(min_value)
        self.most = float("inf") if max_value is None else float(max_value)
        if self.most < self.least:
            raise ValueError("max_value is below min_value")

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept = [row for row in rows if self.least <= number_of(row, self.field) <= self.most]
        return kept, {"filtered_count": len(rows) - len(kept)}


def number_of(row: dict[str, Any], field: str) -> float:
    value = row.get(field)
    if not is_number(value):
        raise ValueError(f"a row has {value!r} as {field!r}, which must be a number; its columns are {', '.join(row)}")
    return float(value)  # type: ignore[arg-type]
