"""A trainer rank before it trains: where the policy learns."""

import pytest

from rft.config import Config
from rft.ground import device as devices
from rft.run.backends import TrainBackend, backend_of


@pytest.mark.parametrize("kind", ["megatron", "tinker"])
def test_every_type_of_trainer_has_a_backend(kind: str) -> None:
    config = Config(name="a")
    config.trainer.trainer_type = kind
    backend = backend_of(config, devices.choose("cpu"))
    for part in ("open_mesh", "build_models", "build_checkpoints", "build_publisher"):
        assert getattr(type(backend), part) is not getattr(TrainBackend, part)
