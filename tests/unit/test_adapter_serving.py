"""Which adapter a request gets, how long that one stays, and what the workers are told to drop."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rft.config import ConfigError, LoraConfig, ModelConfig, SynchronizerConfig
from rft.config.layout import lora_of, sync_of, versions_kept
from rft.ground.names import Dims, read_hf_config
from rft.ground.rounds import AdapterOrder, Installed
from rft.rollout.adapter_serving import AdapterServing
from rft.tools.toy import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: write_model(root / family, family=family, layers=2)
        for family in ("qwen3", "qwen3_moe")
    }


class Workers:
    """Follows orders as a worker does: refuses a number that it
    has, and one more than it has room for.
    """

    def __init__(self, room: int):
        self.room = room
        self.held: list[int] = []
        self.broken = False

    async def __call__(self, order: AdapterOrder) -> Installed:
        self.held = [number for number in self.held if number not in order.drop]
        assert order.number not in self.held and len(self.held) < self.room
        self.held.append(order.number)
        if self.broken:
            raise RuntimeError("a worker died")
        return Installed(version=order.number, adapters=list(self.held))


@pytest.fixture
def workers() -> Workers:
    return Workers(2)


@pytest.fixture
def serving(models: dict[str, Path]) -> AdapterServing:
    model = ModelConfig(model_path=str(models["qwen3"]), lora_configs=[LoraConfig(lora_rank=12)])
    return AdapterServing("engine_0", model, 2)


def test_vllm_is_asked_for_room_in_the_trained_layers_only(serving: AdapterServing) -> None:
    assert serving.arguments() == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    }
    assert len(serving.tensors) == 2 * 2 * 7


def test_a_request_keeps_its_version_and_its_adapter_is_dropped_after_it(
    serving: AdapterServing, workers: Workers
) -> None:
    async def scenario() -> None:
        with serving.use() as base:
            assert base is None
        await serving.install(1, workers, 1)
        with serving.use() as first:
            await serving.install(2, workers, 1)
            assert workers.held == [1, 2]
            with serving.use() as second:
                assert first is not None and second is not None
                assert (first.version, second.version) == (1, 2)
                assert [(s.version, s.start, s.end) for s in first.spans(7)] == [
                    (1, 0, 7)
                ] and first.spans(0) == []
        await serving.install(3, workers, 1)
        assert workers.held == [2, 3]  # until 3 was there, 2 was for new requests

    asyncio.run(scenario())


def test_a_version_that_comes_again_gets_another_number(
    serving: AdapterServing, workers: Workers
) -> None:
    async def scenario() -> None:
        await serving.install(5, workers, 1)
        before = serving.current
        await serving.install(5, workers, 1)
        assert before is not None and serving.current is not None
        assert before.version == serving.current.version and before.number != serving.current.number
        assert before.request().lora_name != serving.current.request().lora_name

    asyncio.run(scenario())


def test_an_installation_waits_for_requests_of_the_oldest_version(
    serving: AdapterServing, workers: Workers
) -> None:
    async def scenario() -> None:
        await serving.install(1, workers, 1)
        with serving.use():
            await serving.install(2, workers, 1)
            with (
                serving.use(),
                pytest.raises(
                    TimeoutError, match="no place for version 3 .* 1 of version 1, 1 of ver"
                ),
            ):
                await serving.install(3, workers, 0.01)
            waiting = asyncio.create_task(serving.install(3, workers, 60))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        assert workers.held == [2, 3]
        assert serving.current is not None and serving.current.version == 3

    asyncio.run(scenario())


def test_a_failed_installation_leaves_the_version_before_and_makes_room(
    serving: AdapterServing, workers: Workers
) -> None:
    async def scenario() -> None:
        await serving.install(1, workers, 1)
        with serving.use():
            workers.broken = True
            for _ in range(3):
                with pytest.raises(RuntimeError, match="a worker died"):
                    await serving.install(2, workers, 1)
            with serving.use() as served:
                assert served is not None and served.version == 1
            workers.broken = False
            await serving.install(2, workers, 1)
        assert serving.current is not None and serving.current.version == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("family", "rank", "device", "asked", "found"),
    [
        ("qwen3", 8, "cpu", None, "adapter"),
        ("qwen3", 8, "cpu", "merged", "merged"),
        ("qwen3", 513, "cuda", None, "merged"),
        ("qwen3_moe", 8, "cpu", None, "merged"),
        ("qwen3_moe", 8, "cuda", "adapter", "adapter"),
    ],
)
def test_adapters_are_synchronized_where_vllm_can_add_them(
    models: dict[str, Path], family: str, rank: int, device: str, asked: str | None, found: str
) -> None:
    dims = Dims.of(read_hf_config(models[family]))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = lora_of([LoraConfig(lora_rank=rank, target_modules=targets)], dims)
    assert sync_of(asked, lora, dims, device) == found
    synchronizer = SynchronizerConfig(max_staleness=1, lora_sync=found)
    assert versions_kept(synchronizer) == (3 if found == "adapter" else 0)


def test_what_vllm_cannot_add_is_refused(models: dict[str, Path]) -> None:
    dims = Dims.of(read_hf_config(models["qwen3_moe"]))
    lora = lora_of([LoraConfig(lora_rank=600, target_modules=["all-linear"])], dims)
    with pytest.raises(
        ConfigError,
        match="up to rank 512, model.lora_configs says 600; on a CPU .*lora_sync=merged",
    ):
        sync_of("adapter", lora, dims, "cpu")
    for feature, what in (("mla", "latent attention"), ("biases", "projections of gpt-oss")):
        with pytest.raises(ConfigError, match=f"{what} cannot have adapters"):
            lora_of([LoraConfig()], replace(dims, more=frozenset({feature})))
    every = ["gate_proj", "up_proj", "down_proj"]
    experts = lora_of([LoraConfig(target_modules=every)], dims)
    assert sync_of(None, experts, dims, "cuda") == "merged"
    with pytest.raises(ConfigError, match="add adapters to attention alone.*lora_sync=merged"):
        sync_of("adapter", experts, dims, "cuda")
    with pytest.raises(ConfigError, match="lora_sync=merged: the policy has no adapter"):
        sync_of("merged", None, dims, "cpu")
