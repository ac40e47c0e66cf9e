"""The weight streams beside a raw broadcast of the same bytes, and beside gathering everything on
rank 0 first.

In: a model directory, whose tensors, random bytes here, are cut over two (TP2) or four (TP2xPP2)
sender processes; one more process receives. Out: seconds of every round. In every round, in turn:

    raw      one rank broadcasts all bytes to the receiver, 16 MiB at a time, in a gloo group of the
             two: no checksum, no tensors
    ours     `WeightSender`s and a `Receiver`: every sender its own blocks on its own wire, xxh3-128
             of every bucket made and
             compared, whole Hugging Face tensors in staging memory at the end
    gather   per tensor: the shards are gathered over the senders that hold them, put together at
             the first of these, handed
             to rank 0 where that is another one, and broadcast from there (what trainers do that
             have no blocks)

The clock is the receiver's, from a barrier to its last byte.
"""

import json
import math
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.weight_sync_model import Shards, dim_of, shapes, stage_of
from rft.ground.rounds import Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender

BUCKET = 16 * 2**20
TIMEOUT_S = 120.0
WAYS = ("raw", "ours", "gather")


class Bench:
    """One process: sender `rank` of tp*pp, or, as the last rank, the receiver."""

    def __init__(self, model: Path, rank: int, tp: int, pp: int):
        self.rank, self.tp, self.pp, self.senders = rank, tp, pp, tp * pp
        self.tensors = shapes(model)
        self.receives = rank == self.senders
        self.raw = dist.new_group([0, self.senders])
        self.gathers = [
            dist.new_group(list(range(stage * tp, (stage + 1) * tp))) for stage in range(pp)
        ]
        self.source = None if self.receives else Shards(self.tensors, rank, tp, pp)
        self.total = sum(2 * math.prod(shape) for shape in self.tensors.values())
        self.message = torch.zeros(BUCKET, dtype=torch.uint8)
        self.version = 0
        self._connect()

    def _connect(self) -> None:
        blocks: list[Any] = [None] * (self.senders + 1)
        dist.all_gather_object(blocks, self.source.blocks() if self.source else [])
        self.plan = plans.build(blocks[:-1], BUCKET)
        sender = WeightSender(self.source, 1, TIMEOUT_S) if self.source else None
        endpoints: list[Any] = [None] * (self.senders + 1)
        dist.all_gather_object(endpoints, sender.endpoint if sender else None)
        if sender:
            self.sender = sender
            sender.follow(self.plan, self.rank)
        else:
            self.receiver = Receiver(0, torch.device("cpu"))
            self.receiver.connect(
                TrainerInfo(
                    plan=plans.encode(self.plan),
                    streams=endpoints[:-1],
                    epoch=1,
                    timeout=TIMEOUT_S,
                    engine="bench",
                )
            )

    def seconds(self, way: str) -> float:
        dist.barrier()
        began = time.perf_counter()
        getattr(self, f"_{way}")()
        took = time.perf_counter() - began
        dist.barrier()
        return took

    def _raw(self) -> None:
        if self.rank in (0, self.senders):
            for start in range(0, self.total, BUCKET):
                dist.broadcast(self.message[: min(BUCKET, self.total - start)], 0, group=self.raw)

    def _ours(self) -> None:
        self.version += 1
        if self.receives:
            staged = self.receiver.stage(Round(version=self.version))
            assert sum(value.nbytes for value in staged.values()) == self.total
            dist.barrier()
        else:
            self.sender.open(self.version)
            dist.barrier()
            self.sender.close_version()

    def _gather(self) -> None:
        mine = {block.name: values for block, values in self.source.parts} if self.source else {}
        for name, shape in self.tensors.items():
            first = stage_of(name, self.pp) * self.tp  # the sender that puts this tensor together
            whole = mine.get(name) if len(shape) == 1 and self.rank == first else None
            if name in mine and len(shape) > 1:
                parts = [torch.empty_like(mine[name]) for _ in range(self.tp)]
                dist.all_gather(parts, mine[name], group=self.gathers[first // self.tp])
                whole = torch.cat(parts, dim=dim_of(name)) if self.rank == first else None
            if first and self.rank in (0, first):
                whole = torch.empty(shape, dtype=torch.bfloat16) if whole is None else whole
                (dist.send(whole, 0) if self.rank else dist.recv(whole, first))
            if self.rank in (0, self.senders):
                whole = torch.empty(shape, dtype=torch.bfloat16) if whole is None else whole
                dist.broadcast(whole, 0, group=self.raw)


def work(rank: int, model: Path, tp: int, pp: int, rounds: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(tp * pp + 1), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    bench = Bench(model, rank, tp, pp)
    for way in WAYS:  # first use of links and memory
        bench.seconds(way)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for shift in range(len(WAYS)):
            way = WAYS[(number + shift) % len(WAYS)]
            found[way].append(bench.seconds(way))
    if bench.receives:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"seconds": found, "bytes": bench.total}, file)
    dist.destroy_process_group()


def measured(model: Path, tp: int, pp: int, rounds: int) -> dict[str, Any]:
    """`seconds` of every way, a list of one per round, and the `bytes` of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/found.json"
        mp.spawn(work, (model, tp, pp, rounds, port, path), nprocs=tp * pp + 1)
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
