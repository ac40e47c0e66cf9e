"""Advantages: how much better than expected each response, or each token, was. One file each, and one entry in a table here.

`ADVANTAGES` are made at rank 0 from the rewards of one step: in `Columns`, out `Credit`, one number per experience, which is
spread over its trained tokens. `TOKEN_ADVANTAGES` are made on the ranks that compute losses, from what models say of each token
(`rft.algorithm.token_credit`): in a microbatch and its rewards per token, out advantages and returns per token. Arguments with
defaults are the keys of `algorithm.advantage_fn_args`. Pure numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rft.algorithm.advantages.asymre import asymre
from rft.algorithm.advantages.clip_cov import clipb, entropy_change
from rft.algorithm.advantages.columns import Columns as Columns
from rft.algorithm.advantages.columns import Credit as Credit
from rft.algorithm.advantages.distillation import jsd, on_policy_distill
from rft.algorithm.advantages.gae import ppo
from rft.algorithm.advantages.gigpo import gigpo
from rft.algorithm.advantages.grpo import grpo
from rft.algorithm.advantages.opmd import opmd
from rft.algorithm.advantages.raft import raft
from rft.algorithm.advantages.rec import rec
from rft.algorithm.advantages.reinforce import reinforce
from rft.algorithm.advantages.reinforce_pp import reinforceplusplus
from rft.algorithm.advantages.remax import remax
from rft.algorithm.advantages.rloo import rloo
from rft.algorithm.advantages.step_wise_grpo import step_wise_grpo
from rft.packing import Packed


@dataclass(frozen=True)
class Advantage:
    """`function(columns, **args)`. `fewest`: responses to a task that it needs at least."""

    function: Callable[..., Credit]
    fewest: int = 2
    takes_penalty: bool = (
        False  # a KL penalty may be taken off its rewards: every response stays, and only its reward counts
    )


@dataclass(frozen=True)
class TokenAdvantage:
    """`function(packed, rewards, **args)` -> (advantages, returns), [T] each."""

    function: Callable[..., tuple[np.ndarray, np.ndarray]]
    needs_critic: bool = False
    needs_teacher: bool = False
    is_whitened: bool = False  # to mean 0 and variance 1 over all trained tokens of the step
    needs_baseline: bool = False  # a greedy response per task, whose reward is the score `baseline`
    over: Callable[[Columns], Credit] | None = None  # begins with these advantages of responses, and not with rewards
    measured: Callable[[Packed], np.ndarray] | None = (
        None  # of `proximal` and `entropy`; `function` gets its `mean` and `std`
    )


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
TOKEN_ADVANTAGES = {
    "ppo": TokenAdvantage(ppo, needs_critic=True, is_whitened=True),
    "reinforceplusplus": TokenAdvantage(reinforceplusplus, is_whitened=True),
    "remax": TokenAdvantage(remax, needs_baseline=True),
    "clipb": TokenAdvantage(clipb, over=grpo, measured=entropy_change),
    "on_policy_distill": TokenAdvantage(on_policy_distill, needs_teacher=True),
    "jsd": TokenAdvantage(jsd, needs_teacher=True),
}
