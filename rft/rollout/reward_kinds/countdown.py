"""The countdown task: make a target from given numbers, each used once. An equation in, 0, 0.1 or 1
out.

The row gives `numbers` and `target` (or the reference answer is the target). Invariant: nothing of
a response is executed; it is parsed as arithmetic, with sizes bounded, and computed exactly.
"""

import ast
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from rft.ground.experience import Task
from rft.rollout.answers import needed

LONGEST = 500  # characters of an equation: trees of any depth would end the parser
OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def countdown(
    response: str, truth: str | None, task: Task, score: float = 1.0, format_score: float = 0.1
) -> float:
    """`score` for an equation of `task.raw["numbers"]` whose value is the target; `format_score`
    for another; 0 for none.
    """
    given = Counter(Fraction(str(number)) for number in _column(task, "numbers", "nums"))
    target = (
        Fraction(str(task.raw["target"])) if "target" in task.raw else Fraction(needed(truth, task))
    )
    said = ANSWER.findall(response)
    if not said:
        return 0.0
    tree = _parsed(said[-1].partition("=")[0])
    if tree is None:
        return 0.0
    used: list[Fraction] = []
    try:
        value = _value(tree, used)
    # divided by 0, or something else than numbers and operations
    except (ArithmeticError, ValueError):
        return format_score
    return score if value == target and Counter(used) == given else format_score


def _parsed(text: str) -> ast.expr | None:
    text = text.strip().replace("×", "*").replace("÷", "/")
    if len(text) > LONGEST:
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _value(tree: ast.expr, used: list[Fraction]) -> Fraction:
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        used.append(Fraction(str(tree.value)))
        return used[-1]
    if isinstance(tree, ast.BinOp) and type(tree.op) in OPERATIONS:
        found: Fraction = OPERATIONS[type(tree.op)](
            _value(tree.left, used), _value(tree.right, used)
        )
        return found
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value(tree.operand, used)
    raise ValueError(f"no arithmetic: {ast.dump(tree)}")


def _column(task: Task, *names: str) -> Any:
    for name in names:
        if name in task.raw:
            return task.raw[name]
    raise ValueError(
        f"task {task.id}: countdown needs the column `{names[0]}` (or `{names[1]}`) of its row"
    )
