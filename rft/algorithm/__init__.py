"""Algorithms as data: which advantage, which loss, which aggregation. The functions live one noun
per file beside this.

An algorithm never touches the explorer, the packing or the trainer: it names a function that turns
the rewards of a step (`advantages`), or what models say of its tokens (`token_advantages`), into
advantages, and one that turns log-probabilities into a loss per token (`losses`). Which models a
step needs beside the policy follows from these names (`recipe`). Adding one is one function with
its entry in the table there, and one entry here. Importing this loads neither torch nor numpy.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Algorithm:
    """Defaults that fill the keys of `algorithm:` which the user left out.

    `source` is what a training step consumes.
    """

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


MIX = Algorithm(
    "rollouts",
    "mix",
    "grpo",
    "token-mean",
    repeat_times=8,
    kl_loss_fn="k2",
    entropy_loss_fn="mix",
    sample_strategy="mix",
)
ALGORITHMS = {
    "ppo": Algorithm("rollouts", "ppo", "ppo", "token-mean", repeat_times=1, kl_loss_fn="k2"),
    "grpo": Algorithm("rollouts", "ppo", "grpo", "token-mean", repeat_times=8),
    "dr_grpo": Algorithm(
        "rollouts",
        "ppo",
        "grpo",
        "seq-mean-token-sum-norm",
        repeat_times=8,
        advantage_fn_args={"normalize_std": False},
    ),
    "dapo": Algorithm(
        "rollouts",
        "ppo",
        "grpo",
        "token-mean",
        repeat_times=16,
        advantage_fn_args={"std_threshold": 0.0},
        policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
    ),
    "gspo": Algorithm(
        "rollouts", "gspo", "grpo", "seq-mean-token-mean", repeat_times=2, kl_loss_fn="k2"
    ),
    "cispo": Algorithm("rollouts", "cispo", "grpo", "token-mean", repeat_times=2, kl_loss_fn="k2"),
    "sapo": Algorithm("rollouts", "sapo", "grpo", "token-mean", repeat_times=2, kl_loss_fn="k2"),
    "rloo": Algorithm("rollouts", "ppo", "rloo", "token-mean", repeat_times=2, kl_loss_fn="k2"),
    "reinforceplusplus": Algorithm(
        "rollouts", "ppo", "reinforceplusplus", "token-mean", repeat_times=2, kl_loss_fn="k2"
    ),
    "reinforce": Algorithm(
        "rollouts",
        "importance_sampling",
        "reinforce",
        "token-mean",
        repeat_times=1,
        kl_loss_fn="k2",
    ),
    "remax": Algorithm("rollouts", "ppo", "remax", "token-mean", repeat_times=1, kl_loss_fn="k2"),
    "opmd": Algorithm("rollouts", "opmd", "opmd", "token-mean", repeat_times=2, kl_loss_fn="k2"),
    "asymre": Algorithm(
        "rollouts", "opmd", "asymre", "token-mean", repeat_times=2, entropy_loss_fn="none"
    ),
    "topr": Algorithm(
        "rollouts", "topr", "reinforce", "token-mean", repeat_times=2, kl_loss_fn="k2"
    ),
    "sppo": Algorithm(
        "rollouts", "sppo", "opmd", "token-mean", repeat_times=2, entropy_loss_fn="none"
    ),
    "rec": Algorithm("rollouts", "rec", "rec", "token-mean", repeat_times=2, kl_loss_fn="k2"),
    "raft": Algorithm(
        "rollouts", "sft", "raft", "token-mean", repeat_times=8, entropy_loss_fn="none"
    ),
    "multi_step_grpo": Algorithm(
        "rollouts", "ppo", "step_wise_grpo", "token-mean", repeat_times=8, kl_loss_fn="k2"
    ),
    "gigpo": Algorithm("rollouts", "ppo", "gigpo", "token-mean", repeat_times=8, kl_loss_fn="k2"),
    "sft": Algorithm("rows", "sft", None, "token-mean", repeat_times=1, entropy_loss_fn="none"),
    "cpt": Algorithm(
        "rows", "sft", None, "token-mean", repeat_times=1, entropy_loss_fn="none", schema="cpt"
    ),
    "dpo": Algorithm("rows", "dpo", None, "seq-mean-token-sum", repeat_times=2, schema="dpo"),
    "mix": MIX,
    "mix_chord": replace(MIX, policy_loss_fn="mix_chord"),
    "on_policy_distill": Algorithm(
        "rollouts", "ppo", "on_policy_distill", "token-mean", repeat_times=8, entropy_loss_fn="none"
    ),
    "jsd": Algorithm(
        "rollouts", "ppo", "jsd", "token-mean", repeat_times=8, entropy_loss_fn="none"
    ),
}
