"""LoRA adapters in PEFT's names and shapes, and where the shards of a rank lie in them. Neither
torch nor megatron.

A projection W [o, i] gets A [r, i] and B [o, r]; what it computes becomes W + alpha/r * B A (Hu et
al. 2021, arXiv:2106.09685). Megatron fuses projections (q, k, v; gate, up), Hugging Face does not,
so a fused layer has one A for each, stacked by rows, and one B whose rows are those of the layer:

    column layer (qkv, gate_up)    A [P*r, i]  on every rank        B [o/T, r]  cut as the layer is
    row layer (o_proj, down_proj)  A [r, i/T]  cut as the layer is  B [o, r]    on every rank

An expert has adapters of its own, for which T is the experts' own tensor parallelism. The matrices
are `lora_A` and `lora_B` in megatron, with a number behind where experts are together one module.

In: the bound rule of a layer's weight (`rft.ground.names`). Out: the same for its adapter, in HF
coordinates, so checkpoints and exports know nothing of the layout. Embeddings have no adapters.
"""

import re
from dataclasses import dataclass
from typing import Any

from rft.ground.names import BoundRule, Dims, Place, ShardSlice, hf_names, hf_shape

PREFIX = "base_model.model."  # PEFT's name of the model that an adapter is for
MATRIX = re.compile(r"(.+)\.(lora_[AB])(\d*)")
ATTENTION = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
MLP = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
W123 = {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}  # the same in Mixtral's names


@dataclass(frozen=True)
class Lora:
    """`layers`: megatron's names of the linear layers that have an adapter. `projections`: what
    they fuse, in the family's names.
    """

    rank: int
    alpha: float
    layers: frozenset[str]
    projections: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def as_peft(self, base: str) -> dict[str, Any]:
        """adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.projections),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
        }


@dataclass(frozen=True)
class Adapter:
    """One adapter matrix of a rank: its rule, the shapes of its HF parts, and where its rows or
    columns lie in them.
    """

    bound: BoundRule
    shapes: tuple[tuple[int, ...], ...]
    segments: list[ShardSlice]


def fused(dims: Dims) -> dict[str, tuple[str, ...]]:
    """megatron's linear layers of this family, and the projections that each fuses."""
    return ATTENTION | (W123 if "w123" in dims.features else MLP)


def beside(name: str) -> tuple[str, str] | None:
    """Of megatron's name of an adapter's matrix: which it is, and the weight that it is beside."""
    found = MATRIX.fullmatch(name)
    return (found[2], f"{found[1]}.weight{found[3]}") if found else None


def adapter(which: str, base: BoundRule, dims: Dims, place: Place, rank: int) -> Adapter:
    """The matrix `which` (lora_A or lora_B) beside a weight whose rule is `base`."""
    hf = tuple(f"{PREFIX}{part.removesuffix('.weight')}.{which}.weight" for part in base.hf)
    whole = [hf_shape(base.kind, part, hf_name, dims) for part, hf_name in enumerate(base.hf)]
    cut = place.segments(base, dims)
    if which == "lora_A":
        shapes = tuple((rank, columns) for _, columns in whole)
        if base.kind == "row":
            return Adapter(BoundRule("row", hf), shapes, cut)
        stacked = [ShardSlice(part, 0, 0, rank, part * rank) for part in range(len(hf))]
        return Adapter(BoundRule("replicated", hf), shapes, stacked)
    shapes = tuple((rows, rank) for rows, _ in whole)
    if base.kind == "row":
        return Adapter(BoundRule("replicated", hf), shapes, [ShardSlice(0, 0, 0, whole[0][0], 0)])
    return Adapter(BoundRule(base.kind, hf), shapes, cut)


def adapter_names(dims: Dims, architecture: str, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Every tensor of the adapter with its shape, in the model's order."""
    names = {}
    for name, shape in hf_names(dims, architecture).items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.rpartition(".")[2] in lora.projections:
            names[f"{PREFIX}{module}.lora_A.weight"] = (lora.rank, shape[1])
            names[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], lora.rank)
    return names
