"""difficulty_curriculum: order rows from easy to hard."""

from typing import Any

from rft.pipeline.task_operators.difficulty import number_of


class Curriculum:
    """By row[field], small numbers first; `hard_is_low` for numbers like a pass rate. Rows of one number keep their order.

    Only a taskset that is read in the order of its file keeps this one: preflight asks for `shuffle: false`.
    """

    whole = True
    ordered = True

    def __init__(self, field: str = "llm_difficulty_score", hard_is_low: bool = False) -> None:
        self.field, self.sign = field, -1 if hard_is_low else 1

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        ordered = sorted(rows, key=lambda row: self.sign * number_of(row, self.field))
        return ordered, {}
