"""Environments as processes of another Python: which one is meant, how episodes find a place in
one, and what becomes of it when it fails.

    workflow ── Environments.episode ──► place in a process (own group and virtual environment)
             ◄── reset, step, drive ──── python -E rft/extras/environments/server.py ──► a class

In: `EnvironmentSettings`, out of `workflow_args`. Out: what an environment answers, checked, or
`EnvironmentFailed`. Invariants: an environment that raises, says something of a wrong type, dies or
takes too long is an exception, so its group fails and is run again, and never a reward; a process
in which a call hangs takes no new episodes, and is killed when the others of it are over; no
process is left behind.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rft.ground.errors import Late
from rft.ground.experience import Record, Task
from rft.ground.process import Child
from rft.ground.shipped import PACKAGE
from rft.ground.surroundings import foreign
from rft.rollout.settings import settings_of

ADAPTERS = PACKAGE / "extras" / "environments"
PLACE = ".venv-env-{}"  # where `make env-NAME` puts a virtual environment
REWARDS = ("sum", "last")
SECONDS = ("timeout", "start_timeout", "step_timeout")
COUNTS = ("processes", "episodes", "max_step_num")


class Known(NamedTuple):
    """An adapter of ours: its file and class, the NAME of `make env-NAME`; `drives`: it asks the
    model itself, over OpenAI's API.
    """

    file: str
    name: str
    venv: str
    drives: bool = False


KNOWN = {
    "gymnasium": Known("gym_adapter.py", "Gymnasium", "gym"),
    "reasoning_gym": Known("reasoning_gym_adapter.py", "ReasoningGym", "reasoning-gym"),
    "verifiers": Known("verifiers_adapter.py", "Verifiers", "verifiers", drives=True),
    "verifiers_v1": Known("verifiers_v1_adapter.py", "VerifiersTasks", "verifiers-v1", drives=True),
    "textworld": Known("textworld_adapter.py", "TextWorld", "textworld"),
    "scienceworld": Known("scienceworld_adapter.py", "ScienceWorld", "scienceworld"),
    "agentscope": Known("agentscope_adapter.py", "AgentScope", "agentscope", drives=True),
}


@dataclass(frozen=True)
class EnvironmentSettings:
    """`workflow_args` of the workflow `environment`."""

    environment: str = ""  # a name of KNOWN, or path/to/file.py:Class
    env_id: str = ""  # what of it: FrozenLake-v1; given to the class as `env_id`, if not empty
    env_args: dict[str, Any] = field(default_factory=dict)  # of the class, by name
    # path of a virtual environment or a Python, or NAME of `make env-NAME`; default: the adapter's
    # own; of a class of yours: rft's
    python: str = ""
    processes: int = 1  # at most, of one explorer
    episodes: int = 32  # at a time, in one process
    start_timeout: float = 120.0  # seconds for a process to import and prepare
    step_timeout: float = 60.0  # seconds of one reset or step
    timeout: float | None = None  # seconds of an episode; default: explorer.max_timeout
    max_step_num: int = 8  # turns
    reward: str = "sum"  # of the steps' rewards: their sum | that of the last one
    per_turn: bool = False  # an experience per turn instead of one per episode
    # with per_turn: each turn has the reward of its own step; false: all have the episode's
    step_rewards: bool = False

    @classmethod
    def of(cls, given: dict[str, Any], key: str = "workflow_args") -> "EnvironmentSettings":
        """Raises ConfigError for all that is wrong, naming `key`."""
        return settings_of(cls, "environment", given, key)

    def problems(self, key: str, unread: set[str]) -> Iterator[str]:
        file, _, name = self.environment.rpartition(":")
        is_own = file.endswith(".py") and name
        if "environment" not in unread and self.environment not in KNOWN and not is_own:
            yield (
                f"{key}.environment={self.environment or 'null'}: give one of {', '.join(KNOWN)}, "
                "or your own, path/to/file.py:Class (docs/environments.md)"
            )
        if self.reward not in REWARDS:
            yield f"{key}.reward={self.reward}: choose one of {', '.join(REWARDS)}"
        for name in COUNTS:
            if (value := getattr(self, name)) < 1:
                yield f"{key}.{name}={value}: must be a number greater than 0"
        for name in SECONDS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{key}.{name}={value}: give seconds, greater than 0"
        if self.step_rewards and not self.per_turn and "per_turn" not in unread:
            yield f"{key}.step_rewards=true: rewards of turns need {key}.per_turn=true"

    @property
    def interpreter(self) -> Path:
        """The Python that is meant, there or not."""
        known = KNOWN.get(self.environment)
        named = str(self.python) or (known.venv if known else sys.executable)
        place = Path(named).expanduser()
        if os.sep not in named and not place.exists():
            place = Path(PLACE.format(named.removeprefix("env-")))
        return (place if place.is_file() else place / "bin" / "python").absolute()

    def setup(self) -> dict[str, Any]:
        """What the process is told first."""
        known = KNOWN.get(self.environment)
        file, _, name = self.environment.rpartition(":")
        path = ADAPTERS / known.file if known else Path(file).expanduser().absolute()
        args = ({"env_id": self.env_id} if self.env_id else {}) | self.env_args
        name = known.name if known else name
        return {"file": str(path), "name": name, "args": args, "is_own": known is None}

    @property
    def command(self) -> list[str]:
        return [str(self.interpreter), "-E", str(ADAPTERS / "server.py")]


def drives(environment: Any) -> bool:
    """Whether it asks the model itself, as far as its name says."""
    known = KNOWN.get(str(environment))
    return known is not None and known.drives


class EnvironmentFailed(RuntimeError):
    """It raised, died, took too long or answered with something of a wrong type."""


def asked_once(settings: EnvironmentSettings, what: str, **more: Any) -> Any:
    """`--check` or `--rows` of a process that ends with the answer. Raises EnvironmentFailed."""
    try:
        ran = subprocess.run(
            [*settings.command, what],
            input=json.dumps({"setup": settings.setup(), **more}).encode(),
            capture_output=True,
            timeout=settings.start_timeout,
            env=surroundings(),
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"it took longer than {settings.start_timeout:g} s to be imported "
            "(workflow_args.start_timeout)"
        ) from None
    if not ran.stdout:
        raise EnvironmentFailed(" ".join(ran.stderr.decode(errors="replace").split())[-500:])
    answer = json.loads(ran.stdout)
    if "error" in answer:
        raise EnvironmentFailed(answer["error"])
    return answer["ok"]


def problems(settings: EnvironmentSettings, key: str, has_api: bool) -> Iterator[str]:
    """Why it cannot be used on this machine; starts it once, for a moment."""
    known, python = KNOWN.get(settings.environment), settings.interpreter
    if not python.is_file():
        venv = known.venv if known else ""
        fix = f"run `make env-{venv}`, or name" if venv else "name"
        yield Late(
            f"{key}.python: {settings.environment} runs in a virtual environment of its own, and "
            f"there is no {python}: {fix} one by {key}.python=DIRECTORY"
        )
        return
    if not Path(settings.setup()["file"]).is_file():
        yield f"{key}.environment={settings.environment}: there is no such file; correct it"
        return
    try:
        told = asked_once(settings, "--check")
    except EnvironmentFailed as error:
        yield (
            f"{key}.environment={settings.environment} cannot be used by {python}: {error}; "
            f"correct {key}, or install what is missing there"
        )
        return
    if told["drives"] and not has_api:
        yield (
            f"{key}.environment={settings.environment} asks the model itself: set "
            "explorer.rollout_model.enable_openai_api=true"
        )


def surroundings() -> dict[str, str]:
    """Of its process, without our packages."""
    return {
        name: value
        for name, value in foreign("programs").items()
        if not name.startswith(("RFT_", "PYTHON"))
    } | {"PYTHONUNBUFFERED": "1"}


class Seen(Record, kw_only=True):
    """What `reset` gives."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class Stepped(Record, kw_only=True):
    messages: list[dict[str, Any]]
    reward: float | None
    done: bool
    metrics: dict[str, float] = {}


class Driven(Record, kw_only=True):
    """Of an episode in which the environment asked the model itself. `reward` None: the task's
    reward function judges the last answer.
    """

    reward: float | None
    metrics: dict[str, float] = {}


class Host:
    """One process. `episodes`: how many live in it; `retired`: it takes no more, those of it go on
    until it is `gone`.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.episodes, self.retired, self.gone = 0, False, False
        self.drives = False  # it asks the model itself
        self.alone = False  # one call at a time; its clock runs when those before it are over
        self._turn = asyncio.Lock()
        self._child = Child(command=settings.command, environment=surroundings())
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sending = asyncio.Lock()

    async def start(self) -> None:
        """In the loop's own thread: the process lives no longer than that."""
        self._child.start()
        self._reading = asyncio.create_task(self._read())
        limit, setup = self.settings.start_timeout, self.settings.setup()
        told = await self.ask("setup", limit, setup=setup)
        self.drives, self.alone = told["drives"], told["alone"]

    async def ask(self, what: str, limit: float | None, **told: Any) -> Any:
        """Raises EnvironmentFailed."""
        async with self._turn if self.alone and what != "drive" else contextlib.nullcontext():
            return await self._asked(what, limit, **told)

    async def _asked(self, what: str, limit: float | None, **told: Any) -> Any:
        if self.gone:
            raise EnvironmentFailed(f"{self.name}: its process is gone")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit):
                async with self._sending:
                    await self._child.send(
                        json.dumps({"id": number, "op": what, **told}, default=str).encode()
                    )
                return await answer
        except TimeoutError:
            self.retired = True
            if self.alone:  # none of the others can go on
                self._child.kill()
            key = {"setup": "start_timeout", "drive": "timeout"}.get(what, "step_timeout")
            raise HangingEnvironment(
                f"{self.name}: {what} took longer than {limit:g} s (workflow_args.{key})"
            ) from None
        except EOFError:
            raise EnvironmentFailed(f"{self.name}: its process is gone") from None
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                told = json.loads(await self._child.receive())
                waiting = self._waiting.get(told["id"])
                if waiting is None or waiting.done():
                    continue  # nobody waits any more: the task's time was up
                if "error" in told:
                    waiting.set_exception(EnvironmentFailed(f"{self.name}: {told['error']}"))
                else:
                    waiting.set_result(told["ok"])
        except (EOFError, ValueError) as error:
            await self._over(error)

    async def _over(self, error: Exception) -> None:
        killed, self.retired, self.gone = self.gone, True, True
        how = "was killed" if killed else await self._child.end()
        if isinstance(error, ValueError):
            how = f"said something that is no message: {error}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    EnvironmentFailed(f"{self.name}: its process {how}; its words are in the log")
                )

    @property
    def name(self) -> str:
        return f"environment {self.settings.environment} {self.settings.env_id}".rstrip()

    async def close(self) -> None:
        self.retired = self.gone = True
        self._child.kill()
        await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.to_thread(self._child.reap)


class HangingEnvironment(EnvironmentFailed):
    """A call did not come back in time."""


class Episode:
    """A place in a process."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number

    async def reset(self, task: Task) -> Seen:
        return self._made(await self._ask("reset", task=_told(task)), Seen)

    async def step(self, action: Any) -> Stepped:
        return self._made(await self._ask("step", action=action), Stepped)

    @property
    def drives(self) -> bool:
        return self.host.drives

    async def drive(self, task: Task, access: dict[str, Any], limit: float | None) -> Driven:
        told = await self.host.ask(
            "drive", limit, episode=self.number, task=_told(task), access=access
        )
        return self._made(told, Driven)

    async def close(self) -> None:
        await self._ask("close")

    async def _ask(self, what: str, **told: Any) -> Any:
        limit = self.host.settings.step_timeout
        return await self.host.ask(what, limit, episode=self.number, **told)

    def _made(self, told: Any, kind: type[Any]) -> Any:
        try:
            return msgspec.convert(told, kind)
        except msgspec.ValidationError as error:
            raise EnvironmentFailed(f"{self.host.name}: {error}") from None


def _told(task: Task) -> dict[str, Any]:
    """All runs of a task begin with the same seed: the row's own, or its number."""
    return {
        "id": task.id,
        "row": task.row,
        "seed": task.raw.get("seed", task.row),
        "prompt": task.prompt,
        "truth": task.truth,
        "raw": task.raw,
    }


class Fleet:
    """The processes of one environment."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.hosts: list[Host] = []
        self.places = asyncio.Semaphore(settings.processes * settings.episodes)
        self.choosing = asyncio.Lock()


class Environments:
    """One per explorer: all processes of all environments. `count(name, words)`: into its metrics.

    A process is started with the first episode that finds no place, and lives until `close`.
    """

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._count = count
        self._fleets: dict[str, Fleet] = {}
        self._numbers = itertools.count(1)
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def episode(self, settings: EnvironmentSettings) -> AsyncIterator[Episode]:
        fleet = self._fleets.setdefault(repr(settings), Fleet(settings))
        await fleet.places.acquire()
        host = None
        try:
            async with fleet.choosing:
                host = await self._chosen(fleet)
                host.episodes += 1
        except EnvironmentFailed as error:
            self._told(error)
            raise
        finally:
            if host is None:
                fleet.places.release()
        episode = Episode(host, next(self._numbers))
        try:
            yield episode
        except EnvironmentFailed as error:
            self._told(error)
            raise
        finally:
            # a task whose time is up does not wait for it
            job = asyncio.create_task(self._leave(fleet, episode))
            self._leaving.add(job)
            job.add_done_callback(self._leaving.discard)

    async def _chosen(self, fleet: Fleet) -> Host:
        fit = [host for host in fleet.hosts if not host.retired]
        least = min(fit, key=lambda host: host.episodes, default=None)
        if least is not None and (not least.episodes or len(fit) == fleet.settings.processes):
            return least
        host = Host(fleet.settings)
        fleet.hosts.append(host)
        try:
            await host.start()
        except BaseException:
            fleet.hosts.remove(host)
            await asyncio.shield(host.close())
            raise
        return host

    async def _leave(self, fleet: Fleet, episode: Episode) -> None:
        host = episode.host
        try:
            if not host.retired:
                await episode.close()
        except EnvironmentFailed as error:
            self._told(error)
        finally:
            host.episodes -= 1
            fleet.places.release()
        if host.retired and not host.episodes and host in fleet.hosts:
            fleet.hosts.remove(host)
            self._count("environment_processes_lost", f"{host.name}: a process was ended")
            await host.close()

    def _told(self, error: EnvironmentFailed) -> None:
        hangs = isinstance(error, HangingEnvironment)
        self._count("environment_timeouts" if hangs else "environment_errors", str(error))

    async def close(self) -> None:
        """Kill all, and wait until they are gone."""
        for job in list(self._leaving):
            job.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        hosts = [host for fleet in self._fleets.values() for host in fleet.hosts]
        self._fleets.clear()
        for host in hosts:
            with contextlib.suppress(EnvironmentFailed):
                await host.close()
