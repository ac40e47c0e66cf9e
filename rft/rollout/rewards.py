"""Reward functions: a response and its reference answer in, one number (or a dict of numbers) out.

A reward function is `(response: str, truth: str | None, task: Task, **task.reward_args) -> float |
dict[str, float]`; the entries of a dict are summed and become metrics. `REWARDS` is the whole
table; instead of a name from it users give their own `package.module:function` or
`path/to/file.py:function`.

Invariant: a function says "wrong" with a number and "I cannot judge this" by raising. Nothing here
guards against a function that hangs or crashes: the pool (`rft.rollout.reward_pool`) runs it in a
process that it can kill.
"""

import importlib
import logging
import re
from collections.abc import Callable

from rft.ground.experience import Task
from rft.ground.plugins import lookup
from rft.rollout.answers import as_number, final_answer, last_boxed, needed, same_mathematics
from rft.rollout.reward_kinds.code import code_tests
from rft.rollout.reward_kinds.countdown import countdown
from rft.rollout.reward_kinds.remote import remote_judge

RewardFunction = Callable[..., float | dict[str, float]]

# DeepSeek-R1's response form: a thought, then something that is not empty
THINK_FORM = r"\s*<think>.*?</think>.*\S.*"


def exact_match(
    response: str,
    truth: str | None,
    task: Task,
    pattern: str | None = None,
    ignore_case: bool = False,
) -> float:
    """1 when the stripped response equals the stripped truth.

    `pattern`: compare its last match (group 1 if any).
    """
    answer = response
    if pattern is not None:
        matches = list(re.finditer(pattern, response, re.DOTALL))
        if not matches:
            return 0.0
        answer = matches[-1].group(1 if matches[-1].re.groups else 0) or ""
    answer, expected = answer.strip(), needed(truth, task).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def math(response: str, truth: str | None, task: Task) -> float:
    """1 when math-verify (Hugging Face; `1/2`, `0.5` and `\\frac12` are equal) finds the truth in
    the response.
    """
    return same_mathematics(response, needed(truth, task))


def math_boxed(response: str, truth: str | None, task: Task) -> float:
    """As `math`, but only the last `\\boxed{...}` counts as the answer
    (the convention of the MATH data set).
    """
    answer = last_boxed(response)
    return 0.0 if answer is None else same_mathematics(f"\\boxed{{{answer}}}", needed(truth, task))


def format(
    response: str, truth: str | None, task: Task, pattern: str = THINK_FORM, score: float = 1.0
) -> float:
    """`score` when the whole response has the form `pattern` (default:

    `<think>..</think>`, then an answer), else 0.
    """
    return score if re.fullmatch(pattern, response, re.DOTALL) else 0.0


def accuracy(response: str, truth: str | None, task: Task) -> float:
    """1 when the final answers agree: what `<answer>` or `\\boxed{}` holds, what follows `####`, or
    the last number.

    Numbers are compared as numbers ("1,200.0" is "1200"), anything else as text without case and
    surrounding space.
    """
    expected = final_answer(needed(truth, task)) or needed(truth, task).strip()
    answer = final_answer(response)
    if answer is None:
        return 0.0
    ours, theirs = as_number(answer), as_number(expected)
    if ours is not None and theirs is not None:
        return float(abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)))
    return float(answer.strip().casefold() == expected.strip().casefold())


def gsm8k(response: str, truth: str | None, task: Task, score: float = 1.0) -> float:
    """`score` when the number behind the response's last `####` is the one behind the truth's (the
    data set's own form).
    """
    answer, expected = (
        as_number(text.rpartition("####")[2]) for text in (response, needed(truth, task))
    )
    if expected is None:
        raise ValueError(
            f"task {task.id}: its reference answer does not end in a number: {truth!r:.200}"
        )
    return score if "####" in response and answer == expected else 0.0


def math_dapo(
    response: str,
    truth: str | None,
    task: Task,
    response_tokens: int = -1,
    overlong: bool = False,
    max_response_tokens: int | None = None,
    cache_tokens: int = 4096,
    penalty_factor: float = 1.0,
) -> dict[str, float]:
    """1 when the final answer is the truth, else -1 (Yu et al. 2025, arXiv:2503.14476, eq. 7).

    `overlong` adds their soft penalty (eq. 13) on the response's length: 0 up to max - cache
    tokens, from there linear to -penalty_factor at max. `max_response_tokens`: default that of the
    run.
    """
    found = {
        "accuracy": 1.0 if accuracy(response, truth, task) or math(response, truth, task) else -1.0
    }
    if not overlong:
        return found
    if response_tokens < 0:
        raise ValueError(
            "math_dapo with overlong needs the number of the response's tokens: pass it to "
            "ctx.score"
        )
    longest = max_response_tokens or task.sampling.max_tokens
    over = response_tokens - (longest - cache_tokens)
    return found | {"overlong": -penalty_factor * min(1.0, max(0.0, over / cache_tokens))}


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
}
LAZY_IMPORTS = dict.fromkeys(
    ("math", "math_boxed", "math_dapo"), "math_verify"
)  # seconds to import: only in processes that score


def resolve(name: str) -> RewardFunction:
    """The function called `name`: from the table, or the user's own `module:function` /
    `file.py:function`.
    """
    return lookup("reward", name, REWARDS)


def prepare(name: str) -> RewardFunction:
    """`resolve`, and import now what the function would import at its first call."""
    function = resolve(name)
    if name in LAZY_IMPORTS:
        module = importlib.import_module(LAZY_IMPORTS[name])
        # a line for each response it cannot parse
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)
    return function
