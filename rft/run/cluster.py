"""The Ray of a run's actors.

In: a config. Out: the address of a Ray: one that exists (`cluster.ray_address`), or a private one
on loopback that ends with the supervisor. A private one hears of no GPU: who gets which is written
in the config (`rft.run.cards`). One that exists gives out its own, also to the trainer's ranks
where it counts those of this machine. Ray is loaded where it is started.
"""

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config import Config
from rft.config.layout import batch_bytes, stored_bytes
from rft.ground.device import loopback_environment
from rft.ground.protocols import ActorHandle
from rft.run.cards import Machine

log = logging.getLogger(__name__)
# for batches of tokens; weights only where `synchronizer.sync_method=memory`
OBJECT_STORE_BYTES = 256 * 2**20  # beside weights and experiences
BATCHES = 2  # in the store at a time: on the way to the buffer, and to rank 0
SLOW_S = 5.0  # a private Ray's head never comes back, but may be slow to answer on busy cores
# Ray ends a process, without a word of ours, to which its head has not answered for so long
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
PRIVATE_RAY = {
    # without its head a private Ray ends itself, after this
    RECONNECT: "30",
    "RAY_worker_niceness": "0",  # Ray's 15 would let everything else go before the engines
    "RAY_task_events_report_interval_ms": "0",  # nobody asks it what became of each call
    # workers without an actor's environment are of no use, and start before it
    "RAY_prestart_worker_first_driver": "false",
    # an actor without GPUs of Ray's keeps the CUDA_VISIBLE_DEVICES that it is given
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
TOKENS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}  # a token of the user's own
TOKEN_FILE = Path(".ray", "auth_token")  # in the home of a user
# a raylet's paragraph for each actor that dies; read as Ray is imported
QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
RAY_STARTS = 3
HOLD_S = 60.0  # for GPUs of this machine that are free in Ray
JOIN_S, LOOK_S = 300.0, 2.0  # for nodes that a script starts; Ray tells nobody that one has joined
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


def start(config: Config) -> str:
    """Start Ray in this process, or join; returns the address."""
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
            keep_token(Path.home(), os.environ)
            start_patiently(
                # not a cluster that happens to run here, or that RAY_ADDRESS names
                ray.init,
                address="local",
                num_cpus=cluster.ray_num_cpus or actors_of(config),
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=store_bytes(config),
                _node_ip_address="127.0.0.1",
                **shared,
            )
    return ray.get_runtime_context().gcs_address


def store_bytes(config: Config) -> int:
    """Of Ray's object store, which takes them as they are needed: a batch of 1,024 experiences of
    32,768 tokens is 0.27 GB, and what finds no room goes to the disk.
    """
    return OBJECT_STORE_BYTES + stored_bytes(config) + BATCHES * batch_bytes(config)


def keep_token(home: Path, environment: Mapping[str, str]) -> None:
    """Ray listens on every interface, whatever it is told, and asks for the token of a file that it
    would make readable for all: whoever reads it runs code as this user.
    """
    if TOKENS & set(environment):
        return
    path = home / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as made:  # for this user alone
            made.write(secrets.token_hex(32))
            made.flush()
            with contextlib.suppress(FileExistsError):  # another run was faster, with a whole one
                os.link(made.name, path)
    if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)


def token_refused(home: Path, environment: Mapping[str, str]) -> str:
    """Why `keep_token` cannot keep one there, and what to do; empty where it can, or need not."""
    if TOKENS & set(environment):
        return ""
    path = nearest = home / TOKEN_FILE
    try:
        while not nearest.exists():
            nearest = nearest.parent
        is_ours = path.is_file() if nearest == path else nearest.is_dir()
        is_ours = is_ours and os.access(nearest, os.R_OK if nearest == path else os.W_OK | os.X_OK)
    except PermissionError:
        is_ours = False
    if is_ours:
        return ""
    what = "read" if nearest == path else "made"
    return (
        f"HOME={home}: the token of a private Ray is kept in {path}, which cannot be {what}: "
        "give HOME a directory of yours, or the token in the variable RAY_AUTH_TOKEN"
    )


def await_loss(address: str, is_private: bool, ending: threading.Event) -> str:
    """Return why when there is no Ray at this address any more, empty once `ending` is set. A head
    that is not ours may be started again; what is left of Ray's patience is for our end.
    """
    given_up = float(os.environ.get(RECONNECT, RECONNECT_S)) / 2
    patience = min(SLOW_S, given_up) if is_private else given_up
    heard = time.monotonic()
    while not ending.wait(LOOK_S):
        why = silence(address)
        if why and time.monotonic() - heard > patience:
            return f"nobody answers at {address} ({why})"
        heard = heard if why else time.monotonic()
    return ""


def silence(address: str, within_s: float = LOOK_S) -> str:
    """Why nobody answers there; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class RankCards:
    """GPUs that Ray keeps for the trainer's ranks as long as `holder` is referred to."""

    names: list[str]
    holder: Any = None


def hold_rank_cards(config: Config, machine: Machine) -> RankCards:
    """GPUs of this machine that Ray counts, for the ranks.

    None where it counts none here, and where CUDA_VISIBLE_DEVICES says which are the ranks': then
    this process may be a job of that Ray. Raises RuntimeError.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, ranks = ray.get_runtime_context().get_node_id(), len(config.cluster.cards.ranks)
    counted = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}.get(here, 0)
    if machine.restricted or not counted or not ranks:
        return RankCards([])
    place = NodeAffinitySchedulingStrategy(here, soft=False)
    actor_class = ray.remote(CardHolder).options(
        num_gpus=ranks, num_cpus=0, scheduling_strategy=place
    )
    held = ActorHandle(actor_class.remote())
    try:
        names = ray.get(held.ask(CardHolder.names), timeout=HOLD_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"the Ray at {config.cluster.ray_address} counts {counted:g} GPUs of this machine and "
            f"has no {ranks} free for trainer.num_ranks={config.trainer.num_ranks}: look at `ray "
            "status`, or lower it"
        ) from error
    if machine.launcher and names != config.cluster.cards.ranks:
        raise RuntimeError(
            f"{machine.launcher} gives the ranks here the GPUs "
            f"{', '.join(config.cluster.cards.ranks)}, which the Ray at "
            f"{config.cluster.ray_address} counts as its own: start it here with --num-gpus=0"
        )
    return RankCards(names, held)


class CardHolder:
    """An actor that has GPUs and does nothing with them."""

    def names(self) -> list[str]:
        import ray

        return [str(name) for name in ray.get_gpu_ids()]


def await_engine_cards(wanted: int, stopped: Callable[[], bool]) -> None:
    """Return when this Ray has `wanted` GPUs, or `stopped`; raises RuntimeError after JOIN_S."""
    import ray

    deadline = time.monotonic() + JOIN_S
    while (there := ray.cluster_resources().get("GPU", 0)) < wanted and not stopped():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{wanted} GPUs are needed for engines and for ranks that Ray counts, and it has "
                f"{there:g}: add nodes, or lower explorer.rollout_model.engine_num"
            )
        time.sleep(LOOK_S)


def actors_of(config: Config) -> int:
    """How many a run starts with: buffer, synchronizer, explorer and engines."""
    explorer = config.explorer
    auxiliary = sum(model.engine_num for model in explorer.auxiliary_models)
    return 3 + int(explorer.rollout_model.engine_num or 1) + auxiliary


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
