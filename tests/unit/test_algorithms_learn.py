"""Every algorithm, as its name fills it, learns a game of two tokens: through feed, scores, credit
and loss of a step.

The policy is a table of logits and the engine samples from it; everything between them is what a
run has. A run with a model, an engine and ranks is tests/e2e/test_algorithms.py.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.fields import Fields
from rft.config import AlgorithmConfig
from rft.data.packing import Cost, Packed
from rft.ground.experience import Batch, Experience, VersionSpan
from rft.preflight.fill import fill_algorithm
from rft.trainer.feed import Feed
from rft.trainer.models import Models
from tests.unit.test_feed import Alone

WORDS, TARGET, TASKS, STEPS = 4, 3, 4, 40
LEARNED = 0.5
ALONE = SimpleNamespace(
    is_last_stage=True, tp_rank=0, cp_rank=0, dp_rank=0, reduce=lambda sums, maxima: None
)
# Without those that need a critic, expert rows or a teacher: they learn in tests/e2e/test_ppo.py
# and test_rows.py.
NAMES = [
    n
    for n, kind in ALGORITHMS.items()
    if kind.source == "rollouts" and kind.sample_strategy != "mix"
]
FILLED = {name: fill_algorithm(AlgorithmConfig(algorithm_type=name)) for name in NAMES}
NAMES = [
    name
    for name, one in FILLED.items()
    if not (recipe.needs_critic(one) or recipe.needs_teacher(one))
]


class Table:
    """A policy whose logits depend on the place in the response alone."""

    mesh = ALONE

    def __init__(self) -> None:
        self.logits = torch.zeros(2, WORDS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)

    def said(self, packed: Packed) -> tuple[Tensor, Tensor]:
        found = torch.log_softmax(self.logits, 1)[torch.from_numpy(np.minimum(packed.positions, 1))]
        labels = torch.from_numpy(np.minimum(packed.labels, WORDS - 1))
        return found.gather(1, labels[:, None]).squeeze(1), -(found.exp() * found).sum(1)

    def score(self, part: list[Packed], trained_only: bool = False) -> list[np.ndarray]:
        return [self.said(packed)[0].detach().numpy() for packed in part]

    def uncertainty(self, part: list[Packed]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return self.score(part), [self.said(packed)[1].detach().numpy() for packed in part]

    def train_step(
        self, part: list[Packed], token_loss: Any, before_update: Any, last: bool = True
    ) -> dict[str, float]:
        self.optimizer.zero_grad()
        told: dict[str, float] = {}
        for packed in part:
            weight = torch.from_numpy(packed.weight)
            logprobs, entropy = self.said(packed)
            scores = {
                n: torch.from_numpy(packed.scores[n])
                for n in ("proximal", "reference", "value", "returns", "kept")
                if n in packed.scores
            }
            sequence = np.repeat(np.arange(len(packed.rows)), np.diff(packed.cu_seqlens))
            fields = Fields(
                torch.from_numpy(packed.behaviour),
                torch.from_numpy(packed.advantage),
                weight,
                weight != 0,
                **scores,
                entropy=entropy,
                sequence=torch.from_numpy(sequence),
                sequences=len(packed.rows),
            )
            losses, metrics = token_loss(logprobs, fields)
            torch.where(fields.mask, losses * weight, torch.zeros(())).sum().backward()
            told |= {
                name: float(value.detach()[fields.mask].mean())
                for name, value in metrics.items()
                if fields.mask.any()
            }
        self.optimizer.step()
        return told | {"skipped": 0.0}


class Game:
    """A source: the engine's samples of the table, a point for every right token, and one greedy
    response where asked.
    """

    def __init__(self, policy: Table, repeat_times: int, has_baseline: bool) -> None:
        self.policy, self.repeat_times, self.has_baseline = policy, repeat_times, has_baseline
        self.random = np.random.default_rng(0)

    def take(self, step: int) -> Batch:
        logprobs = torch.log_softmax(self.policy.logits.detach(), 1).double().numpy()
        made = []
        for task in range(TASKS):
            group = step * TASKS + task
            for sample in range(self.repeat_times):
                tokens = [
                    int(self.random.choice(WORDS, p=np.exp(row) / np.exp(row).sum()))
                    for row in logprobs
                ]
                made.append(
                    self.experience(
                        group,
                        sample,
                        step,
                        tokens,
                        [float(r[t]) for r, t in zip(logprobs, tokens, strict=True)],
                    )
                )
            if self.has_baseline:
                greedy = self.experience(group, 0, step, logprobs.argmax(1).tolist(), [0.0, 0.0])
                greedy.action_mask, greedy.info = [0, 0], {"baseline": True}
                made.append(greedy)
        return Batch(step=step, experiences=made)

    def experience(
        self, group: int, sample: int, step: int, tokens: list[int], logprobs: list[float]
    ) -> Experience:
        return Experience(
            tokens=[0, *tokens],
            prompt_length=1,
            action_mask=[1, 1],
            logprobs=logprobs,
            group=group,
            sample=sample,
            versions=[VersionSpan(version=step, start=0, end=2)],
            reward=float(np.mean(np.array(tokens) == TARGET)),
            info={"env_state_hash": "start"},
        )


def played(
    algorithm: AlgorithmConfig, steps: int = STEPS, enough: float = LEARNED
) -> tuple[float, dict[str, float]]:
    """How likely the policy is to say both right tokens after `steps`, or as soon as that is more
    than `enough`, and what the last step told.
    """
    policy, reference = Table(), Table()
    models = Models(
        policy, reference if recipe.needs_reference(algorithm) else None, None, algorithm
    )  # type: ignore[arg-type]
    source = Game(
        policy, max(4, int(algorithm.repeat_times or 1)), recipe.needs_baseline(algorithm)
    )
    feed = Feed(source, Alone(), algorithm, 1024, 1, Cost(), longest=2)  # type: ignore[arg-type]
    loss = recipe.policy_loss(algorithm, models.kl.loss)
    told: dict[str, float] = {}
    likely = 0.0
    for step in range(steps):
        batch = feed.next(step, stopping=False)
        assert batch is not None
        part, scored = models.score(batch.part, batch.groups)
        told = batch.metrics | scored | models.train_step(part, loss, lambda: None)
        assert all(np.isfinite(value) for value in told.values()), told
        likely = float(torch.softmax(policy.logits.detach(), 1)[:, TARGET].prod())
        if likely > enough:
            break
    return likely, told


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_the_game(name: str) -> None:
    algorithm = fill_algorithm(AlgorithmConfig(algorithm_type=name))
    recipe.check(algorithm)
    assert played(algorithm)[0] > LEARNED, "it began at 1/16"


MORE = {
    "clipb": {"advantage_fn": "clipb"},
    "corrected": {"rollout_correction": {"rollout_is": "token", "rollout_rs": "geometric"}},
    "dppo_tv": {"policy_loss_fn": "dppo_tv"},
    "dppo_kl": {"policy_loss_fn": "dppo_kl"},
    "kpop": {"rollout_correction": {"rollout_is": "token", "rollout_rs": "binary_kl"}},
    "m2po": {
        "policy_loss_fn": "importance_sampling",
        "rollout_correction": {"rollout_is": "token", "rollout_rs": "second_moment"},
    },
    "masked": {"policy_loss_fn_args": {"enable_sequence_masking": True}},
    "penalised": {"algorithm_type": "rloo", "kl_penalty_fn": "k1"},
    "ring": {
        "algorithm_type": "rec",
        "policy_loss_fn_args": {"clip_mode": "ring", "weight": "advantage"},
    },
    "sft_phi": {"algorithm_type": "raft", "policy_loss_fn": "sft_phi"},
    "sft_is": {"algorithm_type": "raft", "policy_loss_fn": "sft_is"},
}


@pytest.mark.parametrize("name", MORE)
def test_so_it_does_with_what_can_be_added(name: str) -> None:
    from rft.config import RolloutCorrectionConfig

    given: dict[str, Any] = {"algorithm_type": "grpo", **MORE[name]}
    if "rollout_correction" in given:
        given["rollout_correction"] = RolloutCorrectionConfig(**given["rollout_correction"])
    algorithm = fill_algorithm(AlgorithmConfig(**given))
    recipe.check(algorithm)
    assert played(algorithm)[0] > LEARNED


def test_an_adaptive_coefficient_holds_the_policy_near() -> None:
    """The same game with a KL that may not grow beyond 0.05: the
    coefficient rises until it does not.
    """
    near = {"adaptive": True, "kl_coef": 0.05, "target_kl": 0.05, "horizon": 1}
    algorithm = fill_algorithm(
        AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="k2", kl_loss_fn_args=near)
    )
    recipe.check(algorithm)
    reached, told = played(algorithm, steps=80, enough=1.0)
    assert told["kl/reference_coef"] > 0.5 and told["kl/reference"] < 0.2 and reached < 0.5
