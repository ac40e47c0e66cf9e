"""Every policy loss against its formula written out here for single numbers, and its slope against
finite differences of it.

What a formula holds constant (stop-gradient) is a number of its own here, so the slopes say what is
differentiated, and what not.
"""

from dataclasses import fields as fields_of
from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import recipe
from rft.algorithm.fields import SCORES, Fields
from rft.algorithm.losses import LOSSES, clipped_value, token_loss
from rft.algorithm.ratios import Coefficient, Correction
from rft.config import AlgorithmConfig, ConfigError
from rft.megatron.totals import Totals
from rft.preflight.fill import fill_algorithm
from rft.trainer.models import KLCoefficients

LENGTHS = [5, 1, 4]  # of the responses in one microbatch; two tokens of padding behind
RNG = np.random.default_rng(4)
TOKENS = sum(LENGTHS) + 2
NEW = RNG.uniform(-2.5, -0.2, TOKENS)
OLD = NEW + RNG.choice([0.0, 0.05, -0.05, 0.4, -0.4, 1.5, -1.5], TOKENS)
OLD[:5] = NEW[:5] + [0.3, 0.2, 0.4, 0.1, 0.3]  # a response that has become less likely on average
ADVANTAGE = np.concatenate([[-1.2] * 5, [0.7], [1.1] * 4, [0.0] * 2])
MASK = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0], dtype=bool)
SEQUENCE = np.array([0] * 5 + [1] + [2] * 4 + [3] * 2)


def given(**more: Any) -> Fields:
    tensors = {"behaviour": OLD, "advantage": ADVANTAGE, "weight": MASK * 1.0, **more}
    fields = {name: torch.tensor(values, dtype=torch.float64) for name, values in tensors.items()}
    return Fields(**fields, mask=torch.tensor(MASK), sequence=torch.tensor(SEQUENCE), sequences=4)


def mean_of_sequence(values: np.ndarray) -> np.ndarray:
    means = {
        s: values[(s == SEQUENCE) & MASK].mean() if ((s == SEQUENCE) & MASK).any() else 0.0
        for s in set(SEQUENCE)
    }
    return np.array([means[s] for s in SEQUENCE])


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


GAP = mean_of_sequence(NEW - OLD)  # held constant where a formula uses it


def ppo(x: float, t: int, low: float = 0.2, high: float = 0.2, masks: bool = False) -> float:
    a, r = ADVANTAGE[t], exp(x - OLD[t])
    if masks and a < 0 and -GAP[t] > 0.1:
        return 0.0
    u = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(u, -a * 3.0) if a < 0 else u


def gspo(x: float, t: int, low: float = 3e-4, high: float = 4e-4) -> float:
    a, s = ADVANTAGE[t], exp(GAP[t]) * exp(x) / exp(NEW[t])
    return max(-a * s, -a * clip(s, 1 - low, 1 + high))


def cispo(x: float, t: int, masks: bool = False) -> float:
    a, r = ADVANTAGE[t], exp(NEW[t] - OLD[t])
    is_out = masks and ((a > 0 and r > 1.3) or (a < 0 and r < 0.7))
    return 0.0 if is_out else -a * clip(r, 0.0, 1.28) * x


def dppo(x: float, t: int, divergence: str, low: float, high: float, cap: float = 20.0) -> float:
    a, p, q = ADVANTAGE[t], exp(NEW[t]), exp(OLD[t])
    gap = abs(p - q)
    if divergence == "kl":  # some of OLD are no log-probabilities: then the token is almost sure
        sure = min(q, exp(-1e-6))
        gap = sure * log(sure / p) + (1 - sure) * log((1 - sure) / (1 - p))
    is_out = (p > q and gap > high) if a > 0 else (p < q and gap > low)
    return 0.0 if is_out else -a * min(p / q, cap) * x


def sapo(x: float, t: int) -> float:
    a, r = ADVANTAGE[t], exp(x - OLD[t])
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + exp(-tau * (r - 1)))


def topr(x: float, t: int) -> float:
    a, r = ADVANTAGE[t], exp(NEW[t] - OLD[t])
    return -(min(r, 1.0) if a <= 0 else 1.0) * a * x


def sppo(x: float, t: int) -> float:
    return -ADVANTAGE[t] * (x - OLD[t]) if 1 / 1.3 <= exp(NEW[t] - OLD[t]) <= 1.3 else 0.0


def rec(
    x: float, t: int, mode: str, weight: str = "none", k2: float = 0.0, forward: float = 0.0
) -> float:
    a, r, s = ADVANTAGE[t], exp(NEW[t] - OLD[t]), exp(GAP[t])
    one_side = {True: lambda x: x <= 1.2, False: lambda x: x >= 0.8}[a >= 0]
    inside = {
        "none": True,
        "one-side": one_side(r),
        "gspo-one-side": one_side(s),
        "two-side": 0.8 <= r <= 1.2,
        "ring": 0.8 <= r <= 1.2 or (a >= 0 and r <= 0.4) or (a <= 0 and r >= 3.0),
    }[mode]
    w = {
        "none": 1.0,
        "importance_sampling": r,
        "gspo_importance_sampling": s,
        "advantage": exp(a / 0.5),
    }[weight]
    return (-a * w * x if inside else 0.0) + k2 * (x - OLD[t]) ** 2 - forward * x


CASES = [
    ("ppo", {}, ppo),
    ("ppo", {"clip_range_low": 0.1, "clip_range_high": 0.5}, lambda x, t: ppo(x, t, 0.1, 0.5)),
    ("ppo", {"enable_sequence_masking": True}, lambda x, t: ppo(x, t, masks=True)),
    ("ppo", {"fallback_to_policy_gradient": True}, lambda x, t: -ADVANTAGE[t] * exp(x - NEW[t])),
    ("gspo", {}, gspo),
    ("gspo", {"clip_range_low": 0.5, "clip_range_high": 0.5}, lambda x, t: gspo(x, t, 0.5, 0.5)),
    ("cispo", {}, cispo),
    (
        "cispo",
        {"enable_mask": True, "mask_clip_range_low": 0.3, "mask_clip_range_high": 0.3},
        lambda x, t: cispo(x, t, True),
    ),
    ("dppo_tv", {}, lambda x, t: dppo(x, t, "tv", 0.2, 0.2)),
    (
        "dppo_tv",
        {"delta_low": 0.05, "delta_high": 0.3, "ratio_cap": 1.2},
        lambda x, t: dppo(x, t, "tv", 0.05, 0.3, 1.2),
    ),
    ("dppo_kl", {}, lambda x, t: dppo(x, t, "kl", 0.05, 0.05)),
    (
        "dppo_kl",
        {"delta_low": 0.2, "delta_high": 0.01},
        lambda x, t: dppo(x, t, "kl", 0.2, 0.01),
    ),
    ("sapo", {}, sapo),
    ("opmd", {"tau": 3.0}, lambda x, t: -ADVANTAGE[t] * x / 4),
    ("topr", {}, topr),
    ("sppo", {}, sppo),
    ("importance_sampling", {}, lambda x, t: -ADVANTAGE[t] * exp(x - OLD[t])),
    *[
        ("rec", {"clip_mode": mode}, lambda x, t, mode=mode: rec(x, t, mode))
        for mode in ("none", "one-side", "gspo-one-side", "two-side", "ring")
    ],
    *[
        (
            "rec",
            {"weight": weight, "temp": 0.5},
            lambda x, t, weight=weight: rec(x, t, "none", weight),
        )
        for weight in ("importance_sampling", "gspo_importance_sampling", "advantage")
    ],
    (
        "rec",
        {"regularizer": "k2", "regularizer_coef": 0.3, "clip_mode": "two-side"},
        lambda x, t: rec(x, t, "two-side", k2=0.3),
    ),
    (
        "rec",
        {"regularizer": "forward-kl", "regularizer_coef": 0.3},
        lambda x, t: rec(x, t, "none", forward=0.3),
    ),
    ("sft", {}, lambda x, t: -x),
    ("sft_is", {}, lambda x, t: -exp(NEW[t]) * x),
    (
        "sft_phi",
        {"cutoff_prob": 0.5},
        lambda x, t: -exp(NEW[t]) * (1 - exp(NEW[t])) * min(x, log(0.5)),
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "formula"), CASES, ids=[f"{c[0]}-{'-'.join(c[1])}" for c in CASES]
)
def test_value_and_slope_of_every_trained_token(
    name: str, arguments: dict[str, Any], formula: Any
) -> None:
    logprobs = torch.tensor(NEW, requires_grad=True)
    losses, metrics = LOSSES[name](logprobs, given(), **arguments)
    losses[torch.tensor(MASK)].sum().backward()
    assert logprobs.grad is not None
    step = 1e-6
    for t in np.flatnonzero(MASK):
        assert losses[t].item() == pytest.approx(formula(NEW[t], t), abs=1e-12), t
        slope = (formula(NEW[t] + step, t) - formula(NEW[t] - step, t)) / (2 * step)
        assert logprobs.grad[t].item() == pytest.approx(slope, abs=1e-6), t
    assert not logprobs.grad[~torch.tensor(MASK)].any()
    assert all(metric.shape == losses.shape for metric in metrics.values())
    assert name.startswith("sft") or "kl/mismatch" in metrics, (
        "every loss on rollouts says how far trainer and engine differ"
    )


def test_every_loss_has_a_case_here() -> None:
    elsewhere = {"dpo", "mix", "mix_chord"}  # test_pair_losses.py, test_mixing.py
    assert {name for name, _, _ in CASES} == set(LOSSES) - elsewhere


@pytest.mark.parametrize(
    "name",
    ["ppo", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "topr", "importance_sampling"],
)
def test_on_policy_the_gradient_is_the_plain_one(name: str) -> None:
    """Where nothing has moved, d loss / d logprobs = -A; so for SAPO
    (W51) too, whose gate then is steepest.
    """
    logprobs = torch.tensor(OLD, requires_grad=True)
    LOSSES[name](logprobs, given())[0].sum().backward()
    assert logprobs.grad is not None and logprobs.grad.numpy() == pytest.approx(-ADVANTAGE)


def test_sapo_damps_large_ratios() -> None:
    """df/dlogprobs at r = 1, 2 and 5: 1, 4 s(1) s(-1) 2 = 1.573, 4 s(4) s(-4) 5 = 0.353 (W51)."""
    for ratio, slope in ((1.0, 1.0), (2.0, 1.5729), (5.0, 0.3533)):
        logprobs = torch.tensor([log(ratio)], dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        LOSSES["sapo"](logprobs, Fields(0 * one, one, one, one > 0))[0].backward()
        assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-slope, abs=1e-4)


# --- sums over a response -------------------------------------------------------------------------


def test_sums_of_a_response_and_their_gradient() -> None:
    """`sums` is differentiable: every trained token of a response has a part in what any of its
    tokens sees.
    """

    def seen(values: torch.Tensor) -> torch.Tensor:
        return given().mean(values**2)[torch.tensor(MASK)]

    assert torch.autograd.gradcheck(seen, torch.tensor(NEW, requires_grad=True))
    total, count = given().sums(torch.tensor(NEW), torch.ones(TOKENS, dtype=torch.float64))
    for s, wanted in enumerate([4, 1, 3]):
        at = s == SEQUENCE
        assert count[at].tolist() == [wanted] * at.sum() and total[at].numpy() == pytest.approx(
            NEW[at & MASK].sum()
        )


# --- off-policy corrections -----------------------------------------------------------------------

BEHAVIOUR = OLD - [0.05, -0.05, 9.0, 0.02, 0.0, 0.9, 0.9, 9.0, -0.8, 0.1, 0.0, 0.0]
RHO = np.exp(OLD - BEHAVIOUR)
PRODUCT = np.array([np.exp((OLD - BEHAVIOUR)[(s == SEQUENCE) & MASK].sum()) for s in SEQUENCE])
GEOMETRIC = np.exp(mean_of_sequence(OLD - BEHAVIOUR))
WEIGHTS = [
    (Correction("token", 1.5), np.minimum(RHO, 1.5)),
    (Correction("sequence", 1.5), np.minimum(PRODUCT, 1.5)),
    (Correction(mask="token", lower=0.5, upper=2.0), (RHO >= 0.5) & (RHO <= 2.0)),
    (Correction(mask="sequence", lower=0.9, upper=1.2), (PRODUCT >= 0.9) & (PRODUCT <= 1.2)),
    (Correction(mask="geometric", lower=0.9, upper=1.2), (GEOMETRIC >= 0.9) & (GEOMETRIC <= 1.2)),
    (
        Correction("token", 5.0, "token", 0.8, 5.0),
        np.where((RHO >= 0.8) & (RHO <= 5.0), np.minimum(RHO, 5.0), 0),
    ),
    (
        Correction(veto=0.5),
        np.array([(RHO[(s == SEQUENCE) & MASK] >= 0.5).all() for s in SEQUENCE]),
    ),
]


@pytest.mark.parametrize(("correction", "weight"), WEIGHTS)
@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo", "rec"])
def test_a_correction_weighs_any_loss(
    name: str, correction: Correction, weight: np.ndarray
) -> None:
    fields = given(behaviour=BEHAVIOUR, proximal=OLD, reference=OLD - 0.1)
    logprobs = torch.tensor(NEW, requires_grad=True)
    plain, _ = token_loss(name, {})(logprobs, fields)
    corrected, metrics = token_loss(name, {}, kl="k2", kl_coef=0.5, correction=correction)(
        logprobs, fields
    )
    wanted = plain.detach().numpy() * weight + 0.5 * (NEW - OLD + 0.1) ** 2 / 2
    assert corrected.detach().numpy()[MASK] == pytest.approx(wanted[MASK])
    assert metrics["importance/mean"].numpy()[MASK] == pytest.approx((weight * 1.0)[MASK])
    left_out = metrics["importance/left_out_frac"][torch.tensor(MASK)].mean()
    assert (0 < left_out < 1) == (correction.mask != "none" or correction.veto is not None)


# --- the coefficient of the KL --------------------------------------------------------------------

ADAPTIVE = {"adaptive": True, "target_kl": 0.1, "horizon": 100}
ADAPTIVE_NEEDS = ("target_kl", "horizon", "kl_coef")


def test_an_adaptive_coefficient_moves_towards_its_target() -> None:
    """Twice the target: as far as it may, in proportion to the
    responses; W53: no tensor is asked for.
    """
    coefficient = Coefficient(0.01, target=0.1, horizon=100)
    coefficient.after(0.2, responses=50)
    assert coefficient.value == pytest.approx(0.01 * (1 + 0.2 * 0.5))
    coefficient.after(0.09, responses=10)
    assert coefficient.value == pytest.approx(0.01 * 1.1 * (1 - 0.1 * 0.1))
    fixed = Coefficient(0.01)
    fixed.after(9.0, responses=100)
    assert fixed.value == 0.01


@pytest.mark.parametrize("name", ADAPTIVE_NEEDS)
def test_an_adaptive_coefficient_that_could_not_move_is_refused(name: str) -> None:
    given = ADAPTIVE | {"kl_coef": 0.01}
    algorithm = fill_algorithm(
        AlgorithmConfig(kl_loss_fn="k2", kl_loss_fn_args=given | {name: 0.0})
    )
    with pytest.raises(ConfigError, match=f"kl_loss_fn_args.{name}=0.0 with adaptive=true"):
        recipe.check(algorithm)
    algorithm.kl_loss_fn_args = given
    recipe.check(algorithm)


def test_a_step_without_a_number_leaves_the_coefficients_as_they_are() -> None:
    """The penalty is known before anybody knows that the step will be skipped."""
    moving = AlgorithmConfig(kl_penalty_fn="k1", kl_penalty_fn_args=ADAPTIVE)
    coefficients = KLCoefficients(moving)
    coefficients.responses = 100
    assert coefficients.after_penalty({"kl/penalty": float("nan")}) == {"kl/penalty_coef": 0.001}
    assert coefficients.penalty.value == 0.001


def test_a_loss_reads_the_coefficient_of_the_moment() -> None:
    coefficient, fields = Coefficient(0.5, 0.1, 1.0), given(reference=OLD)
    loss = token_loss("sft", {}, kl="k1", kl_coef=coefficient)
    before, _ = loss(torch.tensor(NEW), fields)
    coefficient.value = 1.5
    after, _ = loss(torch.tensor(NEW), fields)
    assert (after - before).numpy() == pytest.approx(NEW - OLD)


def test_both_coefficients_are_checkpointed_where_they_move() -> None:
    moving = AlgorithmConfig(
        kl_loss_fn="k2",
        kl_loss_fn_args=ADAPTIVE,
        kl_penalty_fn="k1",
        kl_penalty_fn_args={"kl_coef": 0.3},
    )
    coefficients = KLCoefficients(moving)
    coefficients.responses = 100
    assert coefficients.after_loss({"kl/reference": 0.3, "skipped": 0.0}) == {
        "kl/reference_coef": 0.001
    }
    assert coefficients.after_loss({"kl/reference": 0.3, "skipped": 1.0}) == {}, (
        "nothing was learned"
    )
    assert coefficients.after_penalty({"kl/penalty": 0.3}) == {}
    again = KLCoefficients(replace(moving, kl_penalty_fn_args={"kl_coef": 0.7}))
    again.restore(coefficients.state())
    assert (again.loss.value, again.penalty.value) == (pytest.approx(0.0012), 0.7), (
        "a fixed one is that of the config"
    )
    fixed = KLCoefficients(AlgorithmConfig())
    assert fixed.state() == {}


@pytest.mark.parametrize("name", [*LOSSES, "clipped_value"])
def test_a_microbatch_asks_a_device_for_no_value(name: str) -> None:
    """On a device without values, where the host could wait for none: neither the losses nor the
    metrics of a microbatch need one before the end of the step.
    """
    loss = clipped_value if name == "clipped_value" else token_loss(name, {}, "k2", 0.1, 0.1)
    nowhere = torch.device("meta")
    totals = Totals(loss, counts=True, device=nowhere)
    fields = given(**{one.name: NEW for one in fields_of(Fields) if one.name in SCORES})
    there = {
        name: value.to(nowhere)
        for name, value in vars(replace(fields, entropy=fields.behaviour)).items()
        if isinstance(value, torch.Tensor)
    }
    scores = torch.zeros(TOKENS, dtype=torch.float64, device=nowhere, requires_grad=True)
    totals.add(scores, Fields(**there, sequences=4)).backward()
    assert scores.grad is not None and totals.sums.device == totals.maxima.device == nowhere
    with pytest.raises(NotImplementedError, match="meta"):
        totals.reduce(None)  # type: ignore[arg-type]
