"""Stage 3: an engine that got new weights answers as one that was started with them.

    python -m bench.gpu.engine eager|graphs|tp2 cuda|cpu

In: a kind of device. Out: see `bench.gpu.checks`. One engine is started from the files of model 2
and asked, in a process that ends then. A second one is started from those of model 1 and asked,
gets the weights of model 2 from a sender process, is asked, gets those of model 1 back, is asked.
Answers are greedy and come one at a time; tokens and log-probabilities are compared to the bit.
"""

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.checks import Checks, main
from rft.config import ModelConfig, RolloutModelConfig
from rft.ground import device as devices
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import Block
from rft.ground.rounds import Round, TrainerInfo
from rft.rollout.engine import RolloutEngine
from rft.sync import plan as plans
from rft.sync.links import host_links
from rft.sync.sender import WeightSender
from rft.tools.toy import write_model

SHAPE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 512}
CONTEXT = 256
PROMPTS = ([10, 23, 42, 31, 17, 8], [50, 51, 52], [20 + n % 60 for n in range(100)])
TOKENS = 32
WAIT_S = 120.0
START_S = 400.0
BUCKET = 2**20
FORMS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
    "tp2": {"enforce_eager": False, "tensor_parallel_size": 2},
}
Answers = list[tuple[list[int], list[float]]]


class Files:
    """`WeightSource`: whole tensors of one of some directories, in the trainer's dtype."""

    def __init__(self, directories: list[str], kind: str):
        from safetensors.torch import load_file

        dtype = devices.torch_dtype(devices.default_dtype(kind))
        to = devices.choose(kind).torch
        self.models = [
            {
                name: t.to(to, dtype)
                for name, t in sorted(load_file(f"{d}/model.safetensors").items())
            }
            for d in directories
        ]
        self.chosen = 0

    def blocks(self) -> list[Block]:
        return [
            Block(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, 0, t.shape[0])
            for name, t in self.models[0].items()
        ]

    def read_blocks(self) -> Iterator[Any]:
        return iter(self.models[self.chosen].values())


def serve(orders: Connection, directories: list[str], kind: str) -> None:
    """The sender's process. Orders: (version, number of the model), answered when it is open, and
    again when it is closed; None to end.
    """
    device = devices.choose(kind)
    device.activate()
    weights = Files(directories, kind)
    links = host_links(device.torch, "127.0.0.1")
    sender = WeightSender(weights, 1, WAIT_S, make_link=links, device=str(device.torch))
    plan = plans.build([weights.blocks()], BUCKET)
    sender.follow(plan, 0)
    orders.send((plans.encode(plan), plan.digest, sender.endpoint))
    while order := orders.recv():
        version, weights.chosen = order
        sender.open(version)
        orders.send(None)
        orders.recv()
        sender.close_version()
        orders.send(None)
    sender.close()


def engine_of(path: str, form: str, kind: str) -> RolloutEngine:
    # as in an actor of Ray's: whoever has asked for cards must not fork
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    rollout = RolloutModelConfig(
        dtype=devices.default_dtype(kind),  # type: ignore[arg-type]
        kv_cache_gb=0.25,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        **FORMS[form] | ({"enforce_eager": True} if kind == "cpu" else {}),
    )
    return RolloutEngine("engine_0", ModelConfig(model_path=path), rollout, 1, 0, kind, CONTEXT)


async def answers(engine: RolloutEngine, name: str) -> Answers:
    """In turn, so that every request meets the same company: none."""
    found = []
    greedy = Sampling(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS)
    for number, prompt in enumerate(PROMPTS):
        asked = GenerateRequest(request_id=f"{name}/{number}", prompt=list(prompt), sampling=greedy)
        (made,) = decode(await engine.generate(encode(asked)), list[Completion])
        found.append((np.asarray(made.tokens).tolist(), np.asarray(made.logprobs).tolist()))
    return found


async def fresh(path: str, form: str, kind: str) -> Answers:
    engine = engine_of(path, form, kind)
    await engine.start()
    try:
        return await answers(engine, "fresh")
    finally:
        await engine.shutdown()


async def changed(directories: list[str], form: str, kind: str) -> list[Answers]:
    """Answers of model 1, of 2 that came, and of 1 that came."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    sender = context.Process(target=serve, args=(theirs, directories, kind), daemon=True)
    sender.start()
    plan, digest, endpoint = orders.recv()
    engine = engine_of(directories[0], form, kind)
    await engine.start()
    try:
        found = [await answers(engine, "first")]
        await engine.init_weights(
            TrainerInfo(plan=plan, streams=[endpoint], epoch=1, timeout=WAIT_S, engine="engine_0")
        )
        for version, model in ((1, 1), (2, 0)):
            orders.send((version, model))
            orders.recv()
            coming = Round(version=version, epoch=1, digest=digest, timeout=WAIT_S)
            received = await engine.stage(coming)
            installed = await engine.commit(coming)
            orders.send("close")
            orders.recv()
            print(f"{received}\n{installed}", flush=True)
            found.append(await answers(engine, str(version)))
        return found
    finally:
        await engine.shutdown()
        sender.kill()
        sender.join()


def form(name: str) -> Callable[[Checks], None]:
    def run(checks: Checks) -> None:
        kind = checks.device.kind
        with tempfile.TemporaryDirectory() as directory:
            paths = [
                str(write_model(Path(directory) / str(seed), seed=seed, context=CONTEXT, **SHAPE))
                for seed in (1, 2)
            ]
            command = [sys.executable, "-m", "bench.gpu.engine", "fresh", paths[1], name, kind]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, timeout=START_S
            )
            line = next(one for one in done.stdout.splitlines() if one.startswith("[["))
            wanted = [(tokens, logprobs) for tokens, logprobs in json.loads(line)]
            first, second, again = asyncio.run(changed(paths, name, kind))
        checks.least("answers", len(wanted), len(PROMPTS))
        checks.true("the two models answer differently", first != wanted)
        checks.most("answers of new weights that differ", differing(second, wanted), 0)
        checks.most("answers of the old ones again that differ", differing(again, first), 0)

    return run


def differing(found: Answers, wanted: Answers) -> int:
    for (tokens, logprobs), (others, theirs) in zip(found, wanted, strict=True):
        if tokens != others:
            print(f"tokens {tokens} are not {others}")
        elif logprobs != theirs:
            apart = max(abs(a - b) for a, b in zip(logprobs, theirs, strict=True))
            print(f"log-probabilities are up to {apart:.2e} apart")
    return sum(one != other for one, other in zip(found, wanted, strict=True))


CHECKS = {name: form(name) for name in FORMS}

if __name__ == "__main__":
    if sys.argv[1] == "fresh":
        print("\n" + json.dumps(asyncio.run(fresh(*sys.argv[2:]))), flush=True)
    else:
        main(CHECKS)
