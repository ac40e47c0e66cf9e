"""Advantages and losses against closed forms computed by hand, in fp64, and their gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.advantages import ADVANTAGES, Columns
from rft.algorithm.credit import judge, metrics, rows
from rft.algorithm.fields import Fields
from rft.algorithm.losses import LOSSES, token_loss
from rft.algorithm.ratios import ESTIMATORS, mismatch
from rft.algorithm.recipe import PUSHED
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES
from rft.config import AlgorithmConfig, ConfigError, RolloutCorrectionConfig
from rft.config.arguments import options
from rft.data.runs import expanded
from rft.ground.experience import Experience, VersionSpan
from rft.preflight.fill import fill_algorithm


def fields(behaviour: list[float], advantage: list[float], **more: list[float]) -> Fields:
    given = {
        "behaviour": behaviour,
        "advantage": advantage,
        "weight": [1.0] * len(behaviour),
        **more,
    }
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()}
    return Fields(mask=tensors["weight"] > 0, **tensors)


def experience(reward: float, group: int, response: int = 3, version: int = 0) -> Experience:
    return Experience(
        tokens=[5, 6, *range(10, 10 + response)],
        prompt_length=2,
        action_mask=[1] * response,
        logprobs=[-0.5] * response,
        versions=[VersionSpan(version=version, start=0, end=response)],
        reward=reward,
        reward_outcome="ok",
        group=group,
    )


def columns(rewards: list[float], groups: list[int]) -> Columns:
    return Columns.of(
        [experience(reward, group) for reward, group in zip(rewards, groups, strict=True)]
    )


def grpo(rewards: list[float], groups: list[int], **arguments: Any) -> np.ndarray:
    return ADVANTAGES["grpo"].function(columns(rewards, groups), **arguments).advantages


def test_every_algorithm_names_functions_that_exist() -> None:
    for algorithm in ALGORITHMS.values():
        assert algorithm.policy_loss_fn in LOSSES and algorithm.kl_loss_fn in ESTIMATORS
        assert (
            algorithm.advantage_fn is None
            or algorithm.advantage_fn in ADVANTAGES | TOKEN_ADVANTAGES
        )


def test_grpo_normalises_within_each_group_with_the_unbiased_deviation() -> None:
    advantages = grpo([1.0, 0.0, 0.0, 5.0, 5.0], [7, 7, 7, 8, 8])
    deviation = np.sqrt(1 / 3)  # unbiased variance of (1, 0, 0) is 1/3
    assert advantages == pytest.approx(
        [(2 / 3) / deviation, (-1 / 3) / deviation, (-1 / 3) / deviation, 0, 0], abs=1e-5
    )


def test_grpo_without_scaling_and_for_a_group_of_one() -> None:
    assert grpo([1.0, 0.0], [0, 0], normalize_std=False) == pytest.approx([0.5, -0.5])
    assert grpo([3.0], [0]) == pytest.approx([0.0])


def test_sft_is_negative_log_likelihood() -> None:
    loss, _ = LOSSES["sft"](torch.tensor([-1.5, -0.2]), fields([0, 0], [0, 0]))
    assert loss.tolist() == pytest.approx([1.5, 0.2])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "slope"),
    [
        (0.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient, d(-A r)/dlogp = -A r
        # good token already pushed too far: clipped, no gradient
        (np.log(1.5), 2.0, -2.0 * 1.2, 0.0),
        (np.log(0.5), 2.0, -2.0 * 0.5, -2.0 * 0.5),  # good token pushed the wrong way: not clipped
        (np.log(0.5), -2.0, 2.0 * 0.8, 0.0),  # bad token already suppressed: clipped
        (np.log(1.5), -2.0, 2.0 * 1.5, 2.0 * 1.5),  # bad token grew: gradient flows
        (np.log(10.0), -2.0, 2.0 * 3.0, 0.0),  # dual clip: the loss of a bad token is bounded
    ],
)
def test_ppo_value_and_gradient(
    log_ratio: float, advantage: float, expected: float, slope: float
) -> None:
    logprobs = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    loss, _ = LOSSES["ppo"](logprobs, fields([-1.0], [advantage]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope)


def test_asymmetric_clipping_and_clip_fraction() -> None:
    loss, found = token_loss("ppo", {"clip_range_low": 0.2, "clip_range_high": 0.4})(
        torch.tensor([0.3, 0.6, -0.6], dtype=torch.float64), fields([0, 0, 0], [1, 1, -1])
    )
    assert loss.tolist() == pytest.approx([-np.exp(0.3), -1.4, 0.8])
    assert found["clip_frac"].tolist() == [0.0, 1.0, 1.0]
    assert found["clip_frac_high"].tolist() == [0.0, 1.0, 0.0] and found[
        "clip_frac_low"
    ].tolist() == [0.0, 0.0, 1.0]


def test_tokens_that_the_dual_clip_caps_are_told() -> None:
    """Bad tokens that became more than three times as likely have no gradient either."""
    logprobs = torch.tensor([1.0, 1.2, 1.2, -0.6], dtype=torch.float64, requires_grad=True)
    loss, found = LOSSES["ppo"](logprobs, fields([0.0] * 4, [-1.0, -1.0, 1.0, -1.0]))
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert found["clip_frac_dual"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert found["clip_frac"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert (slope == 0).tolist() == [False, True, True, True]


def test_a_penalty_brings_its_reference() -> None:
    """W54: where the KL comes off the rewards only, there is
    something to compare with all the same.
    """
    assert recipe.needs_reference(
        AlgorithmConfig(advantage_fn="rloo", kl_penalty_fn="k1", kl_loss_fn="none")
    )
    assert not recipe.needs_reference(AlgorithmConfig(advantage_fn="rloo", kl_loss_fn="none"))


def test_mismatch_is_zero_for_equal_policies_and_k3_otherwise() -> None:
    assert all(float(v) in (0.0, 1.0) for v in mismatch(torch.zeros(1)).values())
    assert float(mismatch(torch.tensor([0.1]))["kl/mismatch"]) == pytest.approx(
        np.exp(0.1) - 1 - 0.1, abs=1e-6
    )


def test_rows_align_advantage_and_weight_with_response_tokens() -> None:
    made = rows(
        judge([experience(1.0, 0, response=1), experience(0.0, 0, response=3)], "grpo", {}),
        "token-mean",
    )
    assert [r.trained.tolist() for r in made] == [[0, 0, 1], [0, 0, 1, 1, 1]]
    assert sum(expanded(r.weight).sum() for r in made) == pytest.approx(1.0)
    weight, advantage = expanded(made[0].weight), expanded(made[0].advantage)
    assert weight[2] == pytest.approx(0.25) and advantage[0] == 0 and advantage[2] > 0


def test_rows_leave_out_experiences_without_a_trained_token() -> None:
    empty = Experience(
        tokens=[1, 2], prompt_length=2, action_mask=[], group=0, reward=0.0, stop="prompt_too_long"
    )
    assert len(rows(judge([empty, experience(1.0, 0)], "grpo", {}), "token-mean")) == 1


def test_metrics_count_staleness_and_groups_without_signal() -> None:
    batch = [
        experience(1, 0, version=3),
        experience(1, 0, version=4),
        experience(1, 1, version=4),
        experience(0, 1, version=4),
    ]
    found = metrics(batch, step=4)
    assert found["staleness/max"] == 1 and found["staleness/mean"] == 0.25
    assert found["reward/zero_signal_groups"] == 0.5 and found["reward/mean"] == 0.75
    assert (found["reward/min"], found["reward/max"]) == (0.0, 1.0)


def test_a_reward_that_failed_is_no_reward_of_0() -> None:
    failed = experience(0.0, 0)
    failed.reward_outcome = "timeout"
    found = metrics([experience(-2.0, 0), failed, experience(-1.0, 1), failed], step=4)
    told = {name: found[f"reward/{name}"] for name in ("mean", "max", "min", "failed_frac")}
    assert told == {"mean": -1.5, "max": -1.0, "min": -2.0, "failed_frac": 0.5}
    assert found["sample/groups"] == 2 and found["reward/zero_signal_groups"] == 1.0
    nothing = metrics([failed, failed], step=4)
    assert nothing["reward/failed_frac"] == 1.0 and "reward/mean" not in nothing


def test_staleness_is_counted_for_every_trained_token() -> None:
    """Ten tokens: three of a version that is three steps old, two of the newest; one that was not
    sampled, and has no age; three more of an older one that is trained on nowhere. One token's
    version was forgotten.
    """
    crossing = Experience(
        tokens=[9] * 12,
        prompt_length=2,
        action_mask=[1] * 5 + [0] + [0] * 3 + [1],
        logprobs=[0.0] * 10,
        group=0,
        versions=[
            VersionSpan(version=4, start=0, end=3),
            VersionSpan(version=7, start=3, end=5),
            VersionSpan(version=1, start=6, end=9),
        ],
    )
    found = metrics([crossing, experience(1, 1, version=7)], step=7)
    own = sum(experience(1, 1, version=7).action_mask)
    assert (
        found["staleness/token_mean"] == pytest.approx(9 / (5 + own))
        and found["staleness/token_max"] == 3
    )
    assert (
        found["staleness/unversioned_tokens"] == 1 and found["staleness/tokens_mixed_frac"] == 0.5
    )
    assert found["staleness/max"] == 6


LOSS, ADVANTAGE = "policy_loss_fn_args", "advantage_fn_args"
SENSELESS = [
    ("grpo", LOSS, "clip_range", -0.1),
    ("grpo", LOSS, "clip_range_low", -0.1),
    ("grpo", LOSS, "clip_range_high", -0.1),
    ("grpo", LOSS, "clip_ratio_c", 1.0),
    ("grpo", LOSS, "delta", -1.0),
    ("gspo", LOSS, "clip_range_high", -1e-4),
    ("cispo", LOSS, "clip_range_low", -1.0),
    ("cispo", LOSS, "mask_clip_range_high", -1.0),
    ("sapo", LOSS, "tau_pos", 0.0),
    ("sppo", LOSS, "epsilon", 0.0),
    ("opmd", LOSS, "tau", -1.0),
    ("opmd", ADVANTAGE, "tau", 0.0),
    ("rec", LOSS, "temp", 0.0),
    ("rec", LOSS, "regularizer_coef", -0.1),
    ("rec", ADVANTAGE, "epsilon", 0.0),
    ("grpo", ADVANTAGE, "epsilon", 0.0),
    ("grpo", ADVANTAGE, "rank_penalty", 1.5),
    ("gigpo", ADVANTAGE, "gamma", 1.1),
    ("gigpo", ADVANTAGE, "omega", -1.0),
    ("multi_step_grpo", ADVANTAGE, "epsilon", -1e-6),
    ("ppo", ADVANTAGE, "gamma", 1.01),
    ("ppo", ADVANTAGE, "lam", -0.1),
    ("reinforceplusplus", ADVANTAGE, "gamma", 2.0),
    ("on_policy_distill", ADVANTAGE, "kl_coef", -1.0),
    ("jsd", ADVANTAGE, "lambda_coef", 1.5),
    ("dpo", LOSS, "beta", 0.0),
    ("dpo", LOSS, "label_smoothing", 0.5),
    ("mix", LOSS, "mu", 1.1),
    ("mix_chord", LOSS, "mu_peak", -0.1),
    ("mix_chord", LOSS, "mu_decay_steps", -1),
    ("mix_chord", LOSS, "cutoff_prob", 0.0),
    ("ppo", "kl_loss_fn_args", "kl_coef", -0.1),
]


@pytest.mark.parametrize(("kind", "key", "name", "value"), SENSELESS)
def test_a_number_that_turns_a_formula_round_is_refused(
    kind: str, key: str, name: str, value: float
) -> None:
    """Divisions by 0, gradients of the wrong sign, ranges that hold nothing."""
    algorithm = fill_algorithm(AlgorithmConfig(algorithm_type=kind, **{key: {name: value}}))
    with pytest.raises(ConfigError) as refused:
        recipe.check(algorithm)
    said = str(refused.value)
    assert said.startswith(f"algorithm.{key}.{name}={value:g}: ") and "\n" not in said


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_an_algorithm_takes_by_default_is_taken_when_it_is_said(kind: str) -> None:
    algorithm = fill_algorithm(AlgorithmConfig(algorithm_type=kind))
    functions = {name: one.function for name, one in (ADVANTAGES | TOKEN_ADVANTAGES).items()}
    found = functions.get(str(algorithm.advantage_fn))
    if found is not None:
        given = {name: one.default for name, one in options(found).items()}
        algorithm.advantage_fn_args = given | algorithm.advantage_fn_args
    loss = options(LOSSES[str(algorithm.policy_loss_fn)])
    algorithm.policy_loss_fn_args = {
        name: one.default
        for name, one in loss.items()
        if name != "clip_range" and not name.endswith("_agg_mode")
    } | algorithm.policy_loss_fn_args
    recipe.check(algorithm)


def test_a_clip_range_that_is_given_is_both_ends_of_dapo_too() -> None:
    """Its own 0.2 and 0.28 would be used instead."""
    for given, wanted in (
        ({}, {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        ({"clip_range": 0.1}, {"clip_range": 0.1}),
        ({"clip_range_low": 0.1}, {"clip_range_low": 0.1, "clip_range_high": 0.28}),
    ):
        algorithm = fill_algorithm(
            AlgorithmConfig(algorithm_type="dapo", policy_loss_fn_args=dict(given))
        )
        assert algorithm.policy_loss_fn_args == wanted
        recipe.check(algorithm)


UNSAMPLED = [
    ("dpo", {"rollout_correction": RolloutCorrectionConfig("token")}, "rollout_correction with"),
    ("dpo", {"kl_penalty_fn": "k2"}, "kl_penalty_fn=k2 comes off rewards"),
    ("dpo", {"proximal_logprobs": False}, "proximal_logprobs=false, but algorithm.policy_loss_fn"),
    ("sft", {"rollout_correction": RolloutCorrectionConfig("token")}, "learns from rows, whose"),
    ("cpt", {"kl_penalty_fn": "k1"}, "kl_penalty_fn=k1 comes off rewards"),
    *(("sft", {"policy_loss_fn": name}, "without which it learns nothing") for name in PUSHED),
]


@pytest.mark.parametrize(("kind", "given", "why"), UNSAMPLED)
def test_what_rows_have_not_is_refused_once(kind: str, given: dict[str, Any], why: str) -> None:
    """No engine's log-probabilities to correct, no rewards, no advantages to push with."""
    algorithm = fill_algorithm(AlgorithmConfig(algorithm_type=kind, **given))
    with pytest.raises(ConfigError) as refused:
        recipe.check(algorithm)
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_a_loss_without_advantages_is_none() -> None:
    """What `PUSHED` says: there is nothing to learn from in rows."""
    logprobs = torch.tensor([-0.5, -1.5], dtype=torch.float64)
    given = fields([-0.7, -1.0], [0.0, 0.0])
    given = replace(given, sequence=torch.tensor([0, 0]), sequences=1)
    for name in PUSHED:
        assert not LOSSES[name](logprobs, given)[0].any(), name
    for name in ("sft", "sft_is", "sft_phi"):
        assert LOSSES[name](logprobs, given)[0].all(), name


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"algorithm_type": "grpo"}, True),
        ({"algorithm_type": "grpo", "proximal_logprobs": True}, False),
        ({"algorithm_type": "grpo", "rollout_correction": RolloutCorrectionConfig("token")}, True),
        ({"algorithm_type": "opmd"}, False),
        ({"algorithm_type": "opmd", "kl_penalty_fn": "k1"}, True),
        ({"algorithm_type": "opmd", "kl_loss_fn": "corrected_k3"}, True),
        ({"algorithm_type": "raft"}, False),
        ({"algorithm_type": "sft"}, False),
        ({"algorithm_type": "dpo"}, False),
        ({"algorithm_type": "jsd", "policy_loss_fn": "opmd"}, True),
        (
            {
                "algorithm_type": "grpo",
                "policy_loss_fn": "opmd",
                "advantage_fn_args": {"rank_penalty": 0.2},
            },
            True,
        ),
    ],
)
def test_who_compares_with_what_was_sampled(given: dict[str, Any], wanted: bool) -> None:
    assert recipe.needs_sampler(fill_algorithm(AlgorithmConfig(**given))) is wanted
