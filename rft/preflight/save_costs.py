"""What checkpoints cost a node: bytes and seconds, from sizes alone.

In: parameters that are trained, bytes of one in the run's dtype, the optimizer, ranks and how many
of them a node has, `trainer.checkpoint.memory`, rates. Out: `SaveCost`. A distributed optimizer
cuts the whole state over all ranks, so a part is the same whatever the layout; pieces are not cut,
so that of a rank may be larger by the largest one.
"""

from dataclasses import dataclass

MASTER = 4  # bytes: bf16 weights have an fp32 copy
MOMENTS = {"adam": 8, "sgd": 0}


def state_bytes(item: int, optimizer: str) -> int:
    """Of the optimizer, per parameter."""
    return (MASTER if item < MASTER else 0) + MOMENTS[optimizer]


@dataclass(frozen=True)
class Rates:
    """Bytes per second: of a rank's copy to, and out of, its slots; of a node's disk."""

    copy: float = 1e9
    memory: float = 1e9
    disk: float = 1e9


@dataclass(frozen=True)
class SaveCost:
    """Bytes, then seconds."""

    checkpoint: int  # of all ranks
    part: int  # of one rank
    node_memory: int
    node_disk: int  # that a node writes per checkpoint
    copy_s: float  # beside the next step
    durable_s: float
    back_s: float  # of a part, out of memory
    disk_s: float  # of what a node has written, back


def cost(
    parameters: int,
    item: int,
    optimizer: str,
    ranks: int,
    per_node: int,
    memory: float = 2.0,
    rates: Rates | None = None,
) -> SaveCost:
    rates = rates or Rates()
    checkpoint = parameters * (item + state_bytes(item, optimizer))
    part = -(-checkpoint // ranks)
    on_node = part * min(per_node, ranks)
    return SaveCost(
        checkpoint=checkpoint,
        part=part,
        node_memory=int(memory * on_node),
        node_disk=on_node,
        copy_s=part / rates.copy,
        durable_s=part / rates.copy + on_node / rates.disk,
        back_s=part / rates.memory,
        disk_s=on_node / rates.disk,
    )
