"""Several updates of one batch: which rows are in each, with which weights, and what a step of them
learns and tells.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.algorithm import recipe
from rft.config import AlgorithmConfig
from rft.data.packing import BY_TOKENS, PackingPolicy, Row, pack, token_weights
from rft.data.updates import RowPacking, UpdateRule, planned, regrouped
from rft.preflight.fill import fill_algorithm
from rft.trainer.feed import Feed
from rft.trainer.models import Models, of_step
from tests.unit.test_algorithms_learn import TARGET, Game, Table
from tests.unit.test_feed import Alone

RULES = st.builds(
    UpdateRule,
    epochs=st.integers(1, 3),
    size=st.none() | st.integers(2, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    together=st.sampled_from([1, 2]),
)


def ragged(count: int, experts: int = 0, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        n = int(rng.integers(3, 20))
        trained = (np.arange(n) >= n // 2).astype(np.float32)
        scores = {"expert": np.full(n, float(number >= count - experts), np.float32)}
        rows.append(
            Row(
                rng.integers(5, 90, n),
                trained,
                rng.normal(size=n).astype(np.float32),
                trained,
                trained / count,
                scores=scores,
            )
        )
    return rows


@settings(max_examples=150, deadline=None)
@given(rule=RULES, pairs=st.integers(1, 15), step=st.integers(0, 2), experts=st.integers(0, 4))
def test_every_epoch_has_every_row_once_in_updates_of_one_size(
    rule: UpdateRule, pairs: int, step: int, experts: int
) -> None:
    count = 2 * pairs
    kinds = [row >= count - min(2 * experts, count) for row in range(count)]
    for epoch in range(rule.epochs):
        random.seed(epoch)
        found = rule.updates_of(kinds, step, epoch)
        random.seed(99)
        assert rule.updates_of(kinds, step, epoch) == found, "no generator of the process counts"
        assert sorted(row for update in found for row in update) == list(range(count))
        sizes = [len(update) for update in found]
        assert max(sizes) <= (rule.size or count) and max(sizes) - min(sizes) <= rule.together
        assert len(found) == -(-pairs // (max(1, (rule.size or count) // 2))) or rule.together == 1
        if rule.together == 2:
            assert all(row ^ 1 in update for update in found for row in update), "whole pairs"
        taught = [sum(kinds[row] for row in update) for update in found]
        assert max(taught) - min(taught) <= 2, "each update has its share of expert rows"
        if not rule.shuffle and not any(kinds):
            assert [row for update in found for row in update] == list(range(count))


def test_rows_are_dealt_anew_by_seed_step_and_epoch() -> None:
    kinds = [False] * 12
    dealt = {
        str(UpdateRule(2, 4, shuffle, seed).updates_of(kinds, step, epoch))
        for shuffle in (True,)
        for seed in (0, 1)
        for step in (0, 1)
        for epoch in (0, 1)
    }
    assert len(dealt) == 8
    plain = UpdateRule(2, 4)
    assert plain.updates_of(kinds, 0, 0) == plain.updates_of(kinds, 5, 1)


@pytest.mark.parametrize(
    "modes",
    [("token-mean", "token-mean"), ("seq-mean-token-mean", "token-mean")],
    ids=["one-mode", "two-modes"],
)
@pytest.mark.parametrize("cut", [BY_TOKENS, PackingPolicy(rows=3, pad=True)], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dp", [1, 3])
def test_an_update_is_the_packed_step_of_its_own_rows(
    dp: int, shuffle: bool, cut: PackingPolicy, modes: tuple[str, str]
) -> None:
    """As if nothing else were in the batch: every row whole, where it was scored, and weights by
    the counts of the update, of rollouts and expert rows each.
    """
    rows = ragged(17, experts=3)
    rule = UpdateRule(3, 5, shuffle, 7)
    stacked, updates = planned(rows, rule, 4, RowPacking(dp, 40, 4, cut=cut), modes)
    parts = [[one.packed() for one in part] for part in stacked]
    homes = {int(r): rank for rank, part in enumerate(parts) for one in part for r in one.rows}
    assert len(homes) == 17 and len(updates) == 3 * 4
    kinds = [number >= 14 for number in range(17)]
    wanted = [m for epoch in range(3) for m in rule.updates_of(kinds, 4, epoch)]
    for update, members in zip(updates, wanted, strict=True):
        assert update.rows == sorted(members)
        assert len({len(bins) for bins in update.bins}) == 1, "ranks meet in every microbatch"
        trained = [int(row.trained.sum()) for row in rows]
        for kind, mode in zip((False, True), modes, strict=True):
            alike = [row for row in sorted(members) if kinds[row] is kind]
            assert [update.weights[row] for row in alike] == token_weights(
                [trained[row] for row in alike], mode
            )
        for rank, bins in enumerate(update.bins):
            assert all(homes[row] == rank for bin_ in bins for row in bin_)
            for found in regrouped(parts[rank], bins, update.weights, 4):
                assert found.length % 4 == 0
                bounds = found.cu_seqlens.tolist()
                for row, start, stop in zip(found.rows, bounds, bounds[1:], strict=False):
                    one = rows[row]
                    alone = pack([one], 1, 10**6, 1)[0][0]
                    n = len(one.tokens)
                    assert stop - start == n or cut.pad
                    for name in ("tokens", "labels", "behaviour", "advantage", "positions"):
                        given = getattr(found, name)[start : start + n]
                        assert np.array_equal(given, getattr(alone, name)), name
                    weight = np.where(alone.weight != 0, np.float32(update.weights[row]), 0)
                    assert np.array_equal(found.weight[start : start + n], weight)
                    assert (found.scores["expert"][start : start + n - 1] == kinds[row]).all()


def test_one_update_is_the_batch_as_it_always_was() -> None:
    rows = ragged(9)
    stacked, updates = planned(rows, UpdateRule(1, 9), 0, RowPacking(2, 40, 4), ("token-mean",) * 2)
    assert updates == []
    for part, wanted in zip(stacked, pack(rows, 2, 40, 4), strict=True):
        for one, other in zip([one.packed() for one in part], wanted, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
            assert np.array_equal(one.weight, other.weight)


def test_what_several_updates_tell_of_their_step() -> None:
    one = {"loss": 1.0, "skipped": 0.0, "num_tokens": 5.0, "clip_frac": 0.0, "ratio/max": 2.0}
    two = one | {"loss": 3.0, "clip_frac": 0.5, "ratio/max": 7.0}
    bad = one | {"loss": float("nan"), "skipped": 1.0}
    told = of_step([one, bad, two])
    assert told["loss"] == 2.0 and told["ratio/max"] == 7.0 and told["num_tokens"] == 10.0
    assert (told["clip_frac"], told["clip_frac_first"], told["clip_frac_last"]) == (0.25, 0.0, 0.5)
    assert (told["skipped"], told["updates"], told["skipped_updates"]) == (0.0, 2.0, 1.0)
    assert of_step([bad, bad])["skipped"] == 1.0, "the step changed nothing"
    nothing = {name: 0.0 for name in one}
    assert of_step([one, nothing, two]) == told | {"skipped_updates": 0.0}, "nothing to learn"
    empty = of_step([nothing, nothing])
    assert (empty["skipped"], empty["updates"], empty["skipped_updates"]) == (0.0, 0.0, 0.0)
    assert of_step([nothing, bad])["skipped"] == 1.0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_update_does_not_tell_is_of_the_others(place: int) -> None:
    """Of a mini-batch whose groups have equal rewards no push is known, of one without routes no
    agreement.
    """
    silent = {"loss": 1.0, "skipped": 0.0, "num_tokens": 5.0, "clip_frac": 0.0}
    low = silent | {"loss/weight": 0.5, "drift/gradient": 0.1, "routing/agree_frac": 0.9}
    high = silent | {"loss/weight": 0.7, "drift/gradient": 0.3, "routing/agree_frac": 0.7}
    found = [low, high]
    found.insert(place, silent)
    told = of_step(found)
    assert told["loss/weight"] == pytest.approx(0.6), "a mean over those that have it"
    assert told["routing/agree_frac"] == pytest.approx(0.8)
    assert told["num_tokens"] == 15.0
    ends = {"drift/gradient_first": 0.1, "drift/gradient_last": 0.3}
    if place in (0, 2):
        del ends["drift/gradient_first" if place == 0 else "drift/gradient_last"]
    assert {name: told[name] for name in told if name.startswith("drift/gradient_")} == ends


class Numbers(Table):
    """A table that learns as `Learner` does: gradients, then an update. As a critic its numbers are
    values of the places in the response.
    """

    multiple = 1

    def __init__(self, rate: float = 0.1, is_critic: bool = False) -> None:
        super().__init__()
        self.is_critic, self.step, self.scored, self.updates = is_critic, 0, 0, 0
        if is_critic:
            self.logits = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=rate)

    def said(self, packed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_critic:
            return super().said(packed)
        values = self.logits[torch.from_numpy(np.minimum(packed.positions, 1))]
        return values, values.detach()

    def score(self, part: list[Any], trained_only: bool = False) -> list[np.ndarray]:
        self.scored += 1
        return super().score(part, trained_only)

    def gradients(self, part: list[Any], token_loss: Any) -> dict[str, float]:
        optimizer, self.optimizer = self.optimizer, Held()
        optimizer.zero_grad()
        told = Table.train_step(self, part, token_loss, None)
        self.optimizer = optimizer
        return told | {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 1.0}

    @staticmethod
    def is_finite(metrics: dict[str, float]) -> bool:
        return True

    def update(self, metrics: dict[str, float], finite: bool, last: bool) -> dict[str, float]:
        self.optimizer.step()
        self.updates += 1
        self.step += last
        return metrics | {"lr": 0.0, "skipped": 0.0}


class Held:
    """An optimizer whose step is made later."""

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


PPO = fill_algorithm(
    AlgorithmConfig(algorithm_type="ppo", proximal_logprobs=True, kl_loss_fn="none")
)


def played(rule: UpdateRule, seed: int, steps: int) -> tuple[float, dict[str, float], Models]:
    """How likely a policy is to say both right tokens after so many steps of PPO."""
    policy, critic = Numbers(), Numbers(is_critic=True)
    models = Models(policy, None, critic, PPO)  # type: ignore[arg-type]
    source = Game(policy, 8, has_baseline=False)
    source.random = np.random.default_rng(seed)
    feed = Feed(source, Alone(), PPO, 1024, 1, RowPacking(1, 1, 1).cost, longest=2, rule=rule)  # type: ignore[arg-type]
    loss = recipe.policy_loss(PPO, models.kl.loss, several=True)
    told: dict[str, float] = {}
    for step in range(steps):
        batch, waits = feed.next(step, stopping=False), []
        assert batch is not None
        part, scored = models.score(batch.part, batch.groups)
        told = scored | models.train_step(
            part, loss, lambda waits=waits: waits.append(1), batch.updates
        )
        assert waits == [1], "weights are waited for once in a step"
    likely = float(torch.softmax(policy.logits.detach(), 1)[:, TARGET].prod())
    return likely, told, models


@pytest.mark.parametrize("seed", range(3))
def test_ppo_reaches_in_few_steps_of_sixteen_updates_what_one_does_not(seed: int) -> None:
    steps = 4
    once, _, _ = played(UpdateRule(), seed, steps)
    often, told, models = played(UpdateRule(4, 8, shuffle=True, seed=seed), seed, steps)
    assert once < 0.3 and often > 0.6, "it began at 1/16"
    policy: Any = models.policy
    critic: Any = models.critic
    assert (policy.step, policy.updates, critic.updates) == (steps, 16 * steps, 16 * steps)
    assert policy.scored == critic.scored == steps, "the policy before the step, once per batch"
    assert told["updates"] == 16.0
    assert abs(told["kl/old_first"]) < 1e-6 < abs(told["kl/old_last"]), "ratios begin at 1"
    assert told["clip_frac_first"] == 0.0


@pytest.mark.parametrize(
    ("rows", "longest", "cut", "sizes"),
    [
        (100, 20, BY_TOKENS, [20] * 2),  # as many as fit into half of 100 tokens
        (1, 20, BY_TOKENS, [20]),  # a step has no more
        (4, 130, BY_TOKENS, [130]),  # one that is longer has a microbatch of its own
        (100, 20, PackingPolicy(share=True), [20] * 2),
        (100, 20, PackingPolicy(rows=4), [20] * 4),
        (100, 20, PackingPolicy(rows=64), [20] * 4),  # real ones are shorter
    ],
)
def test_a_made_up_microbatch_is_one_and_within_its_bounds(
    rows: int, longest: int, cut: PackingPolicy, sizes: list[int]
) -> None:
    part = RowPacking(2, 100, 8, cut=cut).made_up(rows, longest, vocab=19)
    assert [np.diff(packed.cu_seqlens).tolist() for packed in part] == [sizes]
    assert part[0].length <= max(100, longest + 7)
    assert set(part[0].tokens.tolist()) == set(range(19))
    assert np.count_nonzero(part[0].weight) == sum(sizes) - len(sizes)  # labels of all but the last
