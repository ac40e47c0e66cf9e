"""What a response says its answer is: text in, the answer out.

Pure text, but for math-verify where mathematics is compared.
"""

import re

from rft.ground.experience import Task

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


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
    """The answer that a text ends in:

    `<answer>`, `\\boxed{}`, `#### x`, else its last number; None without any.
    """
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
    text = text.strip().strip("$").replace(",", "").removesuffix("%").removesuffix(".")
    return float(text) if NUMBER.fullmatch(text) else None
