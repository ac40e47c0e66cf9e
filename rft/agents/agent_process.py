"""A run of an agent in a process of its own, which ends with it: a function or a command in, what
it returned out.

    explorer ── own session ──► python -m rft.ground.process, which ends with the explorer
            ──► python -m rft.agents.agent_process ──► user's function ──► result
            ──► the user's program

OPENAI_BASE_URL and OPENAI_API_KEY are in its environment. A command reads the task as a line of
JSON from its standard input. Files, not pipes, carry what goes in and comes out, so nobody waits
for a pipe that a grandchild holds open. Invariant: when a run is over, however it ends, its
process, its process group and all its descendants are killed; they end with the explorer, too.
"""

import asyncio
import json
import os
import sys
import tempfile
import traceback
from typing import IO, Any

from rft.ground.device import thread_environment, turns_not_inherited
from rft.ground.experience import Record, Task, decode, encode
from rft.ground.process import ending, kill_family, python_path, tied
from rft.ground.surroundings import foreign
from rft.rollout.rewards import lookup

TAIL = 2000  # bytes of what a failed agent wrote last
LOOPBACK = "127.0.0.1,localhost,::1"


class Order(Record, kw_only=True):
    """One call of a user's function."""

    function: str
    task: Task
    access: tuple[str, str]
    args: dict[str, Any] = {}


class Result(Record, kw_only=True):
    value: Any = None
    error: str = ""


class AgentFailed(RuntimeError):
    """It raised, or its process ended badly."""


async def run_function(
    name: str, task: Task, base_url: str, api_key: str, args: dict[str, Any]
) -> Any:
    """`name(task, base_url, api_key, **args)` of a plain function."""
    order = encode(Order(function=name, task=task, access=(base_url, api_key), args=args))
    with tempfile.TemporaryFile() as answer:
        code, said = await _process(
            tied([sys.executable, "-m", "rft.agents.agent_process", str(answer.fileno())]),
            order,
            base_url,
            api_key,
            (answer.fileno(),),
        )
        answer.seek(0)
        data = answer.read()
    if not data:
        raise AgentFailed(f"agent {name}: its process {ending(code)}{said}")
    result = decode(data, Result)
    if result.error:
        raise AgentFailed(f"agent {name}: {result.error}")
    return result.value


async def run_command(command: list[str], task: Task, base_url: str, api_key: str) -> None:
    line = (
        json.dumps(
            {"id": task.id, "prompt": task.prompt, "truth": task.truth, "raw": task.raw},
            default=str,
        )
        + "\n"
    )
    code, said = await _process(
        tied([str(word) for word in command]), line.encode(), base_url, api_key
    )
    if code:
        raise AgentFailed(f"agent {command[0]} {ending(code)}{said}")


async def _process(
    command: list[str], given: bytes, base_url: str, api_key: str, passed: tuple[int, ...] = ()
) -> tuple[int, str]:
    """Exit code, and the end of what it wrote."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given)
        stdin.seek(0)
        with turns_not_inherited():
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                env=_environment(base_url, api_key),
                start_new_session=True,
                pass_fds=passed,
            )
        try:
            code = await process.wait()
        finally:
            kill_family(process.pid)
            await asyncio.shield(process.wait())
        return code, _tail(output)


def _environment(base_url: str, api_key: str) -> dict[str, str]:
    kept = foreign("programs")
    direct = ",".join(filter(None, [kept.get("NO_PROXY", ""), LOOPBACK]))
    return (
        kept
        | thread_environment(1)
        | python_path()
        | {
            "NO_PROXY": direct,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
        }
    )


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL))
    lines = output.read().decode(errors="replace").split("\n")
    said = " | ".join(line.strip() for line in lines if line.strip())
    return f"; it wrote last: {said}" if said else ""


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    order = decode(sys.stdin.buffer.read(), Order)
    try:
        value = lookup("agent", order.function, {})(order.task, *order.access, **order.args)
        result = encode(Result(value=value))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        lines = str(error).strip().splitlines()
        result = encode(Result(error=f"{type(error).__name__}: {lines[0] if lines else ''}{place}"))
    os.write(descriptor, result)


if __name__ == "__main__":
    main()
