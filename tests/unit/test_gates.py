"""The gates of a run: which numbers warn, how often, and how a run ends that is to stop."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rft.algorithm import credit
from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.algorithm.ratios import mismatch
from rft.algorithm.recipe import PLAIN
from rft.config import ConfigError, DriftConfig
from rft.data.packing import AGGREGATIONS
from rft.data.runs import expanded
from rft.ground.experience import Experience, VersionSpan
from rft.megatron.totals import Totals
from rft.trainer.gates import GATES, WINDOW, Drifted, Gates, differences, lost
from tests.unit.test_trainer import STEPS, Parts, trained

FRESH = {"staleness/token_max": 0.0, "staleness/unversioned_tokens": 0.0}
HEALTHY = {
    **FRESH,
    "drift/token_mult_prob_error": 1.0001,
    "clip_frac": 0.1,
    "drift/equal_answers": -0.2,
    "drift/routed_otherwise": 0.05,
    "drift/lost_tokens": 0.0,
    "drift/failed_trained": 0.0,
    "drift/lost_weight": 1e-6,
    "drift/gradient": 1e-4,
    "drift/misjudged": 0.0,
    "logprob_diff/max": 0.0,
}
SEVERAL = {"updates": 2.0}
WRONG = [
    ("engine", {"drift/token_mult_prob_error": 1.06}),
    ("engine", {"drift/token_mult_prob_error": math.nan}),
    ("engine", {**SEVERAL, "drift/token_mult_prob_error_first": 1.3}),
    ("stale engine", {"staleness/token_max": 1.0, "drift/token_mult_prob_error": 2.1}),
    ("clipped", {"clip_frac": 0.4}),
    ("answers", {"drift/equal_answers": 0.1}),
    ("experts", {"drift/routed_otherwise": 0.3}),
    ("experts", {**SEVERAL, "drift/routed_otherwise_first": 0.3}),
    ("tokens", {"drift/lost_tokens": 3.0}),
    ("tokens", {"drift/lost_tokens": -3.0}),
    ("rewards", {"drift/failed_trained": 1.0}),
    ("weights", {"drift/lost_weight": 0.01}),
    ("gradient", {"drift/gradient": 0.6}),
    ("gradient", {**SEVERAL, "drift/gradient_first": 0.6}),
    ("advantages", {"drift/misjudged": 1.0}),
    ("bits", {"logprob_diff/max": 1e-7}),
    ("bits", {**SEVERAL, "logprob_diff/max": 0.3, "logprob_diff/max_first": 1e-7}),
]


def test_a_healthy_step_passes_no_gate(caplog: pytest.LogCaptureFixture) -> None:
    gates = Gates(is_plain=True, is_bitwise=True)
    assert gates.after(1, HEALTHY) == {"drift/alarms": 0.0} and not caplog.records


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_each_gate_warns_once_with_cause_and_page(
    name: str, wrong: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    gates = Gates(is_plain=True, is_bitwise=True)
    (gate,) = [one for one in GATES if one.name == name]
    for step in (1, 2, 3):
        assert gates.after(step, HEALTHY | wrong) == {"drift/alarms": 1.0}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert gate.cause in said and gate.source in said and "docs/observe.md#gates" in said
    assert gate.metric in said and "step 1" in said and not gates.tripped


def test_every_gate_has_a_number_that_passes_it() -> None:
    assert {name for name, _ in WRONG} == {gate.name for gate in GATES}


@pytest.mark.parametrize(
    "metrics",
    [
        {},  # supervised rows
        {"drift/token_mult_prob_error": 9.0},  # nobody knows of which version
        {**FRESH, "staleness/unversioned_tokens": 5.0, "drift/token_mult_prob_error": 9.0},
        {**HEALTHY, "staleness/token_max": 3.0, "drift/token_mult_prob_error": 1.5},
        {**HEALTHY, "staleness/token_max": 3.0, "drift/routed_otherwise": 0.9},
        {**HEALTHY, "drift/gradient": 0.9},  # there are other terms in the loss
    ],
)
def test_what_a_run_does_not_know_warns_nobody(metrics: dict[str, float]) -> None:
    assert Gates().after(1, metrics) == {"drift/alarms": 0.0}


def test_of_several_updates_the_later_ones_do_not_stand_for_the_first() -> None:
    """Whose policy has moved: what the first does not tell of, its groups having equal rewards, is
    not known.
    """
    gates = Gates(is_plain=True)
    moved = HEALTHY | SEVERAL | {"drift/gradient": 0.9, "drift/gradient_last": 0.9}
    assert gates.after(1, moved) == {"drift/alarms": 0.0}
    assert gates.after(2, moved | {"drift/gradient_first": 0.9}) == {"drift/alarms": 1.0}


def test_where_both_compute_in_fp32_the_limit_is_nearer() -> None:
    seen = HEALTHY | {"drift/token_mult_prob_error": 1.01}
    assert Gates().after(1, seen)["drift/alarms"] == 0
    assert Gates(is_fp32=True).after(1, seen)["drift/alarms"] == 1
    pulled = HEALTHY | {"drift/gradient": 0.3}
    assert Gates(is_plain=True).after(1, pulled)["drift/alarms"] == 0
    assert Gates(is_plain=True, is_fp32=True).after(1, pulled)["drift/alarms"] == 1
    own = DriftConfig(token_mult_prob_error=1.1)
    assert Gates(own, is_fp32=True).after(1, seen)["drift/alarms"] == 0


def test_one_spike_among_good_steps_is_none() -> None:
    """An exact number is another thing."""
    gates = Gates()
    for step in range(WINDOW):
        assert gates.after(step, HEALTHY)["drift/alarms"] == 0
    assert gates.after(9, HEALTHY | {"drift/token_mult_prob_error": 40.0})["drift/alarms"] == 0
    assert gates.after(10, HEALTHY | {"drift/lost_tokens": 1.0})["drift/alarms"] == 1


def test_a_run_that_was_stopped_and_mended_goes_on() -> None:
    """The numbers that it was stopped for are not of what it does now."""
    wrong = HEALTHY | {"drift/token_mult_prob_error": 40.0}
    stopped, again = Gates(stop=True), Gates(stop=True)
    for step in range(WINDOW):
        stopped.after(step, wrong)
    assert stopped.tripped
    again.restore(stopped.state())
    assert again.after(WINDOW, HEALTHY)["drift/alarms"] == 0 and not again.tripped


def test_limits_are_those_of_the_config() -> None:
    seen = HEALTHY | {"drift/token_mult_prob_error": 1.03, "clip_frac": 0.9}
    config = DriftConfig(token_mult_prob_error=1.02, clip_frac=1.0)
    gates = Gates(config)
    assert gates.after(1, seen)["drift/alarms"] == 1 and gates.warned == {"engine"}


def test_a_run_that_is_to_stop_ends_with_a_checkpoint_and_says_why() -> None:
    class Failing(Parts):
        def train_step(self, *given: Any) -> dict[str, float]:
            late = self.events.count("update") >= 2
            return super().train_step(*given) | {"drift/failed_trained": float(late)}

    parts = Failing()
    with pytest.raises(Drifted, match="trainer.on_drift=stop.*rewards") as raised:
        trained(parts, gates=Gates(stop=True))
    assert isinstance(raised.value, ConfigError), "no rank is started again"
    assert parts.events.count("update") == 3 < STEPS
    assert parts.events[-1] == "save 3 full" or "save 3 full" in parts.events
    assert parts.events.index("log 3") < parts.events.index("save 3 full")
    warning = Failing()
    trained(warning, gates=Gates())
    assert warning.events.count("update") == STEPS


# --- the numbers ----------------------------------------------------------------------------------


def test_the_probability_error_is_that_of_nemo_rl() -> None:
    """(1/n) sum exp |log p_trainer - log p_engine| (docs/guides/grpo.md there)."""
    import torch

    gaps = np.random.default_rng(2).normal(0, 0.3, 50)
    found = mismatch(torch.tensor(gaps))["drift/token_mult_prob_error"]
    assert found.mean().item() == pytest.approx(np.mean(np.exp(np.abs(gaps))))


def answers(draws: list[list[int]], logprobs: list[list[float]], **more: Any) -> list[Experience]:
    return [
        Experience(
            tokens=[1, *tokens],
            prompt_length=1,
            action_mask=[1] * len(tokens),
            logprobs=said,
            group=number // 8,
            versions=[VersionSpan(version=0, start=0, end=len(tokens))],
            **more,
        )
        for number, (tokens, said) in enumerate(zip(draws, logprobs, strict=True))
    ]


def drawn(distribution: np.ndarray, seed: int, count: int = 256) -> list[Experience]:
    rng = np.random.default_rng(seed)
    tokens = rng.choice(len(distribution), (count, 2), p=distribution)
    return answers(tokens.tolist(), np.log(distribution[tokens]).tolist())


@pytest.mark.parametrize("likely", [1.0, 0.9, 0.5, 0.125])
def test_independent_answers_are_as_equal_as_their_probabilities_say(likely: float) -> None:
    """Also of a policy that is sure: 1000 steps, none of them over 0."""
    distribution = np.full(8, (1 - likely) / 7)
    distribution[0] = likely
    found = [credit.equal_answers(drawn(distribution, seed)) for seed in range(200)]
    margin = math.sqrt(math.log(1e6) / (2 * 128))
    differences = [one["drift/equal_answers"] + margin for one in found]
    assert np.mean(differences) == pytest.approx(0.0, abs=0.01)
    assert max(one["drift/equal_answers"] for one in found) < 0


def test_one_seed_for_a_whole_group_is_seen() -> None:
    distribution = np.full(8, 0.125)
    one_each = drawn(distribution, 3)[::8]
    same = [
        Experience(**{name: getattr(one, name) for name in one.__struct_fields__})
        for one in one_each
        for _ in range(8)
    ]
    found = credit.equal_answers(same)
    assert found["group/equal_frac"] == 1.0 and found["drift/equal_answers"] > 0.5


def test_turns_and_lone_answers_are_not_compared() -> None:
    assert credit.equal_answers(drawn(np.full(8, 0.125), 1)[:1]) == {}
    turns = answers([[2, 2]] * 16, [[-9.0, -9.0]] * 16, turn=1)
    assert credit.equal_answers(turns) == {}


def test_tokens_are_counted_where_all_updates_were_made() -> None:
    assert lost({"sample/trained_tokens": 9.0, "num_tokens": 7.0}) == {"drift/lost_tokens": 2.0}
    assert lost({"num_tokens": 7.0}) == {}
    skipped = {"sample/trained_tokens": 9.0, "num_tokens": 7.0, "skipped_updates": 1.0}
    assert lost(skipped) == {}


def test_weights_are_compared_as_a_share_of_the_batch() -> None:
    given = {"sample/weight": 2.0, "loss/weight": 1.9, "sample/advantage": 0.3}
    given |= {
        "loss/advantage": -1.7,
        "sample/advantage_size": 4.0,
        "sample/trained_tokens": 4.0,
        "num_tokens": 4.0,
    }
    assert lost(given)["drift/lost_weight"] == pytest.approx(0.5)
    assert lost(given | {"loss/weight": 2.0, "loss/advantage": 0.3})["drift/lost_weight"] == 0
    assert "drift/lost_weight" not in lost(given | {"updates": 2.0}), "each has its own"


def judged(rewards: list[float]) -> credit.CreditedStep:
    made = answers([[2, 3], [4, 2]] * 8, [[-1.0, -2.0]] * 16)
    for number, (one, reward) in enumerate(zip(made, rewards, strict=True)):
        one.reward, one.action_mask = reward, [1, number % 3 % 2]
    return credit.judge(made, "grpo", {})


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_sums_of_a_batch_are_those_of_its_rows(mode: str) -> None:
    step = judged([0.1 * (number * 7 % 11) for number in range(16)])
    rows = credit.rows(step, mode, 5)
    found = credit.sums(step, mode, 5)
    weights = [expanded(row.weight) for row in rows]
    assert found["sample/weight"] == pytest.approx(sum(float(one.sum()) for one in weights))
    pushed = sum(
        float(weight @ (expanded(row.advantage) * row.behaviour))
        for row, weight in zip(rows, weights, strict=True)
    )
    assert found["sample/advantage"] == pytest.approx(pushed, abs=1e-6)


def test_a_better_answer_never_has_the_lower_advantage() -> None:
    step = judged([0.1 * (number * 7 % 11) for number in range(16)])
    assert credit.misjudged(step, "grpo", {}) == {"drift/misjudged": 0.0}
    turned = replace(step, advantages=step.advantages[::-1])
    assert credit.misjudged(turned, "grpo", {})["drift/misjudged"] > 10
    assert credit.misjudged(turned, "gigpo", {}) == {}, "which looks at more than rewards"
    assert credit.misjudged(turned, "grpo", {"rank_penalty": 0.1}) == {}


class Alone:
    def reduce(self, sums: Any, maxima: Any) -> None: ...


def pulled(loss: Any, moved: float = 0.0) -> float:
    import torch

    rng = torch.Generator().manual_seed(5)
    old, advantage = (torch.randn(40, generator=rng) for _ in range(2))
    weight = (torch.rand(40, generator=rng) - 0.3).clamp(min=0)
    fields = Fields(
        behaviour=old, advantage=advantage, weight=weight, mask=weight != 0, proximal=old
    )
    logprobs = (old + moved).requires_grad_()
    totals = Totals(loss, counts=True, lacking=("entropy",), advised=True)
    totals.add(logprobs, fields).backward()
    found = totals.reduce(Alone())  # type: ignore[arg-type]
    assert found["loss/weight"] == pytest.approx(float(weight.sum()))
    assert found["loss/advantage"] == pytest.approx(float(weight @ (advantage * old)), abs=1e-6)
    return found["drift/gradient"]


@pytest.mark.parametrize("name", PLAIN)
def test_every_policy_loss_begins_with_the_gradient_of_reinforce(name: str) -> None:
    loss = token_loss(name, {})
    assert pulled(loss) < 1e-5
    assert pulled(loss, moved=-3.0) > 0.2, "one that has moved is no measure"

    def turned(logprobs: Any, fields: Fields) -> Any:
        losses, metrics = loss(logprobs, fields)
        return -losses, metrics

    assert pulled(turned) == pytest.approx(2.0, abs=1e-4)


# --- what a resume finds --------------------------------------------------------------------------

RANK = {"layout": [{"tp": 1}, "fp32"], "step": 3, "updates": 3, "weights": 17}


def test_a_resume_that_finds_what_was_saved_is_silent() -> None:
    assert differences([RANK, RANK], [RANK, RANK]) == []


def test_what_was_lost_is_named_with_its_rank() -> None:
    (sentence,) = differences([RANK, RANK], [RANK, RANK | {"weights": 18}])
    assert "rank 1" in sentence and "weights=18" in sentence and "17" in sentence
    assert len(differences([RANK], [RANK | {"step": 0, "updates": 0}])) == 2


def test_another_layout_holds_other_parts_and_the_same_counters() -> None:
    other = RANK | {"layout": [{"tp": 2}, "fp32"], "weights": 4}
    assert differences([RANK], [other, other]) == []
    (sentence,) = differences([RANK], [other | {"updates": 1}] * 2)
    assert "updates" in sentence


def test_a_resume_under_stop_refuses_and_a_first_start_does_not() -> None:
    gates = Gates(stop=True)
    gates.resumed(None, [RANK])
    gates.refuse()
    gates.resumed([RANK], [RANK | {"step": 0}])
    with pytest.raises(Drifted, match="resume"):
        gates.refuse()
