"""The part of weight sync that lives inside vLLM: installs received tensors into the model, or leaves it as it was.

vLLM calls `start_weight_update`, `update_weights`, `finish_weight_update` on every worker, between pause and resume (nothing
decodes meanwhile). One round:

    receive + verify everything ──► open layer-wise reload ──► load, one generator ──► close (re-packed in place)
    fails: nothing was touched      fails from here on: reload aborted, `mixed` until a full round succeeds

Always through layer-wise reload: on CPU vLLM re-packs linear weights and a raw copy would land nowhere. Invariant: `version`
names exactly the weights in the model unless `mixed` is set.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)

from rft import device as devices
from rft.sync import adapter_install
from rft.sync.receiver import Receiver, file_tensors

log = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    info: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update`: version, and either digest and epoch of the streams or source "files" with a path."""

    update: dict[str, Any]


class StreamedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """States: idle -> started -> loaded -> idle (new version); any failure -> idle (old version, or mixed)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        backend = devices.choose(device.type).backend
        self.receiver = Receiver(vllm_config.parallel_config.rank, device, backend)
        self.version: int | None = None  # None: still the weights that the engine was started with
        self.mixed = False
        self.round: dict[str, Any] = {}
        self.tied = tied_layers(model)
        self.experts = expert_methods(model) if device.type == "cpu" else []

    def state(self) -> dict[str, Any]:
        """What this worker holds and what its last round took: asked for by the engine actor after every round."""
        return {"version": self.version, "mixed": self.mixed, "digest": "", "bytes": 0, "receive_s": 0.0, **self.round}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.receiver.connect(init_info.info)

    def start_weight_update(self) -> None:
        """The reload is opened only once all bytes are there, so a round that never arrives touches nothing."""
        self.round = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overrides vLLM's, which calls `torch.accelerator.synchronize`: on a CPU torch that raises."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self._load(self._received(update_info.update))
        except BaseException:
            self.receiver.close()
            raise
        self.round["target"] = update_info.update["version"]

    def install_adapter(self, update: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
        """Take a round and register it beside the adapters of before, whose requests go on. The base weights stay."""
        self.round = {}
        try:
            tensors = dict(self._received(update))
        except BaseException:
            self.receiver.close()
            raise
        self.round |= adapter_install.install(self.model, adapter_install.Order(**order), tensors)
        self.version = update["version"]
        return self.state()

    def _received(self, update: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """All tensors of the round, verified."""
        began = time.monotonic()
        if update.get("source") == "files":
            tensors = list(file_tensors(update["path"]))
            self.round["digest"] = ""
        else:
            self.receiver.check(update)
            tensors = list(self.receiver.tensors(update["version"]))
            self.round["digest"] = update["digest"]
        self.round["bytes"] = sum(tensor.nbytes for _, tensor in tensors)
        self.round["receive_s"] = time.monotonic() - began
        return tensors

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        self.mixed = True
        for method in self.experts:
            method.moe_kernel = None
        try:
            self.model.load_weights(iter(tensors))
            empty = [name for name in unfilled(self.model) if name not in self.tied]
            if empty:
                raise ValueError(f"the stream has no weights for {empty[:10]}")
        except BaseException:
            abort_reload(self.model)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.tied.values():  # got no weights of its own, but keeps a packed copy of the shared ones on CPU
            layer.quant_method.process_weights_after_loading(layer)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.version, self.mixed = self.round["target"], False

    def shutdown(self) -> None:
        self.receiver.close()


def tied_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Layers whose parameter belongs to an earlier layer: an output head that shares the input embedding."""
    owners: dict[int, str] = {}
    tied: dict[str, Any] = {}
    for name, layer in model.named_modules():
        for parameter in layer.parameters(recurse=False):
            if owners.setdefault(id(parameter), name) != name:
                tied[name] = layer
    return tied


def expert_methods(model: torch.nn.Module) -> list[Any]:
    """What packs the weights of a layer of experts for the CPU: vLLM does so only where it also builds the kernel, once, and
    would copy unpacked weights over packed ones afterwards. Without a kernel it builds and packs again."""
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


def unfilled(model: torch.nn.Module) -> list[str]:
    """Layers of an open reload that wait for weights and got none."""
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        waiting = info.can_load() and info.load_numel == 0 and (info.load_numel_total or 0) > 0
        if waiting and not is_deferred_attention_layer(layer) and dict(layer.named_parameters(recurse=False)):
            names.append(name)
    return names


def abort_reload(model: torch.nn.Module) -> None:
    """Close a half-done layer-wise reload, which vLLM itself cannot: put the old storage back into open layers."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
