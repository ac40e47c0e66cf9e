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
class RolloutCorrectionConfig:
    rollout_is: str = "none"  # none | token | sequence: weigh by policy / engine, at most rollout_is_threshold (TIS)
    rollout_is_threshold: float = 2.0
    rollout_rs: str = "none"  # none | token (IcePop) | sequence | geometric (MIS): leave out what is outside a range
    rollout_rs_threshold: Optional[float] = None  # upper end of the range; default: rollout_is_threshold
    rollout_rs_threshold_lower: Optional[float] = None  # lower end; default: 1 / the upper one
    rollout_token_veto_threshold: Optional[float] = None  # leave out responses with a token below this


@dataclass
class AlgorithmConfig:
    algorithm_type: str = "grpo"  # a key of rft.algorithm.ALGORITHMS
    repeat_times: Optional[int] = None  # responses per task; default: the algorithm's own
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    advantage_fn: Optional[str] = None  # default: the algorithm's own, as for the four keys below
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: Optional[str] = None
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: Optional[str] = None  # token-mean, or seq-mean-token-mean | -sum | -sum-norm
    sample_strategy: Optional[str] = None  # default | warmup (the same) | staleness_control (drops) | mix
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)  # staleness_control, mix: docs/preferences.md
    proximal_logprobs: Optional[bool] = None  # ratios are to the policy before the step; default: where needed
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    kl_loss_fn: Optional[str] = None  # none | k1 | k2 | k3 | low_var_kl | abs | corrected_k3; default: the algorithm's
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)  # kl_coef (0.001), adaptive, target_kl, horizon
    kl_penalty_fn: str = "none"  # the same, taken off the reward of every token
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)  # the same
    entropy_loss_fn: Optional[str] = None  # default | mix (of rollouts only) | none; default: the algorithm's own
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)  # entropy_coef (0.0)
