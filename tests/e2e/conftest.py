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
def ray_session(way: str) -> Iterator[None]:
    import os

    import ray
    from fault_world import HERE

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        # for what stands in: whoever asks an engine looks up how that is asked
        runtime_env={"env_vars": {"PYTHONPATH": HERE}} if way == "nccl" else None,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def way(pytestconfig: pytest.Config) -> Iterator[str]:
    """How trainer ranks of this process send, and engines take."""
    from mortal import link_of_rank

    from rft.sync import origins

    chosen = pytestconfig.getoption("--way")
    with pytest.MonkeyPatch.context() as packed:
        if chosen == "nccl":
            packed.setattr(origins, "host_links", lambda *_: link_of_rank)
        yield chosen


@pytest.fixture
def over_sockets() -> None:
    """For tests that meddle with what is on them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where buckets do not travel over sockets, there is nothing there to meddle with."""
    if config.getoption("--way") != "sockets":
        apart = [item for item in items if "over_sockets" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]


@pytest.fixture(scope="session")
def engine(ray_session: None, model_dirs: tuple[Path, Path], way: str) -> Iterator[Any]:
    """A started RolloutEngine actor, one thread, float32, labelled
    version 0; ended with its processes.
    """
    import ray
    from mortal import MortalEngine

    from rft.config import ModelConfig, RolloutModelConfig
    from rft.rollout.engine import RolloutEngine

    model = ModelConfig(model_path=str(model_dirs[0]))
    rollout = RolloutModelConfig(
        dtype="fp32", kv_cache_gb=0.25, enforce_eager=True, max_num_seqs=256
    )
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    if way == "nccl":
        stand_in, variables = ray.remote(MortalEngine), {"RFT_FAULT_WAY": way}
        actor = stand_in.options(max_concurrency=1000, runtime_env={"env_vars": variables})
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
