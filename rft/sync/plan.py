"""The plan of a weight stream: which bytes go in which message. Pure; both sides compute the same
from the same blocks.

In: every trainer rank's list of `Block`s. Out: a `StreamPlan`: one stream per rank that owns
blocks, in rank order, each cut into buckets of consecutive row ranges (`Slice`). Its digest travels
with every round, so two sides that would cut the bytes differently refuse each other. Invariant:
the blocks of a plan cover every element of every tensor exactly once.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import xxhash

from rft.ground.experience import Record
from rft.ground.names import ITEM_BYTES
from rft.ground.protocols import Block

# bytes; pieces start aligned, so the receiver can view them as any dtype without a copy
ALIGNMENT = 64


class Slice(Record, frozen=True):
    """Rows [start, stop) of block number `block` of its stream, at byte `offset` of the bucket."""

    block: int
    start: int
    stop: int
    offset: int


class Bucket(Record, frozen=True):
    """One message: pieces in stream order and its payload in bytes (padding included)."""

    pieces: tuple[Slice, ...]
    nbytes: int


class WeightStream(Record, frozen=True):
    """What trainer rank `rank` sends, in order."""

    rank: int
    blocks: tuple[Block, ...]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


class StreamPlan(Record, frozen=True):
    """All streams of one trainer. `digest` is xxh3-128 over everything else in it."""

    streams: tuple[WeightStream, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(stream.nbytes for stream in self.streams)


def build(blocks_by_rank: list[list[Block]], bucket_bytes: int) -> StreamPlan:
    """Plan for ranks 0, 1, ... that own these blocks; ranks without blocks have no stream.

    Raises ValueError on bad coverage.
    """
    errors = coverage_errors([block for blocks in blocks_by_rank for block in blocks])
    if errors:
        raise ValueError(f"weight plan, {len(errors)} error(s): " + "; ".join(errors[:20]))
    streams = tuple(
        WeightStream(rank=rank, blocks=tuple(blocks), buckets=tuple(buckets(blocks, bucket_bytes)))
        for rank, blocks in enumerate(blocks_by_rank)
        if blocks
    )
    return StreamPlan(streams=streams, digest=_digest(streams))


def encode(plan: StreamPlan) -> dict[str, object]:
    """Plain dict of lists, strings and numbers, for a process boundary."""
    return msgspec.to_builtins(plan)  # type: ignore[no-any-return]


def decode(data: dict[str, object]) -> StreamPlan:
    """The plan out of `encode`'s dict; raises ValueError when its content does not have the digest
    that it names.
    """
    plan = msgspec.convert(data, StreamPlan)
    actual = _digest(plan.streams)
    if actual != plan.digest:
        raise ValueError(f"weight plan names digest {plan.digest}, its content has {actual}")
    return plan


def coverage_errors(blocks: list[Block]) -> list[str]:
    """Everything that keeps `blocks` from covering each tensor
    exactly once, in words; empty when they do.
    """
    by_name: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        by_name[block.name].append(block)
    if not by_name:
        return ["no rank owns any block"]
    return [error for name, owned in by_name.items() for error in _tensor_errors(name, owned)]


def _tensor_errors(name: str, blocks: list[Block]) -> list[str]:
    first = blocks[0]
    kinds = {(block.dtype, block.shape, block.dim) for block in blocks}
    if len(kinds) > 1:
        return [f"{name}: blocks disagree about dtype, shape or dim: {sorted(kinds)}"]
    if first.dtype not in ITEM_BYTES:
        return [f"{name}: dtype {first.dtype} is unknown"]
    if first.dim not in (0, 1) or len(first.shape) <= first.dim or not all(first.shape):
        return [f"{name}: dim {first.dim} of shape {first.shape} cannot be cut"]
    errors, end = [], 0
    for block in sorted(blocks, key=lambda b: b.start):
        if block.stop <= block.start:
            errors.append(f"{name}: block [{block.start}, {block.stop}) is empty")
        elif block.start > end:
            errors.append(f"{name}: dim {first.dim} [{end}, {block.start}) is missing")
        elif block.start < end:
            errors.append(
                f"{name}: dim {first.dim} [{block.start}, {min(end, block.stop)}) comes more than "
                "once"
            )
        end = max(end, block.stop)
    if end != first.shape[first.dim]:
        errors.append(
            f"{name}: dim {first.dim} ends at {end}, the tensor at {first.shape[first.dim]}"
        )
    return errors


def row_bytes(block: Block) -> int:
    """Bytes of one index of dim 0 of the block."""
    return math.prod(block.block_shape[1:]) * ITEM_BYTES[block.dtype]


def buckets(blocks: Sequence[Block], limit: int) -> list[Bucket]:
    """Fill buckets up to `limit` bytes; a block that does not fit goes on in the next one.

    At least one row each.
    """
    found: list[Bucket] = []
    pieces: list[Slice] = []
    end = 0

    def close() -> None:
        nonlocal pieces, end
        if pieces:
            found.append(Bucket(pieces=tuple(pieces), nbytes=end))
        pieces, end = [], 0

    for number, block in enumerate(blocks):
        start, rows, size = 0, block.block_shape[0], row_bytes(block)
        if end + rows * size > limit and rows * size <= limit:
            close()  # a block that fits into one bucket is never cut: the receiver uses it in place
        while start < rows:
            fitting = min(rows - start, (limit - end) // size)
            if fitting <= 0 and pieces:
                close()
                continue
            stop = start + max(fitting, 1)
            pieces.append(Slice(block=number, start=start, stop=stop, offset=end))
            end += -(-(stop - start) * size // ALIGNMENT) * ALIGNMENT
            start = stop
    close()
    return found


def _digest(streams: tuple[WeightStream, ...]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(streams))
