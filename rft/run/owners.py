"""Who works in a run directory: one process per role; and whose it is, where a run begins anew.

    <job>/control/owners/trainer          modes both and train
    <job>/control/owners/explorer-<name>  modes both, explore and serve
    <job>/control/owners/buffer-<hash>    whoever has the journal, by where that is (no SQL)
    <job>/control/owners/bench            mode bench
    <run>/control/launches/<name>         a launch that has begun this run anew

In: a stage's config. Out: the locks of its roles, held until the end; a `ConfigError` that says who
has one of them, or that the file system has no locks; the run that this launch has begun anew
(`continue_from_checkpoint=false`), in which its later stages, and ranks that are started again, go
on. Invariants: whoever is refused has touched nothing else; a lock ends with its holder, however
that ends; parts of different roles work in one directory together, and each writes its own
`resolved.yaml` and answers at its own socket (`place`).
"""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

import xxhash

from rft.buffer.experience_file import KEY
from rft.buffer.store import journal_of
from rft.checkpoint import fence
from rft.config import TRAINING, Config, ConfigError, job_dir
from rft.ground import durable, process
from rft.trainer.feed import reads_files

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
ELSEWHERE = (
    "rft needs file locks to keep two starts apart: give checkpoint_root_dir on a file system that "
    "has them, or mount this one with them (Lustre: -o flock; NFS: version 4, without nolock)"
)


def place(config: Config) -> Path:
    """What this stage alone writes lies here: the job's own directory is the trainer's."""
    job = job_dir(config)
    if config.mode in ("explore", "serve"):
        return job / "explorers" / config.explorer.name
    return job / "bench" if config.mode == "bench" else job


def roles(config: Config) -> list[str]:
    """In the order in which they are taken, the same for everybody."""
    if config.mode == "bench":
        return ["bench"]
    found = ["trainer"] if config.mode in TRAINING else []
    if config.mode != "train":
        found.append(f"explorer-{config.explorer.name}")
    buffer = config.buffer.trainer_input.experience_buffer
    if buffer.storage_type != "sql" and not reads_files(config):
        journal = Path(journal_of(buffer, job_dir(config))).resolve()
        found.append(f"buffer-{xxhash.xxh3_64_hexdigest(bytes(journal))}")
    return found


@contextlib.contextmanager
def held(config: Config) -> Iterator[None]:
    """Have the stage's roles; raises ConfigError where somebody else has one."""
    descriptors = hold(config)
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def hold(config: Config) -> list[int]:
    """The same for the life of this process, or until these are closed."""
    directory = fence.control_dir(job_dir(config)) / "owners"
    found: list[int] = []
    try:
        for role in roles(config):
            found.append(_take(directory / role, role, config))
        note_launch(config)
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise
    return found


def _take(path: Path, role: str, config: Config) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = durable.lock(path)
        if descriptor is None:
            raise ConfigError(_taken(path, role, config))
        if not durable.is_locked(path):
            os.close(descriptor)
            raise ConfigError(f"{job_dir(config)}: this file system grants every lock. {ELSEWHERE}")
    except OSError as error:
        why = f" {ELSEWHERE}" if error.errno in NO_LOCKS else ""
        raise ConfigError(f"{path} cannot be locked ({error}).{why}") from error
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    with contextlib.suppress(OSError):  # a full disk; the lock is what counts
        durable.sign(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}")
    return descriptor


def _taken(path: Path, role: str, config: Config) -> str:
    who = durable.signed_by(path) or "a process that has not said its name"
    fix = "wait for its end, stop it, or give this run a `name` of its own"
    if role.startswith("explorer-"):
        fix += ", or this explorer an explorer.name"
    what = f"is its {role.replace('-', ' ', 1)}"
    if role.startswith("buffer-"):
        what = "has its journal"
        fix += f", or a journal elsewhere ({KEY})"
    return f"{job_dir(config)}: {who} {what}: {fix}"


def note_launch(config: Config) -> None:
    """A run that begins anew is that of this launch. Ranks that are started again may have their
    first one on another node, so every node's first rank notes its own launcher.
    """
    if not config.continue_from_checkpoint:
        directory = _launches(Path(config.checkpoint_root_dir) / config.project / config.name)
        directory.mkdir(parents=True, exist_ok=True)
        for name in (_starter(os.environ), *_slurm_starts(os.environ)[-1:]):
            (directory / name).touch()


def own_run(first: Path) -> str:
    """Name of the run that this launch has begun anew, though `first` may have been taken; empty
    where it has begun none.
    """
    with_time = re.compile(rf"{re.escape(first.name)}(_\d{{14}})?", re.ASCII)
    runs = [path for path in first.parent.iterdir() if with_time.fullmatch(path.name)]
    return max((path.name for path in runs if _is_own(path)), default="")


def _is_own(run: Path) -> bool:
    """Its launcher is this one's, or it is of an earlier start of this job of Slurm's."""
    directory = _launches(run)
    names = os.listdir(directory) if directory.is_dir() else []
    earlier = _slurm_starts(os.environ)[:-1]  # in this one others may run, too
    return not {_starter(os.environ), *earlier}.isdisjoint(names)


def _launches(run: Path) -> Path:
    return fence.control_dir(run) / "launches"


def _starter(environment: Mapping[str, str]) -> str:
    """The process that outlives all starts of a launch: torchrun; else this one, which begins its
    later stages by an exec.
    """
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in environment else os.getpid()
    return f"{socket.gethostname()}-{process.identity(pid)}"


def _slurm_starts(environment: Mapping[str, str]) -> list[str]:
    """Of this job, up to now: one that was put back into the queue is the same launch."""
    count = int(environment.get("SLURM_RESTART_COUNT", "0"))
    job = environment.get("SLURM_JOB_ID")
    return [f"slurm-{job}-{number}" for number in range(count + 1)] if job else []
