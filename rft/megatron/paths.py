"""Which of several ways of computing a run takes, and why: one line, told once at the start.

In: the mesh, the config and what was built from it. Out: text. It decides nothing itself.
"""

import importlib.metadata

from rft.config import TrainerConfig
from rft.ground.adapters import Lora
from rft.megatron.mesh import Mesh
from rft.megatron.model import uses_transformer_engine
from rft.megatron.optimizer import Optimizer


def describe(mesh: Mesh, trainer: TrainerConfig, optimizer: Optimizer, lora: Lora | None) -> str:
    megatron = importlib.metadata.version("megatron-core")
    parts = [
        mesh.device.describe(),
        trainer.dtype,
        f"megatron-core {megatron}",
        _layers(mesh, lora),
        _optimizer(optimizer),
    ]
    fp8 = trainer.megatron.override_transformer_config.get("fp8")
    recipe = trainer.megatron.override_transformer_config.get("fp8_recipe", "delayed")
    parts.append(f"fp8 {fp8} ({recipe})" if fp8 else "no fp8 (not asked for)")
    if trainer.recompute_granularity:
        parts.append(f"{trainer.recompute_granularity} recompute")
    return "; ".join(parts)


def _layers(mesh: Mesh, lora: Lora | None) -> str:
    if uses_transformer_engine(mesh, lora):
        return f"layers of Transformer Engine {importlib.metadata.version('transformer-engine')}"
    if mesh.device.kind == "cpu":
        return "rft's own layers (on a CPU)"
    return (
        "rft's own layers "
        f"({'adapters have no others' if lora else 'Transformer Engine is not installed'})"
    )


def _optimizer(optimizer: Optimizer) -> str:
    """Transformer Engine's and Apex' kernels are taken by megatron where they are installed."""
    kinds = {type(part.optimizer) for part in optimizer.parts}
    names = sorted(f"{kind.__name__} of {kind.__module__.split('.')[0]}" for kind in kinds)
    return f"distributed optimizer over {', '.join(names) or 'no parameters on this rank'}"
