"""Adapters inside a vLLM worker: received tensors become a LoRA that requests can name, without a file and without a pause.

    PEFT tensors ──copy──► LoRAModel ──► registered and active under `number` ──► requests that carry the number
    `drop`: numbers whose last request has ended ──► slots are free again

In: the model of a worker that vLLM started with LoRA, tensors of the whole adapter (every worker takes its tensor-parallel part
itself, in vLLM's own layers), and an order of the engine actor. Runs in the worker's main thread, so between two steps. The base
weights and every other adapter stay as they are: a failure leaves the worker as it was. Invariants: a number names the same
bytes for as long as it is registered; nothing here refers to the memory that the tensors came in; vLLM never has to evict an
adapter, which it could not load again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from rft.sync.adapter_cpu import group_by_adapter


@dataclass(frozen=True)
class Order:
    """What the engine actor asks of its workers; see `rft.rollout.adapter_serving`."""

    number: int  # vLLM's lora_int_id, never used before in this engine
    drop: list[int]
    rank: int
    alpha: float
    projections: list[str]


def install(model: torch.nn.Module, order: Order, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Drop what the order drops, then make `tensors` the adapter `order.number`. Returns what is registered, and seconds."""
    began = time.monotonic()
    manager = manager_of(model)
    for number in order.drop:
        manager.remove_adapter(number)
    held = sorted(manager.list_adapters())
    if order.number in held or len(held) >= manager.lora_slots:
        raise RuntimeError(f"adapter {order.number} has no place beside {held}, of {manager.lora_slots}")
    lora = _model_of(manager, order, tensors)
    _check_names(manager, lora)
    group_by_adapter(manager)
    with gpu_sync_allowed():
        manager.add_adapter(lora)
        manager.activate_adapter(order.number)
    return {"adapters": sorted(manager.list_adapters()), "install_s": time.monotonic() - began}


def manager_of(model: torch.nn.Module) -> LoRAModelManager:
    """What vLLM hangs on a model whose layers can take adapters."""
    manager = getattr(model, "lora_manager", None)
    if not isinstance(manager, LoRAModelManager):
        raise RuntimeError("this engine was started without adapters (enable_lora): it takes merged weights only")
    return manager


def _model_of(manager: LoRAModelManager, order: Order, tensors: Mapping[str, torch.Tensor]) -> LoRAModel:
    """vLLM scales B in place and keeps the tensors for as long as the adapter is registered: they are copied."""
    described = {"r": order.rank, "lora_alpha": order.alpha, "target_modules": order.projections}
    helper = PEFTHelper.from_dict(described)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    dtype = manager.lora_config.lora_dtype
    return LoRAModel.from_lora_tensors(
        lora_model_id=order.number,
        tensors={name: tensor.to(device="cpu", dtype=dtype, copy=True) for name, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )


def _check_names(manager: LoRAModelManager, lora: LoRAModel) -> None:
    """vLLM passes over what it does not find, on both sides."""
    wanted = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    given = {name for name, layer in lora.loras.items() if layer.lora_a is not None and layer.lora_b is not None}
    if wanted != given:
        missing, more = sorted(wanted - given)[:10], sorted(given - wanted)[:10]
        raise ValueError(f"the adapter lacks A or B of {missing}, and has {more}, which have no adapter in this engine")
