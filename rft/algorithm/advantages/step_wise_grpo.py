"""GRPO over runs of several turns, each of which is an experience of its own."""

from dataclasses import replace
from typing import Literal

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit
from rft.algorithm.advantages.grpo import grpo


def step_wise_grpo(
    columns: Columns, epsilon: float = 1e-6, enable_step_norm: bool = False, std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Credit:  # fmt: skip
    """`grpo` of the rewards of each run's last turn; every turn of the run gets its advantage [divided by the number of turns].

    As `multi_step_grpo` of Trinity-RFT (Pan et al. 2025, arXiv:2505.17826).
    """
    runs = columns.runs()
    last = np.array([run[-1] for run in runs], dtype=np.int64)
    of_runs = grpo(columns.at(last), epsilon, std_threshold=std_threshold, std_cal_level=std_cal_level)
    advantages = np.zeros(len(columns.rewards))
    times = None if of_runs.times is None else np.zeros(len(advantages), dtype=np.int64)
    for number, run in enumerate(runs):
        advantages[run] = of_runs.advantages[number] / (len(run) if enable_step_norm else 1)
        if times is not None and of_runs.times is not None:
            times[run] = of_runs.times[number]
    return replace(of_runs, advantages=advantages, times=times)
