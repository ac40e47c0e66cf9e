"""The part of weight sync that lives inside vLLM: receives weights beside the decoding, installs
them between two steps of it.

    stage (a thread, while the engine decodes)        update_weights (between pause and resume:
                                                      nothing decodes)
    receive + verify everything ──► told, by a channel ──► open layer-wise reload
            ──► load, one generator ──► close, re-packed
    fails: nothing was touched                            fails from here on: reload aborted,
                                                          `mixed` until a round succeeds

`direct` rounds receive inside `update_weights`, without staging memory: what fails there has
touched the model. Always through layer-wise reload: on CPU vLLM re-packs linear weights and a raw
copy would land nowhere. Where the bytes come from is the round's `location`: each kind has a
`WeightReader` that stages them, and everything after that is the same. Invariant: `version` names
exactly the weights in the model unless `mixed` is set; a round is loaded only when it was staged
whole.
"""

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)

from rft.ground import device as devices
from rft.ground.experience import decode
from rft.ground.families import SUPPORTED
from rft.ground.process import NamedThread
from rft.ground.rounds import (
    BROKEN,
    CHECKPOINT,
    MEMORY,
    MISSED,
    STREAM,
    UNREACHABLE,
    AdapterOrder,
    AtPath,
    Received,
    Round,
    TrainerInfo,
    WorkerOffer,
    WorkerState,
)
from rft.ground.streams import enter_thread
from rft.monitor import trace
from rft.rollout.worker_channel import Hello, StageOrder, StageReport
from rft.sync import lora
from rft.sync.connection import PeerConnection, PeerLost, PeerRefused, own_address
from rft.sync.links import LinkSide, join_links
from rft.sync.loading import expert_by_expert, in_layer_order
from rft.sync.plan import WHOLE, Share
from rft.sync.readers import HandedBuckets, SavedWeights, WeightReader, file_tensors
from rft.sync.receiver import Receiver
from rft.sync.relay import Relay
from rft.sync.touched import Chosen, LayersOf, check_whole

log = logging.getLogger(__name__)
CHANNEL_S = 60.0  # for an order that has begun to come, or a report, to come whole
CHANNEL_BYTES = 2**30  # of an order, which may list where every bucket lies


@dataclass
class InitInfo(WeightTransferInitInfo):
    info: bytes  # a TrainerInfo: it comes through vLLM


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    coming: Round


class StreamedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """States: idle -> started -> loaded -> idle (new version); any
    failure -> idle (old version, or mixed).
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.worker = vllm_config.parallel_config.rank
        share = share_of(vllm_config)
        self.receiver = Receiver(self.worker, device, join_links(device), share)
        self.readers: dict[str, WeightReader] = {
            STREAM: self.receiver,
            CHECKPOINT: SavedWeights(vllm_config.model_config.model, device, share),
            MEMORY: HandedBuckets(device, share),
        }
        self.version: int | None = None  # None: still the weights that the engine was started with
        self.mixed = False
        # the last failure was that no bytes came, through `lost`: the model and this worker are all
        # right
        self.unreachable, self.lost = False, ""
        self.received = Received()
        self.load_s = self.install_s = 0.0
        self.adapters: list[int] = []
        # a round without its location, and what it brought
        self.staged: tuple[Round, dict[str, torch.Tensor]] | None = None
        self.loaded: int | None = None  # the version in an update that is not finished
        self.layers = LayersOf(model)
        self.chosen: Chosen | None = None  # what an open update loads; None: all
        self.is_streamed = False  # what is staged is the receiver's
        self.follows = False  # what is loaded is that
        self.tied = tied_layers(model)
        self.experts = expert_methods(model) if device.type == "cpu" else []
        self.fused = reads_fused(vllm_config)
        # parameters that vLLM fills past its reload, by module, and what came for them
        self.sinks = modules_with_sinks(model)
        self.came: dict[str, torch.Tensor] = {}
        self.together = has_all_experts(model) and not self.fused

    def state(self) -> WorkerState:
        """Asked for by the engine actor after every round."""
        return WorkerState(
            version=self.version,
            mixed=self.mixed,
            unreachable=self.unreachable,
            received=self.received,
            load_s=self.load_s,
            adapters=self.adapters,
            install_s=self.install_s,
            lost=self.lost,
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        info = decode(init_info.info, TrainerInfo)
        self.staged, self.unreachable, self.lost = None, False, ""
        reader = self.readers[info.method]
        try:
            reader.connect(info)
        except Exception as error:
            self.unreachable, self.lost = isinstance(error, PeerLost | PeerRefused), lost(error)
            reader.close()
            raise

    def relay(self, cluster: str | None) -> WorkerOffer:
        """Be there for workers of other engines from now on, where these find this machine."""
        self.receiver.relay = Relay(own_address(cluster))
        share, side = self.receiver.share, LinkSide.of(self.receiver.make_link, str(self.device))
        return WorkerOffer(
            shape=(share.workers, share.kv_heads),
            endpoint=self.receiver.relay.endpoint,
            kind=side.kind,
        )

    def disband(self, generation: int) -> None:
        """Wait no more for those who do not come to a group of `generation` or before."""
        assert self.receiver.relay is not None
        self.receiver.relay.meeting.disband(generation)

    def listen(self, path: str, word: str) -> None:
        """Follow the orders that come over the Unix socket `path` (`rft.rollout.worker_channel`),
        in a thread of their own. `word`: tells the other end that this is a worker.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        orders = PeerConnection(connection, "the engine's actor", CHANNEL_S, limit=CHANNEL_BYTES)
        orders.send_record(Hello(word=word))
        NamedThread(target=self._follow, args=(orders,), name="stage", daemon=True).start()

    def _follow(self, orders: PeerConnection) -> None:
        enter_thread(self.device)
        devices.yield_to_others()  # decoding goes first
        trace.start(f"{Path(os.environ.get('RFT_LOG_FILE', 'engine')).stem}_worker_{self.worker}")
        with suppress(PeerLost):  # the actor has ended, and this process will
            while True:
                order = msgspec.convert(orders.receive_record(patient=True), StageOrder)
                report = StageReport(number=order.number, received=self.stage(order.round))
                orders.send_record(report)
        orders.close()

    def stage(self, coming: Round) -> Received:
        """Receive a round while the engine decodes."""
        self.staged = None
        began, reader = time.monotonic(), self.readers[coming.method]
        try:
            reader.check(coming)
            with trace.span("receive weights", version=coming.version):
                tensors = reader.stage(coming)
        except Exception as error:
            log.warning("version %s was not staged", coming.version, exc_info=True)
            told = str(error) or type(error).__name__
            return Received(error=told, blame=blamed(error), lost=lost(error))
        self.received = self._received(coming, reader.size(tensors), began)
        self.staged = replace(coming, location=None), tensors
        self.is_streamed = reader is self.receiver
        return self.received

    def _received(self, coming: Round, size: int, began: float) -> Received:
        return Received(
            digest=coming.digest,
            bytes=size,
            receive_s=time.monotonic() - began,
            again=self.readers[coming.method].again,
        )

    def start_weight_update(self) -> None:
        """The reload is opened only once all bytes are there, so a
        round that never arrives touches nothing.
        """

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overrides vLLM's, which calls
        `torch.accelerator.synchronize`: on a CPU torch that
        raises.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        coming, began, self.unreachable = update_info.coming, time.monotonic(), False
        try:
            tensors = self._source(coming)
            self.chosen = self._chosen(coming)
            self._load(tensors)
        except BaseException as error:
            self.unreachable = isinstance(error, PeerLost | PeerRefused | TimeoutError)
            self.receiver.close()
            raise
        finally:
            self.staged = None
        self.loaded, self.load_s = coming.version, time.monotonic() - began

    def install_adapter(self, coming: Round, order: AdapterOrder) -> None:
        """Register a staged round beside the adapters of before, whose requests go on.

        The base weights stay.
        """
        try:
            tensors = dict(self._source(coming))
        finally:
            self.staged = None
        began = time.monotonic()
        self.adapters = lora.install(self.model, order, tensors)
        self.install_s, self.load_s = time.monotonic() - began, 0.0
        self.version = coming.version

    def _source(self, coming: Round) -> Iterator[tuple[str, torch.Tensor]]:
        """The round's tensors.

        Whatever can be known to be wrong is raised here, before the model is touched.
        """
        if isinstance(coming.location, AtPath):
            tensors = dict(file_tensors(coming.location.path))
            size = sum(tensor.nbytes for tensor in tensors.values())
            self.received = Received(bytes=size)
            return in_layer_order(tensors, self.together)
        if coming.direct:
            self.receiver.check(coming)
            return self._direct(coming)
        if self.staged is None or self.staged[0] != coming:
            here = None if self.staged is None else self.staged[0]
            raise RuntimeError(f"asked to install {coming}, staged is {here}")
        return in_layer_order(self.staged[1], self.together)

    def _direct(self, coming: Round) -> Iterator[tuple[str, torch.Tensor]]:
        """Straight from the streams."""
        began = time.monotonic()
        yield from self.receiver.tensors(coming.version)
        self.received = self._received(coming, self.receiver.payload, began)

    def _chosen(self, coming: Round) -> Chosen | None:
        """What has to be loaded of a staged round; None: all. So it is of what is not the stream's
        and wherever a load has failed; and for experts on a CPU, which are packed all at once.
        """
        here = self.staged is not None and self.staged[0] == coming
        self.follows = here and self.is_streamed
        if self.mixed or not self.follows:
            self.receiver.changed = None
        changed = self.receiver.changed
        whole = changed is None or self.experts or self.fused
        return None if whole else self.layers.chosen(changed)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        first = next(tensors)  # a trainer that is gone already touches nothing
        tensors, chosen = itertools.chain([first], tensors), self.chosen
        if self.fused:
            tensors = expert_by_expert(self._without_sinks(tensors))
        if chosen is not None:
            tensors = ((name, tensor) for name, tensor in tensors if name in chosen.names)
        elif self._is_partial() and not self.layers.is_known and not self.fused:
            tensors = self.layers.watched(tensors)
        initialize_layerwise_reload(self.model if chosen is None else chosen.layers)
        self.mixed = True
        for method in self.experts:
            method.moe_kernel = None
        try:
            self.model.load_weights(tensors)
            here = {*self.tied, *self.came}
            empty = [name for name in unfilled(self.model) if name not in here]
            if empty:
                raise ValueError(f"the stream has no weights for {empty[:10]}")
            if chosen is not None:
                check_whole(chosen)
        except BaseException:
            abort_reload(self.model)
            self._wait_for_copies()
            raise

    def _without_sinks(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Kept for when the reload is closed: until then vLLM has no memory for them, and its
        loader, which copies to the parameter's data, would write nowhere.
        """
        self.came = {}
        for name, tensor in tensors:
            module = name.removesuffix(".sinks").replace(".self_attn", ".attn")
            if module in self.sinks and name.endswith(".sinks"):
                self.came[module] = tensor.clone()
            else:
                yield name, tensor

    def _is_partial(self) -> bool:
        """Some of the staged tensors are the model's already."""
        changed = self.receiver.changed
        return (
            changed is not None and self.staged is not None and len(changed) < len(self.staged[1])
        )

    def finish_weight_update(self) -> None:
        began = time.monotonic()
        finalize_layerwise_reload(self.model, self.model_config)
        for name, tensor in self.came.items():
            held = self.sinks[name].sinks.data
            first = self.worker * len(held) % len(tensor)  # heads are cut by tensor parallelism
            held.copy_(tensor[first : first + len(held)])
        # got no weights of its own, but keeps a packed copy of the shared ones on CPU
        for layer in self.tied.values():
            if self.chosen is None or shares(layer, self.chosen.layers):
                layer.quant_method.process_weights_after_loading(layer)
        self._wait_for_copies()
        self.version, self.mixed = self.loaded, False
        self.receiver.changed = set() if self.follows else None
        self.load_s += time.monotonic() - began

    def _wait_for_copies(self) -> None:
        """They read staging memory, which the next round overwrites."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        for reader in self.readers.values():
            reader.close()


def reads_fused(vllm_config: Any) -> bool:
    """vLLM's model takes an expert's tensors as its files have them."""
    names = getattr(vllm_config.model_config.hf_config, "architectures", None) or [""]
    return "fused" in SUPPORTED.get(names[0], ())


def share_of(vllm_config: Any) -> Share:
    """What this worker needs of the weights: its tensor-parallel part, where vLLM cuts the model in
    that way alone.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size or parallel.enable_expert_parallel:
        return WHOLE
    if reads_fused(vllm_config):
        return WHOLE
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return Share(worker=parallel.rank, workers=parallel.tensor_parallel_size, kv_heads=heads)


def blamed(error: Exception) -> str:
    """Whom a round that was not staged blames."""
    if isinstance(error, PeerRefused):
        return MISSED
    return UNREACHABLE if isinstance(error, PeerLost | TimeoutError) else BROKEN


def lost(error: Exception) -> str:
    """The engine that should have passed on what did not come."""
    return error.lost if isinstance(error, PeerLost) else ""


def tied_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Layers whose parameter belongs to an earlier layer: an output
    head that shares the input embedding.
    """
    owners: dict[int, str] = {}
    tied: dict[str, Any] = {}
    for name, layer in model.named_modules():
        for parameter in layer.parameters(recurse=False):
            if owners.setdefault(id(parameter), name) != name:
                tied[name] = layer
    return tied


def shares(layer: torch.nn.Module, others: torch.nn.Module) -> bool:
    there = {id(parameter) for parameter in others.parameters()}
    return any(id(parameter) in there for parameter in layer.parameters())


def expert_methods(model: torch.nn.Module) -> list[Any]:
    """What packs the weights of a layer of experts for the CPU: vLLM does so only where it also
    builds the kernel, once, and would copy unpacked weights over packed ones afterwards. Without a
    kernel it builds and packs again.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


def has_all_experts(model: torch.nn.Module) -> bool:
    """Whether every layer of experts has all of them here, once: then one tensor of all is taken
    where that of the first would be.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    return all(
        layer.local_num_experts == layer.global_num_experts == layer.moe_config.num_logical_experts
        for layer in layers
    )


def modules_with_sinks(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if "sinks" in dict(module.named_parameters(recurse=False))
    }


def unfilled(model: torch.nn.Module) -> list[str]:
    """Layers of an open reload that wait for weights and got none.

    A vocabulary's part can be padding alone: that has none.
    """
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
    """Close a half-done layer-wise reload, which vLLM itself cannot: put the old storage back into
    open layers.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
