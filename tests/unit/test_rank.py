"""A trainer rank before it trains: where the policy learns, and in which environment."""

import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rft.config import Config
from rft.data.updates import RowPacking
from rft.ground import device as devices
from rft.run.backends import TrainBackend, backend_of


@pytest.mark.parametrize(("cards", "index"), [(1, 0), (2, 1), (8, 3)])
def test_a_rank_that_sees_only_its_own_cards_takes_one_of_them(
    cards: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local rank 3, where Slurm shows every task so many cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert devices.choose("cuda", 3).index == index


@pytest.mark.parametrize("kind", ["megatron", "tinker"])
def test_every_type_of_trainer_has_a_backend(kind: str) -> None:
    config = Config(name="a")
    config.trainer.trainer_type = kind
    backend = backend_of(config, devices.choose("cpu"))
    assert type(backend).__name__ == f"{kind.title()}Backend"
    for part in ("open_mesh", "build_models", "build_checkpoints", "build_publisher", "warm_up"):
        assert getattr(type(backend), part) is not getattr(TrainBackend, part)


@pytest.mark.parametrize(("given", "begins"), [(None, "policy"), ("other", "other")])
def test_a_critic_begins_as_its_own_model_or_as_the_policy(
    given: str | None, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row D2. Megatron's parts only say what they were asked for."""

    def part(module: str, name: str) -> None:
        made = types.SimpleNamespace(**{name: lambda *asked: (name, *asked)})
        monkeypatch.setitem(sys.modules, module, made)

    part("rft.megatron.policy", "Policy")
    part("rft.megatron.learner", "Critic")
    part("rft.megatron.network", "Reference")
    part("rft.megatron.logprobs", "check_label_logprobs")
    monkeypatch.setattr("rft.trainer.models.Models", lambda *models: models)
    config = Config(name="a")
    config.model.model_path, config.model.critic_model_path = "policy", given
    config.algorithm.advantage_fn, config.algorithm.kl_loss_fn = "ppo", "none"
    device = devices.choose("cpu")
    mesh: Any = types.SimpleNamespace(tp_group=None, device=device)
    found: Any = backend_of(config, device).build_models(mesh)
    policy, reference, critic, *_ = found
    assert policy[1] is config.model and reference is None
    assert critic[:2] == ("Critic", begins)


@pytest.mark.parametrize(
    ("kind", "colocate", "transformer", "lengths"),
    [
        ("cuda", False, {}, [[40, 40, 40]]),
        ("cpu", False, {}, None),  # its cores are busy with the start of the engines
        ("cuda", True, {}, None),  # engines have their memory on the same cards
        ("cuda", False, {"fp8": "hybrid"}, None),
    ],
)
def test_models_warm_up_where_that_costs_and_changes_nothing(
    kind: str, colocate: bool, transformer: dict[str, Any], lengths: list[list[int]] | None
) -> None:
    """A step of five rows is of three on one of two ranks."""
    config, told = Config(name="a"), []
    config.model.max_model_len, config.buffer.train_batch_size = 40, 5
    config.cluster.colocate = colocate
    config.trainer.megatron.override_transformer_config = transformer
    policy = types.SimpleNamespace(dims=types.SimpleNamespace(vocab=9))
    models: Any = types.SimpleNamespace(policy=policy, warm_up=told.append)
    device: Any = types.SimpleNamespace(kind=kind)
    backend_of(config, device).warm_up(models, RowPacking(2, 1000, 8))
    found = [[np.diff(one.cu_seqlens).tolist() for one in part] for part in told]
    assert found == ([] if lengths is None else [lengths])


SEGMENTS, QUEUE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("kind", "tp", "cp", "capability", "given", "wanted"),
    [
        ("cpu", 2, 2, None, {}, {}),
        ("cuda", 1, 1, 9, {}, SEGMENTS),
        ("cuda", 2, 1, 9, {}, SEGMENTS | {QUEUE: "1"}),
        ("cuda", 1, 2, 8, {}, SEGMENTS | {QUEUE: "1"}),
        ("cuda", 2, 2, 10, {}, SEGMENTS),
        ("cuda", 2, 2, None, {}, SEGMENTS),
        ("cuda", 2, 1, 9, {QUEUE: "8"}, SEGMENTS),
        ("cuda", 1, 1, 9, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ("cuda", 1, 1, 9, {"PYTORCH_ALLOC_CONF": ""}, {}),
    ],
)
def test_what_a_rank_needs_in_its_environment(
    kind: str, tp: int, cp: int, capability: int | None, given: dict[str, str], wanted: object
) -> None:
    """Megatron's own rule for the queue, and the user's word before both."""
    assert devices.rank_environment(kind, tp, cp, capability, given) == wanted


@pytest.mark.parametrize(
    ("device", "tokens", "columns"),
    [
        ("cpu", 1024, 4096),
        ("cpu", 32_768, 512),
        ("cuda:0", 1024, 16_384),
        ("cuda:0", 16_384, 16_384),
        ("cuda:0", 32_768, 8192),
        ("cuda:0", 131_072, 2048),
        ("cuda:0", 0, 16_384),
    ],
)
def test_tiles_of_logits_fit_a_cache_or_a_gigabyte(device: str, tokens: int, columns: int) -> None:
    assert devices.logit_columns(torch.device(device), tokens) == columns
    assert "cpu" in device or 4 * tokens * columns <= 2**30


def test_memory_that_is_shared_is_no_part_of_an_expandable_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own settings, and its own signatures where there is no GPU."""
    settings = torch._C._accelerator_getAllocatorSettings
    pools: list[object] = []

    @contextmanager
    def use(pool: object, device: object = None) -> Iterator[None]:
        pools.append((pool, settings()))
        yield

    assert inspect.signature(use).parameters.keys() == (
        inspect.signature(torch.cuda.use_mem_pool).parameters.keys()
    )
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    before = settings()
    card = devices.SharedCard(torch.device("cpu"))
    try:
        for expand in (True, False):
            given = f"max_split_size_mb:64,expandable_segments:{expand}"
            torch._C._accelerator_setAllocatorSettings(given)
            assert card.room(64).shape == (64,)
            assert settings() == given
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
    ordinary = "max_split_size_mb:64,expandable_segments:False"
    assert [told for _, told in pools] == [ordinary] * 2
    assert pools[0] == pools[1]
