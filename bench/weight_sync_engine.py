"""A real vLLM engine that gets new weights while it decodes: how long it stands still, and what
decoding loses before that.

In: a model directory; two sender processes hold it as tensor-parallel ranks do; a `Synchronizer`
leads one `RolloutEngine`, each in its own process, as in a run. Out: numbers of every round. In
every round, in turn:

    alone    tokens that the engine makes in a while, without anything beside it
    round    a whole round: staged beside the decoding, paused, loaded, resumed; tokens made while
             it was staged are counted
    floor    the same tensors loaded once more from staging memory, and nothing else: what no pause
             can be shorter than

Requests decode all the time, as many as `REQUESTS`. One thread computes in the engine.
"""

import asyncio
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bench.weight_sync_model import CONTEXT, Shards, shapes
from bench.weight_sync_transport import BUCKET, TIMEOUT_S
from rft.config import ModelConfig, RolloutModelConfig
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import Received, Round
from rft.rollout.engine import RolloutEngine
from rft.run.cluster import PRIVATE_RAY
from rft.sync import plan as plans
from rft.sync.loading import in_layer_order
from rft.sync.sender import WeightSender

TP = 2
REQUESTS, TOKENS = 8, 128
ALONE_S = 1.0
START_S = 240.0


class Measured(RolloutEngine):
    """The engine actor, with requests of its own and a count of their tokens."""

    async def decode(self) -> None:
        """Begin requests that never end: each is followed by the next."""
        self.made = 0
        self.staging = [0, 0.0]  # tokens made, seconds
        self.jobs = [asyncio.create_task(self._request(number)) for number in range(REQUESTS)]
        await self._flowing()

    async def _flowing(self) -> None:
        """Requests in flight have computed their keys anew and make tokens again."""
        begin = self.made
        async with asyncio.timeout(START_S):
            while self.made < begin + 4 * REQUESTS:
                await asyncio.sleep(0.02)

    async def _request(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        assert self.llm is not None
        params = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for turn in range(10**6):
            prompt = TokensPrompt(prompt_token_ids=[10 + number, 20, 30, 40])
            async for made in self.llm.generate(prompt, params, f"{number}/{turn}"):
                self.made += sum(len(output.token_ids) for output in made.outputs)

    async def alone(self) -> tuple[int, float]:
        await self._flowing()
        before, began = self.made, time.monotonic()
        await asyncio.sleep(ALONE_S)
        return self.made - before, time.monotonic() - began

    async def stage(self, coming: Round) -> Received:
        before, began = self.made, time.monotonic()
        received = await super().stage(coming)
        self.staging = [self.made - before, time.monotonic() - began]
        return received

    async def staged_tokens(self) -> tuple[int, float]:
        return self.staging[0], self.staging[1]

    async def floor(self) -> float:
        """Seconds of loading what is still in staging memory, with nothing decoding beside it."""
        assert self.llm is not None
        await self.llm.pause_generation(mode="keep")
        seconds = (await self.llm.collective_rpc(load_again))[0]
        await self.llm.resume_generation()
        return seconds


def load_again(worker: Any) -> float:
    """In the worker: the load of a round, and nothing else."""
    from vllm.config import set_current_vllm_config

    engine = worker.weight_transfer_engine
    tensors = in_layer_order(engine.receiver._kept._tensors, engine.together)
    with set_current_vllm_config(worker.vllm_config):
        began = time.monotonic()
        engine._load(tensors)
        engine.finish_weight_update()
        return time.monotonic() - began


def send(rank: int, model: Path, pipe: Connection) -> None:
    """A sender process: follows what the parent says."""
    torch.set_num_threads(1)
    sender = WeightSender(Shards(shapes(model), rank, TP, 1), 1, TIMEOUT_S)
    pipe.send((sender.source.blocks(), sender.endpoint))
    sender.follow(pipe.recv(), rank)
    while (version := pipe.recv()) is not None:
        sender.open(version)
        pipe.send("open")
        pipe.recv()
        pipe.send(sender.close_version()["send_s"])
    sender.close()


def measured(model: Path, rounds: int) -> list[dict[str, float]]:
    """Numbers per round: `pause_s`, `floor_s`, `control_s`, `receive_s`, tokens per second `alone`,
    `tokens` made in the `span_s` of staging.
    """
    import ray

    from rft.sync.synchronizer import Synchronizer

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", **PRIVATE_RAY}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # `load_again` travels as a function
    rollout = RolloutModelConfig(
        dtype="bf16", kv_cache_gb=0.5, enforce_eager=True, max_num_seqs=REQUESTS
    )
    actor = ray.remote(Measured).options(
        max_concurrency=1000, runtime_env={"env_vars": environment}
    )
    engine = actor.remote(
        "engine_0", ModelConfig(model_path=str(model)), rollout, 1, 0, "cpu", CONTEXT
    )
    context = mp.get_context("spawn")
    pipes = []
    for rank in range(TP):
        ours, theirs = context.Pipe()
        context.Process(target=send, args=(rank, model, theirs), daemon=True).start()
        pipes.append(ours)
    try:
        ray.get(engine.start.remote(), timeout=START_S)
        offers = [pipe.recv() for pipe in pipes]
        plan = plans.build([blocks for blocks, _ in offers], BUCKET)
        for pipe in pipes:
            pipe.send(plan)
        synchronizer = (
            ray.remote(Synchronizer)
            .options(max_concurrency=100)
            .remote(ActorHandle(ray.remote(Buffer).remote()), TIMEOUT_S)
        )
        ray.get(synchronizer.join.remote("engine_0", ActorHandle(engine)))
        ray.get(synchronizer.connect.remote(plan, [endpoint for _, endpoint in offers], 1))
        ray.get(engine.decode.remote(), timeout=TIMEOUT_S)
        found = [
            _round(ray, engine, synchronizer, pipes, version) for version in range(1, rounds + 2)
        ]
        for pipe in pipes:
            pipe.send(None)
        ray.get(engine.shutdown.remote(), timeout=TIMEOUT_S)
        return found[1:]  # the first one allocates
    finally:
        ray.shutdown()


def _round(
    ray: Any, engine: Any, synchronizer: Any, pipes: list[Any], version: int
) -> dict[str, float]:
    tokens, seconds = ray.get(engine.alone.remote())
    for pipe in pipes:
        pipe.send(version)
        pipe.recv()
    numbers = ray.get(synchronizer.publish.remote(version, 1))
    for pipe in pipes:
        pipe.send("close")
        pipe.recv()
    during, span = ray.get(engine.staged_tokens.remote())
    floor = ray.get(engine.floor.remote(), timeout=TIMEOUT_S)
    return {
        **numbers,
        "floor_s": floor,
        "alone": tokens / seconds,
        "tokens": during,
        "span_s": span,
    }


class Buffer:
    """The one method of the experience buffer that the synchronizer calls."""

    async def published(self, version: int, epoch: int) -> None:
        pass
