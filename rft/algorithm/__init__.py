"""Algorithms as data: which advantage, which loss, which aggregation. The functions live one noun per file beside this.

An algorithm never touches the explorer, the packing or the trainer: it names a function that turns the rewards of a
group (`advantages.py`) or the values of a critic (`gae.py`) into advantages, and one that turns log-probabilities into a
loss per token (`losses.py`). Which models a step needs beside the policy follows from these names (`recipe.py`).
Adding one is one function and one entry here. Importing this package loads neither torch nor numpy.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Algorithm:
    """Defaults that fill the keys of `algorithm:` which the user left out. `source` is what a training step consumes."""

    source: Literal["rollouts", "rows"]
    policy_loss_fn: str
    advantage_fn: str | None
    loss_agg_mode: str
    repeat_times: int
    kl_loss_fn: str = "none"


ALGORITHMS = {
    "grpo": Algorithm("rollouts", "ppo", "grpo", "token-mean", repeat_times=8),
    "ppo": Algorithm("rollouts", "ppo", "ppo", "token-mean", repeat_times=1, kl_loss_fn="k2"),
    "sft": Algorithm("rows", "sft", None, "token-mean", repeat_times=1),
}
