"""A job's state in miniature, without torch: what each rank stores, and which bytes every tensor
has at a step.

In: (step, variant, scale, world). Out: the `Begin` of a save, the bytes of a rank's file, the
expected bytes of whole tensors. A `variant` tells two saves of one step apart; `scale` makes the
state bigger. Every byte depends on key, step and variant.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from rft.checkpoint import commit, sharding
from rft.checkpoint.records import Begin, CheckpointSettings, Output, Region, Retention
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import WEIGHTS, Storage
from rft.ground.names import ITEM_BYTES

ROWS, COLUMNS = 24, 40


def shapes(scale: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """key -> (dtype, whole shape)."""
    rows = ROWS * scale
    return {
        "model/w": ("float32", (rows, COLUMNS)),
        "model/b": ("bfloat16", (33,)),
        "master/w": ("float32", (rows, COLUMNS)),
        "moment/w": ("float32", (rows, COLUMNS)),
        "count": ("int64", ()),
    }


@dataclass(frozen=True)
class Cut:
    """What one save consists of."""

    step: int
    variant: int = 0
    scale: int = 1

    def whole(self, key: str) -> bytes:
        """All bytes of a tensor, row-major."""
        return _pattern(key, self)

    def of_region(self, region: Region) -> bytes:
        """The region's bytes, cut out of the whole by indices of elements."""
        shape = region.global_shape
        elements = np.frombuffer(
            self.whole(region.key), dtype=f"V{ITEM_BYTES[region.dtype]}"
        ).reshape(shape)
        inside = elements[
            tuple(slice(low, low + n) for low, n in zip(region.offset, region.shape, strict=True))
        ]
        flat = inside.reshape(-1)
        return (flat[slice(*region.flat)] if region.flat else flat).tobytes()

    def file(self, regions: list[Region]) -> bytes:
        out = bytearray(sharding.extent(regions))
        for region in regions:
            out[region.at : region.at + region.bytes] = self.of_region(region)
        return bytes(out)


@lru_cache(maxsize=64)
def _pattern(key: str, cut: Cut) -> bytes:
    dtype, shape = shapes(cut.scale)[key]
    seed = [zlib.crc32(key.encode()), cut.step, cut.variant]
    return np.random.default_rng(seed).bytes(prod(shape) * ITEM_BYTES[dtype])


@lru_cache(maxsize=16)
def plan(scale: int, world: int) -> list[list[Region]]:
    """Per rank: a block of rows of the weights, and a flat range of masters and moments that ends
    inside a row.
    """
    found = []
    for rank in range(world):
        claims = []
        for key, (dtype, shape) in shapes(scale).items():
            if key == "model/w":
                first, stop = shape[0] * rank // world, shape[0] * (rank + 1) // world
                claims.append(Claim(key, dtype, shape, (first, 0), (stop - first, shape[1]), None))
            elif key.endswith("/w"):
                cuts = [0, *(prod(shape) * r // world + 7 for r in range(1, world)), prod(shape)]
                claims.append(Claim(key, dtype, shape, (0, 0), shape, (cuts[rank], cuts[rank + 1])))
            elif rank == (world - 1 if key == "model/b" else 0):
                claims.append(Claim(key, dtype, shape, (0,) * len(shape), shape, None))
        found.append(sharding.place(claims))
    return found


def begin(
    storage: Storage,
    cut: Cut,
    rank: int,
    world: int,
    identity: str,
    keep: int = 0,
    weights: bool = False,
) -> Begin:
    """As the manager says it: a full save, with `weights` a
    model-only one of the same staging too.
    """
    regions = plan(cut.scale, world)
    outputs = []
    for collection in ["", WEIGHTS] if weights else [""]:
        listed = [
            [r for r in found if not collection or r.key.startswith(sharding.MODEL)]
            for found in regions
        ]
        outputs.append(output(storage, collection, cut.step, identity, listed, rank, keep))
    loop = {"step": cut.step, "variant": cut.variant, "scale": cut.scale}
    return Begin(
        id=identity,
        step=cut.step,
        outputs=outputs,
        small={"rng": b"s%d" % cut.step},
        local={},
        loop=loop if rank == 0 else None,
        about={"toy": True} if rank == 0 else None,
    )


def output(
    storage: Storage,
    collection: str,
    step: int,
    identity: str,
    regions: list[list[Region]],
    rank: int,
    keep: int = 0,
) -> Output:
    """Where a rank's part of a save goes; `regions`: of every rank."""
    draft, final = commit.names_of(storage, collection, step, identity)
    return Output(
        collection=collection,
        draft=draft,
        final=final,
        regions=regions[rank],
        layout=sharding.digest(regions),
        bytes=sharding.extent(regions[rank]),
        retention=Retention(last=keep),
    )


def settings(
    root: str,
    control: str,
    rank: int,
    world: int,
    epoch: int,
    slots: list[int],
    slot_bytes: int,
    deadline_s: float = 20.0,
    lease_s: float = 0.1,
) -> CheckpointSettings:
    return CheckpointSettings(
        root=root,
        control=control,
        rank=rank,
        world=world,
        epoch=epoch,
        slots=slots,
        slot_bytes=slot_bytes,
        strategy="unrestricted",
        rate_limit=0.0,
        deadline_s=deadline_s,
        lease_s=lease_s,
    )
