"""One rank of `bench.train_step`: a policy and the bare loop on the same process groups and
microbatches, a step when asked.

In: over a pipe, ("rft" or "bare", seed of the batch), or None to end. Out: first what both sides
give for the same step, then for every step asked for (seconds from barrier to barrier, processor
seconds of this process).

What is timed of ours is `Policy.train_step` with the `ppo` loss: arrays to tensors, the step,
metrics reduced.
"""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.train_step_rows import LR, Shape, rows_of
from rft.algorithm.losses import token_loss
from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Cost, Packed, pack
from rft.ground import device as devices

TIMEOUT_S = 300.0
CLIP = 1.0
RFT, BARE = "rft", "bare"


@dataclass(frozen=True)
class Case:
    """Where and on what:

    `world` ranks of `threads` threads, all of them one tensor-parallel group with sequence
    parallelism.
    """

    world: int
    threads: int
    dtype: str
    shape: Shape
    model: Path

    @property
    def name(self) -> str:
        where = "1 rank" if self.world == 1 else f"TP{self.world}"
        return f"{where}, {self.threads} thread{'s' * (self.threads > 1)}, {self.dtype}"


def serve(case: Case, rank: int, port: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(case.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    device = devices.choose("auto", rank, case.threads)
    device.activate()
    # megatron calls collectives by names that torch is about to rename; no news here.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if device.kind == "cpu":
        from rft.megatron import cpu_port

        cpu_port.install()
    from rft.megatron.mesh import Mesh
    from rft.megatron.policy import Policy

    sizes = MegatronConfig(tensor_model_parallel_size=case.world, sequence_parallel=case.world > 1)
    mesh = Mesh(sizes, device, TIMEOUT_S)
    policy = Policy(
        ModelConfig(model_path=str(case.model)),
        TrainerConfig(megatron=sizes, dtype=case.dtype, grad_clip=CLIP),
        OptimizerConfig(lr=LR),
        mesh,
        seed=0,
        total_steps=None,
    )
    sides = Sides(policy, case.shape)
    connection.send(sides.compare(0))
    while asked := connection.recv():
        step = sides.prepare(*asked)
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        step()
        devices.settle(device.torch)
        dist.barrier()
        connection.send((time.perf_counter() - began, time.process_time() - busy))
    mesh.close()


class Sides:
    """Both trainers, each with weights and optimizer of its own that began alike."""

    def __init__(self, policy: Any, shape: Shape):
        from bench.train_step_bare import Bare

        self.policy, self.shape = policy, shape
        self.bare = Bare(policy)
        self.loss = token_loss("ppo", {})

    def part(self, seed: int) -> list[Packed]:
        cost = Cost.of(self.policy.hf_config)
        return pack(rows_of(self.shape, seed), 1, self.shape.budget, self.policy.multiple, cost)[0]

    def prepare(self, name: str, seed: int) -> Callable[[], Any]:
        """The step of one side as a call that does nothing but the step."""
        part = self.part(seed)
        if name == RFT:
            return lambda: self.policy.train_step(part, self.loss, lambda: None)
        micros = self._micros(part)
        return lambda: self.bare.step(micros)

    def _micros(self, part: list[Packed]) -> list[Any]:
        return list(self.policy._micros(part, self.policy._lengths(part)))

    def compare(self, seed: int) -> dict[str, Any]:
        """What both give for a step with one loss, and how large it is."""
        part = self.part(seed)
        ours = self.policy.train_step(part, token_loss("sft", {}), lambda: None)
        loss, norm = self.bare.step(self._micros(part))
        return {
            "loss": (ours["loss"], loss / ours["num_tokens"]),
            "grad_norm": (ours["grad_norm"], norm),
            "microbatches": len(part),
            "tokens": sum(packed.length for packed in part),
            "parameters": sum(parameter.numel() for parameter in self.policy.model[0].parameters()),
        }
