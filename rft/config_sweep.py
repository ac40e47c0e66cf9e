"""Keys of the section `sweep`: what a trial of a Hydra multirun is judged by."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class SweepConfig:
    objective: Optional[str] = None  # a metric of metrics.jsonl, of the last stage that has it: eval/held_out/accuracy
    value: str = "last"  # last | best: which of the metric's values is the trial's
    direction: str = "maximize"  # maximize | minimize
