"""What `cluster.colocate` fills in and refuses."""

import pytest
from omegaconf import OmegaConf

from rft.config import Config, ConfigError, to_config
from rft.ground.errors import refuse_all
from rft.preflight.fill import fill_colocate
from rft.preflight.rules import Refusals
from rft.preflight.rules_run import DEVICES

# before our checks
FILLED = ("model.model_path=/m", "synchronizer.max_staleness=0", "synchronizer.sync_method=nccl")


def config_of(*overrides: str) -> Config:
    base = OmegaConf.from_dotlist(["name=shared", *FILLED, *overrides])
    config = to_config(base)  # type: ignore[arg-type]
    fill_colocate(config)
    return config


def check_colocate(config: Config) -> None:
    refusals = Refusals()
    refusals.ask(DEVICES, config)
    refuse_all(refusals.sentences())


def shared(*overrides: str) -> Config:
    return config_of("cluster.colocate=true", *overrides)


def test_the_engine_gets_half_of_the_card_and_no_memory_for_a_second_model() -> None:
    config = shared()
    assert config.explorer.rollout_model.gpu_memory_utilization == 0.5
    assert config.synchronizer.receive == "direct"
    alone = config_of()
    assert (
        alone.explorer.rollout_model.gpu_memory_utilization == 0.9
        and alone.synchronizer.receive == "staged"
    )
    check_colocate(config)
    check_colocate(alone)


REFUSED = {
    "mode=explore": "set mode=both",
    "synchronizer.sync_style=fully_async": "set synchronizer.sync_style=fixed",
    "synchronizer.sync_interval=2": "set synchronizer.sync_interval=1",
    "synchronizer.max_staleness=1": (
        "no rollout may be ahead; set synchronizer.max_staleness=0, or colocate=false"
    ),
    "synchronizer.sync_method=checkpoint": "set synchronizer.sync_method=nccl",
    "synchronizer.kv=keep": "set synchronizer.kv=recompute",
    "cluster.ray_address=10.0.0.1:6379": "leave that out, or colocate=false",
    "explorer.rollout_model.gpu_memory_utilization=0.9": (
        "stay on the card; set it to at most 0.6, or leave it out for 0.5"
    ),
    "explorer.rollout_model.gpu_memory_utilization=1.5": "at most 1",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_with_key_and_fix(overrides: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_colocate(shared(*overrides.split()))
    assert REFUSED[overrides] in str(refused.value) and "\n" not in str(refused.value)
    assert overrides.split()[-1] in str(refused.value)


def test_on_cpus_shares_and_numbers_are_free() -> None:
    check_colocate(
        shared(
            "device=cpu", "explorer.rollout_model.gpu_memory_utilization=0.9", "trainer.num_ranks=2"
        )
    )
