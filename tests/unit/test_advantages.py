"""Every advantage against its formula written out here in another way, in fp64, and the rows that a
step makes of them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rft.algorithm import ALGORITHMS, credit, token_credit
from rft.algorithm.advantages import ADVANTAGES, Columns, Credit
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES
from rft.config import AlgorithmConfig
from rft.data.packing import AGGREGATIONS, Cost, Packed, pack
from rft.data.runs import expanded
from rft.ground.experience import PEERS, Batch, Experience
from rft.trainer.feed import Feed
from tests.unit.test_feed import Alone

GROUPS = {3: [1.0, 0.0, 0.25, 0.5], 4: [2.0, 2.0], 7: [-1.0, 3.0, 1.0], 9: [5.0]}
REWARDS = [reward for rewards in GROUPS.values() for reward in rewards]
NUMBERS = [group for group, rewards in GROUPS.items() for _ in rewards]


def made(
    reward: float, group: int, sample: int = 0, turn: int = 0, length: int = 2, **more: Any
) -> Experience:
    given = {"action_mask": [1] * length, "logprobs": [-0.5] * length} | more
    return Experience(
        tokens=[1, 2, *range(5, 5 + length)],
        prompt_length=2,
        reward=reward,
        group=group,
        sample=sample,
        turn=turn,
        **given,
    )


def columns(**more: Any) -> Columns:
    pairs = list(zip(REWARDS, NUMBERS, strict=True))
    return replace(
        Columns.of([made(reward, group, sample) for sample, (reward, group) in enumerate(pairs)]),
        **more,
    )


def found(name: str, given: Columns | None = None, **arguments: Any) -> Credit:
    return ADVANTAGES[name].function(given or columns(), **arguments)


def by_group(formula: Any, alone: float | None = None) -> list[float]:
    """`formula(reward, the other rewards, all of the group)` for every response; `alone`: of a
    group of one.
    """
    values = []
    for rewards in GROUPS.values():
        for place, reward in enumerate(rewards):
            others = [*rewards[:place], *rewards[place + 1 :]]
            values.append(
                alone if not others and alone is not None else formula(reward, others, rewards)
            )
    return values


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    return sum((x - mean(values)) ** 2 for x in values) / (len(values) - 1)


CLOSED = [
    ("grpo", {}, by_group(lambda r, _, g: (r - mean(g)) / (variance(g) ** 0.5 + 1e-6), 0.0)),
    ("grpo", {"normalize_std": False}, by_group(lambda r, _, g: r - mean(g), 0.0)),
    (
        "grpo",
        {"std_cal_level": "batch"},
        by_group(lambda r, _, g: (r - mean(g)) / (variance(REWARDS) ** 0.5 + 1e-6), 0.0),
    ),
    ("rloo", {}, by_group(lambda r, others, _: r - mean(others), 5.0)),
    ("reinforce", {}, REWARDS),
    ("opmd", {}, by_group(lambda r, _, g: r - mean(g), 5.0)),
    (
        "opmd",
        {"opmd_baseline": "logavgexp", "tau": 0.5},
        by_group(lambda r, _, g: r - 0.5 * np.log(mean([np.exp(x / 0.5) for x in g])), 5.0),
    ),
    ("asymre", {"baseline_shift": -0.2}, by_group(lambda r, _, g: r - mean(g) + 0.2, 5.0)),
    ("rec", {}, by_group(lambda r, _, g: r - mean(g))),
    (
        "rec",
        {"std_normalize": True},
        by_group(
            lambda r, _, g: (
                (r - mean(g)) / ((mean([x * x for x in g]) - mean(g) ** 2) ** 0.5 + 1e-6)
            )
        ),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "wanted"), CLOSED)
def test_advantages_of_responses(name: str, arguments: dict[str, Any], wanted: list[float]) -> None:
    credit_of = found(name, **arguments)
    assert credit_of.advantages == pytest.approx(wanted, abs=1e-9) and credit_of.times is None


def test_groups_without_signal_are_left_out_or_replaced_by_others() -> None:
    """Group 4 has no spread, group 9 one member; what replaces them has a spread, and is chosen
    alike in every run.
    """
    left_out = found("grpo", std_threshold=0.0)
    assert left_out.times is not None
    assert left_out.times.tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert left_out.metrics == {"sample/groups_left_out": 2.0}
    doubled = [
        found("grpo", columns(seed=5), std_threshold=0.0, duplicate_experiences=True).times
        for _ in range(2)
    ]
    assert doubled[0] is not None and np.array_equal(*doubled)
    first, last = doubled[0][:4], doubled[0][6:9]
    assert doubled[0][[4, 5, 9]].tolist() == [0, 0, 0]
    assert len({*first}) == len({*last}) == 1 and first[0] + last[0] == 4
    assert found("grpo", std_threshold=9.0, duplicate_experiences=True).times.tolist() == [0] * 10  # type: ignore[union-attr]


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, -0.1, 1.1, 1 / 3])
def test_equal_rewards_have_no_spread_whatever_their_mean_is_rounded_to(reward: float) -> None:
    """A batch says the same of them: `reward/zero_signal_groups`."""
    for count in range(2, 33):
        silent = [made(reward, 0, sample) for sample in range(count)]
        loud = [made(float(sample % 2), 1, sample) for sample in range(4)]
        given = Columns.of([*silent, *loud])
        for name in ("grpo", "step_wise_grpo"):
            kept = found(name, given, std_threshold=0.0)
            assert kept.times is not None
            assert kept.times.tolist() == [0] * count + [1] * 4
            assert not kept.advantages[:count].any()
            every = found(name, given, std_threshold=-1.0)
            assert every.times is not None and every.times.all()
        for name in ("rloo", "gigpo", "rec"):
            assert not found(name, given).advantages[:count].any(), name
        for normalised in ({"fnorm": "std"}, {"std_normalize": True, "drop": "balance"}):
            name = "gigpo" if "fnorm" in normalised else "rec"
            assert not found(name, given, **normalised).advantages[:count].any()
        assert credit.metrics([*silent, *loud], 0)["reward/zero_signal_groups"] == 0.5


def test_likely_responses_are_worth_less_by_their_rank() -> None:
    logprobs = np.array([-0.1, -0.4, -0.2, -0.3, -1.0, -2.0, -0.7, -0.9, -0.8, -1.0])
    rewards = [1 * (1 - 0.4 * 3 / 4), 0, 0.25 * (1 - 0.4 * 2 / 4), 0.5 * (1 - 0.4 * 1 / 4)]
    wanted = [(r - mean(rewards)) / (variance(rewards) ** 0.5 + 1e-6) for r in rewards]
    assert found("grpo", columns(logprobs=logprobs), rank_penalty=0.4).advantages[
        :4
    ] == pytest.approx(wanted)


def test_rec_drops_surplus_bad_responses() -> None:
    """Of group 3 are good 1 and 0.5 (mean 0.4375); one of the two
    bad ones of ten times as many stays.
    """
    rewards = np.array([1.0, 0, 0, 0, 0])
    given = Columns.of([made(r, 0, sample) for sample, r in enumerate(rewards)])
    advantages = found("rec", given, drop="balance").advantages
    assert sorted(advantages) == pytest.approx([-0.5, 0, 0, 0, 0.5])
    assert found("rec", Columns.of([made(3.0, 0)])).advantages.tolist() == [0.0], (
        "W52: a group of one"
    )


def test_raft_keeps_the_best_of_each_group() -> None:
    assert found("raft").times.tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 0, 0]  # type: ignore[union-attr]
    above = found("raft", reward_threshold=0.4)
    assert above.times.tolist() == [1, 0, 0, 1, 1, 1, 0, 1, 1, 1] and set(above.advantages) == {1.0}  # type: ignore[union-attr]


def runs() -> Columns:
    """Two runs of task 0, of two turns and of one, in no order; one of task 1."""
    return Columns.of(
        [
            made(1.0, 0, sample=0, turn=1, info={"env_state_hash": "b"}),
            made(0.0, 0, sample=1, info={"env_state_hash": "a"}),
            made(0.5, 0, sample=0, turn=0, info={"env_state_hash": "a"}),
            made(2.0, 1, sample=0, info={"env_state_hash": "a"}),
        ]
    )


def test_turns_share_the_advantage_of_their_run() -> None:
    one = 0.5 / (0.5**0.5 + 1e-6)
    assert found("step_wise_grpo", runs()).advantages == pytest.approx([one, -one, one, 0])
    assert found("step_wise_grpo", runs(), enable_step_norm=True).advantages == pytest.approx(
        [one / 2, -one, one / 2, 0]
    )
    assert found("step_wise_grpo", runs(), std_threshold=0.0).times.tolist() == [1, 1, 1, 0]  # type: ignore[union-attr]


def test_gigpo_compares_runs_and_steps_from_the_same_state() -> None:
    """Returns of the runs are 1 and 0.

    From state a: 0.9 x 1 of the first run, 0 of the second; nothing else shares a state.
    """
    assert found("gigpo", runs(), gamma=0.9, omega=2.0).advantages == pytest.approx(
        [0.5, -0.5 - 2 * 0.45, 0.5 + 2 * 0.45, 0]
    )
    scaled = found("gigpo", runs(), fnorm="std").advantages
    assert scaled == pytest.approx([0.5**0.5, -(2**0.5), 2**0.5, 0], abs=1e-5)
    given = runs()
    given.infos[0]["step_reward"] = 3.0
    given.infos[2]["step_reward"] = 1.0
    assert found("gigpo", given, omega=0.0).advantages == pytest.approx([2, -2, 2, 0])


# --- advantages of tokens -------------------------------------------------------------------------


def batch(seed: int = 2) -> list[Experience]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(8):
        length = int(rng.integers(2, 7))
        mask = [1, *rng.integers(0, 2, length - 1).tolist()]
        logprobs = rng.uniform(-2, -0.1, length).tolist()
        found.append(
            made(
                float(rng.normal()),
                number // 2,
                number,
                length=length,
                action_mask=mask,
                logprobs=logprobs,
            )
        )
    return found


def scored(packed: Packed) -> Packed:
    said = {
        "reference": -1.5 + 0.1 * np.sin(packed.labels),
        "proximal": -1.2 + 0.2 * np.cos(packed.labels),
    }
    said["entropy"] = 1.0 + np.cos(3.0 * packed.labels) / 2
    return replace(
        packed, scores=packed.scores | {name: a.astype(np.float32) for name, a in said.items()}
    )


def credited(
    experiences: list[Experience], algorithm: AlgorithmConfig, dp: int = 1, limit: int = 10**6
) -> dict[tuple[int, int], float]:
    """Advantage of every trained token, by row and place; sums
    over ranks are those of passes before.
    """
    penalised = token_credit.is_penalised(algorithm)
    judged = credit.judge(
        experiences, algorithm.advantage_fn, algorithm.advantage_fn_args, 0, penalised
    )
    parts = [
        [scored(p) for p in part] for part in pack(credit.rows(judged, "token-mean"), dp, limit, 1)
    ]
    totals: list[list[float]] = []
    while True:
        asked: list[list[list[float]]] = []
        results = []
        for part in parts:
            own: list[list[float]] = []

            def summed(numbers: list[float], own: list[list[float]] = own) -> list[float]:
                own.append(numbers)
                return totals[len(own) - 1] if len(own) <= len(totals) else numbers

            results.append(
                token_credit.credited(
                    part, algorithm, True, summed, judged.groups, others=judged.others
                )
            )
            asked.append(own)
        if len(totals) == len(asked[0]):
            break
        totals.append(np.sum([own[len(totals)] for own in asked], axis=0).tolist())
    values = {}
    for packed in (p for part, _ in results for p in part):
        for row, start, stop in zip(
            packed.rows, packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True
        ):
            values |= {
                (int(row), int(t - start)): float(packed.advantage[t])
                for t in range(start, stop)
                if packed.weight[t]
            }
    return values


def test_reinforce_plus_plus_is_the_whitened_return() -> None:
    algorithm = AlgorithmConfig(
        advantage_fn="reinforceplusplus", advantage_fn_args={"gamma": 0.9}, kl_loss_fn="none"
    )
    experiences = batch()
    returns = []
    for one in experiences:
        places = [t for t, is_trained in enumerate(one.action_mask) if is_trained]
        returns += [one.reward * 0.9 ** (len(places) - 1 - k) for k in range(len(places))]
    wanted = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
    assert list(credited(experiences, algorithm).values()) == pytest.approx(wanted, abs=1e-5)


def test_rewards_of_tokens_win_over_the_reward() -> None:
    algorithm = AlgorithmConfig(advantage_fn="remax", kl_loss_fn="none")
    experiences = [
        made(9.0, 0, length=3, token_rewards=[1.0, 2.0, 4.0]),
        made(3.0, 0, length=1, action_mask=[0], info={"baseline": True}),
    ]
    assert list(credited(experiences, algorithm).values()) == pytest.approx([7 - 3, 6 - 3, 4 - 3])
    experiences[0].action_mask = [0, 1, 0]
    assert list(credited(experiences, algorithm).values()) == pytest.approx([7 - 3]), (
        "nothing is lost between the trained"
    )
    assert Columns.of(experiences).rewards.tolist() == [7.0, 3.0]


def test_the_greedy_response_is_a_baseline_and_nothing_else() -> None:
    algorithm = AlgorithmConfig(advantage_fn="remax", kl_loss_fn="none")
    greedy = made(0.5, 0, action_mask=[0, 0], info={"baseline": True})
    experiences = [made(1.0, 0), made(0.0, 0, sample=1), greedy]
    assert list(credited(experiences, algorithm).values()) == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert (
        credit.metrics(experiences, 0)["reward/mean"] == 0.5
        and credit.metrics(experiences, 0)["sample/groups"] == 1
    )
    with pytest.raises(ValueError, match="group 1 has no greedy response"):
        credited([*experiences, made(1.0, 1)], algorithm)


@pytest.mark.parametrize("name", [name for name, kind in ADVANTAGES.items() if kind.takes_penalty])
def test_a_penalty_comes_off_the_rewards_before_they_are_compared(name: str) -> None:
    algorithm = AlgorithmConfig(
        advantage_fn=name, kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.3}
    )
    experiences = batch()
    rewards = []
    for one in experiences:
        labels = np.array(one.tokens[2:], dtype=float)[np.array(one.action_mask, bool)]
        penalty = (-1.2 + 0.2 * np.cos(labels)) - (-1.5 + 0.1 * np.sin(labels))
        rewards.append(one.reward - 0.3 * penalty.sum())
    shifted = replace(Columns.of(experiences), rewards=np.array(rewards))
    wanted = found(name, shifted).advantages
    for cut in ({}, {"dp": 3, "limit": 9}):
        values = credited(experiences, algorithm, **cut)  # type: ignore[arg-type]
        for (row, _), value in values.items():
            assert value == pytest.approx(wanted[row], abs=1e-5)
        assert len(values) == sum(sum(one.action_mask) for one in experiences)


@pytest.mark.parametrize("arguments", [{}, {"opmd_baseline": "logavgexp"}], ids=str)
@pytest.mark.parametrize("name", [name for name, kind in ADVANTAGES.items() if kind.takes_penalty])
def test_a_penalty_of_nothing_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    """Also where peers are compared with each other only, and where a response of which no token is
    trained (it gave up, or its end was not its own) is in the baseline of the others.
    """
    arguments = arguments if name == "opmd" else {}
    judges: dict[str, Any] = {"info": {PEERS: "judge"}}
    silent: dict[str, Any] = {"action_mask": [0, 0]}
    experiences = [
        *(made(reward, 0, sample) for sample, reward in enumerate((1.0, 0.0, 0.25))),
        *(made(reward, 0, 3 + place, **judges) for place, reward in enumerate((0.9, 0.75, 0.5))),
        made(-1.0, 0, 6, **silent),
        made(0.125, 0, 7, **judges, **silent),
        *(made(reward, 1, sample) for sample, reward in enumerate((1.0, 1.0))),
        made(-1.0, 1, 2, **silent),
    ]
    judged = credit.judge(experiences, name, arguments)
    algorithm = AlgorithmConfig(
        advantage_fn=name,
        advantage_fn_args=arguments,
        kl_penalty_fn="k1",
        kl_penalty_fn_args={"kl_coef": 0.0},
    )
    for cut in ({}, {"dp": 3, "limit": 9}):
        values = credited(experiences, algorithm, **cut)  # type: ignore[arg-type]
        assert {row for row, _ in values} == set(range(8)), "the trained are rows"
        for (row, _), value in values.items():
            assert value == pytest.approx(judged.advantages[row], abs=1e-6)


def test_what_is_only_compared_with_reaches_the_ranks_that_compare() -> None:
    class Group:
        def take(self, step: int) -> Batch:
            judge = made(0.5, 4, 1, info={PEERS: "judge"})
            silent = made(-1.0, 4, 2, action_mask=[0, 0])
            return Batch(step=step, experiences=[made(1.0, 4), judge, silent])

    for penalty, others in (("k1", [(4, -1.0)]), ("none", [])):
        algorithm = AlgorithmConfig(
            algorithm_type="rloo",
            advantage_fn="rloo",
            loss_agg_mode="token-mean",
            kl_penalty_fn=penalty,
        )
        step = Feed(Group(), Alone(), algorithm, 30, 1, Cost()).next(0, stopping=False)  # type: ignore[arg-type]
        assert step is not None and step.others == others
        assert step.groups[0] == 4 and step.groups[1] > 4, "a judgement has other peers"


def test_clip_b_forgets_bad_tokens_that_would_lower_the_entropy_most() -> None:
    algorithm = AlgorithmConfig(
        advantage_fn="clipb",
        advantage_fn_args={"mu": 0.5},
        kl_loss_fn="none",
        proximal_logprobs=True,
    )
    experiences = batch()
    plain = found("grpo", Columns.of(experiences)).advantages
    change, advantage = [], []
    for one, own in zip(experiences, plain, strict=True):
        for token, is_trained in zip(one.tokens[2:], one.action_mask, strict=True):
            if is_trained:
                logprob = -1.2 + 0.2 * np.cos(token)
                change.append(np.exp(logprob) * (1.0 + np.cos(3.0 * token) / 2 + logprob))
                advantage.append(own)
    limit = np.mean(change) - 0.5 * np.std(change, ddof=1)
    wanted = [0.0 if a < 0 and s < limit else a for a, s in zip(advantage, change, strict=True)]
    assert 0 < sum(w != a for w, a in zip(wanted, advantage, strict=True)) < len(wanted) / 2
    for cut in ({}, {"dp": 2, "limit": 11}):
        values = credited(experiences, algorithm, **cut)  # type: ignore[arg-type]
        assert [values[key] for key in sorted(values)] == pytest.approx(wanted, abs=1e-5)


# --- the step -------------------------------------------------------------------------------------


def test_an_experience_is_trained_on_as_often_as_its_advantage_says() -> None:
    experiences = [
        made(r, g, s) for s, (r, g) in enumerate([(1.0, 0), (0.0, 0), (2.0, 1), (2.0, 1)])
    ]
    arguments = {"std_threshold": 0.0, "duplicate_experiences": True}
    judged = credit.judge(experiences, "grpo", arguments)
    assert judged.groups == [0, 0, 0, 0] and [e.sample for e in judged.experiences] == [0, 0, 1, 1]
    assert sum(
        expanded(row.weight).sum() for row in credit.rows(judged, "token-mean")
    ) == pytest.approx(1.0)
    assert credit.rows(credit.judge(experiences[2:], "grpo", arguments), "token-mean") == []


def test_the_norm_of_dr_grpo_is_the_same_in_every_step() -> None:
    judged = credit.judge(
        [made(1.0, 0, length=3), made(0.0, 0, length=5)], "grpo", {"normalize_std": False}
    )
    rows = credit.rows(judged, "seq-mean-token-sum-norm", longest=10)
    assert [expanded(row.weight).max() for row in rows] == pytest.approx([1 / (2 * 10)] * 2)
    assert set(AGGREGATIONS) >= {kind.loss_agg_mode for kind in ALGORITHMS.values()}


class Stale:
    """A source whose experiences are 0, 1, 2 and 3 versions old."""

    def take(self, step: int) -> Any:
        from rft.ground.experience import Batch, VersionSpan

        spans = [[VersionSpan(version=step - age, start=0, end=2)] for age in range(4)]
        return Batch(
            step=step,
            experiences=[made(1.0 * age, 0, age, versions=spans[age]) for age in range(4)],
        )


def test_staleness_control_leaves_out_what_is_too_old_and_says_so() -> None:
    given = {"algorithm_type": "grpo", "advantage_fn": "grpo", "loss_agg_mode": "token-mean"}
    controlled = AlgorithmConfig(
        **given, sample_strategy="staleness_control", sample_strategy_args={"max_staleness": 1}
    )
    step = Feed(Stale(), Alone(), controlled, 100, 1, Cost()).next(5, stopping=False)  # type: ignore[arg-type]
    assert (
        step is not None and step.metrics["sample/dropped_stale"] == 2.0 and step.groups == [0, 0]
    )
    (packed,) = step.part
    assert packed.rows.tolist() == [0, 1] and step.metrics["staleness/max"] == 3
    plain = Feed(Stale(), Alone(), AlgorithmConfig(**given), 100, 1, Cost()).next(5, stopping=False)  # type: ignore[arg-type]
    assert (
        plain is not None
        and plain.groups == [0] * 4
        and "sample/dropped_stale" not in plain.metrics
    )


DEFAULTS = """
ppo               1  ppo                ppo                  token-mean               k2    default
grpo              8  grpo               ppo                  token-mean               none  default
dr_grpo           8  grpo               ppo                  seq-mean-token-sum-norm  none  default
dapo              16 grpo               ppo                  token-mean               none  default
gspo              2  grpo               gspo                 seq-mean-token-mean      k2    default
cispo             2  grpo               cispo                token-mean               k2    default
sapo              2  grpo               sapo                 token-mean               k2    default
rloo              2  rloo               ppo                  token-mean               k2    default
reinforceplusplus 2  reinforceplusplus  ppo                  token-mean               k2    default
reinforce         1  reinforce          importance_sampling  token-mean               k2    default
remax             1  remax              ppo                  token-mean               k2    default
opmd              2  opmd               opmd                 token-mean               k2    default
asymre            2  asymre             opmd                 token-mean               none  none
topr              2  reinforce          topr                 token-mean               k2    default
sppo              2  opmd               sppo                 token-mean               none  none
rec               2  rec                rec                  token-mean               k2    default
raft              8  raft               sft                  token-mean               none  none
multi_step_grpo   8  step_wise_grpo     ppo                  token-mean               k2    default
gigpo             8  gigpo              ppo                  token-mean               k2    default
mix               8  grpo               mix                  token-mean               k2    mix
mix_chord         8  grpo               mix_chord            token-mean               k2    mix
on_policy_distill 8  on_policy_distill  ppo                  token-mean               none  none
jsd               8  jsd                ppo                  token-mean               none  none
"""


@pytest.mark.parametrize("line", DEFAULTS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_defaults_of_an_algorithm(line: str) -> None:
    name, repeat, *rest = line.split()
    kind = ALGORITHMS[name]
    assert kind.source == "rollouts" and kind.repeat_times == int(repeat)
    assert [
        kind.advantage_fn,
        kind.policy_loss_fn,
        kind.loss_agg_mode,
        kind.kl_loss_fn,
        kind.entropy_loss_fn,
    ] == rest
    assert kind.advantage_fn in ADVANTAGES or kind.advantage_fn in TOKEN_ADVANTAGES
    least = ADVANTAGES[kind.advantage_fn].fewest if kind.advantage_fn in ADVANTAGES else 1
    assert kind.repeat_times >= least, "it can run as it is"
