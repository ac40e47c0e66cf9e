"""The part of weight sync that lives inside vLLM: receives weights beside the decoding, installs them between two steps of it.

    stage (a thread, while the engine decodes)        update_weights (between pause and resume: nothing decodes)
    receive + verify everything ──► told, by a socket ──► open layer-wise reload ──► load, one generator ──► close, re-packed
    fails: nothing was touched                            fails from here on: reload aborted, `mixed` until a round succeeds

`direct` rounds receive inside `update_weights`, without staging memory: what fails there has touched the model. Always through
layer-wise reload: on CPU vLLM re-packs linear weights and a raw copy would land nowhere. Where the bytes come from is the
round's `method`: each has an `Origin` that stages them, and everything after that is the same. Invariant: `version` names exactly
the weights in the model unless `mixed` is set; a round is loaded only when it was staged whole.
"""

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
from rft.monitor import trace
from rft.sync import adapter_install
from rft.sync.from_checkpoint import SavedWeights
from rft.sync.from_memory import HandedBuckets
from rft.sync.narrow import WHOLE, Share
from rft.sync.receiver import Receiver, file_tensors
from rft.sync.sender import Link
from rft.sync.wire import Lost, Refused, Wire

log = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    info: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update`: version, and where its bytes come from: `source` is "staged", "direct" (digest and epoch of the streams) or
    "files" (path)."""

    update: dict[str, Any]


class Origin(Protocol):
    """How a method's weights come to this worker. `again`: buckets of the last round that had to come twice."""

    again: int

    def connect(self, info: dict[str, Any]) -> None: ...
    def check(self, update: dict[str, Any]) -> None: ...
    def stage(self, update: dict[str, Any]) -> dict[str, torch.Tensor]: ...
    def size(self, staged: dict[str, torch.Tensor]) -> int: ...
    def whole(self, staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]: ...
    def close(self) -> None: ...


class StreamedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """States: idle -> started -> loaded -> idle (new version); any failure -> idle (old version, or mixed)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.worker = vllm_config.parallel_config.rank
        self.receiver = Receiver(self.worker, device, link_maker(device), share_of(vllm_config))
        self.origins: dict[str, Origin] = {
            "nccl": self.receiver,
            "checkpoint": SavedWeights(vllm_config.model_config.model, device),
            "memory": HandedBuckets(device),
        }
        self.version: int | None = None  # None: still the weights that the engine was started with
        self.mixed = False
        self.unreachable = False  # the last failure was that no bytes came: the model and this worker are all right
        self.round: dict[str, Any] = {}
        self.staged: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None  # an update, and what it brought
        self.tied = tied_layers(model)
        self.experts = expert_methods(model) if device.type == "cpu" else []

    def state(self) -> dict[str, Any]:
        """What this worker holds and what its last round took: asked for by the engine actor after every round."""
        facts = {"version": self.version, "mixed": self.mixed, "unreachable": self.unreachable}
        return {**facts, "digest": "", "bytes": 0, "receive_s": 0.0, "load_s": 0.0, "again": 0, **self.round}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.staged, self.unreachable = None, False
        try:
            self._origin(init_info.info).connect(init_info.info)
        except (Lost, Refused):
            self.unreachable = True
            raise

    def listen(self, path: str) -> None:
        """Follow the orders that come over the Unix socket `path` (`rft.rollout.orders`), in a thread of their own."""
        orders = socket.socket(socket.AF_UNIX)
        orders.connect(path)
        threading.Thread(target=self._follow, args=(orders,), name="stage", daemon=True).start()

    def _follow(self, orders: socket.socket) -> None:
        devices.yield_to_others()  # decoding goes first
        trace.start(f"{Path(os.environ.get('RFT_LOG_FILE', 'engine')).stem}_worker_{self.worker}")
        with orders, orders.makefile("rb") as lines:
            for line in lines:
                update = json.loads(line)
                number = update.pop("round")
                orders.sendall(
                    json.dumps({**self.stage(update), "round": number, "worker": self.worker}).encode() + b"\n"
                )

    def stage(self, update: dict[str, Any]) -> dict[str, Any]:
        """Receive a round while the engine decodes. Returns its numbers, or what went wrong and whom that blames."""
        self.staged = None
        began, origin = time.monotonic(), self._origin(update)
        try:
            origin.check(update)
            with trace.span("receive weights", version=update["version"]):
                tensors = origin.stage(update)
        except Exception as error:
            origin.close()
            log.warning("version %s was not staged", update["version"], exc_info=True)
            return {"error": str(error), "kind": kind(error)}
        self.staged = {key: value for key, value in update.items() if key != "origin"}, tensors
        self.round = self._numbers(update, origin.size(tensors), began)
        return self.round

    def _origin(self, told: dict[str, Any]) -> Origin:
        return self.origins[told.get("method", "nccl")]

    def _numbers(self, update: dict[str, Any], size: int, began: float) -> dict[str, Any]:
        seconds = time.monotonic() - began
        return {"digest": update["digest"], "bytes": size, "receive_s": seconds, "again": self._origin(update).again}

    def start_weight_update(self) -> None:
        """The reload is opened only once all bytes are there, so a round that never arrives touches nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overrides vLLM's, which calls `torch.accelerator.synchronize`: on a CPU torch that raises."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        update, began, self.unreachable = update_info.update, time.monotonic(), False
        try:
            self._load(self._source(update))
        except BaseException as error:
            self.unreachable = isinstance(error, Lost | Refused | TimeoutError)
            self.receiver.close()
            raise
        finally:
            self.staged = None
        self.round |= {"target": update["version"], "load_s": time.monotonic() - began}

    def install_adapter(self, update: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
        """Register a staged round beside the adapters of before, whose requests go on. The base weights stay."""
        try:
            tensors = dict(self._source(update))
        finally:
            self.staged = None
        self.round |= adapter_install.install(self.model, adapter_install.Order(**order), tensors)
        self.version = update["version"]
        return self.state()

    def _source(self, update: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The round's tensors. Whatever can be known to be wrong is raised here, before the model is touched."""
        if update["source"] == "files":
            tensors = dict(file_tensors(update["path"]))
            self.round = {"bytes": sum(tensor.nbytes for tensor in tensors.values())}
            return iter(tensors.items())
        if update["source"] == "direct":
            self.receiver.check(update)
            return self._direct(update)
        here = None if self.staged is None else {**self.staged[0], "source": "staged"}
        if self.staged is None or here != update:
            raise RuntimeError(f"asked to install {update}, staged is {here}")
        return self._origin(update).whole(self.staged[1])

    def _direct(self, update: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Straight from the streams."""
        began = time.monotonic()
        yield from self.receiver.tensors(update["version"])
        self.round = self._numbers(update, self.receiver.payload, began)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        first = next(tensors)  # a trainer that is gone already touches nothing
        initialize_layerwise_reload(self.model)
        self.mixed = True
        for method in self.experts:
            method.moe_kernel = None
        try:
            self.model.load_weights(itertools.chain([first], tensors))
            empty = [name for name in unfilled(self.model) if name not in self.tied]
            if empty:
                raise ValueError(f"the stream has no weights for {empty[:10]}")
        except BaseException:
            abort_reload(self.model)
            raise

    def finish_weight_update(self) -> None:
        began = time.monotonic()
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.tied.values():  # got no weights of its own, but keeps a packed copy of the shared ones on CPU
            layer.quant_method.process_weights_after_loading(layer)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.version, self.mixed = self.round["target"], False
        self.round["load_s"] += time.monotonic() - began

    def shutdown(self) -> None:
        for origin in self.origins.values():
            origin.close()


def link_maker(device: torch.device) -> Callable[[Wire], Link] | None:
    """How packed buckets come to this worker; None: it takes them from the wire, straight into host memory."""
    if devices.choose(device.type).backend != "nccl":
        return None
    from rft.sync.links import join_link

    return lambda wire: join_link(wire, device)


def share_of(vllm_config: Any) -> Share:
    """What this worker needs of the weights: its tensor-parallel part, where vLLM cuts the model in that way alone."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size or parallel.enable_expert_parallel:
        return WHOLE
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return Share(worker=parallel.rank, workers=parallel.tensor_parallel_size, kv_heads=heads)


def kind(error: Exception) -> str:
    """Whom a failed round blames: "missed" nobody (the version is over), "unreachable" the way to the trainer, "broken" us."""
    if isinstance(error, Refused):
        return "missed"
    return "unreachable" if isinstance(error, Lost | TimeoutError) else "broken"


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
    """Layers of an open reload that wait for weights and got none. A vocabulary's part can be padding alone: that has none."""
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        waiting = info.can_load() and info.load_numel == 0 and (info.load_numel_total or 0) > 0
        padding = getattr(layer, "num_org_embeddings_per_partition", None) == 0
        if (
            waiting
            and not padding
            and not is_deferred_attention_layer(layer)
            and dict(layer.named_parameters(recurse=False))
        ):
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
