"""Numbers of many groups as one number each: what a step tells of its pipeline.

In: (name, value), group by group. Out: `experience_pipeline/<name>` since the last `pop`. A name's last word says how values meet:
`..._count` are added up, `min` and `max` are what they say, anything else is a mean over the groups that told it.
"""

import re
from dataclasses import dataclass

PREFIX = "experience_pipeline/"


@dataclass
class Sum:
    total: float = 0.0
    number: int = 0
    least: float = float("inf")
    most: float = float("-inf")

    def value(self, kind: str) -> float:
        return {"count": self.total, "min": self.least, "max": self.most}.get(kind, self.total / self.number)


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}

    def add(self, name: str, value: float) -> None:
        found = self._sums.setdefault(name, Sum())
        found.total, found.number = found.total + value, found.number + 1
        found.least, found.most = min(found.least, value), max(found.most, value)

    def pop(self) -> dict[str, float]:
        sums, self._sums = self._sums, {}
        return {PREFIX + name: found.value(re.split(r"[/_]", name)[-1]) for name, found in sums.items()}
