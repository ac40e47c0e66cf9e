"""What a run takes of its machines, decided once, by the supervisor: which GPUs the trainer ranks
see and which the engines, and the Ray of its actors.

In: a config and what CUDA_VISIBLE_DEVICES says. Out: `Cards`, or None where there are none to give
out; the address of a Ray, one that exists (`cluster.ray_address`) or a private one on loopback that
ends with the supervisor. Trainer ranks get the first GPUs, engines the rest through Ray; with
`cluster.colocate` both get the same, and Ray, which cannot count a GPU twice, hears of none.
Invariant: no device is given to two parts unless the config says that they share it. Ray is loaded
where it is started.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rft.config import Config, ConfigError
from rft.config.layout import stored_bytes
from rft.ground.device import loopback_environment

log = logging.getLogger(__name__)
# for batches of tokens; weights only where `synchronizer.sync_method=memory`
OBJECT_STORE_BYTES = 256 * 2**20
PRIVATE_RAY = {
    # without its head a private Ray ends itself, after this
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_worker_niceness": "0",  # Ray's 15 would let everything else go before the engines
    "RAY_task_events_report_interval_ms": "0",  # nobody asks it what became of each call
    # workers without an actor's environment are of no use, and start before it
    "RAY_prestart_worker_first_driver": "false",
}
# a raylet's paragraph for each actor that dies; read as Ray is imported
QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
RAY_STARTS = 3
RAY_IS_LATE = "node timed out during startup"
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# --- GPUs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cards:
    ranks: list[str]
    engines: list[str]
    per_engine: int
    shared: bool

    @property
    def for_ray(self) -> int:
        """How many GPUs Ray has to give out."""
        return 0 if self.shared else len(self.engines)

    def of_engine(self, number: int) -> str:
        """What engine `number` sees where Ray does not decide: its
        workers lie on the cards of as many ranks.
        """
        return ",".join(self.engines[number * self.per_engine : (number + 1) * self.per_engine])


def engine_cards(config: Config) -> int:
    """GPUs of the policy's engines and of those of auxiliary models."""
    explorer = config.explorer
    models = [explorer.rollout_model, *explorer.auxiliary_models]
    return sum(one.engine_num * one.tensor_parallel_size for one in models)


def ranks_left(config: Config, fewest: int) -> int:
    """Trainer ranks where nobody gives their number: all GPUs that the engines leave, in whole
    copies of the model, and in whole nodes if it is more than one; `fewest`, which one copy needs,
    where the number of GPUs is not told or there are none.
    """
    cluster = config.cluster
    if (
        config.device == "cpu"
        or not cluster.gpu_per_node
        or config.mode not in ("both", "train")
        or fewest < 1
    ):
        return fewest
    engines = engine_cards(config) if config.mode == "both" else 0
    if config.cluster.colocate:
        return engines
    total = cluster.node_num * cluster.gpu_per_node
    left = total - engines
    given = "explorer.rollout_model.engine_num x tensor_parallel_size"
    given += " and those of explorer.auxiliary_models" if config.explorer.auxiliary_models else ""
    told = f"cluster.node_num x gpu_per_node = {total} GPUs, less {given} = {engines},"
    if left < fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, which needs {fewest}: lower engine_num, or "
            "trainer.megatron's sizes"
        )
    if left > cluster.gpu_per_node and left % cluster.gpu_per_node:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no whole number of nodes of "
            f"{cluster.gpu_per_node}: change "
            "explorer.rollout_model.engine_num, or set trainer.num_ranks"
        )
    if left % fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no multiple of the {fewest} that its layout "
            "needs: change "
            "explorer.rollout_model.engine_num or trainer.megatron's sizes, or set "
            "trainer.num_ranks"
        )
    return left


def split(config: Config, visible: str) -> Cards | None:
    """`visible`: CUDA_VISIBLE_DEVICES, empty when it is not set."""
    devices = [device for device in visible.split(",") if device]
    count = config.cluster.gpu_per_node or len(devices)
    if config.device == "cpu" or not count or config.mode != "both":
        return None
    devices = devices or [str(number) for number in range(count)]
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    wanted = ranks + engine_cards(config)
    if config.cluster.colocate:
        check_same_cards(config)
        wanted = ranks
    if wanted > len(devices):
        needs = "" if config.cluster.colocate else " plus engine_num x tensor_parallel_size"
        raise ConfigError(
            f"trainer.num_ranks={ranks}{needs} = {wanted} GPUs, but {len(devices)} are visible: "
            "lower "
            "explorer.rollout_model.engine_num or the trainer's layout"
        )
    if config.cluster.colocate:
        return Cards(devices[:ranks], devices[:ranks], rollout.tensor_parallel_size, shared=True)
    return Cards(devices[:ranks], devices[ranks:], rollout.tensor_parallel_size, shared=False)


def check_same_cards(config: Config) -> None:
    """On CPUs any number of ranks and engines takes turns; on GPUs every card has one rank and one
    engine worker.
    """
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    workers = rollout.engine_num * rollout.tensor_parallel_size
    if ranks != workers:
        raise ConfigError(
            f"cluster.colocate=true with trainer.num_ranks={ranks} and engine_num x "
            f"tensor_parallel_size = {workers}: they share "
            "the same GPUs, so set explorer.rollout_model.engine_num or tensor_parallel_size so "
            "that both numbers are equal"
        )


# --- Ray -----------------------------------------------------------------------------------------


def start(config: Config, gpus: Callable[[], dict[str, int]]) -> str:
    """Start Ray in this process, or join; returns the address. `gpus`: what a private one has."""
    os.environ.update(QUIET)
    import ray

    from rft.trainer import control

    for variable in LAUNCHER_VARIABLES:
        os.environ.pop(variable, None)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])
    )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = config.cluster
    shared = {
        "namespace": config.ray_namespace,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    with control.our_sigterm():
        if cluster.ray_address:
            ray.init(address=cluster.ray_address, **shared)
        else:
            os.environ.update(PRIVATE_RAY | loopback_environment(engines_too=True))
            start_patiently(
                # not a cluster that happens to run here, or that RAY_ADDRESS names
                ray.init,
                address="local",
                num_cpus=cluster.ray_num_cpus or actors_of(config),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES + stored_bytes(config),
                _node_ip_address="127.0.0.1",
                **gpus(),
                **shared,
            )
    return ray.get_runtime_context().gcs_address


def actors_of(config: Config) -> int:
    """How many a run starts with: buffer, synchronizer, explorer and engines."""
    explorer = config.explorer
    auxiliary = sum(model.engine_num for model in explorer.auxiliary_models)
    return 3 + explorer.rollout_model.engine_num + auxiliary


def start_patiently(start: Callable[..., Any], **settings: Any) -> None:
    """Start a private Ray.

    It gives its own processes 30 seconds, fixed, which a crowded machine may not keep: then again.
    """
    for left in reversed(range(RAY_STARTS)):
        try:
            start(**settings)
            return
        except Exception as error:  # Ray raises no class of its own here
            if left == 0 or RAY_IS_LATE not in str(error):
                raise
            log.warning("Ray did not come up in its own time; %d more tries", left)
