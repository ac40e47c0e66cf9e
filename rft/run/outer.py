"""Ranks that somebody else started: `torchrun ... -m rft.train ...`, or the same under srun.

Every process here is a trainer rank of one stage; for the next stage it starts anew (exec, same
process id). Rank 0 also checks the config and starts a sidecar (`rft.run.sidecar`), once per stage,
in an OS session of its own: the sidecar supervises Ray and its actors and outlives ranks that
torchrun restarts (the next rank 0 finds it by its lock file). Rank 0 ends when its sidecar does,
and so do all. A node that no sidecar is on (a stage of files; others than rank 0's) has a watcher
of stopped ranks instead (`rft.run.standstill`).

    torchrun ─► rank 0 ─► sidecar (Ray: buffer, engines, synchronizer, explorer)
             ─► rank 1..n          wait in the launcher's store for the stage that rank 0 announces
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from omegaconf import DictConfig

from rft import config as configs
from rft.config import TRAINING, Config, ConfigError
from rft.ground import durable, redact, scratch
from rft.ground.device import hosted_store
from rft.ground.errors import refuse
from rft.ground.experience import Record
from rft.ground.plugins import imported
from rft.monitor import logs, trace
from rft.run import owners, sidecar, standstill
from rft.run.cards import launched, nodes_of
from rft.run.stages import StageFailed, finished, ready
from rft.run.supervisor import start_table
from rft.trainer.feed import reads_files

Prepared = Callable[[DictConfig], list[Config]]  # stage configs, filled and checked
Check = Callable[[Config], None]  # refuses one that cannot run
STARTED_S = 900.0  # engines may have to read a large model before rank 0 announces the stage
# for its part of that: rank 0 can still say to all ranks that it has failed
SIDECAR_S = STARTED_S - 60.0
REACH_S = 5.0  # for rank 0's own store to answer
HEARD_S = 60.0  # for all ranks to hear that rank 0 ends
AGAIN_S = 0.2  # between looks
HEARD = "heard"  # by how many
SCONTROL_S = 60.0  # for Slurm to say which nodes there are
END_S = 60.0  # for the sidecar to end, beyond shutdown_grace_s
STAGE = "RFT_OUTER_STAGE"  # how many stages this process has been a rank of
# port of the launcher's store, and whether torchrun's agent hosts it
LAUNCHER_STORE = "RFT_OUTER_STORE"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# MASTER_PORT = 20000 + job id modulo this: outside the ephemeral range, stable over restarts
SLURM_PORTS = 10_000


class Announcement(Record, frozen=True):
    """What rank 0 tells all ranks of the next stage: its `config`, where that is, and the
    `environment` in which they reach its Ray and each other; or the exit code to end with.
    """

    code: int | None = None
    resolved: str = ""
    config: str = ""
    sidecar: bool = False
    environment: dict[str, str] = {}


def join(raw: DictConfig, prepared: Prepared, check: Check) -> int:
    """Be a rank of the first stage that is not finished, then, as a
    new program in this process, of the next.
    """
    from rft.run import rank

    if launched() == "slurm":
        os.environ.update(slurm_ranks(os.environ))
    # they become the rank's log; a failure is still told to the user
    streams = os.dup(1), os.dup(2)
    stage = int(os.environ.get(STAGE, "0"))
    store, number = _store(stage)
    if number == 0:
        hosted, place = own_store()  # hosted for as long as it is held
        news = _announcement(raw, prepared, check)
        told = replace(news, environment=news.environment | place)
        store.set("stage", msgspec.json.encode(told).decode())
        if told.code is not None:
            _let_hear(hosted or store)
    else:
        told = _heard(store)
    if told.code is not None:
        return told.code
    os.environ.update(told.environment)
    have_config(Path(told.resolved), told.config)
    if number and os.environ["LOCAL_RANK"] == "0":
        owners.note_launch(configs.load(told.resolved))
    beside = watcher = None
    if number == 0 and told.sidecar:
        beside = sidecar.Sidecar(Path(told.resolved).parent)
    elif os.environ["LOCAL_RANK"] == "0":
        watcher = standstill.beside_ranks()
    code = rank.main(told.resolved, terminal=streams[1])
    if watcher is not None:
        watcher.kill()
        watcher.wait()
    if beside is not None:
        beside.end(configs.load(told.resolved).shutdown_grace_s + END_S)
    if code == 0:
        _again(stage + 1, streams)
    return code


def have_config(resolved: Path, config: str) -> None:
    """The stage's config is at its place on this node too, which may have a disk of its own."""
    if not resolved.exists() or resolved.read_text(encoding="utf-8") != config:
        resolved.parent.mkdir(parents=True, exist_ok=True)
        durable.put(resolved, config)


def _again(stage: int, streams: tuple[int, int]) -> None:
    """Start this process anew for the next stage: torch, Megatron and Ray hold state that no second
    run should meet.
    """
    logs.flush()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    # not closed before the exec: libraries' threads are still at work on some
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them is gone
            os.set_inheritable(int(name), int(name) < 3)
    os.environ[STAGE] = str(stage)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _announcement(raw: DictConfig, prepared: Prepared, check: Check) -> Announcement:
    """A failure becomes the ranks' exit code, with one message."""
    try:
        return _next_stage(raw, prepared, check)
    except ConfigError as error:
        return Announcement(code=refuse(error))
    except StageFailed as error:
        print(f"rft: {error}", file=sys.stderr, flush=True)
        return Announcement(code=error.code)
    except sidecar.SidecarFailed:  # it has said why
        return Announcement(code=1)


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables from those of srun.

    Ranks meet where MASTER_ADDR says, or at the address by which Slurm itself reaches the first
    node; a container has no Slurm to ask.
    """
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(environment),
        "MASTER_PORT": str(20_000 + int(environment["SLURM_JOB_ID"]) % SLURM_PORTS),
    }


def first_node(environment: Mapping[str, str]) -> str:
    first = scontrol("show", "hostnames", environment["SLURM_STEP_NODELIST"]).split()[0]
    address = re.search(r"NodeAddr=(\S+)", scontrol("show", "node", "--oneliner", first))
    return address.group(1) if address else first


def scontrol(*arguments: str) -> str:
    return subprocess.run(
        ["scontrol", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=SCONTROL_S,
    ).stdout


def _store(stage: int) -> tuple[Any, int]:
    """A store that all ranks reach, with keys of this stage alone, and this process's rank."""
    from torch.distributed import PrefixStore, rendezvous

    port, agent = os.environ.setdefault(
        LAUNCHER_STORE, f"{os.environ['MASTER_PORT']} {os.environ.get(AGENT_STORE, 'False')}"
    ).split()
    # torchrun hosts it; otherwise rank 0 does, and it ends with the stage
    is_agents = agent == "True"
    os.environ.update(
        {AGENT_STORE: agent, "MASTER_PORT": port if is_agents else str(int(port) + stage)}
    )
    store, rank, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=STARTED_S))))
    return PrefixStore(f"rft/{stage}", store), rank


def own_store() -> tuple[Any, dict[str, str]]:
    """The store where the ranks of a stage meet, and how: torchrun's still has the addresses of the
    stage before, and of ranks that it has started again.
    """
    from torch.distributed import TCPStore

    if os.environ[AGENT_STORE] != "True":
        return None, {}
    address, timeout = os.environ["MASTER_ADDR"], timedelta(seconds=STARTED_S)
    if nodes_of(os.environ) == 1:
        address = "127.0.0.1"
        store = hosted_store(address, 0, timeout)
    else:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, {"MASTER_ADDR": address, "MASTER_PORT": str(store.port)}


def _heard(store: Any) -> Announcement:
    """What rank 0 says: not the one before, which torchrun's store still has, and whose own store
    has ended with it.
    """
    end = time.monotonic() + STARTED_S
    while time.monotonic() < end:
        told = msgspec.json.decode(store.get("stage"), type=Announcement)
        if "MASTER_PORT" not in told.environment:  # the store is of this rank 0
            store.add(HEARD, 1)
            return told
        if _is_heard(told.environment):
            return told
        time.sleep(AGAIN_S)
    raise TimeoutError(f"rank 0 has not said within {STARTED_S:g} s what the ranks are to do")


def _is_heard(place: Mapping[str, str]) -> bool:
    """Tell the one who has said it; false where nobody is there."""
    from torch.distributed import DistError, TCPStore

    address, port = place["MASTER_ADDR"], int(place["MASTER_PORT"])
    try:
        socket.create_connection((address, port), REACH_S).close()
        timeout = timedelta(seconds=REACH_S)
        own = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        own.add(HEARD, 1)
    except (OSError, DistError):
        return False
    return True


def _let_hear(own: Any) -> None:
    """Stay until all others know that this rank ends, and why: they ask it, and late ones would
    find nobody.
    """
    end, others = time.monotonic() + HEARD_S, int(os.environ["WORLD_SIZE"]) - 1
    while own.add(HEARD, 0) < others and time.monotonic() < end:
        time.sleep(AGAIN_S)


def _next_stage(raw: DictConfig, prepared: Prepared, check: Check) -> Announcement:
    stages = prepared(raw)
    _check(stages)
    count = next((i for i, config in enumerate(stages) if not finished(config)), len(stages))
    if count == len(stages):
        if stages[0].finish:
            imported(stages[0].finish)(stages)
        return Announcement(code=0)
    owners.hold(stages[count])  # for the life of this rank 0, until it starts anew for a stage
    config = ready(stages, count, check)
    scratch.sweep()
    resolved = configs.job_dir(config) / "resolved.yaml"
    configs.save(config, resolved)
    print(*start_table(config), sep="\n", flush=True)
    if config.trainer.spares:
        print("rft: trainer.spares: an outer launcher starts the ranks, and keeps none", flush=True)
    if reads_files(config):
        environment = _attempt(logs.new_attempt(resolved.parent), config)
        return _of(resolved, environment)
    environment = sidecar.start(resolved, SIDECAR_S) | redact.inherited()
    return replace(_of(resolved, environment), sidecar=True)


def _of(resolved: Path, environment: dict[str, str]) -> Announcement:
    text = resolved.read_text(encoding="utf-8")
    return Announcement(resolved=str(resolved), config=text, environment=environment)


def _attempt(log_dir: Path, config: Config) -> dict[str, str]:
    """What every rank must know of an attempt."""
    trace.turn_on(log_dir, config.monitor.trace)
    return {"RFT_LOG_DIR": str(log_dir)} | trace.environment() | redact.inherited()


def _check(stages: list[Config]) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for config in stages:
        if config.mode not in TRAINING:
            raise ConfigError(
                f"mode={config.mode} has no trainer ranks: start it with plain `python -m "
                "rft.train`"
            )
        if config.trainer.num_ranks != world:
            raise ConfigError(
                f"trainer.num_ranks={config.trainer.num_ranks}, but the launcher started {world} "
                "ranks: make them equal"
            )
        if (
            nodes_of(os.environ) > 1
            and not reads_files(config)
            and config.cluster.ray_address is None
        ):
            raise ConfigError(
                "cluster.ray_address is not set, but the ranks are on several nodes, which cannot "
                "reach the engines of a "
                "private Ray: give the address of a cluster that the nodes belong to"
            )
