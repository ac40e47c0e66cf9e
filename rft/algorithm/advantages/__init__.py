"""Advantages: how much better than expected each response, or each token, was. One file each, and one entry in a table here.

`ADVANTAGES` are made at rank 0 from the rewards of one step: in `Columns`, out `Credit`, one number per experience, which is
spread over its trained tokens. `TOKEN_ADVANTAGES` are made on the ranks that compute losses, from what models say of each token
(`rft.algorithm.token_credit`): in a microbatch and its rewards per token, out advantages and returns per token. Arguments with
defaults are the keys of `algorithm.advantage_fn_args`. Pure numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rft.algorithm.advantages.columns import Columns as Columns
from rft.algorithm.advantages.columns import Credit as Credit
from rft.algorithm.advantages.distillation import jsd, on_policy_distill
from rft.algorithm.advantages.gae import ppo
from rft.algorithm.advantages.grpo import grpo


@dataclass(frozen=True)
class TokenAdvantage:
    """`function(packed, rewards, **args)` -> (advantages, returns), [T] each."""

    function: Callable[..., tuple[np.ndarray, np.ndarray]]
    needs_critic: bool = False
    needs_teacher: bool = False
    is_whitened: bool = False  # to mean 0 and variance 1 over all trained tokens of the step


ADVANTAGES: dict[str, Callable[..., Credit]] = {"grpo": grpo}
TOKEN_ADVANTAGES = {
    "ppo": TokenAdvantage(ppo, needs_critic=True, is_whitened=True),
    "on_policy_distill": TokenAdvantage(on_policy_distill, needs_teacher=True),
    "jsd": TokenAdvantage(jsd, needs_teacher=True),
}
