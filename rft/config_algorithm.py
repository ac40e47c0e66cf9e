"""Keys of the section `algorithm`: what a step learns and how its weights move."""

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class OptimizerConfig:
    optimizer_type: str = "adam"  # adam | sgd (plain: without momentum, and so without any state)
    lr: float = 1e-6
    lr_scheduler_type: str = "constant"  # constant | linear | cosine | wsd (warm-up, stable, decay)
    lr_warmup_steps: int = 0
    lr_warmup_steps_ratio: float = 0.0  # the same as a share of all steps; set one of the two
    lr_decay_steps: Optional[int] = None  # wsd: steps of the decay, which ends with the run
    lr_decay_steps_ratio: Optional[float] = None  # wsd: the same as a share of all steps; default: 0.1
    lr_decay_style: Optional[str] = None  # wsd: linear | cosine | minus_sqrt; default: linear
    min_lr_ratio: float = 0.0  # floor of linear, cosine and wsd, as a share of lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adam only, as is eps
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass
class AlgorithmConfig:
    algorithm_type: str = "grpo"  # a key of rft.algorithm.ALGORITHMS
    repeat_times: Optional[int] = None  # responses per task; default: the algorithm's own
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sample_strategy: Optional[str] = None  # default | mix (expert rows beside rollouts); default: the algorithm's own
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)  # mix: expert_data_ratio (0.5), sft_dataset_name
    advantage_fn: Optional[str] = None  # default: the algorithm's own, as for the four keys below
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: Optional[str] = None
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: Optional[str] = None  # token-mean | seq-mean-token-mean | seq-mean-token-sum
    proximal_logprobs: bool = False  # the policy scores its batch first: the loss's ratio is to that, not to the engine
    kl_loss_fn: Optional[str] = None  # none | k1 | k2 | k3 | low_var_kl | abs | corrected_k3; default: the algorithm's
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)  # kl_coef (0.001)
    kl_penalty_fn: str = "none"  # the same, taken off the reward of every token
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)  # kl_coef (0.001)
    entropy_loss_fn: Optional[str] = None  # default | mix (of rollouts only) | none; default: the algorithm's own
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)  # entropy_coef (0.0)
