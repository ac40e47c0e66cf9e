"""The plan of a weight stream: which bytes go in which message, and to which engine worker. Pure;
both sides compute the same from the same blocks.

    every rank's `Block`s ──build──► StreamPlan: a stream per rank that owns blocks, in rank order,
                                     each cut into buckets of consecutive row ranges (`Slice`)
    a stream, a `Share`   ──part_of──► StreamPart: the rows and columns that vLLM's own loaders take
                                     out of a whole tensor on that worker, in buckets of their own

Digests of the plan and of the part are told with every round and with the first words on a wire, so
two sides that would cut the bytes differently refuse each other. Invariants: the blocks of a plan
cover every element of every tensor exactly once; every element that a worker's loaders read is in
one of its parts, and in one only.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import xxhash

from rft.ground.experience import Record
from rft.ground.names import ITEM_BYTES, Dims
from rft.ground.protocols import Block

# bytes; pieces start aligned, so the receiver can view them as any dtype without a copy
ALIGNMENT = 64
# vLLM pads the vocabulary to a multiple of this, and cuts the result evenly
VOCABULARY_MULTIPLE = 64
VOCABULARY = ("embed_tokens", "lm_head")
ROWS = ("q_proj", "gate_proj", "up_proj", "w1", "w3")  # those of experts too
KV_ROWS = ("k_proj", "v_proj")
COLUMNS = ("o_proj", "down_proj", "w2")
TENSORS = ("weight", "bias")  # an adapter's are named otherwise, and every worker takes all of them


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


# --- what one tensor-parallel worker needs -------------------------------------------------------


class Share(Record, frozen=True):
    """Worker `worker` of the `workers` that hold one copy of a
    model with `kv_heads` key/value heads.
    """

    worker: int = 0
    workers: int = 1
    kv_heads: int = 1


WHOLE = Share()  # one worker that holds all


class StreamPart(Record, frozen=True):
    """What a share needs of one stream.

    `sources`: the number in the whole stream of the block that each block is cut from.
    """

    stream: WeightStream
    sources: tuple[int, ...]
    digest: str

    @property
    def payload(self) -> int:
        """Bytes, without what pads buckets."""
        return sum(row_bytes(block) * block.block_shape[0] for block in self.stream.blocks)


def obstacle(dims: Dims, workers: int) -> str | None:
    """Why vLLM cannot hold a model of these sizes on so many tensor-parallel workers, and what to
    use; None when it can.
    """
    if not (found := _obstacle(dims, workers)):
        return None
    possible = [str(number) for number in range(1, dims.heads + 1) if not _obstacle(dims, number)]
    return f"{found}; use {', '.join(possible)}"


def _obstacle(dims: Dims, workers: int) -> str:
    widths = {"experts": dims.expert_ffn, "shared expert": dims.shared_ffn}
    if dims.dense or not dims.experts:
        widths["MLPs"] = dims.ffn
    if dims.heads % workers:
        return f"does not divide the model's {dims.heads} heads"
    if dims.groups % workers and workers % dims.groups:
        return f"neither divides nor is a multiple of the model's {dims.groups} key/value heads"
    for what, width in widths.items():
        if width % workers:
            return f"does not divide the width {width} of the model's {what}"
    if _padded(dims.vocab) % workers:
        return (
            f"does not divide the model's vocabulary, which vLLM pads to {_padded(dims.vocab)} rows"
        )
    return (
        f"is more than the model's {dims.experts} experts"
        if dims.experts and workers > dims.experts
        else ""
    )


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def needed(name: str, shape: tuple[int, ...], share: Share) -> tuple[int, int, int]:
    """(dim, start, stop): the rows or columns of the HF tensor `name` that vLLM uses on this
    worker. None of the vocabulary where its rows are all padding.
    """
    *_, layer, last = ("", "", *name.split("."))
    worker, workers = share.worker, share.workers
    if last in TENSORS and layer in VOCABULARY:
        rows = _padded(shape[0]) // workers
        return 0, min(worker * rows, shape[0]), min((worker + 1) * rows, shape[0])
    dim, parts = 0, 1
    if last in TENSORS and layer in ROWS:
        parts = workers
    elif last in TENSORS and layer in KV_ROWS:
        # several workers have the same head where there are fewer heads
        parts = min(workers, share.kv_heads)
    elif last in TENSORS and layer in COLUMNS and len(shape) > 1:  # all have the whole bias
        dim, parts = 1, workers
    size, number = shape[dim] // parts, worker * parts // workers
    return dim, number * size, (number + 1) * size


def part_of(plan: StreamPlan, index: int, share: Share) -> StreamPart:
    """Of stream `index` of `plan`, in messages that are so much smaller than those of the whole as
    there are workers: a block that is one piece there is one here.

    It has no blocks where the worker needs nothing that this trainer rank holds.
    """
    stream = plan.streams[index]
    if share.workers == 1:
        return StreamPart(
            stream=stream, sources=tuple(range(len(stream.blocks))), digest=plan.digest
        )
    cuts = [
        (number, cut)
        for number, block in enumerate(stream.blocks)
        if (cut := _cut(block, share)) is not None
    ]
    blocks = tuple(cut for _, cut in cuts)
    limit = max(bucket.nbytes for bucket in stream.buckets) // share.workers
    part = WeightStream(rank=stream.rank, blocks=blocks, buckets=tuple(buckets(blocks, limit)))
    digest = xxhash.xxh3_128_hexdigest(plan.digest.encode() + msgspec.msgpack.encode(part))
    return StreamPart(stream=part, sources=tuple(number for number, _ in cuts), digest=digest)


def _cut(block: Block, share: Share) -> Block | None:
    """`block` as far as the share needs it.

    Where one is cut in rows and the other in columns, all of it: a block has one cut.
    """
    dim, start, stop = needed(block.name, block.shape, share)
    if dim == block.dim:
        start, stop = max(start, block.start), min(stop, block.stop)
    elif (block.start, block.stop) != (0, block.shape[block.dim]):
        return block
    return replace(block, dim=dim, start=start, stop=stop) if start < stop else None
