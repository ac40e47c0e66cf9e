"""An environment package in the format of the hub of verifiers: count a letter of a word, in one
turn; or find a number, in several.
"""

import verifiers as vf
from datasets import Dataset

ROWS = [("banana", "a", 3), ("letter", "t", 2), ("abc", "z", 0)]


def load_environment(kind="single", broken=False):
    def right(completion, answer, **kwargs):
        if broken:
            raise KeyError("no such answer")
        return float(str(completion[-1]["content"]).strip() == answer)

    def short(completion):
        return 1.0 if len(str(completion[-1]["content"])) < 3 else 0.0

    def easy(level=""):
        return float(level == "easy")

    def longest(completions) -> list[float]:
        return [0.0 for _ in completions]

    if kind == "group":
        return vf.EnvGroup([load_environment(one, broken) for one in ("single", "multi")])
    funcs = [right, short, longest if kind == "compared" else easy]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, 0.25, 0.0])
    if kind == "multi":
        rows = {"question": ["a number below 8?"] * 2, "answer": ["5", "3"]}
        return Higher(dataset=Dataset.from_dict(rows), rubric=rubric, max_turns=4)
    rows = {
        "question": [f"how many {letter} in {word}?" for word, letter, _ in ROWS],
        "answer": [str(count) for *_, count in ROWS],
        "level": ["easy"] * len(ROWS),
    }
    kinds = {"single": vf.SingleTurnEnv, "tool": vf.ToolEnv, "compared": vf.SingleTurnEnv}
    more = {"tools": [count_letter]} if kind == "tool" else {}
    return kinds[kind](dataset=Dataset.from_dict(rows), rubric=rubric, **more)


def count_letter(word: str, letter: str) -> str:
    """How often a letter is in a word."""
    return str(word.count(letter))


class Higher(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = int(messages[-1]["content"])
        word = "lower" if said > int(state["answer"]) else "higher"
        return [{"role": "user", "content": word}]

    @vf.stop
    async def found(self, state):
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        return last is not None and str(last["content"]) == state["answer"]
