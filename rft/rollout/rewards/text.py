"""Rewards that read the text of a response: the answer that it says, against the reference answer.

In: a response, the reference, the task. Out: a number, or a dict of numbers. Pure text, but for
math-verify where mathematics is compared. Invariant: nothing of a response is executed: arithmetic
(`countdown`) is parsed, with sizes bounded, and computed exactly.
"""

import ast
import re
from collections import Counter
from fractions import Fraction
from math import inf, isfinite
from typing import Any

from rft.ground.experience import Task

# behind a digit a minus takes away, and is of no number
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MINUS = "\u2212"  # as mathematics is typeset, and models write it
# DeepSeek-R1's response form: a thought, then something that is not empty
THINK_FORM = r"\s*<think>.*?</think>.*\S.*"
# signs of mathematics, or a digit that belongs to a word (H2O)
FORMULA = re.compile(r"[\\^_(){}\[\]/=+*<>|]|[^\W\d_]\d|\d[^\W\d_]")
LONGEST = 500  # characters of an equation: trees of any depth would end the parser
OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


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
    surrounding space. A truth that marks nothing is the answer itself, or a number among words: the
    last number of `\\frac{1}{2}` is none.
    """
    reference = needed(truth, task)
    is_whole = FORMULA.search(reference) or len(NUMBER.findall(reference)) != 1
    marked = marked_answer(reference)
    expected = marked or (reference.strip() if is_whole else final_answer(reference) or "")
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
    enable_overlong_penalty: bool = False,
    max_response_length: int | None = None,
    cache_length: int = 4096,
    penalty_factor: float = 1.0,
) -> dict[str, float]:
    """1 when the final answer is the truth, else -1 (Yu et al. 2025, arXiv:2503.14476, eq. 7).

    `enable_overlong_penalty` adds their soft penalty (eq. 13) on the response's length: 0 up to max
    - cache tokens, from there linear to -penalty_factor at max. `max_response_length`: default that
    of the run.
    """
    found = {
        "accuracy": 1.0 if accuracy(response, truth, task) or math(response, truth, task) else -1.0
    }
    if not enable_overlong_penalty:
        return found
    return found | {
        "overlong": penalty(
            task, response_tokens, max_response_length, cache_length, penalty_factor
        )
    }


def penalty(
    task: Task, response_tokens: int, longest: int | None, cache_length: int, factor: float
) -> float:
    """DAPO's soft penalty on the length of a response."""
    if response_tokens < 0:
        raise ValueError(
            f"{task.reward} with enable_overlong_penalty needs the number of the response's "
            "tokens: pass it to ctx.score"
        )
    over = response_tokens - ((longest or task.sampling.max_tokens) - cache_length)
    return -factor * min(1.0, max(0.0, over / cache_length))


def countdown(
    response: str, truth: str | None, task: Task, score: float = 1.0, format_score: float = 0.1
) -> float:
    """Make a target from given numbers, each used once; the row gives `numbers` and `target` (or
    the reference answer is the target).

    `score` for an equation of `task.raw["numbers"]` whose value is the target; `format_score`
    for another; 0 for none.
    """
    given = Counter(Fraction(str(number)) for number in _column(task, "numbers", "nums"))
    target = (
        Fraction(str(task.raw["target"])) if "target" in task.raw else Fraction(needed(truth, task))
    )
    said = tagged(response, "answer")
    if not said:
        return 0.0
    tree = parsed(said[-1].partition("=")[0])
    if tree is None:
        return 0.0
    used: list[Fraction] = []
    try:
        value = value_of(tree, used)
    # divided by 0, or something else than numbers and operations
    except (ArithmeticError, ValueError):
        return format_score
    return score if value == target and Counter(used) == given else format_score


def parsed(text: str) -> ast.expr | None:
    text = text.strip().replace("×", "*").replace("÷", "/")
    if len(text) > LONGEST:
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def value_of(
    tree: ast.expr, used: list[Fraction], operations: dict[type, Any] = OPERATIONS
) -> Fraction:
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        used.append(Fraction(str(tree.value)))
        return used[-1]
    if isinstance(tree, ast.BinOp) and type(tree.op) in operations:
        found: Fraction = operations[type(tree.op)](
            value_of(tree.left, used, operations), value_of(tree.right, used, operations)
        )
        return found
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -value_of(tree.operand, used, operations)
    raise ValueError(f"no arithmetic: {ast.dump(tree)}")


def _column(task: Task, *names: str) -> Any:
    for name in names:
        if name in task.raw:
            return task.raw[name]
    raise ValueError(
        f"task {task.id}: countdown needs the column `{names[0]}` (or `{names[1]}`) of its row"
    )


# --- what a response says its answer is ---------------------------------------------------------


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


def tagged(text: str, tag: str) -> list[str]:
    """What stands between <tag> and the next </tag>, in time that is linear in the text's length:
    a model that repeats itself writes thousands of tags without an end.
    """
    begin, end, found, at = f"<{tag}>", f"</{tag}>", [], 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
        found.append(text[start + len(begin) : stop])
        at = stop + len(end)
    return found


def final_answer(text: str) -> str | None:
    """The answer that a text ends in: a marked one, else its last number; None without any."""
    if (marked := marked_answer(text)) is not None:
        return marked
    numbers = NUMBER.findall(text.replace(MINUS, "-"))
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    """What the last `<answer>`, `\\boxed{}` or `####` holds."""
    if said := tagged(text, "answer"):
        return said[-1].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return None


def same_mathematics(response: str, truth: str) -> float:
    from math_verify import parse, verify

    # math-verify's own limits are SIGALRM handlers and cannot stop C code; the pool's kill is the
    # limit.
    marked = "$" in truth or "\\boxed" in truth
    gold = parse(
        truth if marked else f"\\boxed{{{truth.rpartition('####')[2].strip()}}}",
        parsing_timeout=None,
    )
    if not gold:
        raise ValueError(f"math-verify reads no expression in the truth {truth!r}")
    answer = parse(response, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def needed(truth: str | None, task: Task) -> str:
    if truth is None:
        raise ValueError(
            f"task {task.id} has no reference answer (format.response_key), but its reward needs "
            "one"
        )
    return truth


def as_number(text: str) -> float | None:
    """None for a text that is none, and for one of more digits than a float can hold."""
    text = text.strip().strip("$").replace(",", "").replace(MINUS, "-")
    text = text.removesuffix("%").removesuffix(".")
    found = float(text) if NUMBER.fullmatch(text) else inf
    return found if isfinite(found) else None
