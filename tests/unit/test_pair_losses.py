"""The loss of pairs: exact in fp64 against autograd through the closed form, wherever packing puts
the two responses (W50).
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rft.algorithm import ALGORITHMS, recipe
from rft.algorithm.credit import judge, rows
from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.algorithm.pairs import credited
from rft.config import AlgorithmConfig
from rft.data.packing import Packed, PackingPolicy, pack
from rft.ground.experience import Experience

LENGTHS = [5, 9, 3, 12, 7, 4, 6, 6]  # of responses; four pairs
PROMPT, VOCAB = 2, 11


def experiences() -> list[Experience]:
    rng = np.random.default_rng(0)
    return [
        Experience(
            tokens=rng.integers(0, VOCAB, PROMPT + n).tolist(),
            prompt_length=PROMPT,
            action_mask=[1] * (n - 1) + [n % 2],
        )
        for n in LENGTHS
    ]


class Table:
    """A policy that is one table of logits by token: log-probabilities of the next one, in fp64."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.from_numpy(
            np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
        ).requires_grad_()

    def __call__(self, tokens: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        return torch.log_softmax(self.logits, -1)[
            torch.from_numpy(tokens), torch.from_numpy(labels)
        ]


def closed_form(policy: Table, reference: Table, beta: float, smoothing: float) -> torch.Tensor:
    """Mean over pairs, pair by pair, with nothing but the formula."""
    ratios = []
    for one in experiences():
        tokens = np.array(one.tokens)
        gap = policy(tokens[:-1], tokens[1:]) - reference(tokens[:-1], tokens[1:]).detach()
        ratios.append((gap[PROMPT - 1 :] * torch.tensor(one.action_mask)).sum())
    losses = []
    for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True):
        scaled = beta * (chosen - rejected)
        losses.append(-(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled))
    return torch.stack(losses).mean()


class World:
    """Ranks that meet in every sum."""

    def __init__(self, size: int) -> None:
        self.given: list[list[float]] = [[]] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def summed(self, rank: int, own: list[float]) -> list[float]:
        self.given[rank] = own
        self.barrier.wait()
        total = np.sum(self.given, axis=0).tolist()
        self.barrier.wait()
        return list(total)


def step_in_parts(
    policy: Table, reference: Table, parts: list[list[Packed]], arguments: dict[str, float]
) -> tuple[float, dict[str, float]]:
    """As the ranks do it: score, sum over all of them, then each its own microbatches.

    Gradients add up in the table.
    """
    scored = [[_scored(policy, reference, packed) for packed in part] for part in parts]
    world, beta = World(len(parts)), arguments.get("beta", 0.1)
    with ThreadPoolExecutor(len(parts)) as ranks:
        found = list(
            ranks.map(
                lambda rank: credited(scored[rank], beta, True, partial(world.summed, rank)),
                range(len(parts)),
            )
        )
    bound, total = token_loss("dpo", arguments), 0.0
    assert all(metrics == found[0][1] for _, metrics in found)
    for part, _ in found:
        for packed in part:
            loss = (
                bound(policy(packed.tokens, packed.labels), _fields(packed))[0]
                * torch.from_numpy(packed.weight).double()
            ).sum()
            loss.backward()
            total += loss.item()
    return total, found[0][1]


def _scored(policy: Table, reference: Table, packed: Packed) -> Packed:
    scores = {
        name: model(packed.tokens, packed.labels).detach().numpy()
        for name, model in (("proximal", policy), ("reference", reference))
    }
    return replace(packed, scores=scores)


def _fields(packed: Packed) -> Fields:
    weight = torch.from_numpy(packed.weight)
    bounds = packed.cu_seqlens
    sequence = np.repeat(np.arange(len(bounds)), [*np.diff(bounds), packed.length - bounds[-1]])
    scores = {name: torch.from_numpy(values).double() for name, values in packed.scores.items()}
    return Fields(
        weight,
        torch.from_numpy(packed.advantage),
        weight,
        weight != 0,
        **scores,
        sequence=torch.from_numpy(sequence),
        sequences=len(bounds),
    )


def packed_parts(dp: int, limit: int, cut: PackingPolicy) -> list[list[Packed]]:
    mode = ALGORITHMS["dpo"].loss_agg_mode
    return pack(rows(judge(experiences(), None, {}), mode), dp, limit, 1, cut=cut)


LAYOUTS = {
    "one": (1, 1000, PackingPolicy()),
    "a-row-each": (1, 1, PackingPolicy()),
    "three-ranks": (3, 14, PackingPolicy()),
    "in-order": (2, 1000, PackingPolicy(3, False)),
    "padded": (2, 1000, PackingPolicy(2, pad=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "arguments", [{}, {"beta": 0.7, "label_smoothing": 0.2}], ids=["default", "smoothed"]
)
def test_value_and_gradient_are_those_of_the_mean_over_pairs(
    layout: str, arguments: dict[str, float]
) -> None:
    policy, reference = Table(1), Table(2)
    wanted = closed_form(
        policy, reference, arguments.get("beta", 0.1), arguments.get("label_smoothing", 0.0)
    )
    (gradient,) = torch.autograd.grad(wanted, policy.logits)
    parts = packed_parts(*LAYOUTS[layout])
    assert layout != "a-row-each" or len(parts[0]) == len(LENGTHS), "no pair is together"
    found, _ = step_in_parts(policy, reference, parts, arguments)
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    assert policy.logits.grad is not None
    assert torch.linalg.norm(policy.logits.grad - gradient) < 1e-6 * torch.linalg.norm(gradient)


def test_a_batch_is_not_summed_before_the_sigmoid() -> None:
    """What W50 has: -log sigma of the sum over all pairs."""
    policy, reference = Table(1), Table(2)
    summed = -logsigmoid(torch.tensor(0.1 * 4) * _margins(policy, reference).mean())
    found, metrics = step_in_parts(policy, reference, packed_parts(1, 1000, PackingPolicy()), {})
    assert abs(found - float(summed)) > 1e-3
    margins = 0.1 * _margins(policy, reference)
    assert metrics["rewards/margin"] == pytest.approx(margins.mean().item(), rel=1e-6)
    assert metrics["rewards/accuracy"] == float((margins > 0).double().mean())
    assert metrics["rewards/chosen"] - metrics["rewards/rejected"] == pytest.approx(
        metrics["rewards/margin"]
    )


def _margins(policy: Table, reference: Table) -> torch.Tensor:
    ratios = []
    for one in experiences():
        tokens = np.array(one.tokens)
        gap = (policy(tokens[:-1], tokens[1:]) - reference(tokens[:-1], tokens[1:])).detach()
        ratios.append((gap[PROMPT - 1 :] * torch.tensor(one.action_mask)).sum())
    return torch.stack(ratios[0::2]) - torch.stack(ratios[1::2])


def test_ranks_without_scores_take_part_in_the_sums() -> None:
    """Earlier pipeline stages, and copies of the last one."""
    asked: list[int] = []

    def summed(own: list[float]) -> list[float]:
        asked.append(len(own))
        return [8.0] if len(own) == 1 else [1.0] * len(own)

    (part,) = packed_parts(1, 1000, PackingPolicy())
    assert credited(part, 0.1, True, summed)[0] == part and asked == [1, 8]
    scored = [_scored(Table(1), Table(2), packed) for packed in part]
    asked.clear()
    copies, _ = credited(scored, 0.1, False, summed)
    assert asked == [1, 8] and all(np.all(packed.scores["margin"] == 0.0) for packed in copies)


def test_what_dpo_needs() -> None:
    dpo = AlgorithmConfig(algorithm_type="dpo", policy_loss_fn="dpo", kl_loss_fn="none")
    assert (
        recipe.needs_reference(dpo) and recipe.needs_proximal(dpo) and not recipe.needs_critic(dpo)
    )
    assert recipe.pair_beta(dpo) == 0.1
    assert ALGORITHMS["dpo"].repeat_times == 2
