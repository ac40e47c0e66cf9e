"""Keys of the section `algorithm`: what a step learns and how its weights move."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rft.config.values import (
    Bool,
    FiniteNonNegFloat,
    FinitePosFloat,
    Float,
    Int,
    NonNegInt,
    PosFloat,
    PosInt,
    Section,
    Str,
)


@dataclass
class OptimizerConfig(Section):
    optimizer_type: Annotated[
        Literal["adam", "sgd"], "sgd is plain: without momentum, and so without any state"
    ] = "adam"
    lr: Annotated[FinitePosFloat, "the learning rate after the warm-up"] = 1e-06
    lr_scheduler_type: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        "how the rate moves after the warm-up; wsd: stable, then a decay",
    ] = "constant"
    lr_warmup_steps: Annotated[NonNegInt, "steps in which the rate rises from 0 to lr"] = 0
    lr_warmup_steps_ratio: Annotated[
        Float, "the same as a share of all steps; set one of the two"
    ] = 0.0
    lr_decay_steps: Annotated[Int | None, "wsd: steps of the decay, which ends with the run"] = None
    lr_decay_steps_ratio: Annotated[
        Float | None, "wsd: the same as a share of all steps; default: 0.1"
    ] = None
    lr_decay_style: Annotated[Str | None, "wsd: linear | cosine | minus_sqrt; default: linear"] = (
        None
    )
    min_lr_ratio: Annotated[Float, "floor of linear, cosine and wsd, as a share of lr"] = 0.0
    betas: Annotated[list[Float], "adam only, as is eps"] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    eps: Annotated[PosFloat, "what Adam adds to the denominator"] = 1e-08
    weight_decay: Annotated[FiniteNonNegFloat, "decoupled, as in AdamW"] = 0.01


@dataclass
class RolloutCorrectionConfig(Section):
    rollout_is: Annotated[
        Str, "none | token | sequence: weigh by policy / engine, truncated (TIS)"
    ] = "none"
    rollout_is_threshold: Annotated[Float, "the largest weight of rollout_is"] = 2.0
    rollout_rs: Annotated[
        Str,
        "none | token (IcePop) | sequence | geometric (MIS) | binary_kl (KPop) | second_moment "
        "(M2PO): masks outliers",
    ] = "none"
    rollout_rs_threshold: Annotated[
        Float | None,
        "upper end of the range; default: rollout_is_threshold; binary_kl: 0.1; second_moment: "
        "0.04",
    ] = None
    rollout_rs_threshold_lower: Annotated[Float | None, "lower end; default: 1 / the upper one"] = (
        None
    )
    rollout_token_veto_threshold: Annotated[
        Float | None, "leave out responses with a token below this"
    ] = None


@dataclass
class AlgorithmConfig(Section):
    algorithm_type: Annotated[Str, "a key of rft.algorithm.ALGORITHMS"] = "grpo"
    repeat_times: Annotated[PosInt | None, "responses per task; default: the algorithm's own"] = (
        None
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    advantage_fn: Annotated[
        Str | None, "default: the algorithm's own, as for the four keys below"
    ] = None
    advantage_fn_args: Annotated[dict[str, Any], "its arguments"] = field(default_factory=dict)
    policy_loss_fn: Annotated[
        Str | None, "a key of rft.algorithm's policy losses; default: the algorithm's own"
    ] = None
    policy_loss_fn_args: Annotated[dict[str, Any], "its arguments"] = field(default_factory=dict)
    loss_agg_mode: Annotated[
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
        ]
        | None,
        "how the losses of tokens become one; default: the algorithm's own",
    ] = None
    sample_strategy: Annotated[
        Str | None, "default | warmup (the same) | staleness_control (drops) | mix"
    ] = None
    sample_strategy_args: Annotated[
        dict[str, Any], "staleness_control, mix: docs/preferences.md"
    ] = field(default_factory=dict)
    proximal_logprobs: Annotated[
        Bool | None, "ratios are to the policy before the step; default: where needed"
    ] = None
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    kl_loss_fn: Annotated[
        Str | None,
        "none | k1 | k2 | k3 | low_var_kl | abs | corrected_k3; default: the algorithm's",
    ] = None
    kl_loss_fn_args: Annotated[dict[str, Any], "kl_coef (0.001), adaptive, target_kl, horizon"] = (
        field(default_factory=dict)
    )
    kl_penalty_fn: Annotated[Str, "the same, taken off the reward of every token"] = "none"
    kl_penalty_fn_args: Annotated[dict[str, Any], "the same"] = field(default_factory=dict)
    entropy_loss_fn: Annotated[
        Str | None, "default | mix (of rollouts only) | none; default: the algorithm's own"
    ] = None
    entropy_loss_fn_args: Annotated[dict[str, Any], "entropy_coef (0.0)"] = field(
        default_factory=dict
    )
