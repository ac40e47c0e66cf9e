"""What an advantage may look at, and what it says: columns over the experiences of one step.

In: the step's experiences in admission order. Out: `Columns`, one entry per experience, and `Credit`. An experience is one
response, or one turn of a run (`samples`, `turns`) where each turn makes an experience of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rft.experience import Experience


@dataclass(frozen=True)
class Columns:
    """[N] each. `rewards`: of a whole response, `token_rewards` added up where there are any."""

    rewards: np.ndarray
    groups: np.ndarray  # experiences of one task
    samples: np.ndarray  # which attempt at the task
    turns: np.ndarray  # which turn of the attempt
    logprobs: np.ndarray  # mean log-probability that the engine gave its trained tokens
    infos: Sequence[dict[str, Any]]
    seed: int = 0  # of what is chosen at random: the same for the same step

    @classmethod
    def of(cls, experiences: Sequence[Experience], seed: int = 0) -> "Columns":
        return cls(
            rewards=np.array([total_reward(e) for e in experiences], dtype=np.float64),
            groups=np.array([e.group for e in experiences], dtype=np.int64),
            samples=np.array([e.sample for e in experiences], dtype=np.int64),
            turns=np.array([e.turn for e in experiences], dtype=np.int64),
            logprobs=np.array([_mean_logprob(e) for e in experiences], dtype=np.float64),
            infos=[e.info for e in experiences],
            seed=seed,
        )

    def at(self, places: np.ndarray) -> "Columns":
        """Of these experiences only."""
        columns = (self.rewards, self.groups, self.samples, self.turns, self.logprobs)
        return Columns(*(column[places] for column in columns), [self.infos[i] for i in places], self.seed)

    def runs(self) -> list[np.ndarray]:
        """The places of each attempt's experiences, first turn first; by group, then by attempt."""
        order = np.lexsort((self.turns, self.samples, self.groups))
        keys = np.stack([self.groups[order], self.samples[order]])
        starts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        return [run for run in np.split(order, starts) if len(run)]

    def members(self) -> list[np.ndarray]:
        """The places of each group's experiences, groups in ascending order."""
        return [np.flatnonzero(self.groups == group) for group in np.unique(self.groups)]


@dataclass(frozen=True)
class Credit:
    """`advantages` [N]; `times` [N]: how often each experience is trained on in this step (0: left out), None: once."""

    advantages: np.ndarray
    times: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def total_reward(experience: Experience) -> float:
    return sum(experience.token_rewards) if experience.token_rewards else experience.reward


def _mean_logprob(experience: Experience) -> float:
    chosen = [x for x, is_trained in zip(experience.logprobs, experience.action_mask, strict=False) if is_trained]
    return sum(chosen) / len(chosen) if chosen else 0.0
