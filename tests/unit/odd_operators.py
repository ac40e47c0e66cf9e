"""Operators as users write them, good and bad; imported by worker processes through their path."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Doubles:
    """A plain `process`, and state: it counts what it has seen."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.seen = factor, 0

    def process(self, experiences: list[Any]) -> Any:
        self.seen += 1
        for experience in experiences:
            experience.reward *= self.factor
            experience.info["seen"] = self.seen
            experience.info["said"] = experience.info["response_text"]
        return experiences, {"seen_max": self.seen}


class Lives:
    """An asynchronous one that tells of its life in a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    async def prepare(self) -> None:
        self.path.write_text("prepared")

    async def process(self, items: list[Any]) -> Any:
        await asyncio.sleep(0)
        return items, {}

    async def close(self) -> None:
        self.path.write_text("closed")


class Does:
    """What its argument says, for groups (or rows) of number 1; nothing for others.

    `mark` gets the number of a child process.
    """

    def __init__(self, what: str, mark: str = "", always: bool = False) -> None:
        self.what, self.mark, self.always = what, mark, always

    def process(self, items: list[Any]) -> Any:
        first = items[0]
        number = first["number"] if isinstance(first, dict) else first.group
        if number != 1 and not self.always:
            return items, {}
        return getattr(self, self.what)(items)

    def raises(self, items: list[Any]) -> Any:
        raise KeyError("answer")

    def exits(self, items: list[Any]) -> Any:
        sys.exit(3)

    def dies(self, items: list[Any]) -> Any:
        os._exit(9)

    def hangs(self, items: list[Any]) -> Any:
        if self.mark:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(self.mark).write_text(str(child.pid))
        time.sleep(600)

    def drops(self, items: list[Any]) -> Any:
        return [], {}

    def no_tuple(self, items: list[Any]) -> Any:
        return items

    def no_items(self, items: list[Any]) -> Any:
        return [1], {}

    def no_metrics(self, items: list[Any]) -> Any:
        return items, 3

    def other_tokens(self, items: list[Any]) -> Any:
        items[0].tokens = [7, 7, 7]
        return items, {}

    def short_mask(self, items: list[Any]) -> Any:
        items[0].action_mask = []
        return items, {}

    def no_number(self, items: list[Any]) -> Any:
        items[0].reward = float("nan")
        return items, {}


def not_a_class() -> int:
    return 3
