"""What a commit gives to vLLM's own loaders: real models of tensor-parallel workers, built in this
process, that take a round whose tensors were complete in any order; and what a stage that was cut
off leaves alone.
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft.ground.experience import encode
from rft.ground.protocols import Block
from rft.ground.rounds import STREAM, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.buckets import Staging
from rft.sync.loading import PartTensor
from rft.sync.plan import COLUMNS, Share, part_of
from rft.sync.receiver import Receiver
from rft.tools.toy import write_model
from tests.unit.test_delta_stream import WAIT_S, World

SHAPE: dict[str, Any] = {
    "hidden": 64,
    "layers": 11,  # two digits: the order of numbers, not of letters
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 128,
    "tied": False,
    "experts": 12,
}
RANKS = 2  # of the trainer
FAMILIES = {
    "llama": {"vocab": 128},
    "qwen2": {"vocab": 91},  # which vLLM pads; with biases
    "qwen3_moe": {"vocab": 128},
}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """vLLM's tensor-parallel group, of which the tests say how large it is."""
    from torch.distributed import HashStore, init_process_group
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield parallel_state.get_tp_group()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def engine_of(
    group: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int, int], Any]:
    """rft's part of a vLLM worker, with a model of random weights: `worker` of `workers`."""

    def make(family: str, worker: int, workers: int) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import (
            initialize_model,
            process_weights_after_loading,
        )

        from rft.sync.install import StreamedWeights

        path = write_model(tmp_path_factory.mktemp(family), family, **SHAPE, **FAMILIES[family])
        config = EngineArgs(
            model=str(path),
            tensor_parallel_size=workers,
            distributed_executor_backend="mp",
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
        ).create_engine_config()
        config.parallel_config.rank = worker
        monkeypatch.setattr(group, "world_size", workers)
        monkeypatch.setattr(group, "rank_in_group", worker)
        with set_current_vllm_config(config), torch.device("cpu"):
            model = initialize_model(config)
            for parameter in model.parameters():
                parameter.data.normal_()
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        made = StreamedWeights(None, config, torch.device("cpu"), model)
        made.path, made.vllm_config = path, config
        return made

    return make


def staged(tensors: dict[str, torch.Tensor], share: Share) -> dict[str, torch.Tensor]:
    """As a round leaves them: each rank holds an equal part, buckets came in any order."""
    by_rank: list[list[Block]] = [[] for _ in range(RANKS)]
    for name, tensor in tensors.items():
        dim = int(name.split(".")[-2] in COLUMNS)
        size = tensor.shape[dim]
        ends = [size * rank // RANKS for rank in range(RANKS + 1)]
        for rank in range(RANKS):
            block = (name, "float32", tuple(tensor.shape), dim, ends[rank], ends[rank + 1])
            by_rank[rank].append(Block(*block))
    plan = plans.build(by_rank, 4096)
    streams = [part_of(plan, index, share).stream for index in range(RANKS)]
    staging = Staging(streams, torch.device("cpu"), kept=True, timeout=1.0)
    buckets = [(index, n) for index, one in enumerate(streams) for n in range(len(one.buckets))]
    random.Random(1).shuffle(buckets)
    found: dict[str, torch.Tensor] = {}
    for index, number in buckets:
        for piece in streams[index].buckets[number].pieces:
            block = streams[index].blocks[piece.block]
            values = tensors[block.name].narrow(block.dim, block.start, block.stop - block.start)
            data = values[piece.start : piece.stop].contiguous().view(-1).view(torch.uint8)
            staging.put(block, piece.start, piece.stop, data)
        found.update(staging.arrived(index, number))
    staging.check_complete()
    return found


def commit(engine: Any, tensors: dict[str, torch.Tensor]) -> list[tuple[str, dict[str, int]]]:
    """What the model was given, and which of its modules were open as it asked for that, with how
    many tensors.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from rft.sync.install import UpdateInfo

    load, seen = type(engine.model).load_weights, []

    def spy(weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                seen.append((name, opened()))
                yield name, tensor

        return load(engine.model, watched())

    def opened() -> dict[str, int]:
        infos = [(name, get_layerwise_info(one)) for name, one in engine.model.named_modules()]
        return {name: len(info.loaded_weights) for name, info in infos if info.loaded_weights}

    engine.model.load_weights = spy
    coming = Round(version=len(engine.adapters) + 1)
    engine.staged = coming, tensors
    with set_current_vllm_config(engine.vllm_config):
        engine.receive_weights(UpdateInfo(coming))
        engine.finish_weight_update()
    del engine.model.load_weights
    return seen


class LiveBytes(TorchDispatchMode):
    """The most memory that tensors made under it took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[StorageWeakRef, int]:
            found = [one.untyped_storage() for one in tree_leaves(tree) if is_plain(one)]
            return {StorageWeakRef(one): one.nbytes() for one in found}

        given = storages((args, kwargs))
        made = func(*args, **(kwargs or {}))
        self.alive |= {ref: size for ref, size in storages(made).items() if ref not in given}
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return made


def largest_module(model: torch.nn.Module) -> int:
    """Bytes of its weights as they are loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    modules = (get_layerwise_info(module).restore_metadata[0] for module in model.modules())
    return max(sum(one.nbytes for one in parameters.values()) for parameters in modules)


def is_plain(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and not isinstance(one, PartTensor) and not one.is_meta


def computed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that a worker's model holds, also what vLLM has packed for the CPU."""
    from vllm.model_executor.layers.linear import LinearBase

    found = {name: value.clone() for name, value in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            x = torch.linspace(-1, 1, getattr(layer, "input_size_per_partition", layer.input_size))
            found[f"{name}()"] = layer.quant_method.apply(layer, x[None])
    return found


@pytest.mark.parametrize(
    ("family", "worker", "workers"),
    [
        ("qwen2", 2, 4),
        ("qwen3_moe", 1, 2),
        *(pytest.param(family, 0, 1, marks=pytest.mark.verify) for family in FAMILIES),
    ],
)
def test_modules_are_filled_one_after_another_from_the_part_alone(
    engine_of: Callable[[str, int, int], Any], family: str, worker: int, workers: int
) -> None:
    engine = engine_of(family, worker, workers)
    tensors = load_file(engine.path / "model.safetensors")
    # vLLM itself, of whole tensors, each by its own name
    commit(engine, dict(tensors))
    wanted = computed(engine.model)
    for parameter in engine.model.parameters():
        parameter.data.fill_(torch.nan)
    found = staged(tensors, engine.receiver.share)
    assert list(found) != sorted(found) and (workers == 1) == (
        not any(isinstance(one, PartTensor) and one.starts[0] for one in found.values())
    )
    with LiveBytes() as live:
        seen = commit(engine, found)
    assert live.peak <= 2 * largest_module(engine.model), "vLLM's own, and what it packs of it"
    for name, value in computed(engine.model).items():
        assert torch.equal(value, wanted[name]), name
    names = [name for name, _ in seen]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and len(set(layers)) == SHAPE["layers"]
    assert "embed" in names[0] and names[-1] == "lm_head.weight"
    if family == "qwen2":  # of the vocabulary vLLM waits for the padding too, until the end
        for _, opened in seen[1:]:
            del opened["model.embed_tokens"]
    for (name, before), (_, after) in pairwise(seen):
        assert len(after) <= 1, (name, after)
        assert all(after.get(one, 0) in (0, number + 1) for one, number in before.items()), name
    if family == "qwen3_moe":
        assert len([name for name in names if ".experts." in name]) == 3 * SHAPE["layers"]


class LateReceiver(Receiver):
    """A stage that fails goes on only when somebody has connected anew."""

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"))
        self.receives, self.connected = threading.Event(), threading.Event()

    def stage(self, coming: Round) -> dict[str, torch.Tensor]:
        try:
            return super().stage(coming)
        except Exception:
            assert self.connected.wait(WAIT_S)
            raise

    def _receive(self, *arguments: Any) -> None:
        self.receives.set()
        super()._receive(*arguments)


def test_a_stage_that_was_cut_off_closes_nothing_that_was_connected_since() -> None:
    """One of two workers: the other one has failed, and the engine is connected anew at once."""
    from rft.sync.install import InitInfo, StreamedWeights

    world, receiver = World(full_interval=None), LateReceiver()
    weights: Any = object.__new__(StreamedWeights)  # but for the model
    weights.receiver, weights.readers = receiver, {STREAM: receiver}

    class Connecting:
        def connect(self, info: TrainerInfo) -> None:
            weights.init_transfer_engine(InitInfo(info=encode(info)))

    trainer: Any = Connecting()
    world.join(trainer)
    world.senders[0].open(1)  # the other rank is late
    coming = Round(version=1, epoch=world.epoch, digest=world.plan.digest)
    with ThreadPoolExecutor(1) as orders:
        old = orders.submit(weights.stage, coming)
        assert receiver.receives.wait(WAIT_S)
        world.join(trainer)
        receiver.connected.set()
        world.senders[1].open(1)
        new = orders.submit(weights.stage, coming)
        assert old.result().error and not new.result().error
    assert weights.staged[1].keys() == world.whole.keys()
    world.close_version()
    receiver.close()
    world.close()
