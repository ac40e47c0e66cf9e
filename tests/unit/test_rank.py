"""A trainer rank before it trains: where the policy learns."""

import pytest
import torch

from rft.config import Config
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
    for part in ("open_mesh", "build_models", "build_checkpoints", "build_publisher"):
        assert getattr(type(backend), part) is not getattr(TrainBackend, part)
