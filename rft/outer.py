"""Ranks that somebody else started: `torchrun ... -m rft.train ...`, or the same under srun.

Every process here is a trainer rank of one stage; for the next stage it starts anew (exec, same process id). Rank 0 also
checks the config and starts a sidecar, once per stage, in an OS session of its own: the sidecar holds Ray and its actors,
outlives ranks that torchrun restarts (the next rank 0 finds it by its lock file) and ends when the stage ends, when an actor
fails, or when the launcher of the ranks is gone. Rank 0 ends when its sidecar does, and so do all.

    torchrun ─► rank 0 ─► sidecar (Ray: buffer, engines, synchronizer, explorer)
             ─► rank 1..n          wait in the launcher's store for rank 0's word
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rft import config as configs
from rft import control
from rft.config import Config, ConfigError
from rft.monitor import logs, redact, trace

log = logging.getLogger(__name__)
STARTED_S = 900.0  # engines may have to read a large model before rank 0 gives its word
STAGE = "RFT_OUTER_STAGE"  # how many stages this process has been a rank of
LAUNCHER_STORE = "RFT_OUTER_STORE"  # port of the launcher's store, and whether torchrun's agent hosts it
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SLURM_PORTS = 10_000  # MASTER_PORT = 20000 + job id modulo this: outside the ephemeral range, stable over restarts


def launched(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process as one rank of many: "torchrun", "slurm", or None for a plain start.

    srun sets no WORLD_SIZE; a batch script's own shell has SLURM_PROCID but no step, and is a plain start.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def join(raw: DictConfig) -> int:
    """Be a rank of the first stage that is not finished, then, as a new program in this process, of the next."""
    from rft import rank

    if launched() == "slurm":
        os.environ.update(slurm_ranks(os.environ))
    streams = os.dup(1), os.dup(2)  # they become the rank's log; a failure is still told to the user
    stage = int(os.environ.get(STAGE, "0"))
    store, number = _store(stage)
    if number == 0:
        store.set("word", json.dumps(_word(raw)))
    word = json.loads(store.get("word"))
    if "code" in word:
        return int(word["code"])
    os.environ.update(word["environment"] | word["store"])
    sidecar = Sidecar(Path(word["resolved"]).parent) if number == 0 and word["sidecar"] else None
    code = rank.main(word["resolved"], terminal=streams[1])
    if sidecar is not None:
        sidecar.end()
    if code == 0:
        _again(stage + 1, streams)
    return code


def _again(stage: int, streams: tuple[int, int]) -> None:
    """Start this process anew for the next stage: torch, Megatron and Ray hold state that no second run should meet."""
    logs.flush()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    for name in os.listdir("/proc/self/fd"):  # not closed before the exec: libraries' threads are still at work on some
        with contextlib.suppress(OSError):  # the one that listed them is gone
            os.set_inheritable(int(name), int(name) < 3)
    os.environ[STAGE] = str(stage)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _word(raw: DictConfig) -> dict[str, Any]:
    """`_lead`, with every failure as a code for all ranks and one message."""
    from rft.launch import StageFailed
    from rft.train import refuse

    try:
        return {"store": own_store(int(os.environ.get(STAGE, "0")))} | _lead(raw)
    except ConfigError as error:
        return {"code": refuse(error)}
    except StageFailed as error:
        print(f"rft: {error}", file=sys.stderr, flush=True)
        return {"code": error.code}
    except SidecarFailed:  # it has said why
        return {"code": 1}


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables from those of srun. Ranks meet at the address by which Slurm itself reaches the first node."""
    first = scontrol("show", "hostnames", environment["SLURM_STEP_NODELIST"]).split()[0]
    address = re.search(r"NodeAddr=(\S+)", scontrol("show", "node", "--oneliner", first))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": address.group(1) if address else first,
        "MASTER_PORT": str(20_000 + int(environment["SLURM_JOB_ID"]) % SLURM_PORTS),
    }


def scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True).stdout


def _store(stage: int) -> tuple[Any, int]:
    """A store that all ranks reach, with keys of this stage alone, and this process's rank."""
    from torch.distributed import PrefixStore, rendezvous

    port, agent = os.environ.setdefault(
        LAUNCHER_STORE, f"{os.environ['MASTER_PORT']} {os.environ.get(AGENT_STORE, 'False')}"
    ).split()
    is_agents = agent == "True"  # torchrun hosts it; otherwise rank 0 does, and it ends with the stage
    os.environ.update({AGENT_STORE: agent, "MASTER_PORT": port if is_agents else str(int(port) + stage)})
    store, rank, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=STARTED_S))))
    return PrefixStore(f"rft/{stage}", store), rank


def own_store(stage: int) -> dict[str, str]:
    """Where the ranks of a later stage meet: torchrun's store still has the addresses of the stage before."""
    if not stage or os.environ[AGENT_STORE] != "True":
        return {}
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"MASTER_PORT": str(probe.getsockname()[1]), AGENT_STORE: "False"}


def _lead(raw: DictConfig) -> dict[str, Any]:
    """Rank 0's word: where the next stage's config is and how to reach its Ray, or the exit code to end with."""
    from rft import launch
    from rft.feed import reads_files
    from rft.train import imported, prepared_stages

    stages = prepared_stages(raw)
    _check(stages)
    count = next((i for i, config in enumerate(stages) if not launch.finished(config)), len(stages))
    if count == len(stages):
        if stages[0].finish:
            imported(stages[0].finish)(stages)
        return {"code": 0}
    config = launch.ready(stages, count)
    resolved = configs.job_dir(config) / "resolved.yaml"
    configs.save(config, resolved)
    if reads_files(config):
        return {
            "resolved": str(resolved),
            "sidecar": False,
            "environment": _attempt(logs.new_attempt(resolved.parent), config),
        }
    return {"resolved": str(resolved), "sidecar": True, "environment": _sidecar(resolved) | redact.inherited()}


def _attempt(log_dir: Path, config: Config) -> dict[str, str]:
    """What every rank must know of an attempt."""
    trace.turn_on(log_dir, config.monitor.trace)
    return {"RFT_LOG_DIR": str(log_dir)} | trace.environment() | redact.inherited()


def _check(stages: list[Config]) -> None:
    from rft.feed import reads_files

    world = int(os.environ["WORLD_SIZE"])
    for config in stages:
        if config.mode not in ("both", "train"):
            raise ConfigError(f"mode={config.mode} has no trainer ranks: start it with plain `python -m rft.train`")
        if config.trainer.num_ranks != world:
            raise ConfigError(
                f"trainer.num_ranks={config.trainer.num_ranks}, but the launcher started {world} ranks: make them equal"
            )
        if nodes_of(os.environ) > 1 and not reads_files(config) and config.cluster.ray_address is None:
            raise ConfigError(
                "cluster.ray_address is not set, but the ranks are on several nodes, which cannot reach the engines of a "
                "private Ray: give the address of a cluster that the nodes belong to"
            )


def nodes_of(environment: Mapping[str, str]) -> int:
    """How many the launcher has put ranks on."""
    if "SLURM_STEP_NUM_NODES" in environment and "TORCHELASTIC_RUN_ID" not in environment:
        return int(environment["SLURM_STEP_NUM_NODES"])
    return int(environment["WORLD_SIZE"]) // int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))


def _sidecar(resolved: Path) -> dict[str, str]:
    """Environment to reach the stage's sidecar; starts one unless the last attempt's is still alive."""
    job = resolved.parent
    with open(job / "sidecar.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return json.loads((job / "sidecar.json").read_text(encoding="utf-8"))["environment"]
    child = subprocess.Popen(
        [sys.executable, "-m", "rft.outer", str(resolved), str(os.getppid())],
        stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    line = child.stdout.readline() if child.stdout else ""
    if not line:
        raise SidecarFailed(f"see {job / 'logs' / 'latest' / 'sidecar.log'}")
    return json.loads(line)["environment"]


class SidecarFailed(RuntimeError):
    """The sidecar ended before its Ray was up; it has told the user why."""


class Sidecar:
    """Rank 0's hold on the sidecar: its end, whatever the reason, is the end of this rank."""

    def __init__(self, job: Path):
        self.job = job
        self.pid = int(json.loads((job / "sidecar.json").read_text(encoding="utf-8"))["pid"])
        self.expected = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        await_end(self.pid)
        if not self.expected:
            logs.flush()
            os._exit(1)  # the parts are gone; torch's launcher ends the other ranks

    def end(self) -> None:
        """Ask it to end and wait until its lock is free."""
        self.expected = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with open(self.job / "sidecar.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def sidecar(resolved: str, launcher: int) -> int:
    """Hold one stage's actors until told to end, an actor fails, or process `launcher` is gone."""
    from rft import launch, processes
    from rft.actors import Actors

    config = configs.load(resolved)
    job = Path(resolved).parent
    lock = open(job / "sidecar.lock", "a")  # noqa: SIM115  held, and so locked, for the life of this process
    fcntl.flock(lock, fcntl.LOCK_EX)
    log_dir = logs.new_attempt(job)
    trace.turn_on(log_dir, config.monitor.trace)
    terminal = logs.Redacted(os.fdopen(os.dup(2), "w"))
    logs.redirect(log_dir / "sidecar.log", config.log, keep_stdout=True)
    processes.adopt_orphans()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the ranks' business, but Slurm may tell every process of a step
    events: queue.SimpleQueue[launch.Event] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: events.put(launch.Event("rank 0")))
    threading.Thread(target=lambda: (await_end(launcher), events.put(launch.Event("launcher"))), daemon=True).start()
    actors = Actors(
        config,
        log_dir,
        failed=lambda part, phase, cause: events.put(launch.Event(part, phase, cause)),
        say=lambda line: print(line, file=terminal, flush=True),
    )
    message = ""
    try:
        actors.start()
        actors.work(lambda: None)
        environment = {
            "RFT_RAY_ADDRESS": actors.address,
            "RFT_RAY_NAMESPACE": str(config.ray_namespace),
            "RFT_LOG_DIR": str(log_dir),
            **trace.environment(),
        }
        word = json.dumps({"pid": os.getpid(), "environment": environment | actors.rank_environment})
        (job / "sidecar.json").write_text(word, encoding="utf-8")
        os.write(1, f"{word}\n".encode())  # for rank 0, and so as it is
        event = events.get()
        message = launch.failure(launch.root_cause(event, events), log_dir) if event.cause else ""
    except Exception as error:
        log.exception("sidecar")
        message = f"sidecar failed: {control.cause(error)}; logs in {log_dir}"
    finally:
        if message:
            (log_dir / "failure.json").write_text(
                redact.text(json.dumps(message)), encoding="utf-8"
            )  # rank 0 need not tell it
            print(f"rft: {message}", file=terminal, flush=True)
        actors.close(config.shutdown_grace_s)
        processes.end_descendants(launch.LAST_S)
        redact.scrub(log_dir)
    return 1 if message else 0


def await_end(pid: int) -> None:
    """Return when the process is gone. It may be anybody's child."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    sys.exit(sidecar(sys.argv[1], int(sys.argv[2])))
