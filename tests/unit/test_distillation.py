"""A teacher's advantages against closed forms in fp64, token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.token_advantages import jsd, on_policy_distill
from rft.algorithm.token_credit import distilled
from rft.config import AlgorithmConfig, ConfigError
from rft.data.packing import Packed, Row, pack
from rft.preflight.fill import fill_algorithm

OLD, TEACHER = np.array([-0.5, -1.0, -3.0, -0.1]), np.array([-0.7, -0.2, -3.0, -2.5])


def packed(**scores: np.ndarray) -> Packed:
    """Prompt of two tokens, four sampled, of which the third is not trained."""
    trained = np.array([0, 0, 1, 1, 0, 1], dtype=np.float32)
    behaviour = np.concatenate([[0, 0], OLD]).astype(np.float32)
    row = Row(
        np.arange(6),
        trained,
        behaviour,
        0 * trained,
        trained / 3,
        scores={
            name: np.concatenate([[0, 0], values]).astype(np.float32)
            for name, values in scores.items()
        },
    )
    return pack([row], 1, 100, 1)[0][0]


def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token() -> None:
    found, _ = on_policy_distill(packed(teacher=TEACHER), np.zeros(6), kl_coef=0.5)
    assert found == pytest.approx([0, *(0.5 * (TEACHER - OLD) * [1, 1, 0, 1]), 0])
    newer = OLD - 0.3
    found, _ = on_policy_distill(packed(teacher=TEACHER, proximal=newer), np.zeros(6))
    assert found == pytest.approx([0, *((TEACHER - newer) * [1, 1, 0, 1]), 0], abs=1e-6)


def divergence(beta: float, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Of the policy `s` from the teacher `t`, whole distributions, as it is defined."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum()

    if beta in (0.0, 1.0):
        return kl(t, s) if beta else kl(s, t)
    middle = (1 - beta) * s + beta * t
    return beta * kl(t, middle) + (1 - beta) * kl(s, middle)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_jsd_goes_down_the_divergence(beta: float) -> None:
    """The mean over all tokens of advantage times score, a policy gradient without sampling, is the
    divergence's own.
    """
    logits = torch.tensor([0.3, -0.5, 1.0, -1.2], dtype=torch.float64, requires_grad=True)
    policy, teacher = (
        logits.log_softmax(0),
        torch.tensor([0.55, 0.3, 0.05, 0.1], dtype=torch.float64),
    )
    (wanted,) = torch.autograd.grad(
        divergence(beta, policy.exp(), teacher), logits, retain_graph=True
    )
    trained = np.ones(4, dtype=np.float32)
    row = Row(
        np.arange(4),
        trained,
        policy.detach().numpy().astype(np.float32),
        0 * trained,
        trained,
        scores={"teacher": teacher.log().numpy().astype(np.float32)},
    )
    (micro,) = pack([row], 1, 100, 1)[0]
    micro = replace(micro, behaviour=row.behaviour, weight=trained, scores=row.scores)
    found, _ = jsd(micro, np.zeros(4), lambda_coef=beta, kl_coef=2.0)
    (made,) = torch.autograd.grad(
        (policy.exp().detach() * torch.from_numpy(found) * policy).sum(), logits
    )
    assert (-made / 2).numpy() == pytest.approx(wanted.numpy(), abs=1e-6)


def test_ranks_without_a_teacher_take_part_in_the_sums() -> None:
    algorithm = AlgorithmConfig(
        algorithm_type="on_policy_distill", advantage_fn="on_policy_distill"
    )
    assert recipe.needs_teacher(algorithm) and not recipe.needs_critic(algorithm)
    assert ALGORITHMS["jsd"].advantage_fn == "jsd"
    asked: list[list[float]] = []

    def summed(own: list[float]) -> list[float]:
        asked.append(own)
        return own

    part, metrics = distilled([packed(teacher=TEACHER)], algorithm, True, summed)
    gap = (TEACHER - OLD)[[0, 1, 3]].mean()
    assert metrics == pytest.approx({"advantage/mean": gap, "kl/teacher": -gap}, rel=1e-5)
    assert np.count_nonzero(part[0].advantage) == 3
    distilled([packed()], algorithm, True, summed)
    distilled([packed(teacher=TEACHER)], algorithm, False, summed)
    assert asked[1:] == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_a_penalty_of_rewards_is_refused_where_there_are_none(name: str) -> None:
    algorithm = fill_algorithm(AlgorithmConfig(algorithm_type=name))
    recipe.check(algorithm)
    for advantages, why in ((name, "looks at no reward"), ("grpo", "needs them before")):
        wrong = replace(algorithm, advantage_fn=advantages, kl_penalty_fn="k1")
        with pytest.raises(ConfigError, match=f"kl_penalty_fn=k1.*={advantages} {why}") as said:
            recipe.check(wrong)
        *_, advised = str(said.value).partition("set kl_loss_fn instead, or ")
        assert "remax" in advised and name not in advised, "what helps is said"
