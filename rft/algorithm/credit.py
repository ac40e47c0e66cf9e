"""From the experiences of one step to rows that can be packed: advantages, global loss weights, aligned arrays.

In: a `Batch` (whole step, at rank 0). Out: `packing.Row`s and the step's reward metrics. Weights are divided by counts over
the whole batch here, before anything is cut, so no later split can change the gradient. Advantages per token are made later,
where the values lie (`rft.models`).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from rft.algorithm.advantages import ADVANTAGES
from rft.algorithm.gae import TOKEN_ADVANTAGES
from rft.experience import Experience
from rft.packing import Row, token_weights


def rows(
    experiences: list[Experience], advantage_fn: str | None, advantage_args: dict[str, Any], mode: str
) -> list[Row]:
    """One row per experience that has at least one trained token; `mode` is a loss_agg_mode.

    Advantages that need a value of every token are 0 here, and the rewards travel as the score `reward`.
    """
    advantages = np.zeros(len(experiences))
    if advantage_fn in ADVANTAGES:
        rewards = np.array([e.reward for e in experiences], dtype=np.float64)
        advantages = ADVANTAGES[advantage_fn](rewards, np.array([e.group for e in experiences]), **advantage_args)
    kept = [(e, a) for e, a in zip(experiences, advantages, strict=True) if any(e.action_mask)]
    if not kept:
        return []
    weights = token_weights([sum(e.action_mask) for e, _ in kept], mode)
    made = [_row(e, a, w) for (e, a), w in zip(kept, weights, strict=True)]
    if advantage_fn not in TOKEN_ADVANTAGES:
        return made
    return [
        replace(row, scores={"reward": _at_last(row.trained, e.reward)}) for row, (e, _) in zip(made, kept, strict=True)
    ]


def _at_last(trained: np.ndarray, reward: float) -> np.ndarray:
    """The reward of a response belongs to its last trained token."""
    rewards = np.zeros(len(trained), dtype=np.float32)
    rewards[np.flatnonzero(trained)[-1]] = reward
    return rewards


def _row(experience: Experience, advantage: float, weight: float) -> Row:
    length, prompt = len(experience.tokens), experience.prompt_length
    trained = np.zeros(length, dtype=np.float32)
    trained[prompt:] = experience.action_mask
    behaviour = np.zeros(length, dtype=np.float32)
    behaviour[prompt:] = experience.logprobs or 0.0
    return Row(
        tokens=np.array(experience.tokens, dtype=np.int64),
        trained=trained,
        behaviour=behaviour,
        advantage=trained * np.float32(advantage),
        weight=trained * np.float32(weight),
        temperature=experience.temperature,
    )


def metrics(experiences: list[Experience], step: int) -> dict[str, float]:
    """What the batch looked like: rewards, lengths, staleness (`step` is the policy version that trains on it)."""
    lengths = np.array([e.response_length for e in experiences], dtype=np.float64)
    found = {
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "truncated_frac": np.mean([e.stop == "length" for e in experiences]),
        "prompt_length/mean": np.mean([e.prompt_length for e in experiences]),
    }
    rollouts = [e for e in experiences if e.group >= 0]
    if rollouts:
        rewards = np.array([e.reward for e in rollouts])
        groups = np.array([e.group for e in rollouts])
        spreads = [np.ptp(rewards[groups == g]) for g in np.unique(groups)]
        ages = np.array([step - e.oldest_version for e in rollouts if e.oldest_version is not None])
        versions = [len({span.version for span in e.versions}) for e in rollouts]
        found |= {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/zero_signal_groups": np.mean(np.array(spreads) == 0),
            "reward/failed_frac": np.mean([e.failed for e in rollouts]),
            "staleness/mean": ages.mean() if len(ages) else 0.0,
            "staleness/max": ages.max() if len(ages) else 0.0,
            "staleness/tokens_mixed_frac": np.mean(np.array(versions) > 1),
            **token_staleness(rollouts, step),
            "sample/groups": len(spreads),
        }
    return {name: float(value) for name, value in found.items()}


def token_staleness(rollouts: list[Experience], step: int) -> dict[str, float]:
    """Of every trained token on its own: how many versions ago it was sampled, and how many tokens nobody knows that of."""
    ages, counts, trained = [], [], 0
    for experience in rollouts:
        before = np.concatenate(([0], np.cumsum(experience.action_mask)))  # trained tokens in front of each position
        trained += int(before[-1])
        for span in experience.versions:
            ages.append(step - span.version)
            counts.append(int(before[span.end] - before[span.start]))
    aged = [age for age, count in zip(ages, counts, strict=True) if count]
    return {
        "staleness/token_mean": float(np.dot(ages, counts)) / max(1, sum(counts)),
        "staleness/token_max": max(aged, default=0),
        "staleness/unversioned_tokens": trained - sum(counts),
    }
