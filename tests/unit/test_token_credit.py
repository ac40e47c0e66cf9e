"""GAE against the sum it stands for, in fp64; KL estimators against exact KLs; a step's advantages
however it was cut.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import credit, token_credit
from rft.algorithm.fields import Fields
from rft.algorithm.losses import LOSSES, clipped_value, token_loss
from rft.algorithm.ratios import ESTIMATORS, Correction, estimate
from rft.algorithm.token_advantages import gae, whitened
from rft.config import AlgorithmConfig
from rft.data.context_parallel import slice_cp
from rft.data.packing import Packed, Row, pack, stack
from rft.data.runs import nonzero
from rft.data.wire import Microbatches, encode_part
from rft.ground.experience import Experience

PENALTY = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.2}}


def closed_form(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum_k (gamma lam)^k delta_t+k of one sequence that is
    all trained (arXiv:1506.02438, eq. 16).
    """
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    n = len(rewards)
    return np.array(
        [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.3)])
def test_gae_is_the_decayed_sum_of_what_was_not_expected(gamma: float, lam: float) -> None:
    """Three sequences, one of them without a trained token, with gaps, and padding behind them."""
    rng = np.random.default_rng(3)
    bounds, length = np.array([0, 7, 9, 20]), 24
    trained = rng.random(length) < 0.6
    trained[7:9] = trained[20:] = False
    rewards, values = rng.normal(size=(2, length))
    advantages, returns = gae(rewards, values, trained, bounds, gamma, lam)
    for start, stop in ((0, 7), (9, 20)):
        at = np.arange(start, stop)[trained[start:stop]]
        wanted = closed_form(rewards[at], values[at], gamma, lam)
        assert advantages[at] == pytest.approx(wanted, abs=1e-12)
        assert returns[at] == pytest.approx(wanted + values[at], abs=1e-12)
    assert not advantages[~trained].any() and not returns[~trained].any()


def test_gae_without_decay_is_reward_to_come_less_the_value() -> None:
    advantages, returns = gae(
        np.array([0, 0, 2.0]), np.array([0.5, 1.0, -1.0]), np.ones(3), np.array([0, 3])
    )
    assert returns == pytest.approx([2, 2, 2]) and advantages == pytest.approx([1.5, 1, 3])


def test_gae_of_nothing() -> None:
    advantages, returns = gae(np.zeros(4), np.ones(4), np.zeros(4), np.array([0]))
    assert not advantages.any() and not returns.any()


def test_whitening_spares_what_is_not_trained() -> None:
    found = whitened(np.array([1.0, 3.0, 9.0]), np.array([True, True, False]), 2.0, 4.0)
    assert found == pytest.approx([-0.5, 0.5, 0.0])


def test_estimators_are_those_of_the_two_distributions() -> None:
    """k1, k3 and corrected_k3 average to the exact KL over the policy's own samples; k2's gradient
    to the KL's gradient.
    """
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.4, -0.5], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    p = policy.exp()
    exact = (p * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for name in ("k1", "k3", "low_var_kl", "corrected_k3"):
        assert float((p * estimate(name, policy, reference, policy)).sum()) == pytest.approx(
            float(exact)
        ), name
    (found,) = torch.autograd.grad(
        (p.detach() * estimate("k2", policy, reference, policy)).sum(), logits
    )
    assert found.numpy() == pytest.approx(wanted.numpy())


def test_estimators_by_hand() -> None:
    new, reference, old = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.5, -2.0))
    k3 = np.exp(-0.5) + 0.5 - 1
    wanted = {
        "k1": 0.5,
        "k2": 0.125,
        "k3": k3,
        "low_var_kl": k3,
        "abs": 0.5,
        "corrected_k3": 2.0 * k3,
    }
    assert set(wanted) | {"none"} == set(ESTIMATORS)
    assert {name: estimate(name, new, reference, old).item() for name in wanted} == pytest.approx(
        wanted
    )
    assert (
        estimate("low_var_kl", torch.tensor(-15.0), torch.tensor(0.0), torch.tensor(0.0)).item()
        == 10.0
    )


def fields(**given: list[float]) -> Fields:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()}
    count = len(next(iter(tensors.values())))
    ones = torch.ones(count, dtype=torch.float64)
    return Fields(
        **({"behaviour": ones, "advantage": ones, "weight": ones, "mask": ones > 0} | tensors)
    )


def test_the_ratio_is_to_the_proximal_policy_where_there_is_one() -> None:
    logprobs = torch.tensor([-0.5, -0.5], dtype=torch.float64, requires_grad=True)
    given = {"behaviour": [-1.0, -2.0], "advantage": [1.0, 1.0], "proximal": [-0.6, -0.6]}
    loss, metrics = LOSSES["ppo"](logprobs, fields(**given))
    assert loss.tolist() == pytest.approx([-np.exp(0.1)] * 2)
    assert metrics["logprob_diff/mean"].tolist() == pytest.approx([0.5, 1.5]), (
        "the engine is still what is compared with"
    )
    weighed, metrics = token_loss("ppo", {}, correction=Correction("token", cap=2.0))(
        logprobs, fields(**given)
    )
    assert metrics["importance/mean"].tolist() == pytest.approx([np.exp(0.4), 2.0])
    assert weighed.tolist() == pytest.approx([-np.exp(0.1) * np.exp(0.4), -np.exp(0.1) * 2])
    clipped, _ = LOSSES["ppo"](logprobs, fields(**given | {"proximal": [-1.0, -1.0]}))
    assert clipped.tolist() == pytest.approx([-1.2] * 2)


def test_kl_and_entropy_terms_join_the_loss() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    given = replace(fields(behaviour=[-1.0], advantage=[0.0], reference=[-1.5]), entropy=entropy)
    loss, metrics = token_loss("ppo", {}, kl="k2", kl_coef=0.1, entropy_coef=0.01)(logprobs, given)
    assert loss.item() == pytest.approx(0.1 * 0.125 - 0.01 * 0.7)
    assert (metrics["kl/reference"].item(), metrics["entropy/mean"].item()) == pytest.approx(
        (0.125, 0.7)
    )
    slopes = torch.autograd.grad(loss.sum(), [logprobs, entropy])
    assert [slope.item() for slope in slopes] == pytest.approx([0.1 * 0.5, -0.01])


@pytest.mark.parametrize(
    ("value", "expected", "slope"),
    [
        (1.2, (1.2 - 3.0) ** 2 / 2, 1.2 - 3.0),  # inside the range: plain
        (2.0, (1.5 - 3.0) ** 2 / 2, 0.0),  # moved too far, towards the return: nothing more to gain
        (0.2, (0.2 - 3.0) ** 2 / 2, 0.2 - 3.0),  # moved too far the wrong way: the way back is open
    ],
)
def test_a_value_moves_by_at_most_its_range(value: float, expected: float, slope: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_value(values, fields(value=[1.0], returns=[3.0]), 0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert values.grad is not None and values.grad.item() == pytest.approx(slope)


def experiences(count: int = 9) -> list[Experience]:
    rng = np.random.default_rng(1)
    found = []
    for number in range(count):
        n = int(rng.integers(2, 9))
        mask = [1, *rng.integers(0, 2, n - 1).tolist()]
        found.append(
            Experience(
                tokens=rng.integers(5, 90, 3 + n).tolist(),
                prompt_length=3,
                action_mask=mask,
                group=number,
                logprobs=rng.uniform(-2, -0.1, n).tolist(),
                reward=float(rng.normal()),
                reward_outcome="ok",
            )
        )
    return found


def said(packed: Packed) -> Packed:
    """With values and reference log-probabilities that are functions of the label alone, so that no
    cut changes them.
    """
    found = {"value": np.sin(packed.labels), "reference": -1 - np.cos(packed.labels) ** 2}
    return replace(
        packed, scores=packed.scores | {name: a.astype(np.float32) for name, a in found.items()}
    )


def by_label(parts: list[list[Packed]], name: str) -> list[tuple[int, float]]:
    """(row, value) of every trained token in order."""
    found = []
    for packed in (p for part in parts for p in part):
        rows = np.repeat(packed.rows, np.diff(packed.cu_seqlens))
        values = packed.advantage if name == "advantage" else packed.scores[name]
        found += [(int(rows[t]), float(values[t])) for t in np.flatnonzero(packed.weight)]
    return sorted(found, key=lambda pair: pair[0])


def credited(
    rows: list[Row], dp: int, limit: int, algorithm: AlgorithmConfig
) -> tuple[list[list[Packed]], Any]:
    """Every rank in turn; sums over ranks are those of a first
    pass, as an all-reduce would give them.
    """
    parts = [[said(packed) for packed in part] for part in pack(rows, dp, limit, 1)]
    totals: list[list[float]] = []
    # the first pass learns the first sums, the second, with these, the second sums
    for calls in (0, 1, 2):
        seen: list[list[list[float]]] = []
        found = []
        for part in parts:
            own: list[list[float]] = []

            def summed(numbers: list[float], own: list[list[float]] = own) -> list[float]:
                own.append(numbers)
                return totals[len(own) - 1] if len(own) <= len(totals) else numbers

            found.append(token_credit.credited(part, algorithm, True, summed))
            seen.append(own)
        if calls < 2:
            totals.append(np.sum([own[calls] for own in seen], axis=0).tolist())
    assert all(moments == found[0][1] for _, moments in found)
    return [part for part, _ in found], found[0][1]


@pytest.mark.parametrize("penalty", [{}, PENALTY], ids=["plain", "kl_penalty"])
def test_advantages_of_a_step_do_not_depend_on_how_it_is_cut(penalty: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(
        advantage_fn="ppo", advantage_fn_args={"gamma": 0.9, "lam": 0.8}, **penalty
    )
    rows = credit.rows(credit.judge(experiences(), "ppo", {}), "token-mean")
    whole, moments = credited(rows, 1, 10**6, algorithm)
    cut, same = credited(rows, 3, 12, algorithm)
    assert sum(len(part) for part in cut) > 3
    assert same == pytest.approx(moments)
    for name in ("advantage", "returns"):
        assert np.array(by_label(cut, name)) == pytest.approx(
            np.array(by_label(whole, name)), abs=1e-5
        )
    values = np.array([value for _, value in by_label(whole, "advantage")])
    assert (values.mean(), values.std(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_the_penalty_is_taken_off_the_reward_of_every_token() -> None:
    (packed,) = pack(credit.rows(credit.judge(experiences(1), "ppo", {}), "token-mean"), 1, 100, 1)[
        0
    ]
    packed = said(packed)
    trained = packed.weight != 0
    algorithm = AlgorithmConfig(advantage_fn="ppo", **PENALTY)
    ([found], moments) = token_credit.credited([packed], algorithm, True, lambda numbers: numbers)
    k1 = (packed.behaviour - packed.scores["reference"])[trained]
    wanted = packed.scores["reward"][trained] - 0.2 * k1
    assert found.scores["returns"][trained] == pytest.approx(
        np.cumsum(wanted[::-1])[::-1], abs=1e-5
    )
    assert moments["kl/penalty"] == pytest.approx(k1.mean())
    proximal = replace(packed, scores=packed.scores | {"proximal": packed.scores["reference"]})
    ([found], moments) = token_credit.credited([proximal], algorithm, True, lambda numbers: numbers)
    assert moments["kl/penalty"] == 0.0, "the old policy is the proximal one, where there is one"


def test_a_rank_without_scores_takes_part_in_the_sums() -> None:
    (packed,) = pack(credit.rows(credit.judge(experiences(2), "ppo", {}), "token-mean"), 1, 100, 1)[
        0
    ]
    asked: list[list[float]] = []

    def summed(numbers: list[float]) -> list[float]:
        asked.append(numbers)
        return [4.0, 8.0, 2.0, 1.0, 0.0] if len(asked) == 1 else [3.0, 1.0, 0.5]

    part, moments = token_credit.credited(
        [packed], AlgorithmConfig(advantage_fn="ppo"), True, summed
    )
    assert part == [packed] and asked == [[0.0] * 5, [0.0] * 3]
    assert moments == {
        "advantage/mean": 2.0,
        "advantage/std": 1.0,
        "returns/mean": 0.5,
        "value/mean": 0.25,
        "value/explained": 0.5,
    }


def test_a_step_without_trained_tokens_is_credited_too() -> None:
    """Every prompt was too long, say: ranks get padding only, which has no rewards."""
    algorithm = AlgorithmConfig(advantage_fn="ppo", kl_loss_fn="none")
    (part,), moments = credited([], 1, 64, algorithm)
    assert not part[0].advantage.any() and moments["returns/mean"] == 0


def test_the_reward_is_that_of_the_last_trained_token() -> None:
    one = Experience(
        tokens=[5, 6, 7, 8, 9], prompt_length=2, action_mask=[1, 1, 0], group=0, reward=2.5
    )
    (row,) = credit.rows(credit.judge([one], "ppo", {}), "token-mean")
    assert row.scores["reward"].tolist() == [0, 0, 0, 2.5, 0] and not nonzero(row.advantage)
    (plain,) = credit.rows(credit.judge([one], "grpo", {}), "token-mean")
    assert plain.scores == {}


def test_scores_travel_and_are_cut_like_every_other_field() -> None:
    (stacked,) = stack(credit.rows(credit.judge(experiences(), "ppo", {}), "token-mean"), 1, 12, 2)
    part = [one.packed() for one in stacked]
    told = list(Microbatches(encode_part(stacked)))
    for sent, received in zip(part, told, strict=True):
        assert sent.scores.keys() == received.scores.keys() == {"reward"}
        assert np.array_equal(sent.scores["reward"], received.scores["reward"])
        copied = replace(received, scores={"reward": received.weight})
        for rank in range(2):
            sliced = slice_cp(copied, rank, 2, 4)
            assert np.array_equal(sliced.scores["reward"], sliced.weight)
    assert sum(float(p.scores["reward"].sum()) for p in part) == pytest.approx(
        sum(e.reward for e in experiences())
    )
