"""A tensor-parallel engine takes its part of the weights only: against vLLM's own loaders, and
through a real engine of two.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from miniature import Trainer, answer, ask, assert_sampled_from
from safetensors.torch import load_file
from saving import SavingTrainer

from rft.config import ModelConfig, RolloutModelConfig
from rft.ground.protocols import ActorHandle
from rft.rollout.engine import RolloutEngine
from rft.sync.loading import PartTensor
from rft.sync.plan import Share, needed
from rft.sync.synchronizer import Synchronizer

HIDDEN, HEADS, HEAD, FFN, VOCABULARY = 32, 8, 4, 64, 91
LAYER = "model.layers.0"


def given(name: str, shape: tuple[int, ...], share: Share) -> PartTensor:
    """The whole tensor, of which only what is said to be needed is there."""
    dim, start, stop = needed(f"{LAYER}.{name}", shape, share)
    size = [*shape[:dim], stop - start, *shape[dim + 1 :]]
    part = torch.arange(math.prod(size), dtype=torch.float32).view(size)
    return PartTensor(name, shape, dim, [start], [part])


def assert_takes_exactly(parameter: torch.Tensor, *sources: PartTensor) -> None:
    """No element that was not there, and, but for padding, all that were."""
    assert not parameter.isnan().any()
    there = [piece for source in sources for piece in source.pieces]
    for piece in there:
        assert set(piece.flatten().tolist()) <= set(parameter.flatten().tolist())
    assert parameter.numel() <= sum(piece.numel() for piece in there) + parameter.eq(0).sum()


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (1, 2), (0, 4), (3, 4), (5, 8)])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_vllms_loaders_read_what_is_needed_and_no_more(
    worker: int, workers: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    share = Share(worker=worker, workers=workers, kv_heads=kv_heads)
    # as if this process were that worker
    for module in (linear, vocab_parallel_embedding, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: worker)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: workers)
    kinds: dict[str, Any] = {"params_dtype": torch.float32}
    with set_current_vllm_config(VllmConfig()):
        qkv = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, kv_heads, bias=True, **kinds)
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, [FFN] * 2, bias=False, **kinds)
        row = linear.RowParallelLinear(FFN, HIDDEN, bias=False, **kinds)
        embedding = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, HIDDEN, **kinds)
    for last, width in (("weight", (HIDDEN,)), ("bias", ())):
        heads = {"q": HEADS, "k": kv_heads, "v": kv_heads}
        loaded = {
            n: given(f"self_attn.{n}_proj.{last}", (rows * HEAD, *width), share)
            for n, rows in heads.items()
        }
        target = getattr(qkv, last)
        for name, tensor in loaded.items():
            target.weight_loader(target, tensor, name)
        assert_takes_exactly(target.data, *loaded.values())
    parts = [given(f"mlp.{name}_proj.weight", (FFN, HIDDEN), share) for name in ("gate", "up")]
    for number, tensor in enumerate(parts):
        gate_up.weight.weight_loader(gate_up.weight, tensor, number)
    assert_takes_exactly(gate_up.weight.data, *parts)
    down = given("mlp.down_proj.weight", (HIDDEN, FFN), share)
    row.weight.weight_loader(row.weight, down)
    assert_takes_exactly(row.weight.data, down)
    table = given("embed_tokens.weight", (VOCABULARY, HIDDEN), share)
    embedding.weight.weight_loader(embedding.weight, table)
    assert not embedding.weight.isnan().any()


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (1, 2), (3, 4)])
def test_vllms_expert_loader_reads_what_is_needed_and_no_more(worker: int, workers: int) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    share = Share(worker=worker, workers=workers, kv_heads=2)
    cut = SimpleNamespace(tp_size=workers)
    layer: Any = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True, moe_parallel_config=cut),
        _get_hidden_dim=RoutedExperts._get_hidden_dim,
        _narrow_expert_data_for_padding=RoutedExperts._narrow_expert_data_for_padding,
    )
    w13 = torch.full((2 * FFN // workers, HIDDEN), torch.nan)
    w2 = torch.full((HIDDEN, FFN // workers), torch.nan)
    gate, up = (
        given(f"mlp.experts.3.{name}_proj.weight", (FFN, HIDDEN), share) for name in ("gate", "up")
    )
    down = given("mlp.experts.3.down_proj.weight", (HIDDEN, FFN), share)
    for shard, tensor in (("w1", gate), ("w3", up)):
        RoutedExperts._load_w13(layer, w13, 0, shard, tensor, worker)
    RoutedExperts._load_w2(layer, w2, 1, down, worker)
    assert_takes_exactly(w13, gate, up)
    assert_takes_exactly(w2, down)


@pytest.fixture(scope="module")
def engine_of_two(ray_session: None, model_dirs: tuple[Path, Path]) -> Iterator[Any]:
    """An engine whose two workers hold half of the model each, with the first weights."""
    rollout = RolloutModelConfig(
        dtype="fp32",
        kv_cache_gb=0.25,
        tensor_parallel_size=2,
        enforce_eager=True,
        max_num_seqs=256,
    )
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    handle = actor.remote(
        "engine_0", ModelConfig(model_path=str(model_dirs[0])), rollout, 1, 0, "cpu", 256
    )
    ray.get(handle.start.remote(), timeout=300)
    yield handle
    ray.get(handle.shutdown.remote(), timeout=60)


@pytest.mark.verify  # an engine of its own; what its workers take is above
@pytest.mark.timeout(600)
@pytest.mark.parametrize("direct", [False, True])
def test_an_engine_of_two_takes_the_model_once(
    engine_of_two: Any, model_dirs: tuple[Path, Path], direct: bool
) -> None:
    class Buffer:  # local: travels by value, Ray's workers cannot import test modules
        async def published(self, version: int, run_epoch: int) -> None:
            self.version = version

    ray.get(engine_of_two.load_weights_from.remote(str(model_dirs[0]), 0), timeout=60)
    assert_sampled_from(model_dirs[0], answer(ask(engine_of_two, max_tokens=20, seed=1))[0], 1.0)
    leader = ray.remote(Synchronizer).options(max_concurrency=100, num_cpus=0.01)
    synchronizer = leader.remote(ActorHandle(ray.remote(Buffer).remote()), 60.0, direct=direct)
    ray.get(synchronizer.join.remote("engine_0", ActorHandle(engine_of_two)))
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(1)
    numbers = trainer.wait()
    assert_serves(engine_of_two, model_dirs[1], 1)
    taken = taken_by_two(model_dirs[1])
    assert numbers["sync/bytes"] == taken
    assert sum(one.origin.sender.sent for one in trainer.publishers) == taken  # type: ignore[union-attr]


def assert_serves(engine: Any, path: Path, version: int) -> None:
    made = answer(ask(engine, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {version}
    assert_sampled_from(path, made, 1.0)


def taken_by_two(path: Path) -> int:
    """Bytes: all once, and what each of two workers needs twice."""
    tensors = load_file(path / "model.safetensors")
    return sum(tensor.nbytes * (1 + ("norm" in name)) for name, tensor in tensors.items())


@pytest.mark.verify  # what its workers take of files is in tests/unit
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["checkpoint", "memory"])
def test_an_engine_of_two_takes_what_is_stored_once(
    engine_of_two: Any, model_dirs: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    ray.get(engine_of_two.load_weights_from.remote(str(model_dirs[0]), 0), timeout=60)
    leader = ray.remote(Synchronizer).options(max_concurrency=100, num_cpus=0.01, name=method)
    synchronizer = leader.remote(None, 60.0)
    ray.get(synchronizer.join.remote("engine_0", ActorHandle(engine_of_two)))
    if method == "checkpoint":
        with SavingTrainer(tmp_path / "root", model_dirs[1], synchronizer, epoch=1) as trainer:
            assert trainer.publish(1)["sync/bytes"] == taken_by_two(model_dirs[1])
    else:
        context = ray.get_runtime_context()
        where = context.gcs_address, context.namespace, method
        script = Path(__file__).with_name("depositing.py")
        command = [sys.executable, str(script), *where, str(model_dirs[1]), "1"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert made.returncode == 0, made.stderr
        assert f"'sync/bytes': {taken_by_two(model_dirs[1])}.0" in made.stdout
    assert_serves(engine_of_two, model_dirs[1], 1)
    ray.get(synchronizer.leave.remote("engine_0", "test"))
