"""Group-in-group advantages: runs are compared with runs, and steps with other steps that began in the same state."""

from collections import defaultdict
from typing import Literal

import numpy as np

from rft.algorithm.advantages.columns import Columns, Credit
from rft.algorithm.advantages.grpo import deviation


def gigpo(
    columns: Columns,
    omega: float = 1.0,
    gamma: float = 1.0,
    fnorm: Literal["none", "std"] = "none",
    epsilon: float = 1e-6,
) -> Credit:
    """A = A_E + omega A_S (Feng et al. 2025, arXiv:2505.10978).

    A_E: the return of the whole run less the mean over the runs of its task. A_S: the return from this step on, discounted by
    `gamma`, less the mean over the steps of the task with the same `info["env_state_hash"]`; 0 where there is no other. Both are
    divided by their unbiased std with `fnorm=std`. A step's reward is `info["step_reward"]`, or, in a run that has none, the
    reward of the run for its last step.
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
    centred = returns - returns.mean()
    return centred / (deviation(returns) + epsilon) if fnorm == "std" else centred
