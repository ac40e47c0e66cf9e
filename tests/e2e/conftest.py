"""One Ray and one vLLM engine for all end-to-end tests of a session; both start on first use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CONTEXT = 1024  # room for generations that are still running when new weights arrive


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two toy Qwen3 models of one shape with different random weights."""
    from rft.tools.toy import write_model

    root = tmp_path_factory.mktemp("models")
    first, second = (write_model(root / str(seed), seed=seed, context=CONTEXT) for seed in (1, 2))
    return first, second


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    import os

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def engine(ray_session: None, model_dirs: tuple[Path, Path]) -> Iterator[Any]:
    """A started RolloutEngine actor, one thread, float32, labelled
    version 0; ended with its processes.
    """
    import ray

    from rft.config import ModelConfig, RolloutModelConfig
    from rft.rollout.engine import RolloutEngine

    model = ModelConfig(model_path=str(model_dirs[0]))
    rollout = RolloutModelConfig(
        dtype="fp32", kv_cache_gb=0.25, enforce_eager=True, max_num_seqs=256
    )
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    handle = actor.remote("engine_0", model, rollout, 1, 0, "cpu", CONTEXT)
    ray.get(handle.start.remote(), timeout=240)
    yield handle
    ray.get(handle.shutdown.remote(), timeout=60)


@pytest.fixture
def first_weights(engine: Any, model_dirs: tuple[Path, Path]) -> Any:
    """The engine serves the first model as version 0, whatever an earlier test left."""
    import ray

    ray.get(engine.load_weights_from.remote(str(model_dirs[0]), 0), timeout=60)
    return engine
