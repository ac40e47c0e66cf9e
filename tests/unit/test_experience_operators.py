"""Every built-in operator on experiences, against what its documentation promises."""

from math import nan
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from rft.algorithm.advantages import total_reward
from rft.config import ConfigError, DataJuicerConfig, OperatorConfig
from rft.extras.pipeline.experiences import MetricTotals
from rft.extras.pipeline.operators import EXPERIENCE_OPERATORS, make
from rft.ground.experience import Experience
from tests.verify import shuffled

KEY = "data_processor.experience_pipeline"


def made(*rewards: float, **fields: Any) -> list[Experience]:
    """A group; every response has its own tokens."""
    return [
        Experience(
            tokens=[1, 2, 10 + i, 20],
            prompt_length=2,
            action_mask=[1, 1],
            logprobs=[0.0, 0.0],
            reward=r,
            **fields,
        )
        for i, r in enumerate(rewards)
    ]


def apply(
    name: str, experiences: list[Experience], **args: Any
) -> tuple[list[Experience], dict[str, float]]:
    return make(KEY, 0, OperatorConfig(name=name, args=args), DataJuicerConfig()).process(
        experiences
    )


def shaped(
    reward: float, info: dict[str, Any], *steps: tuple[str, str, float], outcome: Any = "ok"
) -> float:
    configs = [{"stats_key": key, "op_type": kind, "weight": weight} for key, kind, weight in steps]
    (one,), _ = apply(
        "reward_shaping_mapper",
        made(reward, info=info, reward_outcome=outcome),
        reward_shaping_configs=configs,
    )
    return one.reward


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ADD", 3.0 + 2 * 0.5),
        ("SUB", 3.0 - 2 * 0.5),
        ("MUL", 3.0 * 2 * 0.5),
        ("DIV", 3.0 / (2 * 0.5)),
    ],
)
def test_a_reward_is_shaped_by_a_stat(kind: str, expected: float) -> None:
    assert shaped(3.0, {"score": 0.5}, ("score", kind, 2.0)) == expected


def test_shaping_reaches_an_advantage_of_rewards_per_token() -> None:
    """Their sum wins over `reward`, which it is: a shaped one alone would change nothing."""
    rewards = np.array([0.5, 0.25])
    group = made(0.75, info={"a": 2.0}, reward_outcome="ok", token_rewards=rewards)
    (one,), _ = apply(
        "reward_shaping_mapper",
        group,
        reward_shaping_configs=[{"stats_key": "a", "op_type": "MUL"}],
    )
    assert one.reward == total_reward(one) == 1.5
    assert one.token_rewards.tolist() == [0.5, 1.0] and rewards.tolist() == [0.5, 0.25]


def test_shaping_goes_in_order_and_leaves_alone_what_it_cannot_shape() -> None:
    info = {"a": 2.0, "zero": 0.0, "text": "x", "nan": nan}
    assert shaped(1.0, info, ("a", "ADD", 1.0), ("a", "MUL", 3.0)) == (1.0 + 2.0) * 6.0
    assert shaped(1.0, info, ("missing", "ADD", 1.0)) == 1.0
    assert shaped(1.0, info, ("zero", "DIV", 1.0)) == 1.0
    assert shaped(1.0, info, ("text", "ADD", 1.0), ("nan", "ADD", 1.0)) == 1.0
    assert shaped(0.0, info, ("a", "ADD", 1.0), outcome="timeout") == 0.0, (
        "there is no reward to shape"
    )
    experiences, metrics = apply(
        "reward_shaping_mapper",
        made(1.0, 2.0, info={"a": 1.0}),
        reward_shaping_configs=[{"stats_key": "a"}],
    )
    assert [one.reward for one in experiences] == [2.0, 3.0], "ADD with weight 1 by default"
    assert metrics == {"reward_diff/mean": 1.0, "reward_diff/min": 1.0, "reward_diff/max": 1.0}


def test_filters_on_rewards() -> None:
    assert [
        one.reward for one in apply("reward_filter", made(0.0, 0.5, 1.0, nan), threshold=0.5)[0]
    ] == [0.5, 1.0]
    kept, metrics = apply(
        "invalid_reward_filter", [*made(1.0, nan), *made(0.0, reward_outcome="error")]
    )
    assert [one.reward for one in kept] == [1.0] and metrics == {"filtered_count": 2}


def test_groups_whose_rewards_hardly_differ_are_dropped() -> None:
    group = made(0.0, 1.0)
    assert apply("reward_std_filter", group)[0] == group
    assert apply("reward_std_filter", group, threshold=0.5)[0] == [], (
        "the population's deviation is 0.5, and not above"
    )
    assert (
        apply("reward_std_filter", made(1.0))[0]
        == []
        == apply("reward_std_filter", made(1.0, 1.0, 1.0))[0]
    )


def test_dynamic_sampling_keeps_groups_that_differ() -> None:
    assert (
        apply("dapo_dynamic_sampling", made(1.0, 1.0))[0]
        == []
        == apply("dapo_dynamic_sampling", made(0.0, 0.0))[0]
    )
    assert len(apply("dapo_dynamic_sampling", made(0.0, 1.0))[0]) == 2
    right = apply("dapo_dynamic_sampling", made(1.0, 1.0, 1.0))[1]
    assert (
        right["dropped_all_correct_count"],
        right["dropped_all_wrong_count"],
        right["filtered_count"],
    ) == (3, 0, 3)
    assert (
        apply("dapo_dynamic_sampling", made(0.2, 0.9))[0]
        and not apply("dapo_dynamic_sampling", made(0.2, 0.9), correct_threshold=0.0)[0]
    ), "with a threshold both are right"
    shaped_apart = made(0.9, 1.1, metrics={"accuracy": 1.0})
    assert apply("dapo_dynamic_sampling", shaped_apart)[0] == [], (
        "the outcome counts, not what shaping made of it"
    )
    assert apply("dapo_dynamic_sampling", shaped_apart, metric_key="other")[0] == shaped_apart


def test_truncated_responses_teach_nothing_and_stay() -> None:
    group = [*made(0.0, stop="length"), *made(1.0)]
    kept, metrics = apply("mask_response_truncated", group)
    assert [list(one.action_mask) for one in kept] == [[0, 0], [1, 1]] and metrics == {
        "masked_truncated_count": 1
    }


@pytest.mark.parametrize("outcome", ["error", "timeout"])
def test_a_reward_that_failed_is_no_outcome(outcome: Any) -> None:
    """Whose place in a mean, a spread or a comparison 0 would take."""
    right, failed = made(1.0, 1.0), made(0.0, reward_outcome=outcome)
    group, metrics = apply("pass_rate_calculator", right + failed)
    assert metrics["selection/pass_rate"] == 1 and [e.info["pass_rate"] for e in group] == [1.0] * 3
    for name in ("reward_std_filter", "dapo_dynamic_sampling"):
        kept, metrics = apply(name, right + failed)
        assert kept == [] and metrics["filtered_count"] == 3, f"{name}: the others are equal"
        assert len(apply(name, made(1.0, 0.0) + failed)[0]) == 3
        assert apply(name, failed)[0] == []
    assert metrics["dropped_all_correct_count"] == 3
    group, metrics = apply("pass_rate_calculator", made(0.0, reward_outcome=outcome))
    assert len(group) == 1 and metrics == {} and "pass_rate" not in group[0].info


def test_pass_rates_are_told_and_written_down() -> None:
    group, metrics = apply("pass_rate_calculator", made(0.0, 1.0, 1.0, 0.0))
    assert [one.info["pass_rate"] for one in group] == [0.5] * 4
    assert metrics["selection/pass_rate"] == 0.5 and metrics["selection/valid_ratio"] == 1
    assert apply("pass_rate_calculator", made(1.0, 1.0))[1]["selection/valid_ratio"] == 0


def test_lengths_and_repeats() -> None:
    long = made(1.0)
    long[0].tokens, long[0].action_mask = [1, 2, 3, 4, 5], [1, 1, 1]
    assert apply("length_filter", [*made(0.0), *long], max_tokens=2)[0] == made(0.0)
    assert apply("length_filter", [*made(0.0), *long], min_tokens=3)[0] == long
    assert len(apply("dedupe", made(0.0, 1.0) + made(1.0))[0]) == 2
    operator = make(KEY, 0, OperatorConfig(name="dedupe", args={"remember": 2}), DataJuicerConfig())
    assert (
        len(operator.process(made(0.0, 1.0))[0]) == 2 and operator.process(made(0.0, 1.0))[0] == []
    )
    operator.process(made(0, 0, 0, 0, 0)[3:])
    assert len(operator.process(made(0.0))[0]) == 1, "only the last two are remembered"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("reward_shapin_mapper", {}, "did you mean `reward_shaping_mapper`"),
        ("nowhere:Operator", {}, "cannot import"),
        ("tests/unit/odd_operators.py:not_a_class", {}, "no method `process`"),
        (
            "reward_filter",
            {"treshold": 1},
            "args.treshold: reward_filter does not take it; it takes threshold",
        ),
        ("reward_filter", {"threshold": "high"}, "refuses"),
        ("reward_shaping_mapper", {}, "args.reward_shaping_configs is not set"),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "a", "op_type": "POW"}]},
            "known are ADD, SUB, MUL",
        ),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "a", "weigth": 1}]},
            "has weigth",
        ),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"op_type": "ADD"}]},
            "needs a stats_key",
        ),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "a", "weight": "x"}]},
            "give a number",
        ),
        ("length_filter", {"min_tokens": 3, "max_tokens": 2}, "below min_tokens"),
        ("reward_std_filter", {"threshold": -1}, "0 or more"),
        ("data_juicer", {}, "neither config_path nor operators"),
        ("data_juicer", {"operators": ["text_length_filter"]}, "write {name: {argument: value}}"),
        ("mask_response_truncated", {"x": 1}, "it takes none"),
    ],
)
def test_a_wrong_name_or_argument_is_refused(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(KEY, 2, OperatorConfig(name=name, args=args), DataJuicerConfig())
    assert said in str(refused.value) and f"{KEY}.operators.2" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_has_what_is_documented() -> None:
    assert set(EXPERIENCE_OPERATORS) == {
        "reward_shaping_mapper",
        "reward_filter",
        "reward_std_filter",
        "dapo_dynamic_sampling",
        "mask_response_truncated",
        "pass_rate_calculator",
        "invalid_reward_filter",
        "length_filter",
        "dedupe",
        "data_juicer",
    }


def test_numbers_of_groups_meet_as_their_names_say() -> None:
    totals = MetricTotals()
    for count, least in ((3, 1.0), (5, 0.5)):
        totals.add("filtered_count", count)
        totals.add("reward_diff/min", least)
        totals.add("reward_diff/max", least)
        totals.add("reward_diff/mean", least)
    assert totals.pop() == {
        "experience_pipeline/filtered_count": 8,
        "experience_pipeline/reward_diff/min": 0.5,
        "experience_pipeline/reward_diff/max": 1.0,
        "experience_pipeline/reward_diff/mean": 0.75,
    }
    assert totals.pop() == {}


def test_the_control_deals_rewards_that_say_nothing_of_the_answers() -> None:
    """Every group keeps its rewards, and every answer of it gets each of them as often."""
    control = shuffled.Shuffled()
    first_right = [control.process(made(1.0, 0.5, 0.0, 0.0))[0] for _ in range(2000)]
    dealt = [[one.reward for one in group] for group in first_right]
    assert all(sorted(rewards) == [0.0, 0.0, 0.5, 1.0] for rewards in dealt)
    for place in range(4):
        assert abs(fmean(rewards[place] for rewards in dealt) - 0.375) < 0.04
    assert [list(one.tokens) for one in first_right[0]] == [
        list(one.tokens) for one in made(1, 1, 1, 1)
    ]
