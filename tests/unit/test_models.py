"""The order of a step with two models that learn, and what it
reports when one of them could not.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rft.config import AlgorithmConfig
from rft.preflight.fill import fill_algorithm
from rft.trainer.models import Models


class Learning:
    def __init__(self, name: str, events: list[str], loss: float = 1.0):
        self.name, self.events, self.loss, self.step = name, events, loss, 0

    def gradients(self, part: Any, loss: Any) -> dict[str, float]:
        self.events.append(f"gradients of {self.name}")
        return {"loss": self.loss, "grad_norm": 2.0, "num_tokens": 3.0}

    def is_finite(self, metrics: dict[str, float]) -> bool:
        return math.isfinite(metrics["loss"])

    def update(
        self, metrics: dict[str, float], finite: bool, last: bool = True
    ) -> dict[str, float]:
        self.events.append(f"update of {self.name}")
        self.step += last
        return metrics | {"lr": 0.1, "skipped": float(not finite), self.name: 1.0}


def step(
    policy_loss: float = 1.0, critic_loss: float = 1.0, warmup: int = 0
) -> tuple[list[str], dict[str, float]]:
    events: list[str] = []
    policy: Any = Learning("policy", events, policy_loss)
    critic: Any = Learning("critic", events, critic_loss)
    policy.mesh = SimpleNamespace()
    models = Models(policy, None, critic, AlgorithmConfig(), warmup)
    return events, models.train_step(
        [], lambda scores, fields: (scores, {}), lambda: events.append("wait")
    )


def test_weights_change_after_one_wait_and_all_gradients() -> None:
    events, metrics = step()
    assert events == [
        "gradients of critic",
        "gradients of policy",
        "wait",
        "update of critic",
        "update of policy",
    ]
    assert (
        metrics["policy"] == metrics["critic/critic"] == 1.0 and "critic/num_tokens" not in metrics
    )


def test_while_the_critic_warms_up_the_policy_is_left_alone() -> None:
    events, metrics = step(warmup=1)
    assert events == ["gradients of critic", "wait", "update of critic"]
    assert metrics["loss"] == 1.0 and "critic" not in metrics


def test_both_change_or_neither() -> None:
    for losses in ((math.nan, 1.0), (1.0, math.inf)):
        metrics = step(*losses)[1]
        assert metrics["skipped"] == metrics["critic/skipped"] == 1.0
    metrics = step()[1]
    assert metrics["skipped"] == metrics["critic/skipped"] == 0.0


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dpo", "on_policy_distill", "jsd"])
def test_a_coefficient_moves_by_the_responses_of_the_step_whoever_judges_them(kind: str) -> None:
    algorithm = fill_algorithm(
        AlgorithmConfig(
            algorithm_type=kind,
            kl_loss_fn="k2",
            kl_loss_fn_args={"adaptive": True, "target_kl": 0.1, "horizon": 40},
        )
    )
    policy: Any = Learning("policy", [])
    policy.mesh = SimpleNamespace(
        is_last_stage=True, tp_rank=0, cp_rank=0, reduce=lambda *numbers: None
    )
    other: Any = SimpleNamespace(score=lambda part, trained_only=False: [])
    policy.score = other.score
    models = Models(
        policy,
        other,
        other if kind == "ppo" else None,
        algorithm,
        teacher=other if kind in ("on_policy_distill", "jsd") else None,
    )
    models.score([], groups=[0, 0, 1, 1])
    used = models.kl.loss.value
    told = models.kl.after_loss({"kl/reference": 5.0, "skipped": 0.0})
    assert told == {"kl/reference_coef": used}
    assert models.kl.loss.value == pytest.approx(used * (1 + 0.2 * 4 / 40))
