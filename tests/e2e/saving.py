"""A trainer in miniature that publishes by saves: two ranks with a checkpoint manager each, and
their agents.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from miniature import Shards, ThreadMesh

from rft.checkpoint.manager import CheckpointManager
from rft.config import SynchronizerConfig, TrainerConfig
from rft.ground.protocols import ActorHandle, Piece, Snapshot
from rft.sync.origins import CheckpointOrigin
from rft.sync.publisher import Publisher
from rft.sync.synchronizer import SynchronizerHandle

DEADLINE_S = 60.0


class Rank:
    """One of the two, with its half of the weights of `path`."""

    def __init__(
        self,
        mesh: ThreadMesh,
        root: Path,
        path: Path,
        synchronizer: SynchronizerHandle | None,
        epoch: int,
    ):
        self.parts = Shards(path, mesh.rank).parts
        trainer = TrainerConfig()
        trainer.checkpoint.versions = "all"
        self.manager = CheckpointManager(
            root, mesh, trainer, epoch=epoch, control=root.parent / "control"
        )
        config = SynchronizerConfig(sync_timeout=30.0)
        self.publisher = Publisher(
            CheckpointOrigin(mesh, self.manager, synchronizer, config, epoch, DEADLINE_S)
        )

    def snapshot(self) -> Snapshot:
        pieces = []
        for block, tensor in self.parts:
            offset = tuple(
                block.start if dim == block.dim else 0 for dim in range(len(block.shape))
            )
            pieces.append(Piece(f"model/{block.name}", tensor, block.shape, offset))
        return Snapshot(pieces)

    def connect(self) -> None:
        self.manager.start(self)
        self.publisher.connect()

    def save(self, version: int) -> None:
        self.manager.save(version, self, {}, full=False, weights=True, version=True)
        self.manager.before_update()

    def publish(self, version: int) -> dict[str, float]:
        self.publisher.start(version)
        assert self.publisher.claim_save(version)
        self.save(version)
        self.publisher.wait()
        return self.publisher.last


class SavingTrainer:
    """`synchronizer`: of this run's engines; without one they are elsewhere."""

    def __init__(self, root: Path, path: Path, synchronizer: Any | None, epoch: int):
        slots, barrier = [None, None], Barrier(2)
        handle = None if synchronizer is None else ActorHandle(synchronizer)
        self.root = root
        self.ranks = [
            Rank(ThreadMesh(n, slots, barrier), root, path, handle if n == 0 else None, epoch)
            for n in range(2)
        ]

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return [
                job.result()
                for job in [pool.submit(getattr(rank, method), *arguments) for rank in self.ranks]
            ]

    def __enter__(self) -> "SavingTrainer":
        self.everywhere("connect")
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.manager.close(DEADLINE_S)

    def publish(self, version: int) -> dict[str, float]:
        return self.everywhere("publish", version)[0]

    def save(self, version: int) -> Path:
        """Commit it and tell nobody."""
        self.everywhere("save", version)
        for rank in self.ranks:
            rank.manager.wait(version)
        return self.root / "weights" / f"v_{version:08d}"
