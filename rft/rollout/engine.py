"""One vLLM instance as a service: token ids in, token ids with log-probabilities and weight
versions out.

    generate(GenerateRequest) ──► AsyncLLM ──ZMQ──► EngineCore process (model, KV cache, plug-in)
            ──► [Completion]
    rounds of weights: `rft.rollout.engine_weights`

The supervisor wraps the class as a Ray actor; every method is a coroutine on the actor's event
loop. Consumes encoded requests and weight rounds, produces encoded completions. Invariant: every
returned token carries the version of exactly the weights that produced it.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import xxhash

from rft.config import EngineConfig, ModelConfig
from rft.ground import hubs
from rft.ground.device import YOUNG, freeze_loaded, thread_environment, yield_to_engine
from rft.ground.experience import (
    Completion,
    GenerateRequest,
    StopReason,
    VersionSpan,
    decode,
    encode,
)
from rft.ground.families import has_latent_attention
from rft.ground.names import (
    DTYPES,
    ITEM_BYTES,
    Dims,
    architecture_of,
    hf_names,
    read_hf_config,
)
from rft.ground.process import ending, family
from rft.monitor import trace
from rft.monitor.logs import STACKS_SIGNAL
from rft.rollout.adapter_serving import ServedAdapter
from rft.rollout.engine_routes import EngineRoutes
from rft.rollout.engine_weights import EngineDied, EngineUnavailable, tells_its_death

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
GIB = 2**30
# vLLM's own rotary kernel for a CPU turns the wrong numbers in latent attention (0.32: 0.01 to 0.7
# nats off), and its attention for processors with AMX is of bf16 alone: with these it takes torch's
# rotation, and the attention that any processor has
LATENT_ON_CPU = {
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}
# Whole blocks are what requests share of a prompt. vLLM's 128 on a CPU leave each response of a
# group up to 127 tokens to compute alone, and again at every publication; its kernels take
# multiples of 32.
SMALL_BLOCKS = {"block_size": 32}
# Rows that depend on no other row: on a CPU by rft.sync.worker, which reads this in every process
# of vLLM's, and the rotation is torch's there; on a GPU by vLLM itself. Prompts are not cut there:
# vLLM 0.32 would wind a request's own generator back after each part but the last, which a CPU's
# cannot.
BITWISE = {"cpu": "RFT_BITWISE", "cuda": "VLLM_BATCH_INVARIANT"}
BITWISE_ON_CPU = {
    "compilation_config": LATENT_ON_CPU["compilation_config"],
    "enable_chunked_prefill": False,
}
# Found by vLLM through its plugin entry point and by name; this package does not import rft.sync.
WEIGHT_BACKEND, WORKER_EXTENSION = "rft", "rft.sync.worker.WorkerExtension"
# The share that vLLM wants to see free as it starts, whatever its cache is told to be. A trainer on
# the same card has its state there: how much the engine may take is decided by the cache's size.
UNCHECKED = 0.01
WORK_BYTES = 3 * GIB  # of an engine: context, graphs, activations of one chunk of a prompt
SAMPLER_COPIES = (
    4 * 4
)  # bytes per request and word: logits, their log-probabilities, sorted, masked
# an engine's first answer may wait for kernels that are compiled for it
FIRST_S = 300.0
LITTLE_S = 0.05  # of processor time, between two beats: what a process needs that only waits
SHUTDOWN_S = 5.0  # for vLLM's own orderly end; afterwards it kills its processes
STOPS: dict[str | None, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
# what vLLM must not do: phone home, talk on the user's terminal, resolve this machine's public
# address
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # an engine's workers are on one machine
    "TOKENIZERS_PARALLELISM": "false",
}


class RolloutEngine(EngineRoutes):
    """Life: created -> start -> serving <-> updating; `poisoned` after a half-installed round,
    until the next full one.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        rollout: EngineConfig,
        threads: int,
        seed: int,
        device_kind: str,
        max_model_len: int,
        adapters: int = 0,
        colocated: bool = False,
        cluster: str | None = None,
        bitwise: bool = False,
    ):
        super().__init__(name, model, rollout.tensor_parallel_size, adapters, cluster)
        self.rollout = rollout
        self.threads = threads
        self.seed = seed if rollout.seed is None else rollout.seed
        self.device_kind = device_kind
        self.max_model_len = max_model_len
        self.requests = self._running = 0
        self._wanted: set[str] = set()  # names of requests that nobody has aborted
        self.tokens = 0
        self.cached = 0  # prompt tokens whose keys and values were there already
        self.colocated = colocated  # the trainer has the same devices
        self.bitwise = bitwise  # log-probabilities are to be the trainer's, in every bit
        self._broken: asyncio.Future[None] | None = None
        self._stopping = False
        self._first: float | None = None  # when its first request came
        self._asked: asyncio.Future[bool] | None = None  # for a sign of life
        self._processes: list[psutil.Process] = []  # vLLM's
        self._computed_s = 0.0  # by them, at the last look

    async def start(self, version: int = 0) -> dict[str, Any]:
        """Load the model, labelled `version`; blocks this actor until vLLM serves.

        Returns facts for the log.
        """
        began = time.monotonic()
        is_eager = self.rollout.enforce_eager is not False
        os.environ.update(environment(self.device_kind, self.threads, self.workers, is_eager))
        if self.bitwise:
            os.environ[BITWISE[self.device_kind]] = "1"
        hubs.bring(self.model.model_path, code=self.model.trust_remote_code)
        import vllm

        self.llm = self._started()
        await self.llm.update_weight_version(str(version))
        await self.open_workers()
        if self.tells_routes and self.device_kind == "cpu":
            await self._keep_routes()
        if self.device_kind == "cpu" and trace.environment():
            await self.llm.collective_rpc("rft_count_time")
        self._version = version
        self._watch_processes()
        config = self.llm.model_config
        self.max_model_len = config.max_model_len
        freeze_loaded(YOUNG)
        yield_to_engine()
        return {
            "vllm": vllm.__version__,
            "workers": self.workers,
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": self.device_kind,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "version": version,
            "tells_routes": self.tells_routes,
            "start_s": round(time.monotonic() - began, 2),
        }

    def _started(self) -> "AsyncLLM":
        """vLLM, with its processes; raises what it raises, or one that names `engine_args`."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = self.rollout.engine_args
        try:
            arguments = AsyncEngineArgs(**(self._arguments() | given))
            self.tells_routes = self._tells_routes(arguments)
            if self.device_kind != "cpu":
                arguments.enable_return_routed_experts = self.tells_routes
            return AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            if not given:
                raise
            words = " ".join(str(error).split())
            raise RuntimeError(
                f"{self.name} did not start with engine_args={given}: {words}"
            ) from error

    @property
    def workers(self) -> int:
        """Processes that hold a copy or shard of the model: each
        one receives the weight streams.
        """
        return self.rollout.tensor_parallel_size

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self.model.model_path,
            "trust_remote_code": self.model.trust_remote_code,
            "dtype": DTYPES.get(str(self.rollout.dtype), "auto"),
            "max_model_len": self.max_model_len or None,
            "max_num_seqs": self.rollout.max_num_seqs,
            "tensor_parallel_size": self.workers,
            "enforce_eager": self.rollout.enforce_eager,
            "seed": self.seed % 2**32,  # numpy's takes no other
            # of the distribution sampled from: after temperature, top-k, top-p
            "logprobs_mode": "processed_logprobs",
            # the next turn of an older group is not behind all first ones of younger groups
            "scheduling_policy": "priority",
            "enable_prefix_caching": self.rollout.enable_prefix_caching,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": WEIGHT_BACKEND},
            "worker_extension_cls": WORKER_EXTENSION,
            **(self.adapters.arguments() if self.adapters else {}),
            # One worker lives in the engine core's own process, as vLLM itself would have it: a hop
            # less per step. Sleep, extension and weight transfer are the worker's, wherever it is.
            "distributed_executor_backend": "mp" if self.workers > 1 else "uni",
        }
        return arguments | self._memory()

    def _memory(self) -> dict[str, Any]:
        """What the engine takes of its device."""
        if self.device_kind == "cpu":
            # explicit: vLLM skips its warm-up
            cache = {"kv_cache_memory_bytes": int(self.rollout.kv_cache_gb * GIB)}
            if self.bitwise:
                return cache | BITWISE_ON_CPU
            latent = has_latent_attention(self.model.model_path)
            return cache | (LATENT_ON_CPU if latent else SMALL_BLOCKS)
        share = self.rollout.gpu_memory_utilization
        if not self.colocated:
            return {"gpu_memory_utilization": share}
        assert share is not None, "the config is filled"
        dims = Dims.of(read_hf_config(self.model.model_path))
        sampler = SAMPLER_COPIES * int(self.rollout.max_num_seqs or 0) * dims.vocab
        cache = cache_beside_trainer(share, card_bytes(), self._weight_bytes(), sampler)
        return {
            "gpu_memory_utilization": UNCHECKED,
            "kv_cache_memory_bytes": cache,
            "enable_sleep_mode": True,
        }

    def _weight_bytes(self) -> int:
        """Of one worker."""
        hf = read_hf_config(self.model.model_path)
        numbers = sum(map(prod, hf_names(Dims.of(hf), architecture_of(hf)).values()))
        return numbers * ITEM_BYTES[DTYPES[str(self.rollout.dtype)]] // self.workers

    # --- serving ----------------------------------------------------------------------------------

    @tells_its_death
    async def generate(self, request: bytes) -> bytes:
        """Encoded `GenerateRequest` in, encoded `list[Completion]` (n
        of them) out, when all are finished.
        """
        asked = decode(request, GenerateRequest)
        room = self.max_model_len - len(asked.prompt)
        if room <= 0:
            empty = Completion.empty("prompt_too_long")
            return encode([empty] * asked.n)
        self._wanted.add(asked.request_id)
        try:
            return await self._answered(asked, room)
        finally:
            self._wanted.discard(asked.request_id)

    async def _answered(self, asked: GenerateRequest, room: int) -> bytes:
        async with self.turns.request():  # it belongs to one side of every change of the weights
            if asked.request_id not in self._wanted:  # aborted before vLLM knew of it
                return encode([Completion.empty("abort")] * asked.n)
            with self.adapters.use() if self.adapters else nullcontext() as served, self._counted():
                output = await self._run(asked, sampling_params(asked, room), served)
                routes = await self._routes(asked, output) if self.tells_routes else []
        completions = [completion(self.name, made, served) for made in output.outputs]
        for made, routed in zip(completions, routes, strict=False):
            made.routed_experts = routed
        self.requests += 1
        self.cached += output.num_cached_tokens or 0
        self.tokens += sum(len(made.tokens) for made in completions)
        return encode(completions)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One more request under way, on the timeline."""
        self._running += 1
        self._first = self._first or time.monotonic()
        trace.count("requests", self._running)
        try:
            yield
        finally:
            self._running -= 1
            trace.count("requests", self._running)

    async def _run(
        self, asked: GenerateRequest, params: "SamplingParams", served: ServedAdapter | None
    ) -> "RequestOutput":
        from vllm.inputs import TokensPrompt

        llm = self._healthy()
        prompt = TokensPrompt(prompt_token_ids=asked.prompt)
        if self._kv == "keep":
            prompt["cache_salt"] = f"installation {self._installations}"
        output: RequestOutput | None = None
        lora = served.request() if served else None
        self._served[asked.request_id] = served
        try:
            async for made in llm.generate(
                prompt, params, asked.request_id, lora_request=lora, priority=asked.group or 0
            ):
                output = made
        finally:
            del self._served[asked.request_id]
        assert output is not None and output.finished, (
            "vLLM ended a request without its final output"
        )
        return output

    async def finished(self, asked: dict[str, list[int]]) -> bytes:
        """Of requests that are under way, each with the places of samples that are known: encoded
        {request: {place: `Completion`}} of the others that are finished.
        """
        if self.llm is None or self.tells_routes:  # routes are told of whole answers
            return encode({})
        found = {}
        for parent in list(self.llm.output_processor.parent_requests.values()):
            name = parent.external_req_id
            if name in asked and name in self._served:
                found[name] = {
                    made.index: completion(self.name, made, self._served[name])
                    for made in parent.output_aggregator
                    if made is not None and made.index not in asked[name]
                }
        return encode(found)

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, with stop "abort"."""
        assert self.llm is not None, "abort before start"
        self._wanted.discard(request_id)
        await self.llm.abort(request_id)

    def _healthy(self) -> "AsyncLLM":
        if self.llm is None:
            raise EngineUnavailable(f"{self.name} is not started, or has ended")
        if self.poisoned:
            raise EngineUnavailable(
                f"{self.name} holds mixed weights and serves nothing until a full round: "
                f"{self.poisoned}"
            )
        return self.llm

    # --- life -------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Never returns while the engine is healthy or not yet started; raises EngineDied when its
        process ends.
        """
        await asyncio.shield(self._failure())

    def _failure(self) -> "asyncio.Future[None]":
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        return self._broken

    def _watch_processes(self) -> None:
        """One thread sleeps on the EngineCore processes' sentinels (no interval) and reports the
        first that ends.
        """
        assert self.llm is not None
        processes = list(self.llm.engine_core.resources.engine_manager.processes)
        self._processes = [one for core in processes for one in family(core.pid)]
        failure, loop = self._failure(), asyncio.get_running_loop()

        def report(process: Any) -> None:
            if not self._stopping and not failure.done():
                how = ending(process.exitcode, killed="was killed by")
                failure.set_exception(EngineDied(f"{self.name}: {process.name} {how}"))

        def sleep_until_one_ends() -> None:
            ended = connection.wait([process.sentinel for process in processes])
            for process in processes:
                # the loop may be gone when we end it ourselves
                if process.sentinel in ended and not self._stopping:
                    await_exit_code(process)
                    loop.call_soon_threadsafe(report, process)

        threading.Thread(
            target=sleep_until_one_ends, name=f"{self.name}-watch", daemon=True
        ).start()

    async def is_silent(self) -> bool:
        """Whether vLLM still owes the answer to a question that costs it nothing, asked by the call
        before, and nothing that may take long keeps it.
        """
        keeps = self._is_kept()
        if self._asked is not None and not self._asked.done():
            return not keeps
        if self.llm is not None:
            self._asked = asyncio.ensure_future(self.llm.is_sleeping())
            # what ends vLLM is told by `watch`
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return False

    def _is_kept(self) -> bool:
        """By a change of weights, by its first request, or by its work: on a CPU, where a step may
        take long, that is seen; on a GPU who waits for a device that hangs is as busy.
        """
        before, self._computed_s = self._computed_s, sum(map(computed_s, self._processes))
        is_first = not self.requests and time.monotonic() - (self._first or math.inf) < FIRST_S
        works = self.device_kind == "cpu" and self._computed_s - before > LITTLE_S
        return self.is_changing or is_first or works

    async def dump_stacks(self) -> None:
        """Every thread of this engine's processes, into their logs:
        asked for when one does not answer.
        """
        os.kill(os.getpid(), STACKS_SIGNAL)
        if self.llm is not None:
            cores = [
                psutil.Process(core.pid)
                for core in self.llm.engine_core.resources.engine_manager.processes
            ]
            for process in [
                *cores,
                *(child for core in cores for child in core.children(recursive=True)),
            ]:
                # others do not listen to this signal, and would end
                if "VLLM::" in " ".join(process.cmdline()):
                    process.send_signal(STACKS_SIGNAL)

    async def stats(self) -> dict[str, Any]:
        active = self.llm.output_processor.get_num_unfinished_requests() if self.llm else 0
        return {
            "name": self.name,
            "workers": self.workers,
            "version": self._version,
            "poisoned": self.poisoned,
            "requests": self.requests,
            "tokens": self.tokens,
            "active": active,
            "cached": self.cached,
            "asleep": self.turns.asleep,
        }

    async def shutdown(self) -> None:
        """End vLLM and its processes; none is left when this returns."""
        self._stopping = True
        if self.llm is not None:
            llm, self.llm = self.llm, None
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
            self.channel.close()


def computed_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def card_bytes() -> int:
    """Of the first card that this process sees; asking the driver makes no context on it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def cache_beside_trainer(share: float, card: int, weights: int, sampler: int) -> int:
    """Bytes of the key-value cache of an engine that shares its card with a trainer rank.

    vLLM would find them by what it sees free on the card before and after a trial run. There the
    trainer loads its model meanwhile, or computes where an engine is started again: all that it
    takes would count as the engine's, and all that it gives back fails an assertion.
    """
    cache = int(share * card) - weights - sampler - WORK_BYTES
    if cache <= 0:
        raise ValueError(
            f"explorer.rollout_model.gpu_memory_utilization={share:g} of a card of "
            f"{card / GIB:.0f} GiB has no room for a cache beside {weights / GIB:.1f} GiB of "
            f"weights and {(sampler + WORK_BYTES) / GIB:.1f} GiB to work in: set it higher, "
            "max_num_seqs lower, or tensor_parallel_size higher"
        )
    return cache


# --- vLLM's words --------------------------------------------------------------------------------


def environment(device_kind: str, threads: int, workers: int, is_eager: bool) -> dict[str, str]:
    """On CPU: our thread budget instead of vLLM's core binding, one
    process less when there is one worker, and no compiler where nothing is to be compiled.

    On a GPU nothing is said of torch's allocator, and nothing of `expandable_segments`, which ranks
    have: memory that sleeps lies in pools of vLLM's (CuMemAllocator), which torch cannot make of
    such segments. vLLM 0.32 switches them off around each pool and has to keep both kinds apart
    from then on; a process that never has them has one kind.
    """
    if device_kind != "cpu":
        return QUIET
    return {
        **QUIET,
        **thread_environment(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # 0: EngineCore runs the worker itself
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if workers == 1 else "1",
        # eager engines too have one compiled function, the sampler's: 17 s of C++ compiler at the
        # first request
        "TORCH_COMPILE_DISABLE": str(int(is_eager)),
    }


def sampling_params(asked: GenerateRequest, room: int) -> "SamplingParams":
    """Our request as vLLM's; `room` is what the context leaves for the response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling = asked.sampling
    return SamplingParams(
        n=asked.n,
        stop_token_ids=asked.stop_token_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
        seed=None if sampling.seed is None else spread(sampling.seed) + asked.first,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        stop=asked.stop,
        detokenize=bool(asked.stop),  # nobody reads the text otherwise
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**sampling.structured)
        if sampling.structured
        else None,
    )


def spread(seed: int) -> int:
    """A 62-bit seed: vLLM gives sample i the seed + i, so neighbouring request seeds must not be
    neighbours there.
    """
    return xxhash.xxh3_64_intdigest(seed.to_bytes(16, "little", signed=True)) >> 2


def completion(engine: str, made: "CompletionOutput", served: ServedAdapter | None) -> Completion:
    """vLLM's output as our record; raises when vLLM reports an
    error or leaves a token without version.
    """
    stop = STOPS.get(made.finish_reason)
    if stop is None:
        raise RuntimeError(
            f"{engine}: vLLM ended a request with finish reason {made.finish_reason!r}"
        )
    tokens = np.asarray(made.token_ids, dtype=np.int32)
    spans = [
        VersionSpan(version=int(s.version), start=s.start, end=s.end)
        for s in made.weight_versions or []
    ]
    if served:  # vLLM's version is that of the base model
        spans = served.spans(len(tokens))
    told = made.logprobs.logprobs if len(tokens) else []  # type: ignore[union-attr]
    logprobs = np.asarray(told, dtype=np.float32)
    if len(logprobs) != len(tokens) or sum(s.end - s.start for s in spans) != len(tokens):
        raise RuntimeError(
            f"{engine}: {len(tokens)} tokens came with {len(logprobs)} logprobs and versions "
            f"{spans}"
        )
    return Completion(tokens=tokens, logprobs=logprobs, versions=spans, stop=stop)


def await_exit_code(process: Any) -> None:
    """Return once an ended process's exit code is known, or after a second: vLLM waits for the same
    process in a thread of its own, and whichever of the two the kernel did not tell sees None until
    the other one has noted it.
    """
    deadline = time.monotonic() + 1
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)
