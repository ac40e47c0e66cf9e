"""Weights through the object store without Ray: packed by trainer ranks, handed over as a file,
taken by an engine worker.
"""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rft.ground.protocols import Block
from rft.ground.rounds import InFile, Round, TrainerInfo
from rft.ground.streams import Beside
from rft.sync import plan as plans
from rft.sync.connection import PeerLost
from rft.sync.origins import DepositThread, packed
from rft.sync.plan import StreamPlan
from rft.sync.readers import HandedBuckets
from rft.sync.stored_versions import Deposits, VersionLost

SHAPES = {"rows": (30, 7), "columns": (9, 16), "vector": (13,), "half": (6, 5)}
# dim, and where rank 1's part begins
CUTS = {"rows": (0, 11), "columns": (1, 4), "vector": (0, 13), "half": (0, 2)}
LIMIT = 256  # bytes of a bucket: most blocks are cut over several


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    dtypes = {"half": torch.bfloat16}
    return {
        n: torch.randn(shape, generator=generator).to(dtypes.get(n, torch.float32))
        for n, shape in SHAPES.items()
    }


class Half:
    """A rank's part of the tensors."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int):
        self.parts = []
        for name, value in whole.items():
            dim, cut = CUTS[name]
            start, stop = (0, cut) if rank == 0 else (cut, value.shape[dim])
            if start < stop:
                block = Block(
                    name,
                    str(value.dtype).removeprefix("torch."),
                    tuple(value.shape),
                    dim,
                    start,
                    stop,
                )
                self.parts.append((block, value.narrow(dim, start, stop - start).contiguous()))

    def blocks(self) -> list[Block]:
        return [block for block, _ in self.parts]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self.parts)


def plan_of(whole: dict[str, torch.Tensor]) -> StreamPlan:
    return plans.build([Half(whole, rank).blocks() for rank in range(2)], LIMIT)


def handed(file: Path, plan: StreamPlan, version: int) -> Round:
    """The round that a worker gets, with its file."""
    streams, at = [], 0
    with file.open("wb") as out:
        for index in range(len(plan.streams)):
            streams.append([])
            for data, digest in packed(plan, index, Half(tensors(version), index), version):
                out.write(data)
                streams[-1].append((at, len(data), digest))
                at += len(data)
    location = InFile(path=str(file), streams=streams)
    return Round(version=version, epoch=3, digest=plan.digest, location=location)


@pytest.fixture
def worker() -> HandedBuckets:
    made = HandedBuckets(torch.device("cpu"))
    made.connect(TrainerInfo(plan=plans.encode(plan_of(tensors(1))), epoch=3, timeout=30.0))
    return made


def test_every_tensor_comes_together_again(worker: HandedBuckets, tmp_path: Path) -> None:
    plan = plan_of(tensors(1))
    assert all(len(stream.buckets) > 2 for stream in plan.streams)
    for version in (1, 2):
        coming = handed(tmp_path / "file", plan, version)
        worker.check(coming)
        found = worker.stage(coming)
        assert found.keys() == SHAPES.keys()
        assert all(torch.equal(found[name], value) for name, value in tensors(version).items())


def test_a_flipped_bit_and_another_version_are_named(worker: HandedBuckets, tmp_path: Path) -> None:
    coming = handed(tmp_path / "file", plan_of(tensors(1)), 7)
    with pytest.raises(
        PeerLost, match="checksum of bucket 0 of stream 0 .* not those of version 8"
    ):
        worker.stage(replace(coming, version=8))
    data = bytearray((tmp_path / "file").read_bytes())
    data[coming.location.streams[1][1][0]] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(PeerLost, match="checksum of bucket 1 of stream 1"):
        worker.stage(coming)
    with pytest.raises(ValueError, match="round follows plan 00 of epoch 3"):
        worker.check(replace(coming, digest="00"))


def test_a_version_is_complete_when_every_stream_is_there() -> None:
    async def scene() -> None:
        deposits = Deposits()
        deposits.begin([1, 2])
        await deposits.put((3, 1), 1, 1, "c")
        with pytest.raises(
            TimeoutError,
            match=(
                "version 1: after 0.01 s there are 0 of 1 buckets of stream 0, 1 of 2 buckets of "
                "stream 1"
            ),
        ):
            await deposits.complete((3, 1), 0.01)
        waiting = asyncio.create_task(deposits.complete((3, 1), 20.0))
        await deposits.put((3, 1), 0, 0, "a")
        await deposits.put((3, 1), 1, 0, "b")
        assert (await waiting).streams == [["a"], ["b", "c"]]

    asyncio.run(scene())


@pytest.mark.parametrize("asked_at", range(4))
def test_nothing_is_held_of_a_version_that_is_given_up_whatever_comes_later(asked_at: int) -> None:
    """One rank's weights have changed, those of others are still the same."""

    class Bucket:
        """Of shared memory, while somebody refers to it."""

    async def scene() -> None:
        deposits, mark, held = Deposits(), (3, 1), list[weakref.ref[Bucket]]()
        deposits.begin([1, 2])

        async def left(stream: int, number: int) -> None:
            bucket = Bucket()
            held.append(weakref.ref(bucket))
            await deposits.put(mark, stream, number, (bucket, "digest"))

        waiting, steps = None, [left(0, 0), deposits.give_up(mark), left(1, 0), left(1, 1)]
        for at, step in enumerate(steps):
            if at == asked_at:
                waiting = asyncio.create_task(deposits.complete(mark, 20.0))
                await asyncio.sleep(0)
            await step
        assert waiting is not None
        with pytest.raises(VersionLost, match="version 1"):
            await waiting
        gc.collect()
        assert [one() for one in held] == [None] * 3
        mark = (3, 2)
        for stream, number in ((0, 0), (1, 0), (1, 1)):
            await left(stream, number)
        assert len((await deposits.complete(mark, 20.0)).streams) == 2

    asyncio.run(scene())


def test_what_a_rank_could_not_leave_is_raised_to_it() -> None:
    def fails() -> None:
        raise OSError("no room")

    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="could not be left in the object store: no room"):
        DepositThread(fails, cpu, Beside(cpu)).wait(20.0)
