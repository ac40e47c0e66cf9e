"""rft's own checkpoints as modes of `bench.checkpoint`: lazy and eager staging, as the training
loop drives them.

In: a `State`. Out: committed directories of `rft.checkpoint`, hashes on. The manager is called in
`RftLazy` alone.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.checkpoint_peers import Mode
from bench.checkpoint_state import State
from rft.checkpoint import restore
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.records import Committed, SaveFailed
from rft.config import CheckpointConfig, TrainerConfig
from rft.ground.protocols import Piece, Snapshot


class Ranks:
    """The few collectives that starting and loading need, over gloo."""

    def __init__(self, rank: int, world: int, group: Any) -> None:
        self.rank, self.world, self.group = rank, world, group

    def gather(self, item: Any) -> list[Any] | None:
        found: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(item, found, dst=0, group=self.group)
        return found

    def broadcast(self, item: Any) -> Any:
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self, name: str) -> None:
        dist.barrier(self.group)


class Policy:
    """A `Snapshotable` over some tensors laid out as those of `state`."""

    def __init__(self, state: State, tensors: dict[str, torch.Tensor]) -> None:
        self.state, self.tensors = state, tensors

    def snapshot(self) -> Snapshot:
        pieces = []
        for name, tensor in self.tensors.items():
            whole, offset = tuple(tensor.shape), (0,) * tensor.dim()
            if self.state.sharded(name):
                whole = (whole[0] * self.state.world, *whole[1:])
                offset = (tensor.shape[0] * self.state.rank, *offset[1:])
            pieces.append(Piece(f"optimizer.{name}", tensor, whole, offset))
        return Snapshot(pieces)

    def restore(self, small: dict[str, bytes]) -> None:
        pass


class RftLazy(Mode):
    name = "rft_lazy"
    kind = "async"
    staging = "lazy"

    def __init__(self, root: Path, rank: int, world: int, group: Any) -> None:
        super().__init__(root, rank, world, group)
        self.ranks = Ranks(rank, world, group)

    def start(self, state: State) -> None:
        config = TrainerConfig(
            checkpoint=CheckpointConfig(staging=self.staging), max_checkpoints_to_keep=1
        )
        self.manager = CheckpointManager(
            self.root / "saved",
            self.ranks,
            config,
            control=self.root / "control",
            log_dir=self.root,
        )
        self.manager.start(Policy(state, state.tensors))

    def save(self, step: int, state: State) -> None:
        self.step, self.ended = step, None
        self.clock = time.perf_counter() - time.time()
        if not self.manager.save(step, Policy(state, state.tensors), {}):
            raise RuntimeError(f"save of step {step} was skipped")

    def before_update(self) -> None:
        self.manager.before_update()

    def poll(self) -> bool:
        for report in self.manager.poll():
            if isinstance(report, SaveFailed):
                raise RuntimeError(f"save of step {report.step} failed: {report.cause}")
            if isinstance(report, Committed) and report.step == self.step:
                # The rename is what commits; LATEST follows at once and is only a hint.
                renamed = (self.root / "saved" / report.name).stat().st_ctime
                self.ended = renamed + self.clock
                return True
        return False

    def finish(self) -> None:
        self.manager.wait(self.step)

    def durable_at(self) -> float | None:
        return self.ended

    def load(
        self, step: int, state: State, into: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        found = restore.load(self.manager.storage, self.ranks, Policy(state, into), None)
        if found is None or found.loop["step"] != step:
            raise RuntimeError(f"step {step} was committed, but the newest checkpoint is {found}")
        return into

    def drop(self, step: int) -> None:
        """Left to the manager's retention, which removes it after the next commit, as in a run."""

    def close(self) -> None:
        self.manager.close()


class RftEager(RftLazy):
    name = "rft_eager"
    staging = "eager"


RFT: list[type[Mode]] = [RftLazy, RftEager]
