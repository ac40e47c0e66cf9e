"""Gymnasium's environments of texts and few actions (its toy_text, and what is like it), by words.

In: a name of an action, its number, or the first letter of its name. Out: the rendered text where
the environment has one ("ansi"), else its observation. Invariant: rewards are the environment's
own; an action that cannot be read leaves it as it is, is told, and costs `unread_reward`.
"""

import re
from typing import Any

import gymnasium

ACTIONS = {  # by the name before its version, in the order of their numbers
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
HERE = re.compile(r"\x1b\[4\dm(.)\x1b\[0m")  # where the player is: a colour behind the letter
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NUMBER = re.compile(r"[0-9]{1,9}")
PLAYER = "P"
LAKES = 1000  # maps that are tried


def lake(seed: int, size: int = 8, p: float = 0.8, max_path: "int | None" = None) -> "list[str]":
    """A map that can be crossed; of those that follow from this seed, the first one in at most
    `max_path` steps.
    """
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    if max_path is not None and max_path < 2 * (size - 1):
        raise ValueError(f"max_path={max_path}: a lake of size {size} takes {2 * (size - 1)} steps")
    for attempt in range(LAKES):
        made: list[str] = generate_random_map(size=size, p=p, seed=seed + attempt * 2**32)
        if max_path is None or crossing(made) <= max_path:
            return made
    raise ValueError(f"no lake of {LAKES} is crossed in max_path={max_path} steps: give more")


def crossing(made: "list[str]") -> int:
    """Steps of the shortest way from start to goal."""
    reached, steps = {(0, 0)}, 0
    while not any(made[row][column] == "G" for row, column in reached):
        beside = {
            (row + down, column + right)
            for row, column in reached
            for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0))
        }
        inside = range(len(made))
        reached |= {(r, c) for r, c in beside if r in inside and c in inside and made[r][c] != "H"}
        steps += 1
    return steps


def tagged(answer: str) -> "str | None":
    """What stands in its last <action></action>; in time that is linear in its length."""
    before, found, _ = answer.rpartition("</action>")
    _, begun, action = before.rpartition("<action>")
    return action.partition("</action>")[0] if found and begun else None


class Gymnasium:
    """`env_args`: those of `gymnasium.make`, and the named ones here. A row's `env_args` win."""

    packages = {"gymnasium": ("1",)}

    @classmethod
    def prepare(cls, env_id: str, **args: Any) -> None:
        made = cls(env_id, **args)
        made.reset({"seed": 0, "raw": {}})
        made.close()

    def __init__(
        self,
        env_id: str,
        instructions: "str | None" = None,
        random_map: "dict[str, Any] | None" = None,
        unread_reward: float = 0.0,
        **args: Any,
    ) -> None:
        """`instructions`: instead of our own words above the first observation. `random_map`: of
        FrozenLake, {size, p}, another one for every seed; a row's `size` and `p` win. With
        `max_path` it can be crossed in so many steps.
        """
        self.env_id, self.args, self.random_map = env_id, args, random_map
        self.instructions, self.unread_reward = instructions, float(unread_reward)
        self.env: Any = None

    def reset(self, task: "dict[str, Any]") -> str:
        args, seed = {**self.args, **task["raw"].get("env_args", {})}, int(task["seed"])
        if self.random_map is not None:
            own = {name: task["raw"][name] for name in ("size", "p") if name in task["raw"]}
            args["desc"] = lake(seed, **{**self.random_map, **own})
        self.env = gymnasium.make(self.env_id, **args)
        if "ansi" in self.env.metadata.get("render_modes", ()) and "render_mode" not in args:
            self.env.close()
            self.env = gymnasium.make(self.env_id, render_mode="ansi", **args)
        space = self.env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"{self.env_id} has actions of {space}: only numbered ones have names")
        known = ACTIONS.get(self.env_id.rpartition("-v")[0], ())
        numbers = range(int(space.start), int(space.start + space.n))
        self.actions = dict(zip(known or map(str, numbers), numbers, strict=True))
        seen, _ = self.env.reset(seed=seed)
        shown = self.shown(seen)
        if self.instructions is None:
            return (
                f"{self.env_id}. Choose one of: {', '.join(self.actions)}. Answer with its name "
                f"alone, or in <action></action>.\n{shown}"
            )
        return f"{self.instructions}{shown}"

    def step(self, action: str) -> "tuple[str, float, bool, dict[str, float]]":
        number = self.number(action)
        if number is None:
            told = f"that is no action: choose one of {', '.join(self.actions)}"
            return told, self.unread_reward, False, {"unread": 1.0}
        seen, reward, terminated, truncated, _ = self.env.step(number)
        info = {"terminated": float(terminated), "truncated": float(truncated)}
        return self.shown(seen), float(reward), bool(terminated or truncated), info

    def number(self, action: str) -> "int | None":
        said = tagged(action)
        words = re.findall(r"\w+", (action if said is None else said).lower())
        for word in reversed(words):
            if word in self.actions:
                return self.actions[word]
            # what int() reads of other digits, or of thousands, is no number of an action
            if NUMBER.fullmatch(word) and int(word) in self.actions.values():
                return int(word)
        first = {name[0]: number for name, number in self.actions.items()}
        if len(words) == 1 and len(words[0]) == 1 and len(first) == len(self.actions):
            return first.get(words[0])
        return None

    def shown(self, seen: Any) -> str:
        if self.env.render_mode != "ansi":
            return str(seen)
        text = HERE.sub(PLAYER if "FrozenLake" in self.env_id else r"[\1]", self.env.render())
        lines = [line.rstrip() for line in COLOUR.sub("", text).splitlines()]
        # the last action, which FrozenLake and Taxi write beside the map, is the model's own word
        return "\n".join(line for line in lines if line and not line.startswith("  ("))

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    @classmethod
    def rows(cls, count: int, seed: int, env_id: str, **args: Any) -> "list[dict[str, Any]]":
        return [
            {"prompt": env_id, "response": "", "seed": seed + number} for number in range(count)
        ]
