"""A trainer rank before it trains: where the policy learns."""

import pytest

from rft.config import Config
from rft.run.rank import backend_of


@pytest.mark.parametrize("kind", ["megatron", "tinker"])
def test_every_type_of_trainer_has_a_backend(kind: str) -> None:
    config = Config(name="a")
    config.trainer.trainer_type = kind
    backend = backend_of(config)
    for part in ("open_mesh", "build_models", "build_checkpoints", "build_publisher"):
        assert callable(getattr(backend, part))
