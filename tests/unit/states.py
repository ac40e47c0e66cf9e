"""Toy training states, one-process ranks and a hand on the agent's disk, for the tests of
`rft.checkpoint`.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rft.checkpoint import sharding
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.neighbours import RankPlace
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.records import FORMAT, Manifest, Receipt, encode_json, final_name, sha256
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import open_storage
from rft.checkpoint.writer import ChunkHasher, file_name, receipt_name
from rft.config import TrainerConfig
from rft.ground.protocols import Piece, Snapshot

PATIENCE = 20.0  # seconds until a test gives up; nothing here takes nearly as long
AGENT_SCRIPT = Path(__file__).with_name("held_agent.py")


class OneRank:
    rank, world = 0, 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def barrier(self, name: str) -> None:
        pass


class Ranks:
    """Ranks that are threads of one process."""

    def __init__(self, world: int):
        self.world = world
        self.items: list[Any] = [None] * world
        self.meeting = threading.Barrier(world, timeout=PATIENCE)

    def member(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    def __init__(self, all_of_them: Ranks, rank: int):
        self.all, self.rank, self.world = all_of_them, rank, all_of_them.world

    def gather(self, item: Any) -> list[Any] | None:
        self.all.items[self.rank] = item
        self.all.meeting.wait()
        found = list(self.all.items) if self.rank == 0 else None
        self.all.meeting.wait()
        return found

    def broadcast(self, item: Any) -> Any:
        if self.rank == 0:
            self.all.items[0] = item
        self.all.meeting.wait()
        found = self.all.items[0]
        self.all.meeting.wait()
        return found

    def barrier(self, name: str) -> None:
        self.all.meeting.wait()


class State:
    """Named whole tensors and a byte string; `fill` gives every tensor another content."""

    def __init__(self, tensors: dict[str, torch.Tensor], small: bytes = b""):
        self.tensors, self.small = tensors, small

    def snapshot(self) -> Snapshot:
        pieces = [Piece(key, t, tuple(t.shape), (0,) * t.dim()) for key, t in self.tensors.items()]
        return Snapshot(pieces, {"rng": self.small}, {"stream": self.small[::-1]})

    def restore(self, small: dict[str, bytes]) -> None:
        self.small = small["rng"]
        self.local = small.get("stream")

    def begin(self) -> None:
        """There was nothing to be read."""

    def fill(self, value: int) -> "State":
        for number, tensor in enumerate(self.tensors.values()):
            tensor.fill_((value + number) % 2 if tensor.dtype == torch.bool else value + number)
        self.small = str(value).encode()
        return self


def every_kind() -> State:
    """One tensor of each kind that a trainer has."""
    return State(
        {
            "model/weight": torch.zeros(37, 19),
            "model/half": torch.zeros(7, dtype=torch.bfloat16),
            "model/transposed": torch.zeros(6, 4).t(),
            "model/strided": torch.zeros(20, 6)[::2, 1:4],
            "optimizer/count": torch.zeros((), dtype=torch.int64),
            "optimizer/scalar": torch.zeros(()),
            "optimizer/mask": torch.zeros(11, dtype=torch.bool),
            "optimizer/nothing": torch.empty(0),
            "optimizer/no_rows": torch.empty(0, 5),
            "optimizer/long": torch.zeros(3, 2, 2, dtype=torch.int64),
        }
    )


def plain(rows: int = 8, width: int = 1024, count: int = 4) -> State:
    return State({f"model/w{i}": torch.zeros(rows, width) for i in range(count)})


def whole() -> State:
    """More than one chunk, so that each of a few ranks stores some of it."""
    return State({f"model/w{i}": torch.zeros(1024, 1024) for i in range(6)})


def large() -> State:
    """Six chunks of small pieces: slots hold whole chunks of it without holding all."""
    return State({f"model/w{i:02}": torch.zeros(512, 1024) for i in range(24)})


def equal(one: State, other: State) -> bool:
    same = one.tensors.keys() == other.tensors.keys() and one.small == other.small
    return same and all(torch.equal(t, other.tensors[key]) for key, t in one.tensors.items())


def trainer_config(**checkpoint: Any) -> TrainerConfig:
    config = TrainerConfig(max_checkpoints_to_keep=0)
    config.checkpoint.staging = "lazy"
    for key, value in checkpoint.items():
        setattr(config.checkpoint if hasattr(config.checkpoint, key) else config, key, value)
    return config


def apart(root: Path, number: int) -> dict[str, Any]:
    """Of a manager that is on node `number`."""
    node = f"node{number}"
    return {"control": root.parent / node / "control", "place": RankPlace(node=node)}


@contextlib.contextmanager
def managed(
    root: Path, state: State, epoch: int = 1, config: TrainerConfig | None = None, **more: Any
) -> Iterator[CheckpointManager]:
    """A started manager with its agent, ended with the test."""
    manager = CheckpointManager(
        root, OneRank(), config or trainer_config(), epoch=epoch, log_dir=root.parent, **more
    )
    manager.start(state)
    try:
        yield manager
    finally:
        manager.close(PATIENCE)


def save(manager: CheckpointManager, step: int, state: State, **more: Any) -> None:
    """Save and wait until it is committed."""
    manager.save(step, state, {"seen": step}, **more)
    manager.before_update()
    manager.wait(step)


def held(whole: np.ndarray, claim: Claim) -> np.ndarray:
    """Elements of a claim, the slow and obvious way."""
    inside = whole[
        tuple(slice(o, o + n) for o, n in zip(claim.offset, claim.shape, strict=True))
    ].reshape(-1)
    return inside[slice(*claim.flat)] if claim.flat else inside


def write_cut(root: Path, whole: np.ndarray, ranks: list[list[Claim]], step: int = 1) -> Checkpoint:
    """A checkpoint made without the agent: of the tensor `t`, a file for each rank's claims."""
    storage, name, total = open_storage(root), final_name("step", step), 0
    (root / name).mkdir(parents=True)
    digests = {}
    for rank, claims in enumerate(ranks):
        regions = sharding.place(claims)
        data = bytearray(sharding.extent(regions))
        for region in regions:
            data[region.at : region.at + region.bytes] = held(whole, region).tobytes()
        total += len(data)
        hasher = ChunkHasher()
        hasher.update(memoryview(data))
        receipt = Receipt(
            format=FORMAT,
            id="x",
            step=step,
            epoch=1,
            rank=rank,
            world=len(ranks),
            layout="",
            file=file_name(rank),
            bytes=len(data),
            chunks=hasher.finish(),
            regions=regions,
            small={"rng": b""},
            local={},
        )
        storage.put(f"{name}/{file_name(rank)}", bytes(data))
        storage.put(f"{name}/{receipt_name(rank)}", encode_json(receipt))
        digests[receipt_name(rank)] = sha256(encode_json(receipt))
    manifest = Manifest(
        format=FORMAT,
        id="x",
        step=step,
        epoch=1,
        world=len(ranks),
        layout="",
        bytes=total,
        receipts=digests,
        loop={"step": step},
        about={},
    )
    storage.put(f"{name}/MANIFEST.json", encode_json(manifest.sealed()))
    return Checkpoint(storage, name)


def load(root: Path, state: State, epoch: int = 2) -> dict[str, Any] | None:
    return CheckpointManager(root, OneRank(), trainer_config(), epoch=epoch).load(state)


def until(true: Callable[[], object], what: str) -> None:
    """Returns once `true()`; fails the test after PATIENCE."""
    end = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if true():
            return
        end.wait(0.01)
    raise AssertionError(f"not within {PATIENCE:g} s: {what}")


class Hand:
    """Holds the disk of agents that run `held_agent.py`: they stop
    at an operation until it is let go.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir()
        os.mkfifo(directory / "arrivals")
        self._arrivals = os.open(directory / "arrivals", os.O_RDWR | os.O_CLOEXEC)
        self._held: dict[str, int] = {}
        self.command = (sys.executable, str(AGENT_SCRIPT), str(directory))

    def hold(self, operation: str) -> None:
        descriptor = os.open(self.directory / operation, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held[operation] = descriptor

    def let_go(self, operation: str) -> None:
        (self.directory / operation).unlink()
        os.close(self._held.pop(operation))

    def await_arrival(self) -> int:
        """Until an agent stands before a held operation; its process number."""
        ready, _, _ = select.select([self._arrivals], [], [], PATIENCE)
        assert ready, "no agent has come to the held operation"
        return int(struct.unpack("I", os.read(self._arrivals, 4))[0])

    def set(self, name: str, value: object = "") -> None:
        (self.directory / name).write_text(str(value))

    def clear(self, name: str) -> None:
        (self.directory / name).unlink()

    def close(self) -> None:
        for operation in list(self._held):
            self.let_go(operation)
        os.close(self._arrivals)
