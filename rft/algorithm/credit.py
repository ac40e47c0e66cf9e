"""From the experiences of one step to rows that can be packed: advantages, global loss weights,
aligned arrays.

In: a `Batch` (whole step, at rank 0). Out: `packing.Row`s and the step's reward metrics. Weights
are divided by counts over the whole batch here, before anything is cut, so no later split can
change the gradient. Advantages per token are made later, where the values lie
(`rft.trainer.models`).
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rft.algorithm.advantages import (
    ADVANTAGES,
    Columns,
    Credit,
    mean_logprob,
    peers,
    total_reward,
)
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES
from rft.data.packing import Row, token_weights
from rft.data.runs import Runs
from rft.ground.experience import PEERS, Experience

BY_CHANCE = 1e6  # steps in which equal answers are too many once
ROUNDING = 1e-9  # of advantages
BY_REWARD = ("grpo", "rloo", "reinforce", "opmd")  # the more reward, the more advantage in a group


@dataclass(frozen=True)
class CreditedStep:
    """What a step trains on: experiences, as often as their advantage function wants each, and the
    advantage of each.

    `per_token`: advantages are made later, of every token, of the rewards. `baselines`: of each
    group, where greedy responses give one. `untrained`: where advantages of responses are made
    later, those that are only compared with.
    """

    experiences: list[Experience]
    advantages: np.ndarray
    per_token: bool = False
    baselines: dict[int, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    untrained: list[Experience] = field(default_factory=list)

    @property
    def groups(self) -> list[int]:
        """Whom each is compared with."""
        return self._peers[: len(self.experiences)]

    @property
    def others(self) -> list[tuple[int, float]]:
        """(group, reward) of the untrained."""
        numbers = self._peers[len(self.experiences) :]
        return list(zip(numbers, map(total_reward, self.untrained), strict=True))

    @property
    def _peers(self) -> list[int]:
        numbers: list[int] = peers([*self.experiences, *self.untrained]).tolist()
        return numbers


def judge(
    experiences: list[Experience],
    advantage_fn: str | None,
    arguments: dict[str, Any],
    seed: int = 0,
    penalised: bool = False,
) -> CreditedStep:
    """`seed`: the step. `penalised`: a KL term comes off the rewards later. Experiences that have
    no token to train on are compared with the others of their group, and then left out.
    """
    compared = [experience for experience in experiences if not is_baseline(experience)]
    is_taught = np.array([trained_tokens(one) > 0 for one in compared], dtype=bool)
    later = TOKEN_ADVANTAGES.get(str(advantage_fn))
    per_token = penalised or (later is not None and later.over is None)
    found = Credit(np.zeros(len(compared)))
    if later is not None and later.over is not None:
        found = later.over(Columns.of(compared, seed))
    elif advantage_fn is not None and not per_token:
        found = ADVANTAGES[advantage_fn].function(Columns.of(compared, seed), **arguments)
    times = np.ones(len(compared), dtype=np.int64) if found.times is None else found.times
    chosen = np.repeat(np.arange(len(compared)), times * is_taught)
    baselines = _baselines(experiences) if later is not None and later.needs_baseline else None
    return CreditedStep(
        [compared[i] for i in chosen],
        found.advantages[chosen],
        per_token,
        baselines,
        found.metrics,
        [compared[i] for i in np.flatnonzero(~is_taught)] if penalised else [],
    )


def rows(judged: CreditedStep, mode: str, longest: int = 1) -> list[Row]:
    """One row per experience; `mode` is a loss_agg_mode, `longest` the length of response that one
    of them divides by.

    Where advantages are made of every token, the rewards travel as the score `reward`, and a
    group's baseline as `baseline`.
    """
    weights = token_weights([trained_tokens(e) for e in judged.experiences], mode, longest)
    given = zip(judged.experiences, judged.advantages, weights, strict=True)
    made = [_row(experience, advantage, weight) for experience, advantage, weight in given]
    if not judged.per_token:
        return made
    return [
        replace(row, scores=_scores(row, e, judged.baselines))
        for row, e in zip(made, judged.experiences, strict=True)
    ]


def sums(judged: CreditedStep, mode: str, longest: int = 1) -> dict[str, float]:
    """What the weights of all trained tokens of the step add up to by the definition of `mode`, and
    what weighted advantages do, each times the log-probability that the engine gave the token (or
    those of groups would add up to 0): the loss must find the same.
    """
    lengths = [int(np.sum(e.action_mask)) for e in judged.experiences]
    sequences, tokens = max(1, sum(n > 0 for n in lengths)), sum(lengths)
    whole = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": 1.0 / longest}
    weight = whole[mode] * tokens / sequences if mode in whole else 1.0
    said = [mean_logprob(e) * n for e, n in zip(judged.experiences, lengths, strict=True)]
    of_rows = np.multiply(token_weights(lengths, mode, longest), said)
    pushed = of_rows * judged.advantages
    return {
        "sample/weight": weight,
        "sample/advantage": float(pushed.sum()),
        "sample/advantage_size": float(np.abs(pushed).sum()),
    }


def misjudged(
    judged: CreditedStep, advantage_fn: str, arguments: dict[str, Any]
) -> dict[str, float]:
    """Pairs of single responses of a group in which the lower reward has the higher advantage;
    nothing where advantages do not follow from rewards alone.
    """
    singles = not any(e.turn or PEERS in e.info for e in judged.experiences)
    if advantage_fn not in BY_REWARD or arguments.get("rank_penalty") or not singles:
        return {}
    rewards, groups = map(np.array, ([total_reward(e) for e in judged.experiences], judged.groups))
    found = 0
    for group in np.unique(groups):
        reward, advantage = rewards[groups == group], judged.advantages[groups == group]
        lower = np.subtract.outer(reward, reward) < 0
        found += int((lower & (np.subtract.outer(advantage, advantage) > ROUNDING)).sum())
    return {"drift/misjudged": float(found)}


def scored(experiences: list[Experience]) -> list[Experience]:
    """Those whose reward did not fail.

    A group whose greedy response has none has nothing to be compared with.
    """
    lost = {
        experience.group
        for experience in experiences
        if experience.failed and is_baseline(experience)
    }
    return [one for one in experiences if not one.failed and one.group not in lost]


def trained_tokens(experience: Experience) -> int:
    return int(np.count_nonzero(experience.action_mask))


def left_out(before: list[Experience], after: list[Experience]) -> int:
    """Whose reward did not fail, and who are not there any more; where greedy responses decide
    about others, nobody.
    """
    if any(is_baseline(one) for one in before):
        return 0
    sound = [one for one in before if not one.failed]
    return len(sound) - sum(not one.failed for one in after)


def is_baseline(experience: Experience) -> bool:
    """A greedy response that was made to be compared with: it is not
    trained on, nor counted among the others.
    """
    return bool(experience.info.get("baseline"))


def _baselines(experiences: list[Experience]) -> dict[int, float]:
    """The mean reward of each group's greedy responses."""
    found: dict[int, list[float]] = {}
    for experience in filter(is_baseline, experiences):
        found.setdefault(experience.group, []).append(total_reward(experience))
    if missing := {e.group for e in experiences} - found.keys():
        raise ValueError(
            f"advantage_fn=remax: group {min(missing)} has no greedy response to compare with: "
            "explore again, with this algorithm"
        )
    return {group: sum(rewards) / len(rewards) for group, rewards in found.items()}


def _scores(
    row: Row, experience: Experience, baselines: dict[int, float] | None
) -> dict[str, np.ndarray]:
    found = {"reward": _token_rewards(row, experience)}
    if baselines is not None:
        found["baseline"] = row.trained * np.float32(baselines[experience.group])
    return found


def _token_rewards(row: Row, experience: Experience) -> np.ndarray:
    """The reward of a response belongs to its last trained token, unless every token has its own:
    then that of a token which is not trained goes to the trained one before it, or to the first.
    """
    rewards, trained = np.zeros(len(row.trained), dtype=np.float32), np.flatnonzero(row.trained)
    if not len(experience.token_rewards):
        rewards[trained[-1]] = experience.reward
        return rewards
    places = np.arange(experience.prompt_length, len(rewards))
    np.add.at(
        rewards,
        trained[np.maximum(np.searchsorted(trained, places, side="right") - 1, 0)],
        experience.token_rewards,
    )
    return rewards


def _row(experience: Experience, advantage: float, weight: float) -> Row:
    length, prompt = len(experience.tokens), experience.prompt_length
    trained = np.zeros(length, dtype=bool)
    trained[prompt:] = experience.action_mask
    ones = Runs.of(trained)
    behaviour = np.zeros(length, dtype=np.float32)
    behaviour[prompt:] = experience.logprobs if len(experience.logprobs) else 0.0
    return Row(
        tokens=np.asarray(experience.tokens, dtype=np.int32),
        trained=trained,
        behaviour=behaviour,
        advantage=ones.times(advantage),
        weight=ones.times(weight),
        temperature=experience.temperature,
        group=experience.group,
        routes=experience.routed_experts and experience.routed_experts.array(length),
    )


def metrics(experiences: list[Experience], step: int) -> dict[str, float]:
    """What the batch looked like: rewards, lengths, staleness (`step` is the policy version that
    trains on it).
    """
    experiences = [e for e in experiences if not is_baseline(e)]
    lengths = np.array([e.response_length for e in experiences], dtype=np.float64)
    found = {
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/min": lengths.min(),
        "truncated_frac": np.mean([e.stop == "length" for e in experiences]),
        "prompt_length/mean": np.mean([e.prompt_length for e in experiences]),
        "prompt_length/max": max(e.prompt_length for e in experiences),
        "prompt_length/min": min(e.prompt_length for e in experiences),
    }
    rollouts = [e for e in experiences if e.group >= 0]
    if rollouts:
        ages = np.array([step - e.oldest_version for e in rollouts if e.oldest_version is not None])
        versions = [len({span.version for span in e.versions}) for e in rollouts]
        found |= {
            **_rewards([e for e in rollouts if not e.failed]),
            "reward/failed_frac": np.mean([e.failed for e in rollouts]),
            "staleness/mean": ages.mean() if len(ages) else 0.0,
            "staleness/max": ages.max() if len(ages) else 0.0,
            "staleness/tokens_mixed_frac": np.mean(np.array(versions) > 1),
            **token_staleness(rollouts, step),
            **equal_answers(rollouts),
            "sample/groups": len({e.group for e in rollouts}),
        }
    return {name: float(value) for name, value in found.items()}


def _rewards(judged: list[Experience]) -> dict[str, float]:
    """Of responses whose reward did not fail: nothing where all did."""
    if not judged:
        return {}
    rewards = np.array([total_reward(e) for e in judged])
    groups = np.array([e.group for e in judged])
    spreads = [np.ptp(rewards[groups == group]) for group in np.unique(groups)]
    return {
        "reward/mean": rewards.mean(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "reward/std": rewards.std(),
        "reward/zero_signal_groups": np.mean(np.array(spreads) == 0),
    }


def equal_answers(rollouts: list[Experience]) -> dict[str, float]:
    """Of the pairs of answers of a group, how many are equal to the token (`group/equal_frac`), and
    how much more than their own log-probabilities say, less what chance does
    (`drift/equal_answers`, over 0 once in a million steps).

    Of two independent samples of one policy the second is the first with the first's probability,
    so the difference is 0 on average, whatever the policy; over m pairs that have no answer in
    common its mean is over sqrt(log(10^6) / 2m) with a probability of 10^-6 at most (Hoeffding
    1963, section 5b). Only answers are compared of which the policy has chosen every token, in a
    group where each is a sample of its own.
    """
    groups: dict[int, list[Experience]] = {}
    for one in rollouts:
        groups.setdefault(one.group, []).append(one)
    pairs = equal = expected = apart = 0.0
    for members in groups.values():
        others = len(members) - 1
        if not others or not all(_is_sample(one) for one in members):
            continue
        counts = Counter(one.token_bytes for one in members)
        pairs += others * len(members)
        apart += len(members) // 2
        equal += sum(count * (count - 1) for count in counts.values())
        expected += others * sum(np.exp(min(0.0, float(np.sum(m.logprobs)))) for m in members)
    if not pairs:
        return {}
    by_chance = np.sqrt(np.log(BY_CHANCE) / (2 * apart))
    return {
        "group/equal_frac": equal / pairs,
        "drift/equal_answers": (equal - expected) / pairs - float(by_chance),
    }


def _is_sample(one: Experience) -> bool:
    if one.turn or one.expert or len(one.logprobs) != one.response_length:
        return False
    return trained_tokens(one) == len(one.action_mask)


def token_staleness(rollouts: list[Experience], step: int) -> dict[str, float]:
    """Of every trained token on its own: how many versions ago it was sampled, and how many tokens
    nobody knows that of.
    """
    ages, counts, trained = [], [], 0
    for experience in rollouts:
        mask = np.asarray(experience.action_mask)
        trained += trained_tokens(experience)
        for span in experience.versions:
            ages.append(step - span.version)
            counts.append(int(np.count_nonzero(mask[span.start : span.end])))
    aged = [age for age, count in zip(ages, counts, strict=True) if count]
    return {
        "staleness/token_mean": float(np.dot(ages, counts)) / max(1, sum(counts)),
        "staleness/token_max": max(aged, default=0),
        "staleness/unversioned_tokens": trained - sum(counts),
    }
