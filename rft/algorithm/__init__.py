"""Algorithms as data: which advantage, which loss, which aggregation. The functions live one noun per file beside this.

An algorithm never touches the explorer, the packing or the trainer: it names a function that turns the rewards of a step
(`advantages/`), or what models say of its tokens, into advantages, and one that turns log-probabilities into a loss per token
(`losses/`). Which models a step needs beside the policy follows from these names (`recipe.py`). Adding one is one file in one of
the two packages with its entry in the table there, and one entry here. Importing this loads neither torch nor numpy.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Algorithm:
    """Defaults that fill the keys of `algorithm:` which the user left out. `source` is what a training step consumes."""

    source: Literal["rollouts", "rows"]
    policy_loss_fn: str
    advantage_fn: str | None
    loss_agg_mode: str
    repeat_times: int
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "default"
    sample_strategy: str = "default"
    schema: Literal["sft", "cpt", "dpo"] = "sft"  # what a row is, where the source is rows
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)


ALGORITHMS = {
    "grpo": Algorithm("rollouts", "ppo", "grpo", "token-mean", repeat_times=8),
    "ppo": Algorithm("rollouts", "ppo", "ppo", "token-mean", repeat_times=1, kl_loss_fn="k2"),
    "sft": Algorithm("rows", "sft", None, "token-mean", repeat_times=1, entropy_loss_fn="none"),
    "cpt": Algorithm("rows", "sft", None, "token-mean", repeat_times=1, entropy_loss_fn="none", schema="cpt"),
    "dpo": Algorithm("rows", "dpo", None, "seq-mean-token-sum", repeat_times=2, schema="dpo"),
    "mix": Algorithm(
        "rollouts",
        "mix",
        "grpo",
        "token-mean",
        repeat_times=8,
        kl_loss_fn="k2",
        entropy_loss_fn="mix",
        sample_strategy="mix",
    ),
    "mix_chord": Algorithm(
        "rollouts",
        "mix_chord",
        "grpo",
        "token-mean",
        repeat_times=8,
        kl_loss_fn="k2",
        entropy_loss_fn="mix",
        sample_strategy="mix",
    ),
    "on_policy_distill": Algorithm(
        "rollouts", "ppo", "on_policy_distill", "token-mean", repeat_times=8, entropy_loss_fn="none"
    ),
    "jsd": Algorithm("rollouts", "ppo", "jsd", "token-mean", repeat_times=8, entropy_loss_fn="none"),
}
