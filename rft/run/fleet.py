"""The rollout engines of a stage: started, watched, started again, added and removed while the run
goes on.

    starting ──join──► joining ◄──────► serving ──drain──► leaving ──► (forgotten)
       ▲                  │  admitted,     │
       │                  │  or not        │
       └── again ─────────┴─── died ───────┴──► out (no restart is left within the hour)

In: a way to make an engine's actor, and the synchronizer that admits engines (without one, in modes
without a trainer, the engines are fixed and a death is the failure of the run). Out: states for
`rft engines`, a line on the terminal for whoever comes or goes, and a failure when none can serve
any more. One thread per engine, which asks it for a sign of life until it ends: one that is silent
for SILENT_S, on whatever machine, ends like a dead one. Invariants: the synchronizer hears that an
engine is gone before another one takes its name; of an engine that ended no process is left on this
machine; after `close` nothing is started; a synchronizer that died and is there again hears of
every engine that lives (`reintroduce`), whoever comes or goes meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.ground.process import end_marked
from rft.rollout.engine import RolloutEngine
from rft.rollout.explorer import Explorer, ExplorerHandle
from rft.rollout.pool import EngineHandle
from rft.run.restarts import Restarts
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle
from rft.trainer import control

log = logging.getLogger(__name__)
AGAIN_S = 0.5  # until a synchronizer that is gone is asked again
ENDING_S = 8.0  # for vLLM's own orderly end
# between two signs of life of an engine that has started, and without one until it is replaced
BEAT_S, SILENT_S = 2.0, 30.0
STATS_S = 5.0  # for an engine that is alive; one that loads does not answer
Spawn = Callable[[str, str], EngineHandle]  # of (engine, the actor's own name)
Failed = Callable[[str, str, Exception], None]


class PartFailed(RuntimeError):
    """What an actor raised while it started."""

    def __init__(self, part: str, message: str):
        super().__init__(message)
        self.part = part


class FleetRefusal(ValueError):
    """What somebody asked for cannot be done; the message says why and what can."""


@dataclass
class FleetMember:
    """One name in the pool, and the actor that has it now."""

    name: str
    handle: EngineHandle
    log_file: Path
    budget: Restarts
    state: str = "starting"
    restarts: int = 0  # in all of the run
    cause: str = ""  # of its last end
    is_news: bool = False  # its admission is told on the terminal
    started: "Future[dict[str, Any]]" = field(default_factory=Future)  # for the first time

    @property
    def is_alive(self) -> bool:
        return self.state in ("starting", "joining", "serving")

    @property
    def is_known(self) -> bool:
        """To the synchronizer."""
        return self.state in ("joining", "serving", "leaving")


class EngineFleet:
    def __init__(
        self,
        spawn: Spawn,
        log_dir: Path,
        max_restarts: int,
        failed: Failed,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`max_restarts`: of each engine, within any hour."""
        self.spawn = spawn
        self.log_dir = log_dir
        self.max_restarts = max_restarts
        self.failed = failed
        self.say = say
        self.clock = clock
        self.engines: dict[str, FleetMember] = {}
        self.threads: list[threading.Thread] = []
        self.synchronizer: SynchronizerHandle | None = None
        self.explorer: ExplorerHandle | None = None
        self.drain_s = 0.0
        # the run has begun: an engine that cannot start is no failure of it any more
        self.ready = False
        self._end = threading.Event()
        self._next = 0
        self._lock = threading.RLock()

    @property
    def closing(self) -> bool:
        return self._end.is_set()

    def create(self, count: int, is_news: bool = False) -> dict[str, EngineHandle]:
        """So many new engines by name, without waiting for them."""
        handles = {}
        with self._lock:
            for _ in range(count if not self.closing else 0):
                name = f"engine_{self._next}"
                self._next += 1
                engine = FleetMember(
                    name,
                    self.spawn(name, name),
                    self.log_dir / f"{name}.log",
                    Restarts(self.max_restarts, self.clock),
                    is_news=is_news,
                )
                self.engines[name] = engine
                handles[name] = engine.handle
        return handles

    def run(
        self,
        synchronizer: SynchronizerHandle | None,
        explorer: ExplorerHandle,
        drain_s: float,
    ) -> None:
        """Start all that were created, in the background.

        `drain_s`: for the requests of one that is removed.
        """
        self.synchronizer, self.explorer, self.drain_s = synchronizer, explorer, drain_s
        for engine in self.engines.values():
            self._thread(self._live, engine)
        if synchronizer is not None:
            self._thread(self._follow)
            self._thread(self._replace)
            self._thread(self.reintroduce)  # it may have died before anybody could tell it

    def reintroduce(self) -> None:
        """The synchronizer begins anew: it hears which engines live, until those that it has heard
        of are those that do, or the run ends.
        """
        import ray

        told: dict[str, EngineHandle] = {}
        while not self.closing and self.synchronizer is not None:
            with self._lock:
                living = {e.name: e.handle for e in self.engines.values() if e.is_known}
            try:
                self._ask(Synchronizer.recover, living)
                for name in told.keys() - living.keys():
                    self._tell(Synchronizer.leave, name, "it ended")
            except ray.exceptions.RayActorError:  # the run ends
                return
            with self._lock:
                known = {e.name: e.handle for e in self.engines.values() if e.is_known}
            if known == living:
                return
            told = living

    def await_started(self) -> None:
        """Return when all serve or may join; raises PartFailed for the first that cannot start."""
        for name, engine in list(self.engines.items()):
            log.info("%s: %s", name, engine.started.result(control.START_S + control.REPLY_S))
        self.ready = True

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What `rft engines` asks: {} lists, {"add": count} and {"remove": name} begin to."""
        try:
            if "add" in question:
                return {"begun": self.add(int(question["add"]))}
            if "remove" in question:
                self.remove(str(question["remove"]))
                return {"begun": [question["remove"]]}
        except FleetRefusal as error:
            return {"error": str(error)}
        return {"engines": self.describe()}

    def add(self, count: int) -> list[str]:
        """More engines: they load beside the run and get requests when they hold its version."""
        if self.synchronizer is None:
            raise FleetRefusal("engines come and go only in mode=both: here their number is fixed")
        if not self.ready or self.closing:
            raise FleetRefusal("engines can be added once the run has begun, and until it ends")
        names = list(self.create(count, is_news=True))
        for name in names:
            self._thread(self._live, self.engines[name])
        return names

    def remove(self, name: str) -> None:
        """Begin to take one out: it finishes its requests, then its processes end."""
        if self.synchronizer is None:
            raise FleetRefusal("engines come and go only in mode=both: here their number is fixed")
        with self._lock:
            engine = self.engines.get(name)
            if engine is None:
                raise FleetRefusal(
                    f"there is no {name}; there are {', '.join(self.engines) or 'none'}"
                )
            if engine.state == "leaving":
                raise FleetRefusal(f"{name} is leaving already")
            if engine.state == "serving" and not any(
                other.state == "serving" for other in self.engines.values() if other is not engine
            ):
                raise FleetRefusal(f"{name} is the only one that serves: add another one first")
            engine.state = "leaving"
        self._thread(self._take_out, engine)

    def describe(self) -> list[dict[str, Any]]:
        """One row per engine, in the order in which they came; numbers are left out of those that
        do not answer.
        """
        import ray

        with self._lock:
            engines = list(self.engines.values())
            rows = {
                e.name: {"state": e.state, "restarts": e.restarts, "cause": e.cause}
                for e in engines
            }
            asked = {
                e.handle.ask(RolloutEngine.stats): e.name
                for e in engines
                if e.state in ("joining", "serving", "leaving")
            }
        for reference in (
            ray.wait(list(asked), num_returns=len(asked), timeout=STATS_S)[0] if asked else []
        ):
            row = rows[asked[reference]]
            try:
                row |= {**ray.get(reference), **row}
            except ray.exceptions.RayError as error:  # its own thread hears of it too
                row["cause"] = control.cause(error)
        return [{**row, "name": name} for name, row in rows.items()]

    def handles(self) -> list[EngineHandle]:
        with self._lock:
            return [engine.handle for engine in self.engines.values()]

    def close(self) -> None:
        """Start nothing any more. Whoever called ends the actors."""
        with self._lock:
            self._end.set()

    # --- one engine's life ------------------------------------------------------------------------

    def _live(self, engine: FleetMember) -> None:
        """Its thread: let it serve until it ends; then again, as often as it may."""
        while True:
            try:
                self._serve(engine)
            except Exception as error:  # a death in any phase; what it means is decided there
                if not self._again(engine, error):
                    return

    def _serve(self, engine: FleetMember) -> None:
        """Never returns: raises what ended the engine."""
        import ray

        handle = engine.handle
        end = handle.ask(RolloutEngine.watch)
        try:
            facts = ray.get(handle.ask(RolloutEngine.start), timeout=control.START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"it did not start in {control.START_S:g} s") from error
        if engine.started.done():
            log.info("%s: %s", engine.name, facts)
        with self._lock:
            joins = engine.state == "starting" and self.synchronizer is not None
            if engine.state == "starting":
                engine.state = "joining" if joins else "serving"
        if joins:
            self._tell(Synchronizer.join, engine.name, handle)
        if not engine.started.done():
            engine.started.set_result(facts)
        self._attend(handle, end)

    def _attend(self, handle: EngineHandle, end: Any) -> None:
        """Raise what ended the engine, or that it is silent: the actor, or by its word vLLM.

        Counted in beats, so a stop of this process is none of the engine's.
        """
        import ray

        asked, silent = handle.ask(RolloutEngine.is_silent), 0
        while not ray.wait([end], timeout=BEAT_S)[0]:
            if not ray.wait([asked], timeout=0)[0]:
                silent += 1
            else:
                silent = silent + 1 if ray.get(asked) else 0
                asked = handle.ask(RolloutEngine.is_silent)
            if silent * BEAT_S >= SILENT_S:
                handle.ask(RolloutEngine.dump_stacks)
                raise TimeoutError(f"it lives, and has given no sign of it for {SILENT_S:g} s")
        ray.get(end)
        raise AssertionError("an engine's watch returned")

    def _again(self, engine: FleetMember, error: Exception) -> bool:
        """Clear up after one that ended; whether it is started anew.

        Without that, whoever must hear of it has heard.
        """
        with self._lock:
            if self.closing or engine.state == "leaving":
                return False
            phase = "starting" if engine.state == "starting" else "serving"
            engine.cause = engine.cause if engine.state == "ending" else control.cause(error)
            engine.state = "ending"
            if not self._may_end(engine, phase):
                return False
        self._retire(engine, engine.cause)
        with self._lock:
            if self.closing or engine.state == "leaving":  # since then
                return False
            if not engine.budget.allow(engine.cause):
                return self._give_up(engine)
            engine.restarts += 1
            self.say(
                f"{engine.name}: {engine.cause}; started again ({engine.budget.used} of "
                f"{self.max_restarts})"
            )
            engine.handle = self.spawn(engine.name, f"{engine.name}.{engine.restarts}")
            engine.state, engine.is_news = "starting", True
        return True

    def _may_end(self, engine: FleetMember, phase: str) -> bool:
        """Whether the run outlives the end of an engine; if not, it is told here."""
        if not self.ready and not engine.started.done():
            engine.started.set_exception(PartFailed(engine.name, engine.cause))
        elif self.synchronizer is None or self.max_restarts == 0:
            self.failed(engine.name, phase, PartFailed(engine.name, engine.cause))
        else:
            return True
        engine.state = "out"
        return False

    def _give_up(self, engine: FleetMember) -> bool:
        engine.state, first = "out", engine.budget.first
        why = (
            f"{first}, after {self.max_restarts} restarts within an hour "
            "(explorer.rollout_model.max_restarts)"
        )
        if engine.cause != first:
            why += f"; the last cause: {engine.cause}"
        log.error("%s stays out: %s", engine.name, why)
        if any(other.is_alive or other.state == "ending" for other in self.engines.values()):
            self.say(f"warning: {engine.name} stays out: {why}; the run goes on without it")
        else:
            self.failed(
                engine.name,
                "serving",
                PartFailed(engine.name, f"{why}, and no other engine is left"),
            )
        return False

    def _take_out(self, engine: FleetMember) -> None:
        import ray

        try:
            ray.get(self.explorer.ask(Explorer.drain, engine.name), timeout=self.drain_s)
        # too slow, or the explorer is gone: its requests run again elsewhere
        except ray.exceptions.RayError as error:
            log.warning("%s was not drained: %s", engine.name, control.cause(error))
        if self.closing:
            return
        self._retire(engine, "removed")
        with self._lock:
            del self.engines[engine.name]
        self.say(f"{engine.name}: removed")

    def _retire(self, engine: FleetMember, reason: str) -> None:
        """The synchronizer lets it go; then its actor and all its processes end."""
        import ray

        log.warning("%s ends: %s", engine.name, reason)
        try:
            self._tell(Synchronizer.leave, engine.name, reason)
        except ray.exceptions.RayError as error:  # its own failure ends the run
            log.error(
                "the synchronizer did not hear that %s ended: %s", engine.name, control.cause(error)
            )
        ray.wait([engine.handle.ask(RolloutEngine.shutdown)], timeout=ENDING_S)
        ray.kill(engine.handle.actor)
        end_marked("RFT_LOG_FILE", str(engine.log_file))

    def _tell(self, method: Callable[..., Any], *arguments: Any) -> None:
        """The synchronizer must hear it."""
        self._ask(method, *arguments, timeout=control.REPLY_S)

    def _ask(
        self, method: Callable[..., Any], *arguments: Any, timeout: float | None = None
    ) -> Any:
        """What the synchronizer answers, which may die meanwhile: it is asked again until it is
        back. Raises when the run ends, or when it lives and does not answer.
        """
        import ray

        while True:
            asked = self.synchronizer.ask(method, *arguments)  # type: ignore[union-attr]
            try:
                return ray.get(asked, timeout=timeout)
            except ray.exceptions.RayActorError:
                if self._end.wait(AGAIN_S):
                    raise

    # --- what the synchronizer tells --------------------------------------------------------------

    def _follow(self) -> None:
        """Its thread: who serves is who was admitted."""
        import ray

        seen = -1
        while True:
            try:
                seen, admitted = self._ask(Synchronizer.members, seen)
            except ray.exceptions.RayError:  # the run ends
                return
            with self._lock:
                for engine in self.engines.values():
                    self._admitted(engine, admitted.get(engine.name) == engine.handle)

    def _admitted(self, engine: FleetMember, is_admitted: bool) -> None:
        if is_admitted and engine.state == "joining":
            engine.state = "serving"
            if engine.is_news:
                engine.is_news = False
                self.say(f"{engine.name}: serves")
        elif not is_admitted and engine.state == "serving":
            engine.state = "joining"

    def _replace(self) -> None:
        """Its thread: an engine whose rounds fail again and again lives, and yet another one must
        take its place.
        """
        import ray

        seen = 0
        while True:
            try:
                seen, news = self._ask(Synchronizer.failures, seen)
            except ray.exceptions.RayError:
                return
            for name, cause in news:
                with self._lock:
                    engine = self.engines.get(name)
                    if engine is None or not engine.is_alive or self.closing:
                        continue
                    engine.state, engine.cause = "ending", cause
                    ray.kill(engine.handle.actor)  # its thread hears of it and does the rest

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self.threads.append(thread)
