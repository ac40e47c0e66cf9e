"""Advantages of responses: how much better than expected each was. One function each, and one entry
in `ADVANTAGES`.

They are made at rank 0 from the rewards of one step. In: `Columns`, the step's experiences in
admission order, one entry per experience. Out: `Credit`, one number per experience, which is spread
over its trained tokens. An experience is one response, or one turn of a run (`samples`, `turns`)
where each turn makes an experience of its own. Arguments with defaults are the keys of
`algorithm.advantage_fn_args`. Pure numpy.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rft.config.arguments import Fraction, NonNegative, Positive
from rft.ground.experience import PEERS, Experience


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
            groups=peers(experiences),
            samples=np.array([e.sample for e in experiences], dtype=np.int64),
            turns=np.array([e.turn for e in experiences], dtype=np.int64),
            logprobs=np.array([mean_logprob(e) for e in experiences], dtype=np.float64),
            infos=[e.info for e in experiences],
            seed=seed,
        )

    def at(self, places: np.ndarray) -> "Columns":
        """Of these experiences only."""
        columns = (self.rewards, self.groups, self.samples, self.turns, self.logprobs)
        return Columns(
            *(column[places] for column in columns), [self.infos[i] for i in places], self.seed
        )

    def runs(self) -> list[np.ndarray]:
        """The places of each attempt's experiences, first turn first; by group, then by attempt."""
        order = np.lexsort((self.turns, self.samples, self.groups))
        keys = np.stack([self.groups[order], self.samples[order]])
        starts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        return [run for run in np.split(order, starts) if len(run)]

    def members(self) -> list[np.ndarray]:
        """The places of each group's experiences, groups in ascending order."""
        return [np.flatnonzero(self.groups == group) for group in np.unique(self.groups)]


def peers(experiences: Sequence[Experience]) -> np.ndarray:
    """The group of each; of those that have peers of their own in it, a number behind all."""
    groups = np.array([e.group for e in experiences], dtype=np.int64)
    kinds = sorted({str(e.info[PEERS]) for e in experiences if PEERS in e.info})
    behind = groups.max(initial=0) + 1
    for at, e in enumerate(experiences):
        if PEERS in e.info:
            groups[at] += behind * (1 + kinds.index(str(e.info[PEERS])))
    return groups


@dataclass(frozen=True)
class Credit:
    """`advantages` [N]; `times` [N]: how often each experience is trained on in this step (0: left
    out), None: once.
    """

    advantages: np.ndarray
    times: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def total_reward(experience: Experience) -> float:
    given = experience.token_rewards
    return float(np.sum(given)) if len(given) else experience.reward


def mean_logprob(experience: Experience) -> float:
    if not len(experience.logprobs):
        return 0.0
    chosen, mask = np.asarray(experience.logprobs), np.asarray(experience.action_mask)
    if np.count_nonzero(mask) < len(mask):
        chosen = chosen[mask != 0]
    return float(chosen.mean(dtype=np.float64)) if len(chosen) else 0.0


def reinforce(columns: Columns) -> Credit:
    """REINFORCE without a baseline.

    A_i = R_i (Williams 1992, https://doi.org/10.1007/BF00992696).
    """
    return Credit(columns.rewards.copy())


def rloo(columns: Columns) -> Credit:
    """REINFORCE with the other responses as baseline.

    A_i = R_i - mean of the other rewards of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    That is n / (n - 1) (R_i - mean_g). A response without others keeps its reward.
    """
    advantages = columns.rewards.copy()
    for members in columns.members():
        if (n := len(members)) > 1:
            advantages[members] = centred(columns.rewards[members]) * (n / (n - 1))
    return Credit(np.asarray(advantages))


def grpo(
    columns: Columns,
    epsilon: Positive = 1e-6,
    normalize_std: bool = True,
    std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
    rank_penalty: Fraction | None = None,
    duplicate_experiences: bool = False,
) -> Credit:
    """Group-relative advantages: the other responses to a task are the baseline of each.

    A_i = (R_i - mean_g) / (std + epsilon), std unbiased (Shao et al. 2024, arXiv:2402.03300, eq.
    10).

    `std_cal_level`: whose deviation, the group's or that of all rewards of the step (Liu et al.
    2025, arXiv:2508.08221). `normalize_std=False` divides by 1 (Dr. GRPO, arXiv:2503.20783). A
    group of one has no baseline and gets 0. `rank_penalty` p: rewards become R (1 - p k/n) first, k
    the place of the response among the n of its group, the least likely first (He et al. 2025,
    arXiv:2506.02355). `std_threshold`: groups whose deviation is not larger are left out (0: the
    filter of DAPO, arXiv:2503.14476), with `duplicate_experiences` for a copy of another group,
    chosen by chance.
    """
    rewards = columns.rewards if rank_penalty is None else _penalised(columns, rank_penalty)
    everything = deviation(rewards)
    advantages = np.zeros(len(rewards))
    silent = []
    for members in columns.members():
        own = deviation(rewards[members])
        if std_threshold is not None and own <= std_threshold:
            silent.append(members)
        if len(members) > 1:
            divisor = (own if std_cal_level == "group" else everything) + epsilon
            advantages[members] = centred(rewards[members]) / (divisor if normalize_std else 1.0)
    if std_threshold is None:
        return Credit(advantages)
    return without(columns, advantages, silent, duplicate_experiences)


def _penalised(columns: Columns, penalty: float) -> np.ndarray:
    rewards = columns.rewards.copy()
    for members in columns.members():
        place = np.argsort(np.argsort(columns.logprobs[members], kind="stable"), kind="stable")
        rewards[members] *= 1 - penalty * place / len(members)
    return rewards


def centred(values: np.ndarray) -> np.ndarray:
    """Less their mean. Equal ones are exactly 0: the mean of six times 0.1 is another number."""
    return values - (values.mean() if np.ptp(values) else values[0])


def deviation(values: np.ndarray) -> float:
    """Unbiased; that of one value, and that of equal ones, is exactly 0."""
    return float(values.std(ddof=1)) if len(values) and np.ptp(values) else 0.0


def without(
    columns: Columns, advantages: np.ndarray, silent: list[np.ndarray], replaces: bool = False
) -> Credit:
    """The groups in `silent` are left out; `replaces`: each for a copy of a group that is not, as
    long as there is one.
    """
    times = np.ones(len(advantages), dtype=np.int64)
    for members in silent:
        times[members] = 0
    loud = [members for members in columns.members() if times[members[0]]]
    if replaces and loud:
        for chosen in np.random.default_rng(columns.seed).integers(len(loud), size=len(silent)):
            times[loud[chosen]] += 1
    return Credit(advantages, times, {"sample/groups_left_out": float(len(silent))})


def step_wise_grpo(
    columns: Columns,
    epsilon: Positive = 1e-6,
    enable_step_norm: bool = False,
    std_threshold: float | None = None,
    std_cal_level: Literal["group", "batch"] = "group",
) -> Credit:
    """GRPO over runs of several turns, each of which is an experience of its own.

    `grpo` of the rewards of each run's last turn; every turn of the run gets its advantage [divided
    by the number of turns].

    As `multi_step_grpo` of Trinity-RFT (Pan et al. 2025, arXiv:2505.17826).
    """
    runs = columns.runs()
    last = np.array([run[-1] for run in runs], dtype=np.int64)
    of_runs = grpo(
        columns.at(last), epsilon, std_threshold=std_threshold, std_cal_level=std_cal_level
    )
    advantages = np.zeros(len(columns.rewards))
    times = None if of_runs.times is None else np.zeros(len(advantages), dtype=np.int64)
    for number, run in enumerate(runs):
        advantages[run] = of_runs.advantages[number] / (len(run) if enable_step_norm else 1)
        if times is not None and of_runs.times is not None:
            times[run] = of_runs.times[number]
    return replace(of_runs, advantages=advantages, times=times)


def gigpo(
    columns: Columns,
    omega: NonNegative = 1.0,
    gamma: Fraction = 1.0,
    fnorm: Literal["none", "std"] = "none",
    epsilon: Positive = 1e-6,
) -> Credit:
    """Group-in-group advantages: runs are compared with runs, and steps with other steps that began
    in the same state.

    A = A_E + omega A_S (Feng et al. 2025, arXiv:2505.10978).

    A_E: the return of the whole run less the mean over the runs of its task. A_S: the return from
    this step on, discounted by `gamma`, less the mean over the steps of the task with the same
    `info["env_state_hash"]`; 0 where there is no other. Both are divided by their unbiased std with
    `fnorm=std`. A step's reward is `info["step_reward"]`, or, in a run that has none, the reward of
    the run for its last step.
    """
    count = len(columns.rewards)
    of_runs, of_steps = np.zeros(count), np.zeros(count)
    to_come = np.zeros(count)
    runs: dict[int, list[np.ndarray]] = defaultdict(list)
    states: dict[tuple[int, str], list[int]] = defaultdict(list)
    for run in columns.runs():
        runs[int(columns.groups[run[0]])].append(run)
        behind = 0.0
        for at, reward in zip(run[::-1], _step_rewards(columns, run)[::-1], strict=True):
            to_come[at] = behind = reward + gamma * behind
            if (state := columns.infos[at].get("env_state_hash")) is not None:
                states[int(columns.groups[at]), str(state)].append(at)
    for group in runs.values():
        returns = np.array([_step_rewards(columns, run).sum() for run in group])
        for run, advantage in zip(group, _compared(returns, fnorm, epsilon), strict=True):
            of_runs[run] = advantage
    for members in states.values():
        of_steps[members] = _compared(to_come[members], fnorm, epsilon)
    return Credit(of_runs + omega * of_steps)


def _step_rewards(columns: Columns, run: np.ndarray) -> np.ndarray:
    given = [columns.infos[at].get("step_reward") for at in run]
    if any(reward is not None for reward in given):
        return np.array([0.0 if reward is None else float(reward) for reward in given])
    return np.array([0.0] * (len(run) - 1) + [columns.rewards[run[-1]]])


def _compared(returns: np.ndarray, fnorm: str, epsilon: float) -> np.ndarray:
    if len(returns) < 2:
        return np.zeros(len(returns))
    apart = centred(returns)
    return apart / (deviation(returns) + epsilon) if fnorm == "std" else apart


def opmd(
    columns: Columns, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: Positive = 1.0
) -> Credit:
    """Online policy mirror descent.

    A_i = R_i - b, b = mean_g, or tau log mean exp(R / tau) over the group (Pan et al. 2025,
    arXiv:2505.17826; Kimi k1.5, arXiv:2501.12599, section 2.3.2). A response alone has b = 0.
    """
    advantages = columns.rewards.copy()
    for members in columns.members():
        if len(members) > 1:
            rewards = columns.rewards[members]
            advantages[members] -= (
                rewards.mean() if opmd_baseline == "mean" else _soft_maximum(rewards, tau)
            )
    return Credit(advantages)


def _soft_maximum(rewards: np.ndarray, tau: float) -> float:
    top = rewards.max()
    return float(top + tau * np.log(np.exp((rewards - top) / tau).mean()))


def asymre(columns: Columns, baseline_shift: float = -0.1) -> Credit:
    """Asymmetric REINFORCE: a baseline below the mean, so that good responses teach more than bad
    ones.

    A_i = R_i - (mean_g + shift) (Arnal et al. 2025, arXiv:2506.20520). A response alone has the
    baseline 0.
    """
    advantages = columns.rewards.copy()
    for members in columns.members():
        if len(members) > 1:
            advantages[members] -= columns.rewards[members].mean() + baseline_shift
    return Credit(advantages)


def rec(
    columns: Columns,
    epsilon: Positive = 1e-6,
    std_normalize: bool = False,
    drop: Literal["none", "balance"] = "none",
) -> Credit:
    """The REC family: REINFORCE made safe for data of another policy.

    A_i = R_i - mean over the kept of its group [/ (their population std + epsilon)] (Yao et al.
    2025, arXiv:2509.24203).

    `drop=balance` keeps as many bad responses (R < mean_g) as there are good ones, by chance
    ("RED-Drop"); the others get 0.
    """
    chance = np.random.default_rng(columns.seed)
    advantages = np.zeros(len(columns.rewards))
    for members in columns.members():
        is_good = centred(columns.rewards[members]) >= 0
        good, bad = members[is_good], members[~is_good]
        if drop == "balance" and len(bad) > len(good):
            bad = chance.choice(bad, len(good), replace=False)
        kept = np.concatenate([good, bad])
        rewards = columns.rewards[kept]
        divisor = rewards.std() + epsilon if std_normalize else 1.0
        advantages[kept] = centred(rewards) / divisor
    return Credit(advantages)


def raft(columns: Columns, reward_threshold: float | None = None) -> Credit:
    """RAFT: imitate the best responses, forget the others.

    Trained on are the responses with the highest reward of their group (Dong et al. 2023,
    arXiv:2304.06767), each with A = 1.

    `reward_threshold`: those instead whose reward is larger than this. A group in which all are
    equal has no best one.
    """
    rewards = columns.rewards
    chosen = np.zeros(len(rewards), dtype=bool)
    for members in columns.members():
        own = rewards[members]
        chosen[members] = (
            own > reward_threshold
            if reward_threshold is not None
            else (own == own.max()) & (own > own.min())
        )
    return Credit(
        np.ones(len(rewards)), chosen.astype(np.int64), {"sample/chosen_frac": float(chosen.mean())}
    )


@dataclass(frozen=True)
class Advantage:
    """`function(columns, **args)`. `fewest`: responses to a task that it needs at least.
    `takes_penalty`: a KL penalty may be taken off its rewards: every response stays, and only its
    reward counts.
    """

    function: Callable[..., Credit]
    fewest: int = 2
    takes_penalty: bool = False


ADVANTAGES = {
    "grpo": Advantage(grpo),
    "rloo": Advantage(rloo, fewest=1, takes_penalty=True),
    "reinforce": Advantage(reinforce, fewest=1, takes_penalty=True),
    "opmd": Advantage(opmd, fewest=1, takes_penalty=True),
    "asymre": Advantage(asymre, takes_penalty=True),
    "rec": Advantage(rec),
    "raft": Advantage(raft),
    "step_wise_grpo": Advantage(step_wise_grpo),
    "gigpo": Advantage(gigpo),
}
