"""The weight streams beside a raw broadcast of the same bytes, and beside gathering everything on rank 0 first.

    python -m bench.weight_sync [--quick]

In: nothing; a model of 571 MB in bf16 (14 layers, hidden 1,024, vocabulary 32,000), of random bytes, cut over two (TP2) and four
(TP2xPP2) sender processes; one more process receives. Out: a table and one last line of JSON. In every round, in turn:

    raw      one rank broadcasts all bytes to the receiver, 16 MiB at a time, in a gloo group of the two: no checksum, no tensors
    ours     `WeightSender`s and a `Receiver`: every sender its own blocks on its own link, xxh3-128 of every bucket made and
             compared, whole Hugging Face tensors in staging memory at the end
    gather   per tensor: the shards are gathered over the senders that hold them, put together at the first of these, handed
             to rank 0 where that is another one, and broadcast from there (what trainers do that have no blocks)

The clock is the receiver's, from a barrier to its last byte. Only the transport is measured: installing the tensors, the
pause of an engine, and decoding meanwhile are not.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import report
from rft.protocols import Block
from rft.sync import plan as plans
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender

ROUNDS, QUICK_ROUNDS = 20, 10
BUCKET = 16 * 2**20
HIDDEN, FFN, VOCABULARY, LAYERS = 1024, 3072, 32000, 14
BARS = {"ours/raw": 0.80, "ours/gather": 4.0}
LAYOUTS = {"tp2": (2, 1), "tp2-pp2": (2, 2)}
QKV_ROWS = {"q": 2048, "k": 1024, "v": 1024}
TIMEOUT_S = 120.0
WAYS = ("raw", "ours", "gather")


def tensors() -> dict[str, tuple[tuple[int, int], int]]:
    """Name -> (shape, the dimension that tensor parallelism cuts)."""
    found = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}self_attn.{part}_proj.weight": ((rows, HIDDEN), 0)
            for part, rows in (("q", 2048), ("k", 1024), ("v", 1024))
        }
        found[f"{at}self_attn.o_proj.weight"] = ((HIDDEN, 2048), 1)
        found |= {f"{at}mlp.{part}_proj.weight": ((FFN, HIDDEN), 0) for part in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = ((HIDDEN, FFN), 1)
    found["lm_head.weight"] = ((VOCABULARY, HIDDEN), 0)
    return found


def stage_of(name: str, pp: int) -> int:
    words = name.split(".")
    if words[1] == "layers":
        return int(words[2]) * pp // LAYERS
    return 0 if words[1] == "embed_tokens" else pp - 1


class Shards:
    """`WeightSource` of one sender."""

    def __init__(self, rank: int, tp: int, pp: int):
        self.parts: list[tuple[Block, torch.Tensor]] = []
        place, stage = rank % tp, rank // tp
        generator = torch.Generator().manual_seed(rank)
        for name, (shape, dim) in tensors().items():
            if stage_of(name, pp) != stage:
                continue
            width = shape[dim] // tp
            block = Block(name, "bfloat16", shape, dim, place * width, (place + 1) * width)
            values = torch.randint(-(2**15), 2**15, block.block_shape, dtype=torch.int16, generator=generator)
            self.parts.append((block, values.view(torch.bfloat16)))

    def blocks(self) -> list[Block]:
        return [block for block, _ in self.parts]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (values for _, values in self.parts)


class Bench:
    """One process: sender `rank` of tp*pp, or, as the last rank, the receiver."""

    def __init__(self, rank: int, tp: int, pp: int):
        self.rank, self.tp, self.pp, self.senders = rank, tp, pp, tp * pp
        self.receives = rank == self.senders
        self.raw = dist.new_group([0, self.senders])
        self.gathers = [dist.new_group(list(range(stage * tp, (stage + 1) * tp))) for stage in range(pp)]
        self.source = None if self.receives else Shards(rank, tp, pp)
        self.total = sum(2 * rows * columns for (rows, columns), _ in tensors().values())
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
                {
                    "plan": plans.encode(self.plan),
                    "streams": endpoints[:-1],
                    "epoch": 1,
                    "timeout": TIMEOUT_S,
                    "engine": "bench",
                }
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
            staged = self.receiver.stage({"version": self.version})
            assert sum(value.nbytes for value in staged.values()) == self.total
            dist.barrier()
        else:
            self.sender.open(self.version)
            dist.barrier()
            self.sender.close_version()

    def _gather(self) -> None:
        mine = {block.name: values for block, values in self.source.parts} if self.source else {}
        for name, (shape, dim) in tensors().items():
            first = stage_of(name, self.pp) * self.tp  # the sender that puts this tensor together
            whole = None
            if name in mine:
                parts = [torch.empty_like(mine[name]) for _ in range(self.tp)]
                dist.all_gather(parts, mine[name], group=self.gathers[first // self.tp])
                whole = torch.cat(parts, dim=dim) if self.rank == first else None
            if first and self.rank in (0, first):
                whole = torch.empty(shape, dtype=torch.bfloat16) if whole is None else whole
                (dist.send(whole, 0) if self.rank else dist.recv(whole, first))
            if self.rank in (0, self.senders):
                whole = torch.empty(shape, dtype=torch.bfloat16) if whole is None else whole
                dist.broadcast(whole, 0, group=self.raw)


def work(rank: int, tp: int, pp: int, rounds: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp * pp + 1), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    bench = Bench(rank, tp, pp)
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


def measured(tp: int, pp: int, rounds: int) -> dict[str, Any]:
    import tempfile

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/found.json"
        mp.spawn(work, (tp, pp, rounds, port, path), nprocs=tp * pp + 1)
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    ratios: dict[str, float] = {}
    for layout, (tp, pp) in LAYOUTS.items():
        found = measured(tp, pp, rounds)
        seconds, size = found["seconds"], found["bytes"]
        ours = {
            name: [s / o for s, o in zip(seconds[name], seconds["ours"], strict=True)] for name in ("raw", "gather")
        }
        rows = [[w, f"{report.median(seconds[w]):.3f}", f"{size / report.median(seconds[w]) / 1e9:.2f}"] for w in WAYS]
        report.table(f"{layout}: {size / 1e6:.0f} MB, {rounds} rounds", ("way", "seconds", "GB/s"), rows)
        for name, values in ours.items():
            low, high = report.spread(values)
            ratios[f"{layout} ours/{name}"] = round(report.median(values), 3)
            print(f"ours/{name}: {report.median(values):.2f} ({low:.2f} to {high:.2f}), bar {BARS[f'ours/{name}']}")
    meets = rounds >= 10 and all(value >= BARS[name.split(" ")[1]] for name, value in ratios.items())
    report.last_line(
        "weight_sync", ratios, {"rounds": rounds}, {"bucket": BUCKET, "part": "transport"},
        report.versions("torch", "xxhash"), meets,
    )  # fmt: skip


if __name__ == "__main__":
    main()
