"""Reward functions: a response and its reference answer in, one number (or a dict of numbers) out.

A reward function is `(response: str, truth: str | None, task: Task, **task.reward_args) -> float | dict[str, float]`;
the entries of a dict are summed and become metrics. `REWARDS` is the whole table; instead of a name from it users give
their own `package.module:function` or `path/to/file.py:function`.

Invariant: a function says "wrong" with a number and "I cannot judge this" by raising. Nothing here guards against a
function that hangs or crashes: the pool (`rft.rollout.reward_pool`) runs it in a process that it can kill.
"""

import difflib
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rft.config import ConfigError
from rft.experience import Task

RewardFunction = Callable[..., float | dict[str, float]]

THINK_FORM = r"\s*<think>.*?</think>.*\S.*"  # DeepSeek-R1's response form: a thought, then something that is not empty
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def exact_match(
    response: str, truth: str | None, task: Task, pattern: str | None = None, ignore_case: bool = False
) -> float:
    """1 when the stripped response equals the stripped truth. `pattern`: compare its last match (group 1 if any)."""
    answer = response
    if pattern is not None:
        matches = list(re.finditer(pattern, response, re.DOTALL))
        if not matches:
            return 0.0
        answer = matches[-1].group(1 if matches[-1].re.groups else 0) or ""
    answer, expected = answer.strip(), _needed(truth, task).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def math(response: str, truth: str | None, task: Task) -> float:
    """1 when math-verify (Hugging Face; `1/2`, `0.5` and `\\frac12` are equal) finds the truth in the response."""
    return _same_mathematics(response, _needed(truth, task))


def math_boxed(response: str, truth: str | None, task: Task) -> float:
    """As `math`, but only the last `\\boxed{...}` counts as the answer (the convention of the MATH data set)."""
    answer = last_boxed(response)
    return 0.0 if answer is None else _same_mathematics(f"\\boxed{{{answer}}}", _needed(truth, task))


def format(response: str, truth: str | None, task: Task, pattern: str = THINK_FORM, score: float = 1.0) -> float:
    """`score` when the whole response has the form `pattern` (default: `<think>..</think>`, then an answer), else 0."""
    return score if re.fullmatch(pattern, response, re.DOTALL) else 0.0


def accuracy(response: str, truth: str | None, task: Task) -> float:
    """1 when the final answers agree: what `<answer>` or `\\boxed{}` holds, what follows `####`, or the last number.

    Numbers are compared as numbers ("1,200.0" is "1200"), anything else as text without case and surrounding space.
    """
    expected = final_answer(_needed(truth, task)) or _needed(truth, task).strip()
    answer = final_answer(response)
    if answer is None:
        return 0.0
    ours, theirs = _as_number(answer), _as_number(expected)
    if ours is not None and theirs is not None:
        return float(abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)))
    return float(answer.strip().casefold() == expected.strip().casefold())


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math": math,
    "math_boxed": math_boxed,
    "format": format,
    "accuracy": accuracy,
}
LAZY_IMPORTS = {"math": "math_verify", "math_boxed": "math_verify"}  # seconds to import: only in processes that score


def resolve(name: str) -> RewardFunction:
    """The function called `name`: from the table, or the user's own `module:function` / `file.py:function`."""
    return lookup("reward", name, REWARDS)


def prepare(name: str) -> RewardFunction:
    """`resolve`, and import now what the function would import at its first call."""
    function = resolve(name)
    if name in LAZY_IMPORTS:
        module = importlib.import_module(LAZY_IMPORTS[name])
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)  # a line for each response it cannot parse
    return function


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """`table[name]`, or what the import path `name` points to; ConfigError with the nearest name or the reason."""
    if name in table:
        return table[name]
    if ":" not in name:
        nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"unknown {kind} {name!r}: {hint}known are {', '.join(table)}; your own is "
            "'package.module:function' or 'path/to/file.py:function'"
        )
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{kind} {name!r}: cannot import {place!r}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r}: {place!r} has no function {attribute!r}")
    return found


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            if depth == 0:
                return text[begin:position]
            depth -= 1
    return None


def final_answer(text: str) -> str | None:
    """The answer that a text ends in: `<answer>`, `\\boxed{}`, `#### x`, else its last number; None without any."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _same_mathematics(response: str, truth: str) -> float:
    from math_verify import parse, verify

    # math-verify's own limits are SIGALRM handlers and cannot stop C code; the pool's kill is the limit.
    marked = "$" in truth or "\\boxed" in truth
    gold = parse(truth if marked else f"\\boxed{{{truth.rpartition('####')[2].strip()}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify reads no expression in the truth {truth!r}")
    answer = parse(response, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def _needed(truth: str | None, task: Task) -> str:
    if truth is None:
        raise ValueError(f"task {task.id} has no reference answer (format.response_key), but its reward needs one")
    return truth


def _as_number(text: str) -> float | None:
    text = text.strip().strip("$").replace(",", "").removesuffix("%").removesuffix(".")
    return float(text) if NUMBER.fullmatch(text) else None


def _load_file(path: Path) -> ModuleType:
    name = "rft_user_" + re.sub(r"\W", "_", str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path.resolve()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module  # only once it is whole: a half-executed module is not found by a second try
    return module
