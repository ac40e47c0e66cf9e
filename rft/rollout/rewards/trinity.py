"""Rewards as Trinity-RFT scores them, under its own names: the same answer gets the same number.

In: a response, the reference answer, the task. Out: the parts that the reference reports, whose sum
is the reward. Invariant: nothing here is changed to be kinder than the published formula, nor
stricter; rft's own rewards (`rft.rollout.rewards.text`) keep their own meaning. Where the reference
would run a response as Python (`countdown_reward`), it is parsed instead.
"""

import ast
import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import isclose
from typing import Any

from rft.ground.experience import Task
from rft.rollout.rewards.text import (
    OPERATIONS,
    last_boxed,
    needed,
    parsed,
    penalty,
    tagged,
    value_of,
)

FORM = 0.1  # what its form adds to a response or takes off
MATH_FORM = r"(?s).*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
LINES_FORM = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
GALLERY = ("math_verify_reward",)  # names of RM-Gallery that are scored here
ARITHMETIC = re.compile(r"[\d+\-*/().\s]+")
PYTHONS = OPERATIONS | {
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Pow: lambda a, b: _power(a, b),
}
ANSWER_IS = re.compile(r"(?i)(?:final|the)\s+answer\s+is\s*:?\s*(.+)")
LAST_NUMBER = re.compile(r"[-+]?\d*\.?\d+")

# --- the form ------------------------------------------------------------------------------------


def format_reward(
    response: str, truth: str | None, task: Task, pattern: str = LINES_FORM
) -> dict[str, float]:
    """0.1 when the response begins in the form `pattern` (default: <think> and <answer>, each tag
    in a line of its own), else -0.1.
    """
    return {"format_score": _form(pattern, response)}


def _form(pattern: str, response: str) -> float:
    return FORM if re.match(pattern, response, re.DOTALL | re.MULTILINE) else -FORM


def thinks_once(response: str) -> bool:
    """One <think>, and behind it one </think>."""
    return response.count("<think>") == response.count("</think>") == 1 and response.index(
        "<think>"
    ) < response.index("</think>")


# --- mathematics ---------------------------------------------------------------------------------


def math_reward(
    response: str, truth: str | None, task: Task, pattern: str = MATH_FORM
) -> dict[str, float]:
    """1 when what `<answer>` holds (else the whole response) is the same mathematics as the truth;
    0.1 more for the form <think>..</think><answer>..</answer>, 0.1 less without it.
    """
    return {
        "accuracy": _verified(_said(response), _said(needed(truth, task))),
        "format_score": _form(pattern, response),
    }


def _said(text: str) -> list[Any]:
    """What math-verify reads in the first <answer> of one line, else anywhere."""
    from math_verify import parse

    found = next((said for line in text.split("\n") for said in tagged(line, "answer")), text)
    return parse(found, parsing_timeout=None)


def _verified(answer: Any, truth: Any) -> float:
    from math_verify import verify

    return float(verify(answer, truth, timeout_seconds=None))


def accuracy_reward(response: str, truth: str | None, task: Task) -> dict[str, float]:
    """1 when the LaTeX that the response marks, `\\boxed{}` first, is the truth."""
    from math_verify import LatexExtractionConfig, parse

    expected = needed(truth, task)
    gold = parse(
        expected,
        extraction_mode="first_match",
        extraction_config=[LatexExtractionConfig()],
        parsing_timeout=None,
    )
    usual = LatexExtractionConfig().normalization_config
    marked = LatexExtractionConfig(
        normalization_config=replace(usual, nits=False, malformed_operators=False),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = parse(
        response, extraction_mode="first_match", extraction_config=[marked], parsing_timeout=None
    )
    return {"accuracy": _verified(answer, gold or expected)}


def math_boxed_reward(
    response: str,
    truth: str | None,
    task: Task,
    with_think: bool = False,
    format_score_coef: float = FORM,
) -> dict[str, float]:
    """1 when the last `\\boxed{}` reads as the truth once spaces, units and ways of writing are
    taken off: texts are compared, nothing is computed. `with_think`: `format_score_coef` less
    without one <think>..</think>; the workflow gives both.
    """
    answer, gold = _boxed(response), _boxed(needed(truth, task)) or needed(truth, task)
    told = {"accuracy": float(answer is not None and plain(answer) == plain(gold))}
    lost = with_think and not thinks_once(response)
    return told | {"format_score": -(format_score_coef or FORM) if lost else 0.0}


def math_eval_reward(response: str, truth: str | None, task: Task) -> dict[str, float]:
    """1 when the final answer (boxed, else behind "the answer is", else the last number) equals
    that of the truth; numbers to 1e-4, also as percent.
    """
    answer, gold = _final(response), _final(needed(truth, task))
    same = answer is not None and gold is not None and _equal(answer, gold)
    return {"accuracy": float(same)}


def math_dapo_reward(
    response: str,
    truth: str | None,
    task: Task,
    response_tokens: int = -1,
    enable_overlong_penalty: bool = False,
    max_response_length: int | None = None,
    cache_length: int = 4096,
    penalty_factor: float = 1.0,
) -> dict[str, float]:
    """1 when the last box behind </think>, or the whole text there, is the truth, else -1; and
    `math_dapo`'s penalty on length.
    """
    behind = response.rpartition("</think>")[2]
    boxed, gold = last_boxed(behind), needed(truth, task)
    right = _equal(boxed, gold) if boxed else _equal_text(behind, gold)
    told = {"accuracy": 1.0 if right else -1.0, "format_score": 0.0}
    if enable_overlong_penalty:
        told["format_score"] = penalty(
            task, response_tokens, max_response_length, cache_length, penalty_factor
        )
    return told


def bots_math_boxed_reward(
    response: str,
    truth: str | None,
    task: Task,
    with_think: bool = False,
    format_score_coef: float = FORM,
) -> dict[str, float]:
    """As `math_dapo_reward` finds it right, 1 or 0; and `math_boxed_reward`'s form."""
    right = math_dapo_reward(response, truth, task)["accuracy"] > 0
    form = math_boxed_reward(response, truth, task, with_think, format_score_coef)
    return form | {"accuracy": float(right)}


def rm_gallery_reward(
    response: str, truth: str | None, task: Task, reward_name: str = ""
) -> dict[str, float]:
    """`reward_name=math_verify_reward`: 1 when the first thing read in truth and response agree."""
    from math_verify import parse

    if reward_name not in GALLERY:
        raise ValueError(f"rm_gallery_reward scores {', '.join(GALLERY)}, not {reward_name!r}")
    gold, answer = (
        parse(text.strip(), parsing_timeout=None) for text in (needed(truth, task), response)
    )
    return {"math_verify": _verified(gold[0], answer[0]) if gold and answer else 0.0}


# --- one answer against another -------------------------------------------------------------------

UNITS = (
    *("degree", "deg", "mph", "kmph", "km", "cm", "mm", "m", "meter", "metre", "mile", "ft"),
    *("feet", "foot", "inch", "inches", "yard", "kg", "g", "gm", "lb", "liter", "litre", "gallon"),
    *("day", "hour", "hr", "minute", "min", "second", "sec", "month", "year", "yr", "percent"),
    *("square", "sq", "cubic", "cube", "unit", "coin", "men", "women", "way", "apple", "acre"),
)
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)
PLAIN = [  # what is written otherwise, in this order
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\n|\\!|\\left|\\right|\\mathbf|\\?[$%]|\^\{?\\circ\}?|\\mbox\{.*?\}", ""),
        (r"[td]frac", "frac"),
        (r"\\(ne|le|ge)q", r"\\\1"),
        (r"\\([{}])", r"\1"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"(^|\W)(?:" + "|".join(UNITS) + r")s?(?=\W|$)", r"\1"),
        (r"^\s*[a-zA-Z]\s*=\s*", ""),
        (r"(\d)\.0+(?!\d)", r"\1"),
        (r"(^|[ {])\.(?=\d)", r"\g<1>0."),
        (r"\s", ""),
        (r"\\sqrt(\w+)", r"\\sqrt{\1}"),
        (r"\\frac([^{])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})([^{])", r"\1{\2}"),
        (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
        (r"^[({](.*)[)}]$", r"\1"),
    )
]


def plain(text: str) -> str:
    """An answer without spaces, units, signs of money and percent, and other ways of writing."""
    found = text.strip().rstrip(".")
    for pattern, written in PLAIN:
        found = pattern.sub(written, found) or found
    return str(WORDS.index(found.lower())) if found.lower() in WORDS else found


def _boxed(text: str) -> str | None:
    """What the last box holds, also one without braces, `\\boxed 5`."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    return last_boxed(text)


def _final(text: str) -> str | None:
    boxed = _boxed(text)
    if boxed is not None:
        return plain(boxed)
    if said := ANSWER_IS.search(text):
        return plain(said[1])
    numbers = LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def _equal(answer: str, truth: str) -> bool:
    """As texts, as numbers, or as mathematics."""
    from math_verify import parse, verify

    if _equal_text(answer, truth):
        return True
    given, gold = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (plain(answer), plain(truth))
    )
    return bool(given and gold) and bool(verify(gold, given, timeout_seconds=None))


def _equal_text(answer: str, truth: str) -> bool:
    """The same text, or the same number, where a percent may stand for its share."""
    given, gold = plain(answer).lower(), plain(truth).lower()
    if given == gold:
        return True
    try:
        value, expected = (float(text.replace(",", "")) for text in (given, gold))
    except ValueError:
        return False
    return any(isclose(value, expected * share, rel_tol=1e-4) for share in (1, 0.01, 100))


# --- other answers --------------------------------------------------------------------------------


def countdown_reward(response: str, truth: str | None, task: Task) -> dict[str, float]:
    """1 for an equation in <answer>, in the last line, that uses each number once and makes the
    target, 0.1 for another, 0 for none. The truth is JSON with `numbers` and `target`, or the row
    has these columns.
    """
    numbers, target = _countdown(truth, task)
    said = tagged(response.split("\n")[-1], "answer")
    if not said:
        return {"score": 0.0}
    equation = said[-1].strip()
    used = sorted(map(int, re.findall(r"\d+", equation)))
    value = _computed(equation) if used == sorted(numbers) else None
    right = value is not None and abs(value - Fraction(str(target))) < Fraction(1, 100_000)
    return {"score": 1.0 if right else FORM}


def _power(a: Fraction, b: Fraction) -> Fraction:
    if b.denominator != 1 or abs(b) > 64:
        raise ValueError("too large, or no fraction")
    return Fraction(a**b.numerator)


def _countdown(truth: str | None, task: Task) -> tuple[list[int], Any]:
    try:
        told = json.loads(truth or "null")
    except ValueError:
        told = None
    told = told if isinstance(told, dict) else task.raw
    if "numbers" not in told or "target" not in told:
        raise ValueError(
            f"task {task.id}: countdown_reward needs `numbers` and `target`: as JSON in the "
            "reference answer, or as columns of the row"
        )
    return [int(number) for number in told["numbers"]], told["target"]


def _computed(equation: str) -> Fraction | None:
    tree = parsed(equation) if ARITHMETIC.fullmatch(equation) else None
    try:
        return value_of(tree, [], PYTHONS) if tree else None
    except (ArithmeticError, ValueError):
        return None


def tool_call_reward(response: str, truth: str | None, task: Task) -> dict[str, float]:
    """1 when the response thinks once and then calls, in <tool_call>, exactly the tools with
    exactly the arguments of the row's `answer` (JSON), in any order; else 0.
    """
    given = task.raw.get("answer", truth)
    expected = json.loads(given) if isinstance(given, str) else given
    expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(expected, list):
        raise ValueError(f"task {task.id}: its column `answer` is no JSON list of tool calls")
    made = _called(response)
    right = made is not None and thinks_once(response) and made == _counted(expected)
    in_order = right and response.index("</think>") < response.index("<tool_call>")
    return {"reward": float(in_order)}


def _called(response: str) -> Counter[tuple[str, str]] | None:
    """The calls in the last <tool_call>; None where there are none that can be read."""
    said = tagged(response, "tool_call")
    if not said:
        return None
    try:
        made = json.loads(said[-1])
        made = json.loads(made) if isinstance(made, str) else made
        return _counted([made] if isinstance(made, dict) else made)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _counted(calls: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((one["name"], json.dumps(one["arguments"], sort_keys=True)) for one in calls)
