"""The elastic parts of a stage as Ray actors: experience buffer, rollout engines, synchronizer,
explorer.

    start ──► Ray, actors created ──► work: all load at the same time ──► serving ──► close
                                      (one of them dies: Ray starts it again, `_watch` tells it
                                       what only the supervisor knows; an engine: `rft.run.fleet`;
                                       too often, or while all start: `failed(part, phase, cause)`,
                                       from a thread)

In: a stage's config, a callback for failures and one for what the user should read. Out: actors
under known names in the run's namespace, started with an environment cleaned of torch launcher
variables, each writing to its own log file. Invariant: no call here waits for an actor without a
deadline, so the supervisor hears signals at any time; `close` ends every actor and the private Ray,
and nothing is started again from then on.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rft import config as configs
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.checkpoint import fence
from rft.config import Config, LogConfig
from rft.ground import plugins, redact, scratch, surroundings
from rft.ground.device import (
    network_environment,
    quiet_environment,
    thread_environment,
    wait_for_turn,
)
from rft.ground.host_memory import keep_no_blocks
from rft.ground.process import die_with_parent
from rft.ground.protocols import BACK_S, ActorHandle
from rft.monitor import logs, trace
from rft.rollout.engine import RolloutEngine
from rft.rollout.explorer import EndpointFactory, Explorer, ExplorerHandle
from rft.rollout.pool import EngineHandle
from rft.rollout.runner import AllTasksFail
from rft.run import cards, cluster, modes, owners, parts
from rft.run.cards import VISIBLE
from rft.run.control_socket import ControlSocket
from rft.run.fleet import EngineFleet, PartFailed
from rft.run.parts import ActorSpec
from rft.run.restarts import Restarts, pause_s
from rft.sync.lead import is_reborn
from rft.sync.synchronizer import SynchronizerHandle
from rft.trainer import control

log = logging.getLogger(__name__)
# they wait for a core rather than interrupt an engine or a rank
KEEP_BOOKS = ("buffer", "explorer")
DOING = {
    "buffer": "storing",
    "engine": "serving",
    "synchronizer": "publishing",
    "explorer": "exploring",
}  # for messages
# What dies comes back, and goes on with this. Whoever had asked it is answered by the new process.
RETURNS = {
    "buffer": "with all that it has acknowledged",
    "explorer": "with the tasks under way",
    "synchronizer": "and asks the engines what they hold",
}
LOOK_S = 0.5  # at what becomes of one that comes back
Failed = Callable[[str, str, str], None]
Work = Callable[[ExplorerHandle], None]
T = TypeVar("T")


class Watched(Protocol):
    """What every actor of a run can do."""

    async def watch(self) -> None:
        """Raise what broke it; until then, wait."""

    async def shutdown(self) -> None: ...

    async def process(self) -> int:
        """Its number."""


class Actors:
    def __init__(
        self,
        config: Config,
        log_dir: Path,
        failed: Failed,
        say: Callable[[str], None],
        task: Work | None = None,
    ):
        self.config = config
        self.task = task  # instead of what the mode does with the explorer
        self.log_dir = log_dir
        self.failed = failed
        self.say = say
        self.buffer: ActorHandle[ExperienceBuffer] | None = None
        self.synchronizer: SynchronizerHandle | None = None
        self.explorer: ExplorerHandle | None = None
        self.auxiliary: dict[str, EngineHandle] = {}
        restarts = config.explorer.rollout_model.max_restarts
        self.fleet = EngineFleet(self._create_engine, log_dir, restarts, self._fail, say)
        self.socket = ControlSocket(fence.control_dir(owners.place(config)), self._answer)
        self.threads: list[threading.Thread] = []
        self.ready = False
        self.closing = False
        self.ending = threading.Event()
        self.address = ""
        self.seats = cards.Seats(config.cluster.cards)
        self.machine = cards.here()  # before Ray's start changes the environment
        self.held = cluster.RankCards([])
        self.rank_environment: dict[str, str] = {}

    def start(self) -> None:
        """Start Ray and create every actor, without waiting for them.

        Ranks may be started as soon as this returns.
        """
        config = self.config
        self.address = cluster.start(config)
        self._thread(self._watch_ray)
        if "RAY_AUTH_MODE" in os.environ:  # set by Ray as it starts; a client without it is refused
            self.rank_environment["RAY_AUTH_MODE"] = os.environ["RAY_AUTH_MODE"]
        if config.cluster.ray_address and config.device == "cuda":
            self.held = cluster.hold_rank_cards(config, self.machine)
        if config.mode != "bench":
            self.buffer = self._spawn(parts.buffer_spec(config, str(self.log_dir)))
        # explorers are runs of their own, earlier ones or, with a database, at the same time
        if config.mode == "train":
            return
        engines = self.fleet.create(int(config.explorer.rollout_model.engine_num or 1))
        if self.buffer is not None:
            self.synchronizer = self._spawn(parts.synchronizer_spec(config, self.buffer))
            engines = {}  # the explorer follows those that the synchronizer admits
        api = self._api() if config.explorer.rollout_model.enable_openai_api else None
        self.explorer = self._spawn(
            parts.explorer_spec(config, engines, self.buffer, self.synchronizer, api)
        )
        self.fleet.run(
            self.synchronizer, self.explorer, config.explorer.max_timeout + control.REPLY_S
        )
        self._listen()

    def work(self, done: Callable[[], None]) -> None:
        """In the background: wait until all serve, do what a mode without a trainer does, then call
        `done`.

        With a trainer that is: let its rank 0 begin. Whatever fails is reported as that part's
        failure.
        """

        def run() -> None:
            try:
                self._await_ready()
            except PartFailed as error:
                self._fail(error.part, "starting", error)
                return
            try:
                self._begin()
            except Exception as error:
                log.exception("mode %s", self.config.mode)
                self._fail("explorer", f"working on mode={self.config.mode}", error)
                return
            done()

        self._thread(run)

    def close(self, grace_s: float) -> None:
        """Ask every actor to shut down, then kill whatever is left of them and of Ray; at most
        about `grace_s` seconds.
        """
        import ray

        self.closing = True
        self.ending.set()
        self.fleet.close()
        if not ray.is_initialized() or cluster.silence(self.address):
            return  # the shutdown of a Ray that is gone would end this process without a word
        deadline = time.monotonic() + grace_s
        explorer = [self.explorer] if self.explorer else []  # it asks the others for things
        others = [handle for handle in (self.buffer, self.synchronizer) if handle]
        others += [*self.auxiliary.values(), *self.fleet.handles()]
        for handles in filter(None, (explorer, others)):
            asked = [handle.ask(Watched.shutdown) for handle in handles]
            ray.wait(asked, num_returns=len(asked), timeout=grace_s / 3)
        for handle in explorer + others:
            ray.kill(handle.actor)
        # each ends with its actor; Ray aborts the process when it is shut down under a waiting call
        for thread in self.threads + self.fleet.threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self.socket.close(max(0.1, deadline - time.monotonic()))
        ray.shutdown()

    def _api(self) -> EndpointFactory:
        """What the explorer's OpenAI API needs: a place for its key, and the engines of auxiliary
        models, which never change.
        """
        from rft.agents.endpoint import OpenAIEndpointFactory

        config = self.config
        auxiliary: dict[str, dict[str, EngineHandle]] = {}
        for model in config.explorer.auxiliary_models:
            specs = [
                parts.auxiliary_spec(config, model, number) for number in range(model.engine_num)
            ]
            auxiliary[model.name] = {spec.name: self._spawn(spec) for spec in specs}
            self.auxiliary |= auxiliary[model.name]
        serves, size = config.mode == "serve", int(config.algorithm.repeat_times or 1)
        return OpenAIEndpointFactory(str(configs.job_dir(config)), serves, size, auxiliary)

    def _await_ready(self) -> None:
        """All parts load at the same time; raises PartFailed for the first that cannot."""
        if self.config.cluster.ray_address and self.config.device == "cuda":
            self._await_cards()
        starting = {}
        if self.explorer is not None:
            starting["explorer"] = self.explorer.ask(Explorer.prepare)
        starting |= {
            name: handle.ask(RolloutEngine.start) for name, handle in self.auxiliary.items()
        }
        if self.config.mode == "train" and not parts.is_shared(self.config):
            starting["buffer"] = self.buffer.ask(ExperienceBuffer.input_done)  # type: ignore[union-attr]
        for part, reference in starting.items():
            log.info("%s: %s", part, self._get(part, reference))
        self.fleet.await_started()
        self.ready = True

    def _await_cards(self) -> None:
        """Ray itself would wait for ever for GPUs that no node has."""
        engines = cards.engine_cards(self.config) if self.config.mode != "train" else 0
        try:
            cluster.await_engine_cards(len(self.held.names) + engines, lambda: self.closing)
        except RuntimeError as error:
            raise PartFailed("engine_0", str(error)) from error

    def _begin(self) -> None:
        """What the supervisor sets going once all parts serve."""
        import ray

        if self.explorer is None:
            return
        if self.task is not None:
            self.task(self.explorer)
        elif self.config.mode == "both":
            ray.get(self.explorer.ask(Explorer.open), timeout=control.REPLY_S)
        elif self.config.mode == "bench":
            modes.evaluate_checkpoints(self.config, self.explorer)
        elif self.synchronizer is not None and self.buffer is not None:
            if self.config.mode == "explore":
                modes.explore(self.config, self.explorer, self.synchronizer, self.buffer)
            else:
                modes.serve(self.config, self.explorer, self.synchronizer, self.say)

    def _get(self, part: str, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=control.START_S)
        except ray.exceptions.RayError as error:
            raise PartFailed(part, control.cause(error)) from error

    def _spawn(self, spec: ActorSpec[T]) -> ActorHandle[T]:
        """An actor that is watched: its end is a failure of the run, unless it comes back."""
        restarts = Restarts(self._may_return(spec.part))
        handle = self._create(spec, returns=restarts.limit > 0)
        self._thread(self._watch, spec.part, handle, restarts)
        return handle

    def _may_return(self, part: str) -> int:
        """How often within an hour."""
        return self.config.cluster.max_restarts if part in RETURNS else 0

    def _create_engine(self, engine: str, name: str) -> EngineHandle:
        self.seats.take(engine, self._size, (*self.fleet.engines, *self.auxiliary))
        return self._create(parts.engine_spec(self.config, engine, name))

    def _create(self, spec: ActorSpec[T], returns: bool = False) -> ActorHandle[T]:
        """`returns`: Ray starts it again when it dies, under its name and for all who have its
        handle, and asks it again what it has not answered.
        """
        import ray

        environment = (
            network_environment()
            | quiet_environment()
            | thread_environment(spec.threads)
            | {"RFT_LOG_FILE": str(self.log_dir / f"{spec.part}.log")}
            | trace.environment()
            | {plugins.VARIABLE: os.pathsep.join(self.config.plugin_dirs)}
            | surroundings.names_to_tell()
        )
        is_engine = spec.part not in (*KEEP_BOOKS, "synchronizer")
        others = surroundings.others_secrets("engine") if is_engine else []
        environment |= dict.fromkeys(others, "")
        # not through Ray, which writes `env_vars` to its logs
        own = self.config.explorer.env_vars if spec.part == "explorer" else {}
        options = {
            "name": spec.name,
            "num_cpus": spec.cpus,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": environment},
        }
        if returns:
            options |= {"max_restarts": -1, "max_task_retries": -1}
        if names := self.seats.of_engine.get(spec.part):
            environment[VISIBLE] = names
        elif spec.gpus and self.config.device == "cuda":
            options["num_gpus"] = spec.gpus
        cls = hosted(
            spec.make.func,
            self.config.log,
            computes=spec.part not in KEEP_BOOKS,
            own=own,
            others=others,
            # with the class, which is there as long as Ray is: what goes through its object store
            # may be lost, it says on the terminal
            given=ray.cloudpickle.dumps((spec.make.args, spec.make.keywords)) if returns else b"",
        )
        actor_class = ray.remote(cls).options(**options)
        given = ((), {}) if returns else (spec.make.args, spec.make.keywords)
        try:
            return ActorHandle(actor_class.remote(*given[0], **given[1]))
        except ray.exceptions.ActorAlreadyExistsError as error:
            raise RuntimeError(
                f"ray_namespace={self.config.ray_namespace}: another run has its {spec.name} there "
                f"in the Ray at {self.config.cluster.ray_address}; wait for its end, or give this "
                "one a ray_namespace of its own"
            ) from error

    def _listen(self) -> None:
        """`rft engines` reaches this run, if its directory can hold a socket."""
        try:
            self.socket.open()
        except OSError as error:
            self.say(f"warning: `rft engines` cannot reach this run: {error}")

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Of `rft engines`. Ray would wait for ever for GPUs that nobody gives back."""
        if "add" in question and self.config.device == "cuda":
            wanted, free = int(question["add"]) * self._size, self._free_cards()
            if free < wanted:
                return {
                    "error": (
                        f"{wanted} more GPUs are needed "
                        f"(explorer.rollout_model.tensor_parallel_size), {free} are free"
                    )
                }
        return self.fleet.answer(question)

    @property
    def _size(self) -> int:
        """GPUs of one of the policy's engines."""
        return self.config.explorer.rollout_model.tensor_parallel_size

    def _free_cards(self) -> int:
        """GPUs for more engines: Ray's, or of this machine."""
        import ray

        if not self.seats.of_engine:
            return int(ray.available_resources().get("GPU", 0))
        return len(self.seats.free((*self.fleet.engines, *self.auxiliary)))

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _watch_ray(self) -> None:
        is_private = self.config.cluster.ray_address is None
        if why := cluster.await_loss(self.address, is_private, self.ending):
            self._fail("ray", "holding the parts", PartFailed("ray", why))

    def _watch(self, part: str, handle: ActorHandle[Any], restarts: Restarts) -> None:
        """One thread per actor, asleep until the actor dies or says what broke it; then it follows
        the next of its lives, as long as there may be one.
        """
        import ray

        while True:
            try:
                ray.get(handle.ask_once(Watched.watch))
                return
            except Exception as error:
                died = error
            if not self._again(part, handle, restarts, died):
                return

    def _again(
        self, part: str, handle: ActorHandle[Any], restarts: Restarts, error: Exception
    ) -> bool:
        """Whether it lives again, and was told what only the supervisor knows."""
        import ray

        why, phase = control.cause(error), DOING[part.split("_")[0]] if self.ready else "starting"
        if self.closing:
            return False
        if not self.ready or not may_return(error) or not restarts.allow(why):
            why = restarts.cause() if restarts.limit and self.ready and may_return(error) else why
            self._fail(part, phase, PartFailed(part, why))
            ray.kill(handle.actor)
            return False
        log.warning("%s: %s", part, why)
        self.say(f"{part}: {why}; it comes back {RETURNS[part]} ({restarts.told()})")
        if says_itself(error):
            if self.ending.wait(pause_s(restarts.used)):
                return False
            ray.kill(handle.actor, no_restart=False)
        deadline = time.monotonic() + BACK_S
        try:
            self._await_return(part, handle, restarts, deadline)
            self._tell(part, deadline)
        except Exception as told:  # it died again, and says so to its watch, or does not come back
            if not self._is_death(told):
                self._fail(part, phase, told)
                return False
        return True

    def _await_return(
        self, part: str, handle: ActorHandle[Any], restarts: Restarts, deadline: float
    ) -> None:
        """Until the new process answers: Ray asks it as soon as it is there. One that could not be
        made is followed by another one, as long as there may be.
        """
        import ray

        asked, why = handle.ask(Watched.process), unmade(self.log_dir / f"{part}.log")
        heard = 0
        while not ray.wait([asked], timeout=LOOK_S)[0]:
            for cause in causes(why)[heard:]:
                heard += 1
                if not restarts.allow(cause):
                    raise PartFailed(part, restarts.cause())
                self.say(f"{part}: {cause}; it is tried again ({restarts.told()})")
            if self.closing or time.monotonic() > deadline:
                raise PartFailed(part, f"it was not back in {BACK_S:g} s")
        why.unlink(missing_ok=True)
        log.info("%s: process %d", part, ray.get(asked, timeout=control.REPLY_S))

    def _tell(self, part: str, deadline: float) -> None:
        """A new process what the last one knew of the supervisor."""
        import ray

        if part == "explorer" and self.explorer is not None:
            for method in (Explorer.prepare, Explorer.open):
                left_s = max(0.0, deadline - time.monotonic())
                ray.get(self.explorer.ask_once(method), timeout=left_s)
        elif part == "synchronizer":
            self.fleet.reintroduce()

    @staticmethod
    def _is_death(error: Exception) -> bool:
        import ray

        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def _fail(self, part: str, phase: str, error: Exception) -> None:
        if not self.closing:
            self.failed(
                part, phase, str(error) if isinstance(error, PartFailed) else control.cause(error)
            )


def says_itself(error: Exception) -> bool:
    """Whether the part lives, and has said that it is broken."""
    from ray.exceptions import RayTaskError

    return isinstance(error, RayTaskError)


def may_return(error: Exception) -> bool:
    """Whether another process could do better: not where tasks fail one after the other, or where
    it could not even be made.
    """
    from ray.exceptions import ActorDiedError, RayTaskError

    failed = error.cause if isinstance(error, RayTaskError) else None
    return not isinstance(failed, AllTasksFail) and not isinstance(error, ActorDiedError)


def unmade(log_file: Path) -> Path:
    """Where an actor that comes back and cannot be made leaves why, a line each time."""
    return log_file.with_suffix(".unmade")


def causes(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def give_way(error: Exception) -> None:
    """To another process, after a pause: an actor whose constructor raises would be dead for good
    to Ray, and what failed may be over soon (a full disk).
    """
    log.error("it could not be made", exc_info=error)
    path = unmade(Path(os.environ["RFT_LOG_FILE"]))
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(redact.text(f"{control.cause(error)}\n"))  # unless the disk is that full
    time.sleep(pause_s(len(causes(path))))
    os._exit(1)


def hosted(
    cls: Callable[..., Any],
    log_config: LogConfig,
    computes: bool,
    own: Mapping[str, str],
    others: Sequence[str],
    given: bytes = b"",
) -> type:
    """`cls` as an actor that writes to the log file named in its environment, with variables of its
    `own` in it, and without those of `others`, which it was started with empty.

    One that computes nothing gives way to others, and keeps no memory of what went through it.
    `given`: its arguments, packed.
    """

    class Hosted(cls):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any, **named: Any):
            for name in others:
                os.environ.pop(name, None)
            os.environ.update(own)
            logs.redirect(Path(os.environ["RFT_LOG_FILE"]), log_config)
            # the raylet; Ray itself only looks for it now and then, and not everywhere
            die_with_parent()
            scratch.enter()
            plugins.load()
            if not computes:
                wait_for_turn()
                keep_no_blocks()
            if given:
                import ray

                arguments, named = ray.cloudpickle.loads(given)
            try:
                super().__init__(*arguments, **named)
            except Exception as error:
                if not given or not is_reborn():
                    raise
                give_way(error)

        async def process(self) -> int:
            return os.getpid()

    Hosted.__name__ = Hosted.__qualname__ = cls.__name__
    return Hosted
