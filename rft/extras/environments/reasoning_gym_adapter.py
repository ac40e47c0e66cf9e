"""reasoning-gym: a procedural task, one answer, the score of its own scorer.

In: an answer, of which <answer></answer> counts where it is there. Out: the score, between 0 and 1.
`env_id` is the name of a dataset (chain_sum), `env_args` its arguments. The task of a row is that
of its `seed` and `index`.
"""

from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


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
        answer = action.strip() if tagged is None else tagged
        score = self.data.score_answer(answer=answer, entry=self.entry)
        return None, score, True, {"tagged": float(tagged is not None)}

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
