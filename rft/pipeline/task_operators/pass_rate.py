"""pass_rate_filter: keep the tasks that an earlier run solved sometimes, as its samples tell."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rft.pipeline.task_operators.length import text_of


class PassRateFilter:
    """`samples`: what `experience_pipeline.save_input` wrote, or JSON lines with a `prompt` and a `reward` each. Rows are
    matched by `field`, the text of the prompt, so the data file may have changed since. The rate goes into the column
    `pass_rate`; rows without a sample stay if `keep_unseen`.
    """

    def __init__(
        self,
        samples: str,
        field: str = "prompt",
        min_rate: float = 0.0,
        max_rate: float = 1.0,
        keep_unseen: bool = True,
    ) -> None:
        self.path, self.field, self.keep_unseen = Path(samples), field, bool(keep_unseen)
        self.least, self.most = float(min_rate), float(max_rate)
        if not self.path.is_file():
            raise ValueError(f"samples={samples}: no such file")
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError("min_rate and max_rate must be shares, the first at most the second")

    async def prepare(self) -> None:
        rewards: dict[str, list[float]] = defaultdict(list)
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                found = samples_of(json.loads(line))
                if not found:
                    raise ValueError(f"{self.path} line {number} has no prompt with a reward")
                for prompt, reward in found:
                    rewards[prompt.strip()].append(reward)
        self.rates = {prompt: min(1.0, max(0.0, fmean(given))) for prompt, given in rewards.items()}

    def process(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        kept, unseen = [], 0
        for row in rows:
            rate = self.rates.get(text_of(row, self.field).strip())
            unseen += rate is None
            if self.keep_unseen if rate is None else self.least <= rate <= self.most:
                kept.append(row if rate is None else row | {"pass_rate": rate})
        return kept, {"filtered_count": len(rows) - len(kept), "unseen_count": unseen}


def samples_of(line: dict[str, Any]) -> list[tuple[str, float]]:
    """(prompt, reward) of one line, or of all experiences of a recorded group."""
    if "experiences" in line:
        return [(line["prompt"], float(made.get("reward", 0.0))) for made in line["experiences"]]
    return [(line["prompt"], float(line["reward"]))] if "prompt" in line and "reward" in line else []
