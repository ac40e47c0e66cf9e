"""One vLLM instance as a service: token ids in, token ids with log-probabilities and weight versions out.

    generate(GenerateRequest) ──► AsyncLLM ──ZMQ──► EngineCore process (model, KV cache, plug-in) ──► [Completion]
    stage(version)            ──► workers receive, decoding goes on
    commit(version)           ──► pause keep ─► install, all workers ─► label ─► resume

The supervisor wraps the class as a Ray actor; every method is a coroutine on the actor's event loop. Consumes encoded
requests and weight rounds, produces encoded completions. Invariants: every returned token carries the version of exactly
the weights that produced it, and an engine whose weights are neither wholly old nor wholly new (`poisoned`) answers no
request until a full round commits. How the key-value cache outlives a commit is told with the streams (`kv`): "recompute"
drops it, also of requests in flight; "keep" keeps it for these, and salts the prefix cache, so that no new request meets it.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import psutil

from rft.config import EngineConfig, ModelConfig
from rft.device import freeze_loaded
from rft.experience import Completion, GenerateRequest, decode, encode
from rft.monitor import trace
from rft.monitor.logs import STACKS_SIGNAL
from rft.names import Dims, architecture_of, hf_names, read_hf_config
from rft.rollout.adapter_serving import AdapterServing, Served
from rft.rollout.endings import await_exit_code, ending
from rft.rollout.environment import environment
from rft.rollout.handed_over import handed_over
from rft.rollout.orders import Orders
from rft.rollout.turns import CACHE, WEIGHTS, Turns
from rft.rollout.vllm_requests import completion, pause, sampling_params

if TYPE_CHECKING:
    from vllm import AsyncLLM, SamplingParams
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)
GIB = 2**30
# Found by vLLM through its plugin entry point and by name; this package does not import rft.sync.
WEIGHT_BACKEND, WORKER_EXTENSION = "rft", "rft.sync.receiver.WorkerExtension"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SHUTDOWN_S = 5.0  # for vLLM's own orderly end; afterwards it kills its processes


class EngineUnavailable(RuntimeError):
    """This engine does not serve; another one may."""


class EngineDied(EngineUnavailable):
    """The engine's processes or its actor are gone; the message names the engine and the cause."""


class RoundFailed(RuntimeError):
    """A round of weights that was not installed. `kind`: "unreachable" (no bytes came), "broken" or "damaged" (poisoned)."""

    def __init__(self, message: str, kind: str = "broken"):
        super().__init__(message, kind)  # both, so that it can be pickled
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class RolloutEngine:
    """Life: created -> start -> serving <-> updating; `poisoned` after a half-installed round, until the next full one."""

    def __init__(
        self, name: str, model: ModelConfig, rollout: EngineConfig, threads: int, seed: int, device_kind: str,
        max_model_len: int, adapters: int = 0, colocated: bool = False,
    ):  # fmt: skip
        self.name = name
        self.model = model
        self.rollout = rollout
        self.threads = threads
        self.seed = seed
        self.device_kind = device_kind
        self.max_model_len = max_model_len
        self.adapters = AdapterServing(name, model, adapters) if adapters else None
        self.llm: AsyncLLM | None = None
        self.poisoned: str | None = None
        self.requests = self._running = 0
        self.tokens = 0
        self.cached = 0  # prompt tokens whose keys and values were there already
        self._version = 0
        self._kv = "recompute"
        self._room_s = 600.0  # for requests of old adapters to end, before a new one has a place
        self._round = asyncio.Lock()
        self.colocated = colocated  # the trainer has the same devices
        self.turns = Turns(name)
        self.orders = Orders(rollout.tensor_parallel_size)
        self._broken: asyncio.Future[None] | None = None
        self._stopping = False

    async def start(self, version: int = 0) -> dict[str, Any]:
        """Load the model, labelled `version`; blocks this actor until vLLM serves. Returns facts for the log."""
        began = time.monotonic()
        os.environ.update(environment(self.device_kind, self.threads, self.workers))
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))
        await self.llm.update_weight_version(str(version))
        await self.llm.collective_rpc("rft_listen", args=(await self.orders.open(),))
        self._version = version
        self._watch_processes()
        config = self.llm.model_config
        self.max_model_len = config.max_model_len
        freeze_loaded()
        return {
            "vllm": vllm.__version__,
            "workers": self.workers,
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": self.device_kind,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "version": version,
            "start_s": round(time.monotonic() - began, 2),
        }

    @property
    def workers(self) -> int:
        """Processes that hold a copy or shard of the model: each one receives the weight streams."""
        return self.rollout.tensor_parallel_size

    def _arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig

        arguments: dict[str, Any] = {
            "model": self.model.model_path,
            "trust_remote_code": self.model.trust_remote_code,
            "dtype": DTYPES.get(str(self.rollout.dtype), "auto"),
            "max_model_len": self.max_model_len or None,
            "max_num_seqs": self.rollout.max_num_seqs,
            "tensor_parallel_size": self.workers,
            "enforce_eager": self.rollout.enforce_eager,
            "seed": self.seed,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature, top-k, top-p
            "enable_prefix_caching": self.rollout.enable_prefix_caching,
            "disable_log_stats": True,
            "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_BACKEND),
            "worker_extension_cls": WORKER_EXTENSION,
            **(self.adapters.arguments() if self.adapters else {}),
        }
        if self.device_kind == "cpu":
            arguments["kv_cache_memory_bytes"] = int(self.rollout.kv_cache_gb * GIB)  # explicit: vLLM skips its warm-up
        else:
            arguments["gpu_memory_utilization"] = self.rollout.gpu_memory_utilization
            arguments["enable_sleep_mode"] = self.colocated
        if self.device_kind != "cpu" or self.workers > 1:
            arguments["distributed_executor_backend"] = "mp"
        return arguments

    # --- serving ------------------------------------------------------------------------------------------------

    async def generate(self, request: bytes) -> bytes:
        """Encoded `GenerateRequest` in, encoded `list[Completion]` (n of them) out, when all are finished."""
        asked = decode(request, GenerateRequest)
        room = self.max_model_len - len(asked.prompt)
        if room <= 0:
            empty = Completion(tokens=[], logprobs=[], versions=[], stop="prompt_too_long")
            return encode([empty] * asked.n)
        async with self.turns.request():  # it belongs to one side of every change of the weights
            with self.adapters.use() if self.adapters else nullcontext() as served, self._counted():
                output = await self._run(asked, sampling_params(asked, room), served)
        completions = [completion(self.name, made, served) for made in output.outputs]
        self.requests += 1
        self.cached += output.num_cached_tokens or 0
        self.tokens += sum(len(made.tokens) for made in completions)
        return encode(completions)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One more request under way, on the timeline."""
        self._running += 1
        trace.count("requests", self._running)
        try:
            yield
        finally:
            self._running -= 1
            trace.count("requests", self._running)

    async def _run(self, asked: GenerateRequest, params: "SamplingParams", served: Served | None) -> "RequestOutput":
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._healthy()
        prompt = TokensPrompt(prompt_token_ids=asked.prompt)
        if self._kv == "keep":
            prompt["cache_salt"] = f"weights {self._version}"
        output: RequestOutput | None = None
        try:
            lora = served.request() if served else None
            async for made in llm.generate(prompt, params, asked.request_id, lora_request=lora):
                output = made
        except EngineDeadError as error:
            raise EngineDied(f"{self.name} died while it served {asked.request_id}") from error
        assert output is not None and output.finished, "vLLM ended a request without its final output"
        return output

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, with stop "abort"."""
        assert self.llm is not None, "abort before start"
        await self.llm.abort(request_id)

    def _healthy(self) -> "AsyncLLM":
        if self.llm is None:
            raise EngineUnavailable(f"{self.name} is not started, or has ended")
        if self.poisoned:
            raise EngineUnavailable(
                f"{self.name} holds mixed weights and serves nothing until a full round: {self.poisoned}"
            )
        return self.llm

    # --- weights ------------------------------------------------------------------------------------------------

    async def check_plan(self, plan: dict[str, Any]) -> None:
        """Raises ValueError listing what this engine's model and the plan of a trainer's streams do not have in common."""
        hf = read_hf_config(self.model.model_path)
        ours = self.adapters.tensors if self.adapters else hf_names(Dims.of(hf), architecture_of(hf))
        theirs = {block["name"]: tuple(block["shape"]) for stream in plan["streams"] for block in stream["blocks"]}
        problems = [f"{name} is missing" for name in ours if name not in theirs]
        problems += [f"{name} is not of this model" for name in theirs if name not in ours]
        problems += [
            f"{name} is {list(theirs[name])}, here {list(shape)}"
            for name, shape in ours.items() if name in theirs and theirs[name] != tuple(shape)
        ]  # fmt: skip
        if problems:
            raise ValueError(
                f"the trainer's weights are not those of the model of {self.name}, {self.model.model_path}: "
                + "; ".join(problems)
            )

    async def init_weights(self, info: dict[str, Any]) -> None:
        """Join the trainer's weight streams: `info` as made by `rft.sync.synchronizer` (plan, streams, epoch, ...)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        assert self.llm is not None, "init_weights before start"
        if "plan" in info:
            await self.check_plan(info["plan"])
        async with self._round:
            self._kv, self._room_s = info.get("kv", "recompute"), info["timeout"]
            try:
                await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"info": info}))
            except Exception as error:
                lost = any(state["unreachable"] for state in await self._states())
                raise RoundFailed(
                    f"{self.name} did not join the weight streams: {first_line(error)}",
                    "unreachable" if lost else "broken",
                ) from error

    async def stage(self, version: int, update: dict[str, Any]) -> dict[str, Any]:
        """Receive `version` beside the decoding. Returns the first worker's numbers, or {"missed": why} if the trainer has
        moved on. With `update["direct"]` nothing is received before `commit`."""
        assert self.llm is not None, "stage before start"
        if update.get("direct"):
            return {}
        async with self._round, handed_over(update, update["timeout"]) as origin:
            told = {**plain(update), "version": version, "origin": origin}
            found = await self.orders.ask(told, update["timeout"])
        failure = next((report for report in found if "error" in report), None)
        if failure is None:
            return found[0]
        if failure["kind"] == "missed":
            return {"missed": failure["error"]}
        raise RoundFailed(f"{self.name} did not receive version {version}: {failure['error']}", failure["kind"])

    async def commit(self, version: int, update: dict[str, Any]) -> dict[str, Any]:
        """Install what was staged (or, direct, receive it now); see `_install`."""
        source = "direct" if update.get("direct") else "staged"
        with trace.overlapping("install weights", version=version):
            return await self._install(version, {**plain(update), "source": source})

    async def _install(self, version: int, update: dict[str, Any]) -> dict[str, Any]:
        """From pause to resume. In-flight requests freeze and go on under the new weights.

        Raises RoundFailed; then the engine serves the old version again if every worker still holds exactly those
        weights, and is `poisoned` (and stays paused) if not.
        """
        assert self.llm is not None, "commit before start"
        if self.adapters:
            try:
                return await self._install_adapter(version, update)
            finally:
                self.turns.open()
        async with self._round:
            began = time.monotonic()
            self.turns.close()
            await pause(self.llm, clear_cache=self._kv != "keep")
            paused = time.monotonic()
            try:
                await self.turns.wake(self.llm, WEIGHTS)
                states = await self.llm.collective_rpc("rft_install", args=({**update, "version": version},))
                report = self._committed(version, states)
                await self.llm.update_weight_version(str(version))
                self._version, self.poisoned = version, None
            except Exception as error:
                self.poisoned = await self._damage(error)
                lost = not self.poisoned and any(state["unreachable"] for state in await self._states())
                kind = "damaged" if self.poisoned else "unreachable" if lost else "broken"
                what = f"{self.name}: version {version} was not installed: {first_line(error)}"
                raise RoundFailed(what, kind) from error
            finally:
                if self.poisoned is None:
                    await self.turns.wake(self.llm, CACHE)
                    await self.llm.resume_generation()
                self.turns.open()
            done = time.monotonic()
        return {**report, "version": version, "pause_s": done - began, "install_s": done - paused}

    async def _install_adapter(self, version: int, update: dict[str, Any]) -> dict[str, Any]:
        """The adapter alone: nothing pauses, and what fails leaves the version before to be served."""
        assert self.llm is not None and self.adapters is not None
        llm, told = self.llm, {**update, "version": version}

        async def ask(order: dict[str, Any]) -> dict[str, Any]:
            states = await llm.collective_rpc("rft_install_adapter", args=(told, order))
            seconds = max(state["install_s"] for state in states)  # between two steps
            numbers = {"version": version, "pause_s": seconds, "install_s": seconds, "adapters": states[0]["adapters"]}
            return {**self._committed(version, states), **numbers}

        async with self._round:
            await self.turns.wake(llm, WEIGHTS, CACHE)  # requests of old adapters may have to make room first
            try:
                report = await self.adapters.install(version, ask, self._room_s)
            except Exception as error:
                kind = (
                    "unreachable" if isinstance(error, TimeoutError) else "broken"
                )  # busy with rollouts is not broken
                raise RoundFailed(
                    f"{self.name}: version {version} was not installed: {first_line(error)}", kind
                ) from error
            self._version = version
        return report

    async def load_weights_from(self, path: str, version: int) -> dict[str, Any]:
        """Install the safetensors of a Hugging Face directory as `version`: the same round, from files."""
        return await self._install(version, {"source": "files", "path": path})

    async def sleep(self, patience: float) -> dict[str, Any]:
        """Leave the devices to the trainer until the next round wakes this engine; see `rft.rollout.turns`."""
        assert self.llm is not None, "sleep before start"
        async with self._round:
            return await self.turns.sleep(self.llm, patience)

    async def weight_version(self) -> int:
        return self._version

    async def _states(self) -> list[dict[str, Any]]:
        assert self.llm is not None
        return await self.llm.collective_rpc("rft_weight_state")

    def _committed(self, version: int, states: list[dict[str, Any]]) -> dict[str, Any]:
        wrong = [s for s in states if s["version"] != version or s["mixed"]]
        if wrong:
            raise RuntimeError(f"workers do not hold version {version} after finish: {wrong}")
        first = states[0]
        return {
            "digest": first["digest"], "bytes": sum(s["bytes"] for s in states), "receive_s": first["receive_s"],
            "again": sum(s["again"] for s in states), "load_s": max(s["load_s"] for s in states),
        }  # fmt: skip

    async def _damage(self, error: Exception) -> str | None:
        """None when every worker still holds the weights from before the round, else why the engine is unusable."""
        if self.poisoned:
            return self.poisoned
        try:
            states = await self._states()
        except Exception as unreachable:  # not swallowed: it becomes the reason to refuse requests
            return f"{first_line(error)}; workers do not answer: {first_line(unreachable)}"
        before = len({s["version"] for s in states}) == 1 and states[0]["version"] in (None, self._version)
        intact = before and not any(s["mixed"] for s in states)
        return None if intact else first_line(error)

    # --- life ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Never returns while the engine is healthy or not yet started; raises EngineDied when its process ends."""
        await asyncio.shield(self._failure())

    def _failure(self) -> "asyncio.Future[None]":
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        return self._broken

    def _watch_processes(self) -> None:
        """One thread sleeps on the EngineCore processes' sentinels (no interval) and reports the first that ends."""
        assert self.llm is not None
        processes = list(self.llm.engine_core.resources.engine_manager.processes)
        failure, loop = self._failure(), asyncio.get_running_loop()

        def report(process: Any) -> None:
            if not self._stopping and not failure.done():
                failure.set_exception(EngineDied(f"{self.name}: {process.name} {ending(process.exitcode)}"))

        def sleep_until_one_ends() -> None:
            ended = connection.wait([process.sentinel for process in processes])
            for process in processes:
                if process.sentinel in ended and not self._stopping:  # the loop may be gone when we end it ourselves
                    await_exit_code(process)
                    loop.call_soon_threadsafe(report, process)

        threading.Thread(target=sleep_until_one_ends, name=f"{self.name}-watch", daemon=True).start()

    async def dump_stacks(self) -> None:
        """Every thread of this engine's processes, into their logs: asked for when one does not answer."""
        os.kill(os.getpid(), STACKS_SIGNAL)
        if self.llm is not None:
            cores = [psutil.Process(core.pid) for core in self.llm.engine_core.resources.engine_manager.processes]
            for process in [*cores, *(child for core in cores for child in core.children(recursive=True))]:
                if "VLLM::" in " ".join(process.cmdline()):  # others do not listen to this signal, and would end
                    process.send_signal(STACKS_SIGNAL)

    async def stats(self) -> dict[str, Any]:
        active = self.llm.output_processor.get_num_unfinished_requests() if self.llm else 0
        return {
            "name": self.name, "workers": self.workers, "version": self._version, "poisoned": self.poisoned,
            "requests": self.requests, "tokens": self.tokens, "active": active, "cached": self.cached,
            "asleep": self.turns.asleep,
        }  # fmt: skip

    async def shutdown(self) -> None:
        """End vLLM and its processes; none is left when this returns."""
        self._stopping = True
        if self.llm is not None:
            llm, self.llm = self.llm, None
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
            self.orders.close()


def plain(update: dict[str, Any]) -> dict[str, Any]:
    """What workers compare a round by."""
    return {key: update[key] for key in ("digest", "epoch", "method") if key in update}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
