"""Trainer ranks in processes of their own, as far as weight sync sees them: two tensor-parallel
shards of a version's weights.

The weights of version v are a known function of the first model's and of v, so that whoever judges
can make them again. They change in place, like a trainer's, as soon as a version is closed: a
reader who is late would read mixed weights.
"""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from miniature import BUCKET_BYTES, Shards
from mortal import Doom, MortalSender, link_of_rank
from safetensors.torch import load_file

from rft.ground.protocols import Block
from rft.sync import plan as plans
from rft.sync.transport import NCCL

NOISE = 0.02  # as large as the weights of a fresh model
ANSWER_S = 90.0


def weights(path: Path, version: int) -> dict[str, torch.Tensor]:
    """All tensors of `version`; 0 is the model at `path` itself."""
    first, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(version)
    scale = NOISE if version else 0.0
    return {
        name: first[name] + scale * torch.randn(first[name].shape, generator=generator)
        for name in sorted(first)
    }


class ChangingShards(Shards):
    """Those of one rank, at the same place in memory for every version."""

    def __init__(self, path: Path, rank: int):
        super().__init__(path, rank)
        self.path, self.rank = path, rank

    def become(self, version: int) -> None:
        cut = (
            self._cut(name, tensor, self.rank)
            for name, tensor in weights(self.path, version).items()
        )
        for (block, mine), (other, new) in zip(self.parts, filter(None, cut), strict=True):
            assert block == other
            mine.copy_(new)

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self.parts)


def be_rank(asked: Connection, path: Path, rank: int, epoch: int, timeout: float, way: str) -> None:
    """A rank's process: does what the test tells it, until the test is gone."""
    torch.set_num_threads(1)
    source = ChangingShards(path, rank)
    sender = MortalSender(source, epoch, timeout, make_link=link_of_rank if way == NCCL else None)

    def follow(plan: dict[str, Any]) -> None:
        sender.follow(plans.decode(plan), rank)

    def open_version(version: int) -> None:
        source.become(version)
        sender.open(version)

    def doom(doom: Doom, peer: str) -> None:
        sender.peer, sender.doom = peer, doom

    acts = {"follow": follow, "open": open_version, "close": sender.close_version, "doom": doom}
    asked.send((os.getpid(), msgspec.to_builtins(source.blocks()), sender.endpoint))
    while True:
        name, *arguments = asked.recv()
        asked.send(acts[name](*arguments))


class RankDied(Exception):
    pass


class TrainerRanks:
    """Two ranks of one epoch; odd epochs are reached by TCP, even ones by Unix sockets."""

    def __init__(self, path: Path, epoch: int, timeout: float, way: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "rft.sync.sender"])
        self.epoch, self.way = epoch, way
        self.processes, self._pipes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_rank, args=(theirs, path, rank, epoch, timeout, way), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        found = self.hear()
        self.pids = [pid for pid, _, _ in found]
        self.plan = plans.build(
            [msgspec.convert(blocks, list[Block]) for _, blocks, _ in found], BUCKET_BYTES
        )
        self.streams = [endpoint for _, _, endpoint in found]
        if epoch % 2:
            self.streams = [{**endpoint, "machine": "another one"} for endpoint in self.streams]
        self.ask("follow", plans.encode(self.plan))

    @property
    def messages(self) -> int:
        """About how many the smaller stream has: parts of buckets, and their checksums; these alone
        where buckets do not go over the wire.
        """
        each = int(self.way != NCCL)
        return min(
            sum(each * len(bucket.pieces) + 1 for bucket in stream.buckets)
            for stream in self.plan.streams
        )

    def tell(self, name: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((name, *arguments))

    def hear(self) -> list[Any]:
        """Both answers; RankDied when one will not come."""
        return [self._hear(rank) for rank in range(2)]

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        self.tell(name, *arguments)
        return self.hear()

    def doom(self, rank: int, doom: Doom, peer: str = "") -> None:
        """Let a rank kill itself, or whom it names, at a point of its own work."""
        self._pipes[rank].send(("doom", doom, peer))
        self._hear(rank)

    def end(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def _hear(self, rank: int) -> Any:
        assert self._pipes[rank].poll(ANSWER_S), (
            f"trainer rank {rank} has not answered for {ANSWER_S} s"
        )
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise RankDied(f"trainer rank {rank} died") from error
