"""Reward functions: a response and its reference answer in, one number (or a dict of numbers) out.

A reward function is `(response: str, truth: str | None, task: Task, **task.reward_args) -> float |
dict[str, float]`; the entries of a dict are summed and become metrics; of a tuple (number, dict)
the number is the reward, and the dict metrics. `REWARDS` is the whole
table; instead of a name from it users give their own `package.module:function` or
`path/to/file.py:function`.

Invariant: a function says "wrong" with a number and "I cannot judge this" by raising. Nothing here
guards against a function that hangs or crashes: the pool (`rft.rollout.reward_pool`) runs it in a
process that it can kill. What is `QUICK` can do neither.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from rft.ground.plugins import lookup
from rft.rollout.rewards.code import code_tests
from rft.rollout.rewards.data_sources import own, verl
from rft.rollout.rewards.judge import remote_judge
from rft.rollout.rewards.text import (
    accuracy,
    countdown,
    exact_match,
    format,
    gsm8k,
    math,
    math_boxed,
    math_dapo,
)
from rft.rollout.rewards.trinity import (
    accuracy_reward,
    bots_math_boxed_reward,
    countdown_reward,
    format_reward,
    math_boxed_reward,
    math_dapo_reward,
    math_eval_reward,
    math_reward,
    rm_gallery_reward,
    tool_call_reward,
)

RewardFunction = Callable[..., float | dict[str, float] | tuple[float, dict[str, float]]]
REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math": math,
    "math_boxed": math_boxed,
    "format": format,
    "accuracy": accuracy,
    "gsm8k": gsm8k,
    "countdown": countdown,
    "math_dapo": math_dapo,
    "code_tests": code_tests,
    "remote_judge": remote_judge,
    "verl": verl,
    **{  # as Trinity-RFT scores them
        one.__name__: one
        for one in (
            *(math_reward, math_boxed_reward, math_eval_reward, math_dapo_reward),
            *(accuracy_reward, format_reward, countdown_reward, rm_gallery_reward),
            *(tool_call_reward, bots_math_boxed_reward),
        )
    },
}
# Pure functions of ours whose time is linear in the length of their texts, whatever those say, and
# the arguments with which they are not: a pattern is the user's, and may backtrack for ever.
QUICK: dict[RewardFunction, tuple[str, ...]] = {exact_match: ("pattern",), gsm8k: ()}
WITHOUT_TRUTH = ("format", "code_tests", "remote_judge")  # those that can do without an answer
LAZY_IMPORTS = dict.fromkeys(
    (
        *("math", "math_boxed", "math_dapo", "math_reward", "math_eval_reward", "accuracy_reward"),
        *("math_dapo_reward", "bots_math_boxed_reward", "rm_gallery_reward"),
    ),
    "math_verify",
)  # seconds to import: only in processes that score


def resolve(name: str) -> RewardFunction:
    """The function called `name`: from the table, or the user's own `module:function` /
    `file.py:function`.
    """
    return lookup("reward", name, REWARDS)


def is_quick(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a reward that is called so is one of `QUICK`."""
    function = REWARDS.get(name)
    return function in QUICK and not any(slow in arguments for slow in QUICK[function])


def takes(name: str, argument: str) -> bool:
    """Whether the reward has a parameter of this name."""
    return argument in inspect.signature(resolve(name)).parameters


def prepare(name: str, arguments: Mapping[str, Any] | None = None) -> RewardFunction:
    """`resolve`, and import now what the function would import at its first call with these
    arguments.
    """
    function = resolve(name)
    if name == "verl" and arguments and arguments.get("path"):
        own(arguments["path"], arguments.get("function", "compute_score"))
    if name in LAZY_IMPORTS:
        module = importlib.import_module(LAZY_IMPORTS[name])
        # a line for each response it cannot parse
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)
    return function
