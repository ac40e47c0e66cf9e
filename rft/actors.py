"""The elastic parts of a stage as Ray actors: experience buffer, rollout engines, synchronizer, explorer.

    start ──► Ray, actors created ──► work: all load at the same time ──► serving ──► close
                                      (any of them fails: `failed(part, phase, cause)`, from a thread;
                                       an engine is first started again: `rft.engines`)

In: a stage's config, a callback for failures and one for what the user should read. Out: actors under known names in the
run's namespace, started with an environment cleaned of torch launcher variables, each writing to its own log file. Invariant:
no call here waits for an actor without a deadline, so the supervisor hears signals at any time; `close` ends every actor and
the private Ray.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rft import cards, control, plugins
from rft import config as configs
from rft.adapters import versions_kept
from rft.algorithm import recipe
from rft.checkpoint import fence
from rft.config import Config, LogConfig, SynchronizerConfig
from rft.control_socket import ControlSocket
from rft.device import thread_environment, wait_for_turn
from rft.engines import Engines, PartFailed
from rft.monitor import logs, trace
from rft.preflight_sync import stored_bytes
from rft.preflight_tinker import is_remote

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 256 * 2**20  # for batches of tokens; weights only where `synchronizer.sync_method=memory`
PRIVATE_RAY = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # without its head a private Ray ends itself, after this
    "RAY_worker_niceness": "0",  # Ray's 15 would let everything else go before the engines
    "RAY_task_events_report_interval_ms": "0",  # nobody asks it what became of each call
    "RAY_prestart_worker_first_driver": "false",  # workers without an actor's environment are of no use, and start before it
}
QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # a raylet's paragraph for each actor that dies; read as Ray is imported
KEEP_BOOKS = ("buffer", "explorer")  # they wait for a core rather than interrupt an engine or a rank
RAY_STARTS = 3
RAY_IS_LATE = "node timed out during startup"
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
DOING = {
    "buffer": "storing",
    "engine": "serving",
    "synchronizer": "publishing",
    "explorer": "exploring",
}  # for messages
Failed = Callable[[str, str, str], None]
Work = Callable[[Any], None]


def start_patiently(start: Callable[..., Any], **settings: Any) -> None:
    """Start a private Ray. It gives its own processes 30 seconds, fixed, which a crowded machine may not keep: then again."""
    for left in reversed(range(RAY_STARTS)):
        try:
            start(**settings)
            return
        except Exception as error:  # Ray raises no class of its own here
            if left == 0 or RAY_IS_LATE not in str(error):
                raise
            log.warning("Ray did not come up in its own time; %d more tries", left)


class Actors:
    def __init__(
        self, config: Config, log_dir: Path, failed: Failed, say: Callable[[str], None], task: Work | None = None
    ):
        self.config = config
        self.task = task  # instead of what the mode does with the explorer
        self.log_dir = log_dir
        self.failed = failed
        self.say = say
        self.handles: dict[str, Any] = {}  # but for the policy's engines'
        restarts = config.explorer.rollout_model.max_restarts
        self.engines = Engines(self._spawn_engine, log_dir, restarts, self._fail, say)
        self.socket = ControlSocket(fence.control_dir(configs.job_dir(config)), self._answer)
        self.threads: list[threading.Thread] = []
        self.ready = False
        self.closing = False
        self.address = ""
        self.cards: cards.Cards | None = None
        self.rank_environment: dict[str, str] = {}

    def start(self) -> None:
        """Start Ray and create every actor, without waiting for them. Ranks may be started as soon as this returns."""
        self._start_ray()
        if self.config.mode != "bench":
            self._spawn_buffer()
        if (
            self.config.mode == "train"
        ):  # explorers are runs of their own, earlier ones or, with a database, at the same time
            return
        config, buffer = self.config, self.handles.get("buffer")
        from rft.sync.synchronizer import Synchronizer

        engines, synchronizer = self.engines.create(config.explorer.rollout_model.engine_num), None
        if config.mode != "bench":
            freed = (
                buffer if config.mode == "both" or self.is_shared else None
            )  # slots are counted where a trainer frees them
            timeout, told = config.synchronizer.sync_timeout, settings(config.synchronizer)
            synchronizer = self._spawn("synchronizer", "synchronizer", Synchronizer, 1, freed, timeout, told)
            engines = {}  # the explorer follows those that the synchronizer admits
        api = self._api() if config.explorer.rollout_model.enable_openai_api else None
        explorer = self._spawn("explorer", config.explorer.name, *_explorer(config, engines, buffer, synchronizer, api))
        self.engines.run(synchronizer, explorer, config.explorer.max_timeout + control.REPLY_S)
        self._listen()

    def work(self, done: Callable[[], None]) -> None:
        """In the background: wait until all serve, do what a mode without a trainer does, then call `done`.

        With a trainer that is: let its rank 0 begin. Whatever fails is reported as that part's failure.
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
        """Ask every actor to shut down, then kill whatever is left of them and of Ray; at most about `grace_s` seconds."""
        import ray

        self.closing = True
        self.engines.close()
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + grace_s
        first = [handle for part, handle in self.handles.items() if part == "explorer"]  # it asks the others for things
        rest = [handle for part, handle in self.handles.items() if part != "explorer"] + self.engines.handles()
        for handles in filter(None, (first, rest)):
            asked = [handle.shutdown.remote() for handle in handles]
            ray.wait(asked, num_returns=len(asked), timeout=grace_s / 3)
        for handle in first + rest:
            ray.kill(handle)
        # each ends with its actor; Ray aborts the process when it is shut down under a waiting call
        for thread in self.threads + self.engines.threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self.socket.close(max(0.1, deadline - time.monotonic()))
        ray.shutdown()

    def _start_ray(self) -> None:
        os.environ.update(QUIET)
        import ray

        for variable in LAUNCHER_VARIABLES:
            os.environ.pop(variable, None)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        cluster = self.config.cluster
        shared = {"namespace": self.config.ray_namespace, "log_to_driver": False, "logging_level": "ERROR"}
        with control.our_sigterm():
            if cluster.ray_address:
                ray.init(address=cluster.ray_address, **shared)
            else:
                os.environ.update(PRIVATE_RAY)
                store = OBJECT_STORE_BYTES + stored_bytes(self.config)
                explorer = self.config.explorer
                actors = (
                    3 + explorer.rollout_model.engine_num + sum(one.engine_num for one in explorer.auxiliary_models)
                )
                start_patiently(
                    ray.init, address="local",  # not a cluster that happens to run here, or that RAY_ADDRESS names
                    num_cpus=cluster.ray_num_cpus or actors, include_dashboard=False, object_store_memory=store,
                    _node_ip_address="127.0.0.1", **self._split_gpus(), **shared,
                )  # fmt: skip
        self.address = ray.get_runtime_context().gcs_address
        if "RAY_AUTH_MODE" in os.environ:  # set by Ray as it starts; a client without it is refused
            self.rank_environment["RAY_AUTH_MODE"] = os.environ["RAY_AUTH_MODE"]

    def _spawn_buffer(self) -> None:
        from rft.buffer.build import buffer_of

        config = self.config
        settings = config.buffer.trainer_input.experience_buffer
        limited = config.mode == "both" or (self.is_shared and config.mode != "serve")  # a client asks when it asks
        cls, arguments = buffer_of(
            settings, configs.job_dir(config), f"{config.project}/{config.name}", config.buffer.batch_size,
            int(config.algorithm.repeat_times or 1), config.synchronizer.max_staleness if limited else None,
            config.trainer.total_steps if config.mode != "serve" else None, config.seed,
            config.explorer.over_rollout if config.mode == "both" else None,
        )  # fmt: skip
        self._spawn("buffer", settings.name, cls, 1, *arguments)

    @property
    def is_shared(self) -> bool:
        """Whether other processes write to the buffer, or read from it, while this one runs."""
        return self.config.buffer.trainer_input.experience_buffer.storage_type == "sql"

    def _api(self) -> Any:
        """What the explorer's OpenAI API needs: a place for its key, and the engines of auxiliary models, which never change."""
        from rft.rollout.endpoint.life import Api

        config, auxiliary = self.config, {}
        for one in config.explorer.auxiliary_models:
            names = [f"engine_of_{one.name}_{number}" for number in range(one.engine_num)]
            auxiliary[one.name] = {name: self._spawn_auxiliary(name, one) for name in names}
        serves, size = config.mode == "serve", int(config.algorithm.repeat_times or 1)
        return Api(str(configs.job_dir(config)), serves, size, auxiliary)

    def _spawn_auxiliary(self, name: str, one: configs.AuxiliaryModelConfig) -> Any:
        from rft.rollout.engine import RolloutEngine

        model = configs.ModelConfig(model_path=one.model_path, trust_remote_code=one.trust_remote_code)
        config, threads = self.config, self.config.cluster.threads_per_engine
        handle = self._create(
            name, name, RolloutEngine, threads, name, model, one, threads, config.seed, self._device_kind(),
            int(one.max_model_len or 0), gpus=one.tensor_parallel_size,
        )  # fmt: skip
        self.handles[name] = handle
        self._thread(self._watch, name, handle)
        return handle

    def _await_ready(self) -> None:
        """All parts load at the same time; raises PartFailed for the first that cannot."""
        starting = {}
        if "explorer" in self.handles:
            starting["explorer"] = self.handles["explorer"].prepare.remote()
        starting |= {name: h.start.remote() for name, h in self.handles.items() if name.startswith("engine_of_")}
        if self.config.mode == "train" and not self.is_shared:
            starting["buffer"] = self.handles["buffer"].input_done.remote()
        for part, reference in starting.items():
            log.info("%s: %s", part, self._get(part, reference))
        self.engines.await_started()
        self.ready = True

    def _begin(self) -> None:
        """What the supervisor sets going once all parts serve."""
        import ray

        from rft import modes

        if self.task is not None:
            self.task(self.handles["explorer"])
        elif self.config.mode == "both":
            ray.get(self.handles["explorer"].open.remote())
        elif self.config.mode == "explore":
            modes.explore(self.config, self.handles["explorer"], self.handles["synchronizer"], self.handles["buffer"])
        elif self.config.mode == "serve":
            modes.serve(self.config, self.handles["explorer"], self.handles["synchronizer"], self.say)
        elif self.config.mode == "bench":
            modes.evaluate_checkpoints(self.config, self.handles["explorer"])

    def _get(self, part: str, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=control.START_S)
        except ray.exceptions.RayError as error:
            raise PartFailed(part, control.cause(error)) from error

    def _split_gpus(self) -> dict[str, int]:
        """Trainer ranks get the first devices of this machine, Ray only the rest (DESIGN: split once, here)."""
        self.cards = cards.split(self.config, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if self.cards is None:
            return {}
        self.rank_environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.cards.ranks)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.cards.engines)
        return {"num_gpus": self.cards.for_ray}

    def _device_kind(self) -> str:
        return (
            self.config.device
            if self.config.device != "auto"
            else ("cuda" if "CUDA_VISIBLE_DEVICES" in self.rank_environment else "cpu")
        )

    def _spawn(self, part: str, name: str, cls: type, threads: int, *arguments: Any) -> Any:
        handle = self._create(part, name, cls, threads, *arguments)
        self.handles[part] = handle
        self._thread(self._watch, part, handle)
        return handle

    def _spawn_engine(self, engine: str, name: str) -> Any:
        """The actor `name` of `engine`. Only those of the start have a CPU of the private Ray's, which are only bookkeeping."""
        from rft.rollout.engine import RolloutEngine
        from rft.tinker.engine import SamplerEngine

        config = self.config
        rollout, threads = config.explorer.rollout_model, config.cluster.threads_per_engine
        is_first = int(engine.removeprefix("engine_")) < rollout.engine_num
        cpus, longest = 1 if is_first or config.cluster.ray_address else 0, int(config.model.max_model_len or 0)
        if is_remote(config):
            return self._create(engine, name, SamplerEngine, threads, engine, config.model, longest, cpus=cpus)
        return self._create(
            engine, name, RolloutEngine, threads, engine, config.model, rollout, threads, config.seed, self._device_kind(),
            longest, versions_kept(config.synchronizer) if config.mode != "bench" else 0, config.cluster.colocate,
            gpus=rollout.tensor_parallel_size, cpus=cpus,
        )  # fmt: skip

    def _create(
        self, part: str, name: str, cls: type, threads: int, *arguments: Any, gpus: int = 0, cpus: int = 1
    ) -> Any:
        import ray

        environment = (
            thread_environment(threads)
            | {"RFT_LOG_FILE": str(self.log_dir / f"{part}.log")}
            | trace.environment()
            | {plugins.VARIABLE: os.pathsep.join(self.config.plugin_dirs)}
        )
        environment |= self.config.explorer.env_vars if part == "explorer" else {}  # reward workers inherit them
        options = {"name": name, "num_cpus": cpus, "max_concurrency": 10_000, "runtime_env": {"env_vars": environment}}
        if gpus and self.cards is not None and self.cards.shared:
            environment["CUDA_VISIBLE_DEVICES"] = self.cards.of_engine(int(part.removeprefix("engine_")))
        elif gpus and self._device_kind() == "cuda":
            options["num_gpus"] = gpus
        cls = hosted(cls, self.config.log, computes=part not in KEEP_BOOKS)
        return ray.remote(cls).options(**options).remote(*arguments)

    def _listen(self) -> None:
        """`rft engines` reaches this run, if its directory can hold a socket."""
        try:
            self.socket.open()
        except OSError as error:
            self.say(f"warning: `rft engines` cannot reach this run: {error}")

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Of `rft engines`. Ray would wait for ever for GPUs that nobody gives back."""
        import ray

        if "add" in question and self._device_kind() == "cuda":
            wanted = int(question["add"]) * self.config.explorer.rollout_model.tensor_parallel_size
            free = int(ray.available_resources().get("GPU", 0))
            if free < wanted:
                return {
                    "error": f"{wanted} more GPUs are needed (explorer.rollout_model.tensor_parallel_size), {free} are free"
                }
        return self.engines.answer(question)

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _watch(self, part: str, handle: Any) -> None:
        """One thread per actor, asleep until the actor dies or says what broke it."""
        import ray

        try:
            ray.get(handle.watch.remote())
        except Exception as error:
            self._fail(part, DOING[part.split("_")[0]] if self.ready else "starting", error)

    def _fail(self, part: str, phase: str, error: Exception) -> None:
        if not self.closing:
            self.failed(part, phase, str(error) if isinstance(error, PartFailed) else control.cause(error))


def settings(synchronizer: SynchronizerConfig) -> dict[str, Any]:
    """What engines are told of every round."""
    return {"kv": synchronizer.kv, "direct": synchronizer.receive == "direct"}


def hosted(cls: type, log_config: LogConfig, computes: bool) -> type:
    """`cls` as an actor that writes to the log file named in its environment. One that computes nothing gives way to others."""

    class Hosted(cls):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any):
            logs.redirect(Path(os.environ["RFT_LOG_FILE"]), log_config)
            logs.die_with_parent()  # the raylet; Ray itself only looks for it now and then, and not everywhere
            plugins.load()
            if not computes:
                wait_for_turn()
            super().__init__(*arguments)

    Hosted.__name__ = Hosted.__qualname__ = cls.__name__
    return Hosted


def _explorer(config: Config, engines: dict[str, Any], buffer: Any, synchronizer: Any, api: Any) -> tuple[Any, ...]:
    from rft.buffer.taskset import build_tasksets
    from rft.rollout.explorer import Explorer

    staleness = config.synchronizer.max_staleness if config.mode == "both" else None
    taskset, evals = build_tasksets(
        config.buffer, config.model, config.seed, config.trainer.total_steps, max_staleness=staleness
    )
    return (
        Explorer,
        1,
        config.explorer,
        config.model,
        taskset,
        evals,
        engines,
        buffer,
        config.buffer.batch_size,
        config.seed if config.deterministic else None,
        synchronizer,
        recipe.needs_baseline(config.algorithm),
        api,
        _pipeline(config),
    )


def _pipeline(config: Config) -> Callable[[], Any] | None:
    """What makes the experience pipeline where the explorer runs; None: groups go straight to the buffer."""
    given = config.data_processor.experience_pipeline
    if config.mode == "bench" or not (given.operators or given.save_input):
        return None
    from rft.pipeline.experiences import ExperiencePipeline

    return partial(
        ExperiencePipeline, given, config.service.data_juicer, configs.job_dir(config), config.buffer.batch_size
    )
