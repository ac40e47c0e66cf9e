"""A real Slurm on this host for a test: munge, slurmctld and three slurmd, ended with the block;
nothing outside `root` is written.

In: an empty directory, root, and Debian's packages (installed when they are missing). Out: `Slurm`,
whose `environment` makes sbatch, squeue and scontrol talk to this Slurm and to no other. Every node
is this host, and believes in eight CPUs.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rft.ground.process import adopt_orphans

PACKAGES = ("slurm-wlm", "munge")
DAEMONS = ("slurmctld", "slurmd", "munged")
NODES = ("n1", "n2", "n3")
READY_S = 60.0
ENDING_S = 10.0
LOOK_S = 0.2  # between two questions to slurmctld; it calls nobody back
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdSpoolDir={root}/spool-%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8 State=UNKNOWN
PartitionName=main Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""  # cred_expire: a requeued job waits for its old credentials to expire, two minutes by default


class Slurm:
    def __init__(self, root: Path):
        self.jobs: list[int] = []
        self.environment = os.environ | {"SLURM_CONF": str(root / "slurm.conf")}

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, directory: Path, *command: str, **environment: str) -> int:
        """sbatch with `directory` as the working directory; returns the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *command],
            cwd=directory,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        self.jobs.append(int(done.stdout))
        return self.jobs[-1]

    def state(self, job: int | str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED ..."""
        return self.field(job, "JobState")

    def field(self, job: int | str, name: str) -> str:
        words = self.ask("scontrol", "show", "job", "--oneliner", str(job)).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def await_end(self, job: int | str, log: Path, timeout: float) -> str:
        """The state that the job ends in, requeued or not."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"job {job} is still {state}:\n{read(log)}"
            time.sleep(LOOK_S)
        return state

    def await_line(self, job: int, log: Path, text: str, timeout: float, count: int = 1) -> None:
        """Until the job's log has `text`, `count` times."""
        deadline = time.monotonic() + timeout
        while read(log).count(text) < count:
            state = self.state(job)
            assert state in ("PENDING", "RUNNING", "COMPLETING"), (
                f"job {job} is {state} without {text!r}:\n{read(log)}"
            )
            assert time.monotonic() < deadline, (
                f"job {job} ({state}) has not said {text!r}:\n{read(log)}"
            )
            time.sleep(LOOK_S)


def read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def install() -> None:
    """Skips the test, with the reason, where Slurm is not there and cannot be installed."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root")
    if all(shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in DAEMONS):
        return
    if shutil.which("apt-get") is None:
        pytest.skip("no Slurm here, and no apt-get to install it")
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}")


@contextlib.contextmanager
def running(root: Path) -> Iterator[Slurm]:
    install()
    write_files(root)
    slurm = Slurm(root)
    adopt_orphans()
    before = family()
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        with open(root / f"{name}.out", "ab") as out:
            path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
            daemons.append(
                subprocess.Popen(
                    [str(path), *arguments], env=slurm.environment, stdout=out, stderr=out
                )
            )

    try:
        munge = {
            "key-file": "munge.key",
            "socket": "munge/socket",
            "pid-file": "munge/pid",
            "log-file": "munge/log",
        }
        paths = [
            f"--{option}={root / name}"
            for option, name in (munge | {"seed-file": "munge/seed"}).items()
        ]
        start("munged", "--foreground", "--force", *paths)
        await_true(lambda: (root / "munge" / "socket").exists(), "munged has no socket")
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        await_true(
            lambda: ready(slurm), f"the nodes are not idle: {read(root / 'slurmctld.log')[-2000:]}"
        )
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        end_all(before)


def family() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def end_all(but: set[psutil.Process]) -> None:
    """Whatever was started since `but` was taken: daemons, the steps that detach themselves from
    them, and what those run.
    """
    psutil.wait_procs(family() - but, timeout=ENDING_S)
    while alive := family() - but:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=ENDING_S)


def write_files(root: Path) -> None:
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (root / name).mkdir(mode=0o700)
    (root / "munge.key").touch(mode=0o600)
    (root / "munge.key").write_bytes(os.urandom(1024))
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(1 + len(NODES))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    (root / "slurm.conf").write_text(CONFIG.format(root=root, ports=ports), encoding="utf-8")


def ready(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T %D"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip() == f"idle {len(NODES)}"


def await_true(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(LOOK_S)
