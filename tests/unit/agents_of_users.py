"""Agents as users write them: what `workflow_args.agent` names in tests.

Their clients are told a base_url and a key.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from rft.ground.experience import Task


async def two_turns(task: Task, base_url: str, api_key: str, **args: Any) -> Any:
    """Asks, and asks again about the answer; `returns` is its reward, `posts` one that it posts."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        said = [{"role": "user", "content": str(task.prompt)}]
        for _ in range(args.get("turns", 2)):
            made = await client.chat.completions.create(model="gpt-4o", messages=said)
            said += [
                {"role": "assistant", "content": made.choices[0].message.content},
                {"role": "user", "content": "?"},
            ]
    if "posts" in args:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            (
                await http.post(f"{base_url}/feedback", json={"reward": args["posts"]})
            ).raise_for_status()
    if "raises" in args:
        raise KeyError(args["raises"])
    return args.get("returns")


async def never(task: Task, base_url: str, api_key: str) -> None:
    await asyncio.Event().wait()


async def quiet(task: Task, base_url: str, api_key: str) -> float:
    """Asks nothing."""
    return 1.0


def plain(task: Task, base_url: str, api_key: str, reward: float = 0.0) -> dict[str, float]:
    """No coroutine: it has a process of its own, and OpenAI's variables in its environment."""
    assert (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]) == (base_url, api_key)
    made = OpenAI(max_retries=0).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}]
    )
    return {"kind": reward, "short": 0.5 * (len(made.choices[0].message.content) < 100)}


def fails(task: Task, base_url: str, api_key: str) -> None:
    raise ValueError("no such town\nand more")


def dies(task: Task, base_url: str, api_key: str) -> None:
    print("before the end", flush=True)
    os.kill(os.getpid(), 9)


def has_children(task: Task, base_url: str, api_key: str, file: str) -> None:
    """Leaves a child, which has a session of its own, and hangs."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    Path(file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
