"""Engines that are started again, added and removed, with real Ray actors that stand in for vLLM:
what the supervisor does.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rft.ground.process import adopt_orphans
from rft.ground.protocols import ActorHandle
from rft.run import fleet as fleets
from rft.run import restarts
from rft.run.fleet import EngineFleet, PartFailed

WAIT_S = 120.0  # for Ray on a busy machine
HERE = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")])
    )
}


class Vllm:
    """An engine as far as the supervisor sees it, with a process of its own."""

    is_mute = False

    async def start(self) -> dict[str, Any]:
        if os.environ["RFT_FAKE_START"] == "fails":
            raise RuntimeError("CUDA out of memory")
        self.child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
        )
        self.broken = self.broken_or_not()
        return {"pid": os.getpid(), "child": self.child.pid}

    def broken_or_not(self) -> Any:
        import asyncio

        if not hasattr(self, "broken"):
            self.broken = asyncio.get_running_loop().create_future()
        return self.broken

    async def watch(self) -> None:
        import asyncio

        await asyncio.shield(self.broken_or_not())

    async def is_silent(self) -> bool:
        return self.is_mute

    async def fall_silent(self) -> None:
        self.is_mute = True

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def dump_stacks(self) -> None: ...

    async def die(self, cause: str = "EngineCore was killed by SIGKILL") -> None:
        self.broken.set_exception(RuntimeError(cause))

    async def pids(self) -> list[int]:
        return [os.getpid(), self.child.pid]

    async def stats(self) -> dict[str, Any]:
        return {
            "name": "?",
            "version": 3,
            "requests": 1,
            "tokens": 2,
            "active": 0,
            "poisoned": None,
        }

    async def shutdown(self) -> None:
        pass


class Synchronizer:
    """Admits whoever joins, at once; `events` is what it heard."""

    def __init__(self) -> None:
        import asyncio

        self.generation = os.getpid()  # of no two lives the same
        self.admitted: dict[str, Any] = {}
        self.lost: list[tuple[str, str]] = []
        self.events: list[tuple[str, ...]] = []
        self.changed = asyncio.Condition()

    async def join(self, name: str, handle: ActorHandle[Any]) -> None:
        await self._set(("join", name), {**self.admitted, name: handle})

    async def leave(self, name: str, reason: str) -> None:
        await self._set(
            ("leave", name, reason), {n: h for n, h in self.admitted.items() if n != name}
        )

    async def members(self, seen: int) -> tuple[int, dict[str, Any]]:
        async with self.changed:
            await self.changed.wait_for(lambda: self.generation != seen)
            return self.generation, dict(self.admitted)

    async def failures(self, seen: int) -> tuple[int, list[tuple[str, str]]]:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.lost) > seen)
            return len(self.lost), self.lost[seen:]

    async def recover(self, engines: dict[str, Any]) -> None:
        new = {name: handle for name, handle in engines.items() if name not in self.admitted}
        if new:
            await self._set(("recover", *sorted(new)), {**self.admitted, **new})

    async def give_up_on(self, name: str, cause: str) -> None:
        self.lost.append((name, cause))
        await self._set(("gone", name), {n: h for n, h in self.admitted.items() if n != name})

    async def heard(self) -> list[tuple[str, ...]]:
        return self.events

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _set(self, event: tuple[str, ...], admitted: dict[str, Any]) -> None:
        async with self.changed:
            self.generation += 1
            self.admitted = admitted
            self.events.append(event)
            self.changed.notify_all()


class Explorer:
    """Drains an engine when it may."""

    def __init__(self) -> None:
        import asyncio

        self.may = asyncio.Event()

    async def drain(self, name: str) -> None:
        await self.may.wait()

    async def let_drain(self) -> None:
        self.may.set()


def is_running(pid: int) -> bool:
    """A zombie does not: whoever adopted it reaps it when it likes."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def actor(cls: type, name: str | None = None, **environment: str) -> Any:
    settings = {
        "num_cpus": 0,
        "max_concurrency": 100,
        "max_restarts": -1 if cls is Synchronizer else 0,
        "runtime_env": {"env_vars": HERE | environment},
    }
    return ray.remote(cls).options(name=name, **settings).remote()


class Fleet:
    """`EngineFleet` and the actors around it; `told`: every line and every failure, in order."""

    def __init__(self, log_dir: Path, budget: int, followed: bool = True):
        self.log_dir = log_dir
        self.start = "works"
        self.now = 0.0  # seconds, of the clock of the budgets
        self.told: queue.Queue[tuple[str, ...]] = queue.Queue()
        self.engines = EngineFleet(
            self._spawn,
            log_dir,
            budget,
            lambda part, phase, error: self.told.put((part, phase, str(error))),
            lambda line: self.told.put((line,)),
            lambda: self.now,
        )
        self.synchronizer = ActorHandle(actor(Synchronizer)) if followed else None
        self.explorer = ActorHandle(actor(Explorer))

    def _spawn(self, engine: str, name: str) -> Any:
        environment = {
            "RFT_LOG_FILE": str(self.log_dir / f"{engine}.log"),
            "RFT_FAKE_START": self.start,
        }
        return ActorHandle(actor(Vllm, name=f"{self.log_dir.name}/{name}", **environment))

    def begin(self, count: int) -> "Fleet":
        """Start so many; when the synchronizer is there, return when it has admitted them."""
        names = self.engines.create(count, is_news=True)
        self.engines.run(self.synchronizer, self.explorer, WAIT_S)
        self.engines.await_started()
        if self.synchronizer is not None:
            assert {self.hear()[0] for _ in names} == {f"{name}: serves" for name in names}
        return self

    def hear(self) -> tuple[str, ...]:
        return self.told.get(timeout=WAIT_S)

    def call(self, engine: str, method: str, *arguments: Any) -> Any:
        actor = self.engines.engines[engine].handle.actor
        return ray.get(getattr(actor, method).remote(*arguments), timeout=WAIT_S)

    def heard(self) -> list[tuple[str, ...]]:
        return ray.get(self.synchronizer.ask(Synchronizer.heard), timeout=WAIT_S)

    def heard_or_none(self) -> list[tuple[str, ...]] | None:
        """None while the synchronizer is dead."""
        try:
            return self.heard()
        except ray.exceptions.RayActorError:
            return None

    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.engines.describe()}

    def close(self) -> None:
        self.engines.close()
        for handle in [
            *self.engines.handles(),
            self.explorer,
            *([self.synchronizer] if self.synchronizer else []),
        ]:
            ray.kill(handle.actor)
        for thread in self.engines.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def made(ray_session: None, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets; at the end their threads must have ended and nothing more been told."""
    adopt_orphans()
    fleets: list[Fleet] = []

    def make(budget: int = 3, followed: bool = True) -> Fleet:
        fleets.append(Fleet(tmp_path, budget, followed))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
        assert fleet.told.empty()


def test_an_engine_that_dies_is_started_again_and_nothing_of_it_is_left(
    made: Callable[..., Fleet],
) -> None:
    fleet = made().begin(2)
    pids = fleet.call("engine_0", "pids")
    kept = fleet.call("engine_1", "pids")
    os.kill(pids[0], signal.SIGKILL)  # its child would live on
    line = fleet.hear()[0]
    assert (
        line.startswith("engine_0: ")
        and "died" in line
        and line.endswith("; started again (1 of 3)")
    )
    assert not any(map(is_running, pids))
    assert fleet.hear() == ("engine_0: serves",)
    fleet.call("engine_0", "die")
    assert fleet.hear() == (
        "engine_0: RuntimeError: EngineCore was killed by SIGKILL; started again (2 of 3)",
    )
    assert fleet.hear() == ("engine_0: serves",)
    events = [event[:2] for event in fleet.heard() if event[1] == "engine_0"]
    assert events == [("join", "engine_0"), ("leave", "engine_0")] * 2 + [("join", "engine_0")]
    assert fleet.call("engine_1", "pids") == kept and fleet.states() == {
        "engine_0": "serving",
        "engine_1": "serving",
    }
    rows = fleet.engines.answer({})["engines"]
    assert [(row["restarts"], row["version"]) for row in rows] == [
        (2, 3),
        (0, 3),
    ] and "EngineCore" in rows[0]["cause"]


@pytest.mark.verify
def test_without_restarts_left_the_others_go_on_and_the_last_one_ends_the_run(
    made: Callable[..., Fleet],
) -> None:
    fleet = made(budget=1).begin(2)
    for name, words in (("engine_0", "the run goes on without it"), ("engine_1", None)):
        fleet.call(name, "die")
        assert "started again (1 of 1)" in fleet.hear()[0]
        assert fleet.hear() == (f"{name}: serves",)
        fleet.call(name, "die")
        if words:
            line = fleet.hear()[0]
            assert line.startswith(f"warning: {name} stays out: ") and line.endswith(words)
    part, phase, cause = fleet.hear()
    assert (part, phase) == ("engine_1", "serving") and cause.endswith(
        "and no other engine is left"
    )
    assert fleet.states() == {"engine_0": "out", "engine_1": "out"}


@pytest.mark.parametrize(
    "silence",
    ["fall_silent", pytest.param("stop", marks=pytest.mark.verify)],
    ids=["vllm", "actor"],
)
def test_a_silent_engine_is_replaced(
    made: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    """As one whose device hangs, or one that is stopped where no kernel can be asked."""
    monkeypatch.setattr(fleets, "BEAT_S", 0.05)
    fleet = made().begin(1)
    pids = fleet.call("engine_0", "pids")
    getattr(fleet.engines.engines["engine_0"].handle.actor, silence).remote()
    with monkeypatch.context() as impatient:
        impatient.setattr(fleets, "SILENT_S", 0.5)
        line = fleet.hear()[0]
    assert line == (
        "engine_0: TimeoutError: it lives, and has given no sign of it for 0.5 s; "
        "started again (1 of 3)"
    )
    assert not any(map(is_running, pids))
    assert fleet.hear() == ("engine_0: serves",)


@pytest.mark.verify
def test_restarts_count_within_an_hour_and_the_first_cause_is_named(
    made: Callable[..., Fleet],
) -> None:
    fleet = made(budget=1).begin(1)
    for cause in ("disk", "card"):  # more than an hour lies between them
        fleet.call("engine_0", "die", cause)
        assert fleet.hear() == (f"engine_0: RuntimeError: {cause}; started again (1 of 1)",)
        assert fleet.hear() == ("engine_0: serves",)
        fleet.now += restarts.HOUR_S
    fleet.now -= 1.0
    fleet.call("engine_0", "die", "lost files")
    part, _, told = fleet.hear()
    assert (part, told) == (
        "engine_0",
        "RuntimeError: card, after 1 restarts within an hour (explorer.rollout_model.max_restarts)"
        "; the last cause: RuntimeError: lost files, and no other engine is left",
    )


@pytest.mark.parametrize(
    "followed",
    [True, pytest.param(False, marks=pytest.mark.verify)],
    ids=["max_restarts=0", "fixed"],
)
def test_a_death_ends_the_run(made: Callable[..., Fleet], followed: bool) -> None:
    fleet = made(0 if followed else 3, followed).begin(1)
    assert fleet.states() == {"engine_0": "serving"}
    fleet.call("engine_0", "die")
    assert fleet.hear() == ("engine_0", "serving", "RuntimeError: EngineCore was killed by SIGKILL")


@pytest.mark.verify
def test_one_that_cannot_start_at_the_beginning_ends_the_run_at_once(
    made: Callable[..., Fleet],
) -> None:
    fleet = made()
    fleet.start = "fails"
    with pytest.raises(PartFailed, match="CUDA out of memory") as error:
        fleet.begin(1)
    assert error.value.part == "engine_0"


@pytest.mark.verify
def test_one_that_cannot_start_later_stays_out(made: Callable[..., Fleet]) -> None:
    fleet = made(budget=1).begin(1)
    fleet.start = "fails"
    assert fleet.engines.answer({"add": 1}) == {"begun": ["engine_1"]}
    assert fleet.hear() == ("engine_1: RuntimeError: CUDA out of memory; started again (1 of 1)",)
    assert fleet.hear()[0].startswith(
        "warning: engine_1 stays out: RuntimeError: CUDA out of memory, after 1 restarts"
    )
    assert fleet.states() == {"engine_0": "serving", "engine_1": "out"}


def test_added_and_removed(made: Callable[..., Fleet]) -> None:
    fleet = made().begin(1)
    ask = fleet.engines.answer
    assert ask({"remove": "engine_0"}) == {
        "error": "engine_0 is the only one that serves: add another one first"
    }
    assert ask({"remove": "engine_7"}) == {"error": "there is no engine_7; there are engine_0"}
    assert ask({"add": 2}) == {"begun": ["engine_1", "engine_2"]}
    assert {fleet.hear()[0], fleet.hear()[0]} == {"engine_1: serves", "engine_2: serves"}
    pids = fleet.call("engine_0", "pids")
    assert ask({"remove": "engine_0"}) == {"begun": ["engine_0"]}
    assert ask({"remove": "engine_0"}) == {"error": "engine_0 is leaving already"}
    assert fleet.states()["engine_0"] == "leaving" and is_running(pids[0])
    ray.get(fleet.explorer.ask(Explorer.let_drain), timeout=WAIT_S)
    assert fleet.hear() == ("engine_0: removed",)
    assert not any(map(is_running, pids))
    assert fleet.states() == {"engine_1": "serving", "engine_2": "serving"}
    assert ("leave", "engine_0", "removed") in fleet.heard()
    assert ask({"add": 1}) == {"begun": ["engine_3"]}, (
        "a name that comes again would mix two engines' logs"
    )
    assert fleet.hear() == ("engine_3: serves",)


@pytest.mark.verify
def test_one_that_the_synchronizer_gives_up_on_is_replaced(made: Callable[..., Fleet]) -> None:
    fleet = made().begin(1)
    pids = fleet.call("engine_0", "pids")
    for number in (1, 2):
        ray.get(
            fleet.synchronizer.ask(Synchronizer.give_up_on, "engine_0", f"checksum {number}"),
            timeout=WAIT_S,
        )
        assert fleet.hear() == (f"engine_0: checksum {number}; started again ({number} of 3)",)
        assert fleet.hear() == ("engine_0: serves",)
    assert fleet.call("engine_0", "pids")[0] != pids[0]


@pytest.mark.verify
def test_a_synchronizer_that_is_there_again_hears_who_lives_and_is_listened_to(
    made: Callable[..., Fleet],
) -> None:
    fleet = made().begin(2)
    fleet.synchronizer.ask(Synchronizer.die)
    while fleet.heard_or_none() != []:
        pass
    fleet.engines.reintroduce()
    assert fleet.heard() == [("recover", "engine_0", "engine_1")]
    fleet.call("engine_1", "die")
    assert "started again (1 of 3)" in fleet.hear()[0] and fleet.hear() == ("engine_1: serves",)
    assert [event[:2] for event in fleet.heard()[1:]] == [
        ("leave", "engine_1"),
        ("join", "engine_1"),
    ]
    ray.get(fleet.synchronizer.ask(Synchronizer.give_up_on, "engine_0", "checksum"), timeout=WAIT_S)
    assert fleet.hear() == ("engine_0: checksum; started again (1 of 3)",)
    assert fleet.hear() == ("engine_0: serves",)


@pytest.mark.verify
def test_fixed_engines_neither_come_nor_go(made: Callable[..., Fleet]) -> None:
    fleet = made(followed=False).begin(1)
    for question in ({"add": 1}, {"remove": "engine_0"}):
        assert fleet.engines.answer(question) == {
            "error": "engines come and go only in mode=both: here their number is fixed"
        }


@pytest.mark.verify
def test_nothing_starts_after_the_end(made: Callable[..., Fleet]) -> None:
    fleet = made().begin(1)
    threads = threading.active_count()
    fleet.engines.close()
    fleet.call("engine_0", "die")
    assert fleet.engines.answer({"add": 1}) == {
        "error": "engines can be added once the run has begun, and until it ends"
    }
    for thread in fleet.engines.threads[:1]:
        thread.join(WAIT_S)
    assert fleet.told.empty() and threading.active_count() < threads
