"""Environments that behave badly, each in its way, on its first action."""

import os
import sys
import threading
from pathlib import Path


class Odd:
    def __init__(self, manner="", notes=""):
        self.manner, self.notes = manner, notes

    @classmethod
    def prepare(cls, manner="", notes=""):
        if manner == "unprepared":
            raise KeyError("no such game")
        if notes:
            with (Path(notes) / "pids").open("a") as file:
                file.write(f"{os.getpid()}\n")

    def reset(self, task):
        print("words that are no message")
        self.hangs = self.manner == "hangs" and "hang" in task["raw"]
        return {"a": 1} if self.manner == "odd reset" else "go"

    def step(self, action):
        if self.hangs:
            if self.notes:
                (Path(self.notes) / "hangs").touch()
            threading.Event().wait()
        if self.manner == "raises":
            raise ZeroDivisionError("of the game")
        if self.manner == "exits":
            sys.exit(3)
        if self.manner == "dies":
            os._exit(7)
        return {
            "pair": ("a", 1.0),
            "text": ("a", "1.0", True, {}),
            "nan": ("a", float("nan"), True, {}),
            "done": ("a", 1.0, 1, {}),
            "number": (5, 1.0, False, {}),
        }.get(self.manner, (None, 1.0, True, {"pid": os.getpid()}))


class Tooled:
    tools = [
        {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}}
    ]

    def reset(self, task):
        return [
            {"role": "system", "content": "be quick"},
            {"role": "user", "content": task["prompt"]},
        ]

    def step(self, action):
        if isinstance(action, str):
            return None, float("42" in action), True, {}
        said = [{"role": "tool", "content": str(sum(one["arguments"].values()))} for one in action]
        return said, 0.25, False, {}


class Newer:
    packages = {"psutil": ("99",)}


class Driver:
    drives = True

    def __init__(self, asks=1):
        self.asks = asks

    async def drive(self, task, access):
        import json
        import urllib.request

        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "6*7="}]})
        request = urllib.request.Request(
            access["base_url"] + "/chat/completions",
            body.encode(),
            {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"},
        )
        said = ""
        for _ in range(self.asks):
            with urllib.request.urlopen(request, timeout=20) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
        return float(said == "42"), {"length": len(said)}
