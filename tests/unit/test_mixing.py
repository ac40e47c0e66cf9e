"""Expert rows beside rollouts: how many, how much they weigh, and a gradient that no cut of the
batch changes.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import mixing
from rft.algorithm.fields import Fields
from rft.algorithm.losses import ppo, token_loss
from rft.algorithm.ratios import Correction
from rft.config import AlgorithmConfig, ExperienceBufferConfig, RowFormatConfig
from rft.data.packing import Cost
from rft.data.runs import expanded
from rft.data.supervised import SupervisedRows
from rft.data.updates import ONE_UPDATE, UpdateRule
from rft.ground.experience import Batch, Experience
from rft.megatron.totals import Totals
from rft.tools.toy import character_tokenizer
from rft.trainer.feed import Feed


def recipe(loss: str = "mix", ratio: float = 0.5, **arguments: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        algorithm_type=loss,
        policy_loss_fn=loss,
        policy_loss_fn_args=arguments,
        advantage_fn="grpo",
        loss_agg_mode="token-mean",
        sample_strategy="mix",
        sample_strategy_args={"expert_data_ratio": ratio},
    )


def rollout(reward: float, length: int, group: int = 0) -> Experience:
    return Experience(
        tokens=[1] * (2 + length),
        prompt_length=2,
        action_mask=[1] * length,
        logprobs=[-0.5] * length,
        reward=reward,
        group=group,
    )


def expert(length: int) -> Experience:
    return Experience(
        tokens=[2] * (3 + length), prompt_length=3, action_mask=[1] * length, expert=True
    )


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_a_batch_has_room_for_its_rollouts_and_the_reference_share_of_experts(ratio: float) -> None:
    for rollouts in (1, 7, 16, 256):
        algorithm = recipe(ratio=ratio)
        batch = mixing.batch_for(algorithm, rollouts)
        experts = mixing.expert_rows(algorithm, batch)
        assert batch - experts == rollouts and abs(experts - ratio * batch) < 1, (
            "ceil(ratio * train_batch_size)"
        )
    assert mixing.expert_rows(recipe(ratio=0.7), 10) == 7, (
        "0.7 * 10 is a little more than 7 in floating point"
    )


def test_mu_of_chord_rises_and_falls_by_half_a_cosine() -> None:
    given = recipe("mix_chord", mu_warmup_steps=10, mu_decay_steps=20, mu_peak=0.8, mu_valley=0.2)
    found = [mixing.share(given, step) for step in (0, 5, 10, 20, 30, 1000)]
    assert found == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert mixing.share(given, 15) == pytest.approx(0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2)
    assert mixing.share(recipe("mix_chord"), 7) == mixing.share(recipe(), 7) == 0.1
    assert mixing.share(recipe(mu=0.3), 0) == 0.3


def closed_form(
    loss: str, mu: float, logprobs: list[torch.Tensor], batch: list[Experience]
) -> torch.Tensor:
    """(1 - mu) of the mean surrogate of rollout tokens, mu of the mean loss of expert tokens."""
    rewards = np.array([e.reward for e in batch if not e.expert])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    surrogate, taught, number = [], [], 0
    for one, values in zip(batch, logprobs, strict=True):
        if one.expert:
            p = values.detach().exp()
            taught.append(-values * (p * (1 - p) if loss == "mix_chord" else 1))
        else:
            count = len(values)
            same = torch.full((count,), float(advantages[number]), dtype=torch.float64)
            old, weight = torch.full_like(same, -0.5), torch.ones_like(same)
            surrogate.append(ppo(values, Fields(old, same, weight, weight > 0))[0])
            number += 1
    return (1 - mu) * torch.cat(surrogate).mean() + mu * torch.cat(taught).mean()


@pytest.mark.parametrize(
    "correction",
    [
        Correction("token", 0.5),
        Correction("sequence", 2.0),
        Correction(mask="token"),
        Correction(mask="geometric"),
        Correction(mask="binary_kl", upper=0.1),
        Correction(veto=0.2),
    ],
)
def test_a_correction_is_of_rollouts_only(correction: Correction) -> None:
    """An expert row has no log-probabilities of an engine: 0 would make its rho the probability."""
    values = {
        "behaviour": [-1.0, -1.0, 0.0, 0.0],
        "proximal": [-1.0, -3.0, -2.0, -3.0],
        "advantage": [0.9, 0.9, 0.1, 0.1],
        "weight": [1.0] * 4,
        "expert": [0.0, 0.0, 1.0, 1.0],
    }
    given = {name: torch.tensor(one, dtype=torch.float64) for name, one in values.items()}
    sequence = torch.tensor([0, 0, 1, 1])
    fields = Fields(**given, mask=given["weight"] > 0, sequence=sequence, sequences=2)
    plain, _ = token_loss("mix", {})(given["proximal"], fields)
    corrected, _ = token_loss("mix", {}, correction=correction)(given["proximal"], fields)
    assert corrected[2:].tolist() == plain[2:].tolist() == pytest.approx([0.2, 0.3])
    assert corrected[:2].tolist() != plain[:2].tolist()


@pytest.mark.parametrize(("loss", "mu"), [("mix", 0.3), ("mix_chord", 0.1)])
def test_each_kind_is_divided_by_its_own_count(loss: str, mu: float) -> None:
    """W56: the loss of the reference grows with the microbatch; here it is one number however the
    rows are cut.
    """
    batch = [rollout(1.0, 3), expert(5), rollout(0.0, 4), expert(2)]
    rng = np.random.default_rng(3)
    drawn = [
        torch.tensor(
            rng.uniform(-2, -0.1, len(e.action_mask)), dtype=torch.float64
        ).requires_grad_()
        for e in batch
    ]
    wanted = closed_form(loss, mu, drawn, batch)
    gradients = torch.autograd.grad(wanted, drawn)
    _, made = mixing.rows(batch, recipe(loss, **({"mu": mu} if loss == "mix" else {})), step=4)
    bound, total = (
        token_loss(loss, {"mu": mu} if loss == "mix" else {}),
        torch.zeros((), dtype=torch.float64),
    )
    order = [0, 2, 1, 3]  # rollouts first
    for row, place in zip(made, order, strict=True):
        kept = row.trained > 0
        tensors = [
            torch.from_numpy(expanded(a)[kept]).double()
            for a in (row.behaviour, row.advantage, row.weight, row.scores["expert"])
        ]
        fields = Fields(tensors[0], tensors[1], tensors[2], tensors[2] > 0, expert=tensors[3])
        total = total + (bound(drawn[place], fields)[0] * tensors[2]).sum()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    found = torch.autograd.grad(total, drawn)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, gradients, strict=True))


def test_terms_against_the_reference_and_entropy_are_of_rollouts_only() -> None:
    values = {
        name: torch.tensor([a, b], dtype=torch.float64)
        for name, a, b in (
            ("behaviour", -0.5, 0.0),
            ("advantage", 0.0, 0.0),
            ("weight", 1.0, 1.0),
            ("reference", -1.0, -1.0),
            ("entropy", 2.0, 2.0),
            ("expert", 0.0, 1.0),
        )
    }
    fields = Fields(mask=values["weight"] > 0, **values)
    logprobs = torch.tensor([-0.5, -0.5], dtype=torch.float64)
    losses, _ = token_loss("mix", {}, kl="k2", kl_coef=1.0, entropy_coef=1.0, entropy_of="mix")(
        logprobs, fields
    )
    assert losses.tolist() == pytest.approx([0.125 - 2.0, 0.0])
    losses, _ = token_loss("mix", {}, entropy_coef=1.0)(logprobs, fields)
    assert losses.tolist() == pytest.approx([-2.0, -2.0]), "default: of every row"


def test_metrics_of_rollouts_are_not_thinned_by_expert_tokens() -> None:
    class Alone:
        def reduce(self, *tensors: Any) -> None: ...

    totals = Totals(token_loss("mix", {}), counts=True)
    logprobs = torch.tensor([-0.5, -0.7, -3.0, -1.0])
    same = torch.zeros(4)
    behaviour = torch.tensor([-0.5, -0.5, 0.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    totals.add(
        logprobs,
        Fields(
            behaviour,
            same,
            mask.float(),
            mask,
            entropy=same,
            expert=torch.tensor([0.0, 0.0, 1.0, 1.0]),
        ),
    )
    found = totals.reduce(Alone())  # type: ignore[arg-type]
    assert found["num_tokens"] == 3 and found["expert/nll"] == pytest.approx(3.0)
    assert found["logprob_diff/mean"] == pytest.approx(0.1) and found[
        "logprob_diff/max"
    ] == pytest.approx(0.2)


class Rollouts:
    """A source that has forgotten everything but the step."""

    def take(self, step: int) -> Batch:
        return Batch(
            step=step,
            experiences=[rollout(1.0, 2, step), rollout(0.0, 3, step)] if step < 9 else [],
        )


class Alone:
    rank, dp = 0, 1

    def broadcast(self, item: Any) -> Any:
        return item

    def scatter_parts(self, parts: Any) -> Any:
        return [stacked.packed() for stacked in parts[0]]


def feed(path: Path, rule: UpdateRule = ONE_UPDATE, **modes: str) -> Feed:
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "response": "7"}) + "\n" for n in range(10))
    )
    config = ExperienceBufferConfig(
        "sft_dataset", "file", str(path), format=RowFormatConfig("plaintext")
    )
    algorithm = recipe(ratio=0.5, **modes)
    rows = SupervisedRows(
        config, character_tokenizer(), mixing.expert_rows(algorithm, 4), 5, 64, expert=True
    )
    return Feed(Rollouts(), Alone(), algorithm, 1000, 1, Cost(), experts=rows, rule=rule)  # type: ignore[arg-type]


def test_each_kind_keeps_its_aggregation_in_every_update(tmp_path: Path) -> None:
    modes = {"grpo_loss_agg_mode": "seq-mean-token-sum", "sft_loss_agg_mode": "seq-mean-token-mean"}
    once = feed(tmp_path / "rows.jsonl", **modes).next(0, stopping=False)
    twice = feed(tmp_path / "rows.jsonl", UpdateRule(2), **modes).next(0, stopping=False)
    assert once is not None and twice is not None and len(twice.updates) == 2
    whole = {
        int(row): float(packed.weight[start:stop].max())
        for packed in once.part
        for row, start, stop in zip(
            packed.rows, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False
        )
    }
    # two responses, each of whose tokens counts whole; two rows of one trained token and its end
    assert [whole[row] for row in range(4)] == pytest.approx([0.5, 0.5, 0.25, 0.25])
    for update in twice.updates:
        assert update.weights == pytest.approx([whole[row] for row in range(4)])


def test_a_resume_goes_on_behind_the_expert_rows_that_were_trained(tmp_path: Path) -> None:
    """F47, W32: the checkpoint's step is the whole read position;
    nothing is repeated, nothing is left out.
    """
    straight = feed(tmp_path / "rows.jsonl")
    tasks: list[list[str]] = []
    for step in range(9):
        made = straight.next(step, stopping=False)
        assert (
            made is not None
            and made.metrics["sample/expert_rows"] == 2
            and made.metrics["loss/mu"] == 0.1
        )
        assert [e.expert for e in made.experiences] == [False, False, True, True]
        assert made.metrics["response_length/mean"] == 2.5, "of rollouts"
        assert straight.current is not None and len(straight.current.experiences) == 4
        tasks.append([e.task for e in made.experiences if e.expert])
    assert straight.next(9, stopping=False) is None
    assert len({task for step in tasks[:5] for task in step}) == 10, "an epoch takes every row once"
    for at in (5, 2, 8):
        resumed = feed(tmp_path / "rows.jsonl")
        made = resumed.next(at, stopping=False)
        assert made is not None and [e.task for e in made.experiences if e.expert] == tasks[at]
