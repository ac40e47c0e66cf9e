"""ScienceWorld: experiments of a primary school in a world of text; its simulator runs under Java.

In: a command, of which <action></action> counts where it is there, else the last line. Out: what
the simulator says. Rewards are shares of its 100 points, and their sum is the most that an episode
stood at above its beginning: what is lost later takes nothing away. `env_id` is the name of a task
(boil); a row may name its own as `task_name` and `var_num`, also as JSON in its prompt. The
simulator is that of the package, whatever `jar_path` a row has.
"""

import json
import shutil
from typing import Any

from scienceworld import ScienceWorldEnv

UNREAD = "No known action matches that input."
POINTS = 100.0
SPLITS = ("train", "dev", "test")


class ScienceWorld:
    packages = {"scienceworld": ("1",)}
    idle: "list[ScienceWorldEnv]" = []  # simulators whose episode is over: each is a Java process

    @classmethod
    def prepare(cls, env_id: str = "", split: str = "train", **args: Any) -> None:
        if shutil.which("java") is None:
            raise RuntimeError("there is no java: install a Java runtime (default-jre-headless)")
        if split not in SPLITS:
            raise ValueError(f"split={split}: choose one of {', '.join(SPLITS)}")
        made = cls(env_id, split, **args)
        if env_id:
            made.reset({"seed": 0, "raw": {}, "prompt": ""})
            made.close()

    def __init__(
        self, env_id: str = "", split: str = "train", simplifications: str = "easy"
    ) -> None:
        """`split`: whose variations of the task a seed chooses from. `simplifications`: the
        simulator's own, with commas; empty: none.
        """
        self.env_id, self.split, self.simplifications = env_id, split, simplifications
        self.world: ScienceWorldEnv | None = None

    def reset(self, task: "dict[str, Any]") -> str:
        row = described(task)
        name = row.get("task_name") or self.env_id
        if not name:
            raise ValueError("which task? Give env_id, or rows with task_name")
        self.world = world = self.idle.pop() if self.idle else ScienceWorldEnv()
        variation = row.get("var_num")
        if variation is None:
            world.load(name, 0, self.simplifications)  # its splits are those of the task it has
            among = getattr(world, f"get_variations_{self.split}")()
            variation = among[int(task["seed"]) % len(among)]
        if int(variation) not in range(count := world.get_max_variations(name)):
            raise ValueError(f"var_num={variation}: {name} has {count}, from 0")
        world.load(name, int(variation), self.simplifications)
        seen, info = world.reset()
        self.gained, self.most = 0, 0
        return (
            f"{info['taskDesc'].strip()}\nCommands: {', '.join(world.get_possible_actions())}. "
            f"OBJ is a thing, LOC a room. Answer with one, or in <action></action>.\n{seen}"
        )

    def step(self, action: str) -> "tuple[str, float, bool, dict[str, float]]":
        assert self.world is not None, "reset comes first"
        said = tagged(action)
        last = "".join(action.strip().splitlines()[-1:]) if said is None else said
        seen, gain, done, info = self.world.step(last.strip())
        self.gained += gain
        reward = max(0, self.gained - self.most) / POINTS
        self.most = max(self.most, self.gained)
        told = {"score": float(info["score"])}
        return seen, reward, bool(done), told | ({"unread": 1.0} if seen == UNREAD else {})

    def close(self) -> None:
        if self.world is not None:
            self.idle.append(self.world)
            self.world = None

    @classmethod
    def rows(
        cls, count: int, seed: int, env_id: str = "", split: str = "train", **args: Any
    ) -> "list[dict[str, Any]]":
        """Variations of one task; without `env_id` the tasks in turn."""
        world = ScienceWorldEnv()
        names, found = [env_id] if env_id else world.get_task_names(), []
        for number in range(seed, seed + count):
            name = names[number % len(names)]
            world.load(name, 0, args.get("simplifications", "easy"))
            among = getattr(world, f"get_variations_{split}")()
            variation = among[number // len(names) % len(among)]
            row = {"task_name": name, "var_num": variation, "seed": number}
            found.append({"prompt": f"{name} {variation}", "response": ""} | row)
        return found


def tagged(answer: str) -> "str | None":
    """What stands in its last <action></action>; in time that is linear in its length."""
    before, found, _ = answer.rpartition("</action>")
    _, begun, action = before.rpartition("<action>")
    return action.partition("</action>")[0] if found and begun else None


def described(task: "dict[str, Any]") -> "dict[str, Any]":
    """The row; or its prompt, where that is a task's description as JSON."""
    row, prompt = task["raw"], task["prompt"]
    if "task_name" in row or not isinstance(prompt, str) or not prompt.lstrip().startswith("{"):
        return row
    return json.loads(prompt)
