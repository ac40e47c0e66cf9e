"""What runs inside the Python of an environment: one process, many episodes. Nothing but the
standard library is imported here, and by an adapter nothing but its own package beside it.

    rft ── frames of JSON over a socket ──► this ──► a class of the environment ──► an object per
                                                                                   episode
In: `setup` (which file and class, its arguments), then `reset`, `step`, `drive`, `close` of
episodes, `rows`. Out: an answer to each, {"id", "ok"} or {"id", "error"}. Invariants: what a class
raises or returns of a wrong type is an answer with `error`, also sys.exit, and never a reward;
episodes do not wait for each other, unless the class says `alone = True`; the process ends with its
parent, whatever kills that. How to write a class: docs/environments.md.

    python -E server.py <socket fd> <parent pid>
    python -E server.py --check | --rows     one setup as JSON in, one answer out
"""

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import signal
import socket
import struct
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<I")  # of a frame, as rft.ground.process has it
PR_SET_PDEATHSIG = 1
MAX_MESSAGE = 2000  # characters of an error that travel


def load(setup: "dict[str, Any]") -> Any:
    """The class, imported and prepared. Raises what is wrong, in words for a user."""
    file = Path(setup["file"]).resolve()
    sys.path[0] = str(file.parent) if setup["is_own"] else os.devnull
    spec = importlib.util.spec_from_file_location("rft_environment_" + file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = getattr(module, setup["name"], None)
    if not isinstance(made, type):
        raise ImportError(f"{file} has no class {setup['name']!r}")
    for package, majors in getattr(made, "packages", {}).items():
        _check_version(package, majors)
    prepare = getattr(made, "prepare", None)
    if prepare is not None:
        prepare(**setup["args"])
    return made


def _check_version(package: str, majors: "tuple[str, ...]") -> None:
    """`majors`: the beginnings of versions that the class was tried with."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed in {sys.prefix}") from None
    if not any(found == one or found.startswith(one + ".") for one in majors):
        raise ImportError(
            f"{package} {found} is of another major version than {' and '.join(majors)}, which "
            "this adapter speaks to: install that"
        )


class World:
    """The class, and its episodes by number."""

    def __init__(self, setup: "dict[str, Any]") -> None:
        self.kind, self.args = load(setup), setup["args"]
        self.episodes: dict[int, Any] = {}
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.driving: dict[int, Any] = {}
        self.only = ThreadPoolExecutor(1) if getattr(self.kind, "alone", False) else None

    async def answer(self, asked: "dict[str, Any]") -> Any:
        what, number = asked["op"], asked.get("episode", 0)
        if what == "reset":
            self.threads[number] = self.only or ThreadPoolExecutor(1)
            made = await self._call(number, self.kind, **self.args)
            self.episodes[number] = made
            seen = await self._call(number, made.reset, asked["task"])
            return {"messages": messages(seen), "tools": tools(made)}
        if what == "step":
            return stepped(await self._call(number, self.episodes[number].step, asked["action"]))
        if what == "drive":
            self.driving[number] = asyncio.current_task()
            self.threads[number] = self.only or ThreadPoolExecutor(1)
            made = self.episodes[number] = await self._call(number, self.kind, **self.args)
            told = await self._call(number, made.drive, asked["task"], asked["access"])
            return rewarded(told)
        assert what == "close"
        if number in self.driving:
            self.driving.pop(number).cancel()
        threads, made = self.threads.pop(number, None), self.episodes.pop(number, None)
        if hasattr(made, "close"):
            self.threads[number] = threads
            await self._call(number, made.close)
            del self.threads[number]
        if threads is not None and threads is not self.only:
            threads.shutdown(wait=False)
        return None

    async def _call(self, number: int, function: Any, *given: Any, **named: Any) -> Any:
        """A coroutine is awaited here; the rest runs in the episode's thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*given, **named)
        return await asyncio.wrap_future(
            self.threads[number].submit(lambda: function(*given, **named))
        )


def messages(seen: Any) -> "list[dict[str, Any]]":
    """An observation as chat messages: a text is one of the user's."""
    if isinstance(seen, str):
        return [{"role": "user", "content": seen}]
    if not isinstance(seen, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in seen
    ):
        raise TypeError(f"an observation is a text or a list of chat messages, not {seen!r:.200}")
    return seen


def tools(made: Any) -> "list[dict[str, Any]]":
    """Each {"name", "description", "parameters": a JSON schema}."""
    found = list(getattr(made, "tools", ()))
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise TypeError(f"a tool is a dict with a name, not {one!r:.200}")
    return found


def stepped(made: Any) -> "dict[str, Any]":
    if not isinstance(made, tuple) or len(made) != 4:
        raise TypeError(f"step must return (observation, reward, done, info), not {made!r:.200}")
    seen, reward, done, info = made
    done = done.item() if hasattr(done, "item") else done
    if not isinstance(done, bool):
        raise TypeError(f"`done` of a step must be True or False, not {done!r:.200}")
    if not isinstance(info, dict):
        raise TypeError(f"`info` of a step must be a dict, not {info!r:.200}")
    metrics = {
        str(key): float(value)
        for key, value in info.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
    seen = [] if done and seen is None else messages(seen)
    reward = None if reward is None else number(reward)
    return {"messages": seen, "reward": reward, "done": done, "metrics": metrics}


def rewarded(told: Any) -> "dict[str, Any]":
    """Of a whole episode: a number, or (a number, metrics); None: rft's reward judges."""
    if told is None:
        return {"reward": None}
    reward, metrics = told if isinstance(told, tuple) and len(told) == 2 else (told, {})
    metrics = {str(key): number(value) for key, value in metrics.items()}
    return {"reward": number(reward), "metrics": metrics}


def number(given: Any) -> float:
    given = given.item() if hasattr(given, "item") else given
    if not isinstance(given, (bool, int, float)) or not math.isfinite(given):
        raise TypeError(f"a reward must be a finite number, not {given!r:.200}")
    return float(given)


def told(error: BaseException) -> str:
    """One line, with the place that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE] + place


async def serve(descriptor: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    worlds: list[World] = []
    under_way: set[asyncio.Task[None]] = set()

    async def respond(asked: "dict[str, Any]") -> None:
        answer: dict[str, Any] = {"id": asked["id"]}
        try:
            if asked["op"] == "setup":
                worlds.append(World(asked["setup"]))
                answer["ok"] = {
                    name: bool(getattr(worlds[0].kind, name, False)) for name in ("drives", "alone")
                }
            else:
                answer["ok"] = await worlds[0].answer(asked)
            body = json.dumps(answer, allow_nan=False)
        # user code, or nobody waits any more: reported, never obeyed
        except BaseException as error:
            body = json.dumps({"id": asked["id"], "error": told(error)})
        data = body.encode()
        writer.write(HEADER.pack(len(data)) + data)
        await writer.drain()

    while True:
        try:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            asked = json.loads(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # rft has closed its end; threads of episodes are not waited for
        job = asyncio.ensure_future(respond(asked))
        under_way.add(job)
        job.add_done_callback(under_way.discard)
        if asked["op"] == "setup":
            await job  # in the main thread, before all else: some packages want that


def once(what: str) -> None:
    """`--check`: what the class says of itself. `--rows`: tasks for a taskset."""
    asked, real = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)  # what a package prints is no answer
    try:
        kind = load(asked["setup"])
        if what == "--rows":
            make = getattr(kind, "rows", None)
            if make is None:
                raise TypeError(f"{asked['setup']['name']} has no `rows`: write them yourself")
            made = list(make(asked["count"], asked["seed"], **asked["setup"]["args"]))
            answer: dict[str, Any] = {"ok": made}
        else:
            inspect.signature(kind).bind(**asked["setup"]["args"])
            answer = {"ok": {"drives": bool(getattr(kind, "drives", False))}}
        body = json.dumps(answer, allow_nan=False)
    except BaseException as error:
        body = json.dumps({"error": told(error)})
    with os.fdopen(real, "w") as out:
        out.write(body)
    os._exit(0)


def main() -> None:
    if sys.argv[1] in ("--check", "--rows"):
        once(sys.argv[1])
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # who asks the run's terminal gets an error
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.set_inheritable(descriptor, False)  # not for the programs that an environment starts
        asyncio.run(serve(descriptor))


if __name__ == "__main__":
    main()
