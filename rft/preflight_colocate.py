"""What a config asks of devices that trainer and engines share (`cluster.colocate`). Called by `preflight`.

In: a config whose other sections may not be checked yet (`fill_colocate`), then a filled one (`check_colocate`). Out: the engine's
share of a card's memory is set, as is the way in which weights are received; or a ConfigError for the first thing that cannot work.
"""

from rft.config import Config, ConfigError, get

ALONE_SHARE, SHARED = 0.9, 0.5  # of a card's memory, for an engine
MOST_SHARED = 0.6
ONLY = {  # what taking turns needs of other keys, and why
    "mode": ("both", "only a run with trainer and engines has something to share"),
    "synchronizer.sync_style": ("fixed", "trainer and engines take turns, step by step"),
    "synchronizer.sync_interval": (1, "the engines are woken by new weights"),
    "synchronizer.max_staleness": (0, "the engines sleep while the trainer works, so no rollout may be ahead"),
    "synchronizer.sync_method": ("nccl", "the weights do not leave the card"),
    "synchronizer.kv": ("recompute", "nothing is kept of the cache while the engines sleep"),
    "cluster.ray_address": (None, "the engines must be on the trainer's own machine"),
}


def fill_colocate(config: Config) -> None:
    rollout, shared = config.explorer.rollout_model, config.cluster.colocate
    if rollout.gpu_memory_utilization is None:
        rollout.gpu_memory_utilization = SHARED if shared else ALONE_SHARE
    if shared:  # nothing decodes meanwhile: memory for a second copy of the model would be for nothing
        config.synchronizer.receive = "direct"


def check_colocate(config: Config) -> None:
    rollout = config.explorer.rollout_model
    share = float(rollout.gpu_memory_utilization or 0)
    if not 0 < share <= 1:
        raise ConfigError(f"explorer.rollout_model.gpu_memory_utilization={share:g}: give a share above 0, at most 1")
    if not config.cluster.colocate:
        return
    for key, (only, why) in ONLY.items():
        if get(config, key) != only:
            fix = "leave that out" if only is None else f"set {key}={only}"
            raise ConfigError(f"cluster.colocate=true with {key}={get(config, key)}: {why}; {fix}, or colocate=false")
    if config.device != "cpu" and share > MOST_SHARED:
        raise ConfigError(
            f"explorer.rollout_model.gpu_memory_utilization={share:g} with cluster.colocate=true: it is the engine's share while "
            "it decodes, and weights, gradients and optimizer state of the trainer stay on the card; set it to at most "
            f"{MOST_SHARED}, or leave it out for {SHARED}"
        )
    if config.device == "cuda":
        check_same_cards(config)


def check_same_cards(config: Config) -> None:
    """On CPUs any number of ranks and engines takes turns; on GPUs every card has one rank and one engine worker."""
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    workers = rollout.engine_num * rollout.tensor_parallel_size
    if ranks != workers:
        raise ConfigError(
            f"cluster.colocate=true with trainer.num_ranks={ranks} and engine_num x tensor_parallel_size = {workers}: they share "
            "the same GPUs, so set explorer.rollout_model.engine_num or tensor_parallel_size so that both numbers are equal"
        )
