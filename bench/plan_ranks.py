"""One rank of a layout for `bench.plan`, forked from a process that has loaded megatron.

In: rank, world, port, the layout and what to train on. Out: over a pipe, of every step but those
that warm up, (seconds from barrier to barrier, processor seconds of this rank). A rank lives for
one layout: what process groups leave behind ends with it.
"""

import os
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch._dynamo  # noqa: F401 (torch's optimizers load it at their first step)
import torch.distributed as dist

from bench.train_step_rows import Shape, rows_of
from rft.algorithm.losses import token_loss
from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Cost, pack
from rft.ground import device as devices
from rft.megatron import cpu_port

cpu_port.install()

from rft.megatron.mesh import Mesh  # noqa: E402 (its sources are rewritten as they are imported)
from rft.megatron.policy import Policy  # noqa: E402

TIMEOUT_S = 300.0
WARM = 1


def measure(
    rank: int,
    world: int,
    port: int,
    sizes: MegatronConfig,
    model: str,
    shape: Shape,
    steps: int,
    connection: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = devices.choose("cpu", rank, 1)
    device.activate()
    mesh = Mesh(sizes, device, TIMEOUT_S)
    trainer = TrainerConfig(megatron=sizes, dtype="fp32")
    policy: Any = Policy(
        ModelConfig(model_path=model), trainer, OptimizerConfig(lr=1e-6), mesh, 0, None
    )
    rows = rows_of(shape, 0)
    cost = Cost.of(policy.hf_config)
    part = pack(rows, mesh.dp, shape.budget * mesh.cp, policy.multiple, cost)[mesh.dp_rank]
    loss, found = token_loss("sft", {}), []
    for step in range(WARM + steps):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        policy.train_step(part, loss, lambda: None)
        dist.barrier()
        if step >= WARM:
            found.append((time.perf_counter() - began, time.process_time() - busy))
    connection.send(found)
    mesh.close()
