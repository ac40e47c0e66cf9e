"""Who works in a run directory: one process per role.

    <job>/control/owners/trainer          modes both and train
    <job>/control/owners/explorer-<name>  modes both, explore and serve
    <job>/control/owners/buffer-<hash>    whoever has the journal, by where that is (no SQL)
    <job>/control/owners/bench            mode bench

In: a stage's config. Out: the locks of its roles, held until the end; a `ConfigError` that says who
has one of them, or that the file system has no locks. Invariants: whoever is refused has touched
nothing else; a lock ends with its holder, however that ends; parts of different roles work in one
directory together, and each writes its own `resolved.yaml` and answers at its own socket (`place`).
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import xxhash

from rft.buffer.experience_file import KEY
from rft.buffer.store import journal_of
from rft.checkpoint import fence
from rft.config import TRAINING, Config, ConfigError, job_dir
from rft.ground import durable
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
