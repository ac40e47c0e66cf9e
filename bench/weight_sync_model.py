"""The model of `bench.weight_sync`: a Qwen3 of 571 MB in bf16, random weights, cut as Megatron's
ranks hold them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.ground.protocols import Block
from rft.tools.toy import write_model

HIDDEN, VOCABULARY, LAYERS = 1024, 32000, 14
CONTEXT = 4096
COLUMNS = ("o_proj", "down_proj")  # cut by tensor parallelism in dimension 1


def write(
    directory: Path, layers: int = LAYERS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
) -> Path:
    """The directory of such a model, with weights."""
    return write_model(
        directory,
        hidden=hidden,
        layers=layers,
        ffn=3 * hidden,
        heads=16,
        kv_heads=8,
        head_dim=max(32, hidden // 8),
        vocab=vocabulary,
        tied=False,
        context=CONTEXT,
    )


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    hf = read_hf_config(directory)
    return hf_names(Dims.of(hf), architecture_of(hf))


def dim_of(name: str) -> int:
    return int(any(part in name for part in COLUMNS))


def stage_of(name: str, pp: int, layers: int = LAYERS) -> int:
    words = name.split(".")
    if words[1] == "layers":
        return int(words[2]) * pp // layers
    return 0 if words[1] == "embed_tokens" else pp - 1


class Shards:
    """`WeightSource` of one sender: the first of a stage's
    ranks also owns what all of them hold.
    """

    def __init__(self, tensors: dict[str, tuple[int, ...]], rank: int, tp: int, pp: int):
        self.parts: list[tuple[Block, torch.Tensor]] = []
        place, stage = rank % tp, rank // tp
        layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
        generator = torch.Generator().manual_seed(rank)
        for name, shape in tensors.items():
            replicated = len(shape) == 1
            if stage_of(name, pp, layers) != stage or (replicated and place):
                continue
            dim, width = (
                dim_of(name),
                shape[dim_of(name) if not replicated else 0] // (1 if replicated else tp),
            )
            block = Block(
                name,
                "bfloat16",
                shape,
                0 if replicated else dim,
                place * width,
                (place + 1) * width,
            )
            self.parts.append(
                (
                    block,
                    0.02 * torch.randn(block.block_shape, generator=generator).to(torch.bfloat16),
                )
            )

    def blocks(self) -> list[Block]:
        return [block for block, _ in self.parts]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (values for _, values in self.parts)
