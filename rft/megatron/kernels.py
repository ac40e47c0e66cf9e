"""Kernels of other libraries, where they are installed: Transformer Engine's, and those of NVIDIA's
Apex.

In: this rank's device, and what Megatron found as it was imported. Out: whether Transformer
Engine's layers are used, which of Megatron's fields are on with them, and words for the start line.
Invariant: what is there is what Megatron says is there, for its layers and its optimizer take what
it found; a library of which parts are missing is refused instead of passed over.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from torch import nn

from rft.ground.device import Device
from rft.ground.errors import ConfigError

# what Megatron imports of it, in an order in which the first that fails is the cause
PARTS = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
WGRAD = "gradient_accumulation_fusion"
PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def check() -> None:
    """Raise ConfigError for a Transformer Engine that is half installed; for a GPU, before megatron
    is imported, which would go without it, or fall over it.
    """
    if importlib.util.find_spec(PARTS[0]) is None:
        return
    for part in PARTS:
        try:
            importlib.import_module(part)
        except Exception as error:
            raise ConfigError(_half(f"`import {part}` failed: {error}")) from error
    if not _megatron_has_it():
        raise ConfigError(_half("the installed megatron-core cannot import what it needs of it"))


def _half(why: str) -> str:
    return (
        f"Transformer Engine is half installed: {why}. Install it again, with its part for PyTorch "
        "and for this machine's CUDA (docs/install.md), or uninstall transformer-engine: then "
        "rft's own layers are used, which are slower"
    )


def _megatron_has_it() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def uses_transformer_engine(device: Device) -> bool:
    return device.kind != "cpu" and _megatron_has_it()


def fused(experts: bool) -> dict[str, bool]:
    """Fields of megatron's TransformerConfig that are on with Transformer Engine's layers; its
    versions do not all have every kernel.
    """
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    has_permutations = all(getattr(moe_utils, name, None) is not None for name in PERMUTATIONS)
    return {
        "apply_rope_fusion": rope_utils.fused_apply_rotary_pos_emb_thd is not None,
        "bias_activation_fusion": True,
        "moe_permute_fusion": experts and has_permutations,
    }


def fuse_weight_gradients(model: Iterable[nn.Module]) -> None:
    """Transformer Engine's products add weight gradients straight to what megatron's DDP holds.

    By its layers' own switch: with megatron's field, megatron's output layer would ask for an
    extension of Apex before it is built, and rft's takes its gradient from `logprobs` anyway.
    """
    for part in model:
        for module in part.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def describe(device: Device, on: dict[str, Any]) -> str:
    """Whose layers compute, and why those. `on`: fields that may be on with fused kernels."""
    if device.kind == "cpu":
        return "rft's own layers (on a CPU)"
    if not uses_transformer_engine(device):
        return f"rft's own layers (Transformer Engine is not installed); {_apex()}"
    from megatron.core.utils import get_te_version

    names = ", ".join(name for name, value in on.items() if value)
    return (
        f"layers of Transformer Engine {get_te_version()} ({names or 'nothing fused'}); {_apex()}"
    )


def _apex() -> str:
    """NVIDIA's: the package index has unrelated software of that name, which has no such module."""
    if importlib.util.find_spec("amp_C") is None:
        return "no Apex of NVIDIA's"
    from megatron.core.optimizer import clip_grads

    taken = getattr(clip_grads.l2_norm_impl, "__module__", "") or ""
    return "NVIDIA's Apex " + (
        "for gradient norms" if taken.startswith("amp_C") else "is there, and not needed"
    )
