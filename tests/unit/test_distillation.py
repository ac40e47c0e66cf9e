"""A teacher's advantages against closed forms in fp64, token by token."""

import numpy as np
import pytest

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.advantages.distillation import jsd, on_policy_distill
from rft.algorithm.distillation import credited
from rft.config import AlgorithmConfig
from rft.packing import Packed, Row, pack

OLD, TEACHER = np.array([-0.5, -1.0, -3.0, -0.1]), np.array([-0.7, -0.2, -3.0, -2.5])


def packed(**scores: np.ndarray) -> Packed:
    """Prompt of two tokens, four sampled, of which the third is not trained."""
    trained = np.array([0, 0, 1, 1, 0, 1], dtype=np.float32)
    behaviour = np.concatenate([[0, 0], OLD]).astype(np.float32)
    row = Row(np.arange(6), trained, behaviour, 0 * trained, trained / 3, scores={
        name: np.concatenate([[0, 0], values]).astype(np.float32) for name, values in scores.items()
    })  # fmt: skip
    return pack([row], 1, 100, 1)[0][0]


def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token() -> None:
    found, _ = on_policy_distill(packed(teacher=TEACHER), np.zeros(6), kl_coef=0.5)
    assert found == pytest.approx([0, *(0.5 * (TEACHER - OLD) * [1, 1, 0, 1]), 0])
    newer = OLD - 0.3
    found, _ = on_policy_distill(packed(teacher=TEACHER, proximal=newer), np.zeros(6))
    assert found == pytest.approx([0, *((TEACHER - newer) * [1, 1, 0, 1]), 0], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_jsd_is_the_divergence_of_the_token_from_the_mixture(beta: float) -> None:
    s, t = np.exp(OLD), np.exp(TEACHER)
    if beta in (0.0, 1.0):
        wanted = TEACHER - OLD if beta else OLD - TEACHER
    else:
        middle = (1 - beta) * s + beta * t
        wanted = beta * np.log(t / middle) + (1 - beta) * np.log(s / middle)
    found, _ = jsd(packed(teacher=TEACHER), np.zeros(6), lambda_coef=beta, kl_coef=2.0)
    assert found == pytest.approx([0, *(-2.0 * wanted * [1, 1, 0, 1]), 0], rel=1e-5, abs=1e-6)


def test_ranks_without_a_teacher_take_part_in_the_sums() -> None:
    algorithm = AlgorithmConfig(algorithm_type="on_policy_distill", advantage_fn="on_policy_distill")
    assert recipe.needs_teacher(algorithm) and not recipe.needs_critic(algorithm)
    assert ALGORITHMS["jsd"].advantage_fn == "jsd"
    asked: list[list[float]] = []

    def summed(own: list[float]) -> list[float]:
        asked.append(own)
        return own

    part, metrics = credited([packed(teacher=TEACHER)], algorithm, True, summed)
    gap = (TEACHER - OLD)[[0, 1, 3]].mean()
    assert metrics == pytest.approx({"advantage/mean": gap, "kl/teacher": -gap}, rel=1e-5)
    assert np.count_nonzero(part[0].advantage) == 3
    credited([packed()], algorithm, True, summed)
    credited([packed(teacher=TEACHER)], algorithm, False, summed)
    assert asked[1:] == [[0.0] * 3] * 2
