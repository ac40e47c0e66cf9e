"""What one tensor-parallel engine worker needs of a weight stream. Pure: both ends of a stream
compute the same.

In: the plan of all streams, and which worker of how many asks (`Share`). Out: a `StreamPart` of a
stream: the same blocks, cut to the rows and columns that vLLM's own loaders take out of a whole
Hugging Face tensor on that worker, in buckets of their own. Its digest is told with the first words
on a wire, so two sides that would cut differently refuse each other. Invariant: every element that
the worker's loaders read is in one of its parts, and in one only.
"""

from dataclasses import replace

import msgspec
import xxhash

from rft.ground.experience import Record
from rft.ground.names import Dims
from rft.ground.protocols import Block
from rft.sync import plan as plans
from rft.sync.plan import StreamPlan, WeightStream

# vLLM pads the vocabulary to a multiple of this, and cuts the result evenly
VOCABULARY_MULTIPLE = 64
VOCABULARY = ("embed_tokens", "lm_head")
ROWS = ("q_proj", "gate_proj", "up_proj")  # those of experts too
KV_ROWS = ("k_proj", "v_proj")
COLUMNS = ("o_proj", "down_proj")
TENSORS = ("weight", "bias")  # an adapter's are named otherwise, and every worker takes all of them


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
        return sum(plans.row_bytes(block) * block.block_shape[0] for block in self.stream.blocks)


def obstacle(dims: Dims, workers: int) -> str | None:
    """Why vLLM cannot hold a model of these sizes on so many tensor-parallel workers, and what to
    use; None when it can.
    """
    if not (found := _obstacle(dims, workers)):
        return None
    possible = [str(number) for number in range(1, dims.heads + 1) if not _obstacle(dims, number)]
    return f"{found}; use {', '.join(possible)}"


def _obstacle(dims: Dims, workers: int) -> str:
    width, what = (dims.expert_ffn, "experts") if dims.experts else (dims.ffn, "MLPs")
    if dims.heads % workers:
        return f"does not divide the model's {dims.heads} heads"
    if dims.groups % workers and workers % dims.groups:
        return f"neither divides nor is a multiple of the model's {dims.groups} key/value heads"
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
    elif last in TENSORS and layer in COLUMNS:
        dim, parts = 1, workers
    size, number = shape[dim] // parts, worker * parts // workers
    return dim, number * size, (number + 1) * size


def part_of(plan: StreamPlan, index: int, share: Share) -> StreamPart:
    """Of stream `index` of `plan`.

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
    largest = max(bucket.nbytes for bucket in stream.buckets)
    part = WeightStream(
        rank=stream.rank, blocks=blocks, buckets=tuple(plans.buckets(blocks, largest))
    )
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
