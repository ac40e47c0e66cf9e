"""reasoning-gym: a procedural task, one answer, the score of its own scorer.

In: an answer, of which <answer></answer> counts where it is there. Out: the score, between 0 and 1.
`env_id` is the name of a dataset (chain_sum), `env_args` its arguments. The task of a row is that
of its `seed` and `index`. Invariant: no answer is run as Python: some scorers evaluate what they
are given, and are given constants and formulas alone. An answer that a scorer cannot read has the
score of none at all.
"""

import ast
import inspect
import re
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

EVALUATES = re.compile(r"\b(eval|parse_expr)\(")
# Of a formula: no quotes, brackets or commas, no attribute, and calls of these functions only.
FORMULA = re.compile(r"(?!.*(__|\blambda\b|\.\s*[^\W\d]))[\w\s+\-*/^().!=]*", re.DOTALL)
CALLED = re.compile(r"([^\W\d]\w*)\s*\(")
FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot"}
FUNCTIONS |= {"asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs", "abs"}


class ReasoningGym:
    packages = {"reasoning-gym": ("0",)}

    @classmethod
    def prepare(cls, env_id: str, **args: Any) -> None:
        reasoning_gym.create_dataset(env_id, size=1, seed=0, **args)

    def __init__(self, env_id: str, **args: Any) -> None:
        self.env_id, self.args = env_id, args

    def reset(self, task: "dict[str, Any]") -> str:
        index = int(task["raw"].get("index", 0))
        self.data = reasoning_gym.create_dataset(
            self.env_id, size=index + 1, seed=int(task["seed"]), **self.args
        )
        self.entry = self.data[index]
        return self.entry["question"]

    def step(self, action: str) -> "tuple[None, float, bool, dict[str, float]]":
        tagged = extract_answer(action)
        score, read = self.scored(action.strip() if tagged is None else tagged)
        return None, score, True, {"tagged": float(tagged is not None), "unread": float(not read)}

    def scored(self, answer: str) -> "tuple[float, bool]":
        """Its score, and whether the scorer could read it."""
        if not evaluates(self.data) or is_harmless(answer):
            try:
                return self.data.score_answer(answer=answer, entry=self.entry), True
            except Exception:  # of the answer, unless the right one raises as well
                self.data.score_answer(answer=self.entry["answer"], entry=self.entry)
        return self.data.score_answer(answer=None, entry=self.entry), False

    @classmethod
    def rows(cls, count: int, seed: int, env_id: str, **args: Any) -> "list[dict[str, Any]]":
        """Tasks as text with their answers, for any workflow."""
        data = reasoning_gym.create_dataset(env_id, size=count, seed=seed, **args)
        return [
            {
                "prompt": entry["question"],
                "response": str(entry["answer"]),
                "seed": seed,
                "index": index,
            }
            for index, entry in enumerate(data)
        ]


def evaluates(data: Any) -> bool:
    """Whether its scorer runs Python."""
    return bool(EVALUATES.search(inspect.getsource(type(data).score_answer)))


def is_harmless(answer: str) -> bool:
    """Constants, or a formula."""
    if FORMULA.fullmatch(answer):
        return set(CALLED.findall(answer)) <= FUNCTIONS
    try:
        ast.literal_eval(answer.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
