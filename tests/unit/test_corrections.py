"""Masks of off-policy corrections against slow literal forms of what was published, in fp64: KPop,
DPPO's divergences, M2PO; with nothing, one token, all left out, and numbers that fp32 cannot hold.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import outliers, recipe
from rft.algorithm.fields import Fields
from rft.algorithm.losses import LOSSES, token_loss
from rft.algorithm.ratios import Correction, binary_kl
from rft.config import AlgorithmConfig, ConfigError, RolloutCorrectionConfig
from rft.data.packing import Packed

RNG = np.random.default_rng(11)
TAU = 0.04
CERTAIN = [0.0, -1e-9, -1e-7, -0.5, -20.0, -120.0, -np.inf]  # log-probabilities


def coins(p: float, q: float) -> float:
    """KL of two coins (arXiv:2602.04879, section 4; KPop's D_B), term by term."""
    heads = p * math.log(p / q) if p else 0.0
    tails = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return heads + tails


def fields(
    behaviour: Any, proximal: Any, dtype: torch.dtype = torch.float64, **more: Any
) -> Fields:
    given = {"behaviour": behaviour, "proximal": proximal, **more}
    tensors = {name: torch.tensor(values, dtype=dtype) for name, values in given.items()}
    ones = torch.ones(len(behaviour), dtype=dtype)
    return Fields(**({"advantage": ones, "weight": ones} | tensors), mask=ones > 0)


# --- binary KL: KPop ------------------------------------------------------------------------------


def test_the_binary_kl_is_that_of_two_coins() -> None:
    p, q = RNG.uniform(0.001, 0.999, (2, 200))
    found = binary_kl(torch.tensor(np.log(p)), torch.tensor(np.log(q)))
    wanted = [coins(*pair) for pair in zip(p, q, strict=True)]
    assert found.numpy() == pytest.approx(np.array(wanted), rel=1e-9)
    assert (found >= 0).all()


def test_in_fp32_it_neither_overflows_nor_loses_what_is_almost_certain() -> None:
    """1 - p is 0 in fp32 for p above 1 - 6e-8; p is 0 for logprobs below -104."""
    for first in CERTAIN:
        for second in CERTAIN:
            found = binary_kl(torch.tensor([first]), torch.tensor([second]))
            assert found.isfinite().all() and found.item() >= -1e-6, (first, second)
    almost = torch.tensor([math.log1p(-3e-6)]), torch.tensor([math.log1p(-1e-5)])
    assert binary_kl(*almost).item() == pytest.approx(coins(1 - 3e-6, 1 - 1e-5), rel=0.02)


@pytest.mark.parametrize("phi", [0.01, 0.1, 1.0])
def test_kpop_keeps_a_token_that_is_near_in_both_directions(phi: float) -> None:
    p, q = RNG.uniform(0.001, 0.999, (2, 400))
    weight, told = Correction(mask="binary_kl", upper=phi)(fields(np.log(q), np.log(p)))
    wanted = [float(coins(a, b) <= phi and coins(b, a) <= phi) for a, b in zip(p, q, strict=True)]
    assert weight.tolist() == wanted and 0 < sum(wanted) < len(wanted)
    assert told["importance/left_out_frac"].mean().item() == pytest.approx(1 - np.mean(wanted))


def test_kpop_is_wide_for_rare_tokens_and_narrow_for_sure_ones() -> None:
    """What IcePop's fixed range cannot be: the ratio is 3 in the first, 0.9 in the second."""
    seen = fields(np.log([1e-3, 0.999]), np.log([3e-3, 0.9]))
    assert Correction(mask="binary_kl", upper=0.1)(seen)[0].tolist() == [1.0, 0.0]
    assert Correction(mask="token", lower=0.5, upper=2.0)(seen)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("count", [0, 1])
def test_kpop_of_nothing_and_of_one_token(count: int) -> None:
    seen = fields(np.full(count, -0.5), np.full(count, -0.5), torch.float32)
    assert Correction(mask="binary_kl", upper=0.1)(seen)[0].tolist() == [1.0] * count


@pytest.mark.parametrize("mask", ["binary_kl", "second_moment"])
def test_where_all_is_left_out_there_is_no_loss_and_no_gradient(mask: str) -> None:
    seen = fields([-0.1, -0.2], [-60.0, -70.0], torch.float32, kept=[0.0, 0.0])
    logprobs = torch.tensor([-60.0, -70.0], requires_grad=True)
    loss = token_loss("importance_sampling", {}, correction=Correction("token", mask=mask))
    losses, told = loss(logprobs, seen)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0] and not logprobs.grad.any()
    assert told["importance/left_out_frac"].tolist() == [1.0, 1.0]


# --- DPPO -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_in_fp32_at_the_edges(name: str) -> None:
    """Nothing, one token, and every pair of probabilities that fp32 rounds to 0 or 1."""
    for values in ([], [-0.5], CERTAIN[:-1]):
        pairs = np.array([(a, b) for a in values for b in values], dtype=np.float32).reshape(-1, 2)
        for sign in (1.0, -1.0):
            seen = fields(pairs[:, 0], pairs[:, 0], torch.float32, advantage=[sign] * len(pairs))
            logprobs = torch.tensor(pairs[:, 1], requires_grad=True)
            losses, told = LOSSES[name](logprobs, seen)
            losses.sum().backward()
            assert losses.isfinite().all() and logprobs.grad.isfinite().all()
            assert all(metric.isfinite().all() for metric in told.values())
            is_out = told["clip_frac"].bool()
            moved = np.sign(pairs[:, 1] - pairs[:, 0])
            assert (moved[is_out.numpy()] == sign).all(), "a token that comes back is kept"
            assert not losses[is_out].any()


# --- the second moment: M2PO ----------------------------------------------------------------------


def packed(behaviour: Any, proximal: Any, advantage: Any, weight: Any = None) -> Packed:
    values = [np.array(one, np.float32) for one in (behaviour, proximal, advantage)]
    count = len(values[0])
    whole = np.ones(count, np.float32) if weight is None else np.array(weight, np.float32)
    nothing = np.zeros(count, np.int64)
    return Packed(
        tokens=nothing,
        positions=nothing,
        labels=nothing,
        weight=whole,
        behaviour=values[0],
        advantage=values[2],
        temperature=whole,
        cu_seqlens=np.array([0, count], np.int32),
        rows=np.zeros(1, np.int32),
        scores={"proximal": values[1]},
    )


def literal(gap: np.ndarray, advantage: np.ndarray, trained: np.ndarray, tau: float) -> np.ndarray:
    """Algorithm 1: one after another, the largest of the tokens that clipping looks at."""
    judged = {
        t: float(gap[t]) ** 2
        for t in np.flatnonzero(trained)
        if (advantage[t] > 0 and gap[t] > 0) or (advantage[t] < 0 and gap[t] < 0)
    }
    kept = np.ones(len(gap))
    while judged and sum(judged.values()) / len(judged) > tau:
        largest = max(judged, key=judged.__getitem__)
        kept[largest] = 0.0
        del judged[largest]
    return kept


def alone(numbers: list[float]) -> list[float]:
    return numbers


def step_of(count: int = 300) -> tuple[np.ndarray, ...]:
    behaviour = RNG.uniform(-3, -0.1, count).astype(np.float32)
    gap = (RNG.standard_t(2, count) * 0.2).astype(np.float32)
    return behaviour, behaviour + gap, RNG.choice([-1.0, 0.0, 0.5, 2.0], count), RNG.random(count)


@pytest.mark.parametrize("tau", [1e-4, 0.01, TAU, 0.5, 1e3])
def test_m2po_leaves_out_the_largest_until_the_mean_keeps_to_its_budget(tau: float) -> None:
    behaviour, proximal, advantage, weight = step_of()
    weight = np.where(weight < 0.2, 0.0, weight)
    (found,), told = outliers.judged(
        [packed(behaviour, proximal, advantage, weight)], tau, True, alone
    )
    kept = literal(proximal - behaviour, advantage, weight != 0, tau)
    assert found.scores["kept"].tolist() == kept.tolist()
    assert told["importance/second_moment_kept"] <= tau
    assert (kept.min() == 0) == (told["importance/second_moment"] > tau)


@pytest.mark.parametrize("cuts", [[300], [1, 150], [10, 20, 290]])
def test_m2po_does_not_depend_on_how_the_step_was_cut(cuts: list[int]) -> None:
    columns = step_of()
    whole, told = outliers.judged([packed(*columns)], TAU, True, alone)
    pieces = [packed(*parts) for parts in zip(*(np.split(c, cuts) for c in columns), strict=True)]
    found, again = outliers.judged(pieces, TAU, True, alone)
    kept = np.concatenate([one.scores["kept"] for one in found])
    assert kept.tolist() == whole[0].scores["kept"].tolist() and 0 < kept.mean() < 1
    assert again == pytest.approx(told)


def test_m2po_keeps_what_comes_back_and_what_is_equal_together() -> None:
    """Far tokens that the advantage pulls back are no outliers; of equal ones none is chosen."""
    found, _ = outliers.judged(
        [packed([-1, -1, -1, -1, -1], [-3, 1, -1.5, -1.5, -1.1], [1, -1, -1, -1, -1])],
        0.1,
        True,
        alone,
    )
    assert found[0].scores["kept"].tolist() == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (packed([], [], []), []),
        (packed([-1], [-1], [1]), [1]),
        (packed([-1], [-0.1], [1]), [0]),  # the only one is over the budget
        (packed([-1, -1], [-0.1, -2], [1, -1]), [0, 0]),
        (packed([-1, -1], [-0.1, -2], [1, -1], weight=[0, 0]), [1, 1]),  # nothing is trained
        (packed([-3e38, -1], [0, -0.9], [1, 1]), [0, 1]),  # its square is no fp32
        (packed([-np.inf, -np.inf], [0, -np.inf], [1, 1]), [0, 1]),
    ],
)
def test_m2po_at_the_edges(given: Packed, kept: list[float]) -> None:
    found, told = outliers.judged([given], TAU, True, alone)
    assert found[0].scores["kept"].tolist() == kept
    assert all(np.isfinite(value) for value in told.values())


def test_a_rank_without_scores_makes_the_same_sums() -> None:
    """The first stage of a pipeline gives nothing, and is asked as often."""
    asked: list[int] = []
    columns = step_of()

    def noted(numbers: list[float]) -> list[float]:
        asked.append(len(numbers))
        return numbers

    outliers.judged([packed(*columns)], TAU, True, noted)
    answers = iter(asked.copy())
    assert len(asked) <= 9 and max(asked) == 2 * outliers.PROBES
    whole: list[list[float]] = []

    def recorded(numbers: list[float]) -> list[float]:
        whole.append(numbers)
        return numbers

    outliers.judged([packed(*columns)], TAU, True, recorded)
    told = iter(whole)

    def other(numbers: list[float]) -> list[float]:
        assert len(numbers) == next(answers) and not any(numbers)
        return next(told)

    outliers.judged([packed(*columns)], TAU, False, other)
    assert next(told, None) is None


# --- what a config may ask for --------------------------------------------------------------------


def refused(**wanted: Any) -> str:
    algorithm = AlgorithmConfig(
        algorithm_type="grpo",
        advantage_fn="grpo",
        policy_loss_fn="ppo",
        loss_agg_mode="token-mean",
        sample_strategy="default",
        kl_loss_fn="none",
        entropy_loss_fn="none",
        proximal_logprobs=True,
        rollout_correction=RolloutCorrectionConfig(**wanted),
    )
    try:
        recipe.check(algorithm)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "published"), [("binary_kl", 0.1), ("second_moment", 0.04)])
def test_a_budget_is_the_published_one_or_a_number_above_0(kind: str, published: float) -> None:
    assert refused(rollout_rs=kind) == refused(rollout_rs=kind, rollout_rs_threshold=2.0) == ""
    assert recipe.outlier_budget(RolloutCorrectionConfig(rollout_rs=kind)) == published
    assert "greater than 0" in refused(rollout_rs=kind, rollout_rs_threshold=0.0)
    assert "no lower end" in refused(rollout_rs=kind, rollout_rs_threshold_lower=0.5)
    assert "rollout_is_threshold" in refused(rollout_rs=kind, rollout_is_threshold=0.0)


def test_a_range_is_asked_of_masks_alone() -> None:
    """V-trace truncates at 1 (arXiv:1802.01561): a weight needs no range around 1."""
    assert refused(rollout_is="token", rollout_is_threshold=1.0) == ""
    assert refused(rollout_is="sequence", rollout_is_threshold=0.5) == ""
    assert "rollout_is_threshold" in refused(rollout_is="token", rollout_is_threshold=0.0)
    assert "must hold 1 inside" in refused(rollout_rs="token", rollout_is_threshold=1.0)


@pytest.mark.parametrize("name", ["rollout_rs_threshold", "rollout_rs_threshold_lower"])
def test_a_threshold_without_its_mask_is_refused(name: str) -> None:
    assert f"{name}=0.5 with rollout_rs=none" in refused(**{name: 0.5})
    assert name in refused(rollout_is="token", **{name: 0.5})


def test_a_veto_is_a_small_ratio() -> None:
    assert refused(rollout_token_veto_threshold=1e-4) == ""
    for ratio in (1.0, 5.0, -1.0, float("nan")):
        assert "rollout_token_veto_threshold" in refused(rollout_token_veto_threshold=ratio)
