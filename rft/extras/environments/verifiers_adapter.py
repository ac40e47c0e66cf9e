"""Environment packages in the format of the hub of `verifiers`: a module with
`load_environment(**args)` that returns a SingleTurnEnv, a MultiTurnEnv, a ToolEnv or the like.

In: a row of its dataset, the address of the model. Out: its rubric's reward and metrics. It leads
the conversation itself. `env_id`: the name of an installed package, or the directory of one.
Invariant: a rollout that ended with an error, and a reward function that raised, are raised:
verifiers counts them as reward 0.
"""

import contextvars
import functools
import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

RAISED: "contextvars.ContextVar[list[BaseException]]" = contextvars.ContextVar("raised")


class Verifiers:
    packages = {"verifiers": ("0.2",)}
    drives = True
    env: Any = None  # one of a process; a rollout keeps its own state

    @classmethod
    def prepare(cls, env_id: str, **args: Any) -> None:
        place = Path(env_id).expanduser()
        if place.is_dir():
            sys.path.insert(0, str(place.resolve()))
        logging.getLogger("verifiers").setLevel(logging.WARNING)
        cls.env = verifiers.load_environment(place.name, **args)
        for rubric in rubrics(cls.env.rubric):
            if rubric.has_group_rewards:
                raise ValueError(
                    f"{env_id} has a reward function that compares the answers of a group, and "
                    "each is scored alone here: use another rubric, or rft's workflow ruler"
                )
            rubric.funcs = [watched(function) for function in rubric.funcs]

    def __init__(self, env_id: str, **args: Any) -> None:
        self.client: AsyncOpenAI | None = None

    async def drive(
        self, task: "dict[str, Any]", access: "dict[str, Any]"
    ) -> "tuple[float, dict[str, float]]":
        raised: list[BaseException] = []
        RAISED.set(raised)
        self.client = AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"])
        made = await self.env.run_rollout(
            self.input(task), OpenAIChatCompletionsClient(self.client), "policy", {}
        )
        if raised:
            raise raised[0]
        if made.get("error"):
            raise RuntimeError(f"the rollout of verifiers failed: {made['error']}")
        return made["reward"], {**made["metrics"], "truncated": float(made["is_truncated"])}

    def input(self, task: "dict[str, Any]") -> "dict[str, Any]":
        """The row that `rows` wrote, else that of the environment's dataset with its number."""
        given = task["raw"].get("input")
        if given is None:
            return dict(self.env.get_dataset()[task["row"]])
        return json.loads(given) if isinstance(given, str) else given

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()

    @classmethod
    def rows(cls, count: int, seed: int, env_id: str, **args: Any) -> "list[dict[str, Any]]":
        """`input` as text: rows of one dataset have columns of one type."""
        found = []
        for row in cls.env.get_dataset(count, seed):
            prompt = row["prompt"]
            shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            # a reward function may ask for any column
            kept = {name: value for name, value in row.items() if value is not None}
            answer = str(row.get("answer", ""))
            found.append(
                {"prompt": shown, "response": answer, "input": json.dumps(kept, default=str)}
            )
        return found


def rubrics(rubric: Any) -> "list[Any]":
    group = getattr(rubric, "env_map", {}).values()  # of an EnvGroup
    inner = getattr(rubric, "rubrics", None) or [env.rubric for env in group]
    return [one for group in inner for one in rubrics(group)] if inner else [rubric]


def watched(function: Any) -> Any:
    """The same function; what it raises is also told to the rollout that asked."""

    async def waits(*given: Any, **named: Any) -> Any:
        try:
            made = function(*given, **named)
            return await made if inspect.isawaitable(made) else made
        except Exception as error:
            RAISED.get().append(error)
            raise

    return functools.wraps(function)(waits)
