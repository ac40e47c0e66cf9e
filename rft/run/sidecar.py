"""The supervisor of ranks that somebody else started: a process of its own beside them, one for a
stage.

    rank 0 ──start──► python -m rft.run.sidecar RESOLVED_YAML LAUNCHER_PID
           ◄── one line of JSON: how to reach its Ray ──   (in <job>/sidecar.json too, for the
                                                            rank 0 of a restart)
           ──Sidecar.end──► it closes, and is killed if it does not in time

In: a stage's resolved config and the process that holds the ranks. Out: as `rft.run.launch` of its
own ranks; the message of a failure on the terminal and in `failure.json`. It ends when it is told
to, when an actor fails, or when the launcher is gone: not with the rank 0 that started it, even if
that dies before it hears. Invariants: whoever holds `sidecar.lock` is the job's one sidecar; a
record is believed while the process that wrote it lives and serves this launcher's ranks; no
process of it is left when it has ended.
"""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from rft import config as configs
from rft.ground import durable, redact
from rft.ground.experience import Record
from rft.ground.process import (
    adopt_orphans,
    await_end,
    end_family,
    family,
    identity,
    is_stopped,
)
from rft.monitor import logs
from rft.run.stages import StageFailed
from rft.run.standstill import LOOK_S, Looks
from rft.run.supervisor import Event, Events, Supervisor, failure, signals_as_events
from rft.trainer import control

log = logging.getLogger(__name__)
LOCK, RECORD = "sidecar.lock", "sidecar.json"  # in the job's directory
BEFORE_S = 600.0  # for another sidecar of the job to end, or to serve


class SidecarFailed(RuntimeError):
    """The sidecar ended before its Ray was up; it has told the user why."""


class Serving(Record, frozen=True):
    """What a sidecar tells when its actors load: who it is and whom it serves (`identity` of both),
    and how ranks reach it.
    """

    process: str = ""
    launcher: str = ""
    environment: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return int(self.process.partition("-")[0])


def serving(job: Path) -> Serving | None:
    """The job's sidecar, once ranks can reach it. What one that is gone has written is nobody's,
    though its number be somebody's.
    """
    try:
        told = msgspec.json.decode((job / RECORD).read_bytes(), type=Serving)
    except FileNotFoundError:
        return None
    return told if told.process and identity(told.pid) == told.process else None


def start(resolved: Path, deadline_s: float) -> dict[str, str]:
    """Environment to reach the stage's sidecar; starts one unless that of an earlier rank 0 of this
    launcher serves.
    """
    job = resolved.parent
    found = serving(job)
    if found is not None and found.launcher == identity(os.getppid()):
        return found.environment
    child = subprocess.Popen(
        [sys.executable, "-m", "rft.run.sidecar", str(resolved), str(os.getppid())],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    see = f"see {job / 'logs' / 'latest' / 'sidecar.log'}"
    assert child.stdout is not None
    try:
        line = first_line(child.stdout.fileno(), deadline_s)
    except TimeoutError as error:
        end_family(child.pid)
        raise StageFailed(
            1, f"the sidecar was not ready within {deadline_s:g} s and was killed; {see}"
        ) from error
    if not line:
        raise SidecarFailed(see)
    return msgspec.json.decode(line, type=Serving).environment


def first_line(descriptor: int, deadline_s: float) -> bytes:
    """What comes up to the end of a line, or of the stream. Raises TimeoutError."""
    end, line = time.monotonic() + deadline_s, b""
    while b"\n" not in line:
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError(f"no line within {deadline_s:g} s")
        if not (part := os.read(descriptor, 2**16)):
            break
        line += part
    return line.partition(b"\n")[0]


class Sidecar:
    """Rank 0's hold on the sidecar: its end, whatever the reason, is the end of this rank. One that
    stays stopped is ended.
    """

    def __init__(self, job: Path):
        found = serving(job)
        if found is None:
            _end_rank()  # since it was started
        self.pid = found.pid
        self.expected = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        looks = Looks()
        while not await_end(self.pid, LOOK_S):
            if looks.look(filter(is_stopped, family(self.pid)[:1])):
                log.error("the sidecar (pid %d) has been stopped for too long", self.pid)
                end_family(self.pid)
        if not self.expected:
            _end_rank()

    def end(self, deadline_s: float) -> None:
        """Ask it to end, and wait until it has.

        One that has not at the deadline is killed with all that it holds.
        """
        self.expected = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        if not await_end(self.pid, deadline_s):
            log.error(
                "the sidecar (pid %d) did not end within %g s and is killed", self.pid, deadline_s
            )
            end_family(self.pid)


def _end_rank() -> NoReturn:
    """The parts are gone; torch's launcher ends the other ranks."""
    logs.flush()
    os._exit(1)


def main(resolved: str, launcher: int) -> int:
    """Hold one stage's actors until told to end, an actor fails, or process `launcher` is gone."""
    config = configs.load(resolved)
    job, ranks = Path(resolved).parent, identity(launcher)
    if (other := _other(job, launcher, ranks)) is not None:
        _tell(other)
        return 0
    terminal = logs.Redacted(os.fdopen(os.dup(2), "w"))
    events: Events = queue.SimpleQueue()
    supervisor = Supervisor(config, events, lambda line: print(line, file=terminal, flush=True))
    logs.redirect(supervisor.log_dir / "sidecar.log", config.log, keep_stdout=True)
    adopt_orphans()
    # the ranks' business, but Slurm may tell every process of a step
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(
        target=lambda: (await_end(launcher), events.put(Event("launcher"))), daemon=True
    ).start()
    with signals_as_events(events, (signal.SIGTERM, signal.SIGINT)):
        message = ""
        try:
            supervisor.guard(launcher)
            message = _hold(supervisor, job, ranks)
        except Exception as error:
            log.exception("sidecar")
            message = f"sidecar failed: {control.cause(error)}; logs in {supervisor.log_dir}"
        finally:
            if message:
                record = redact.text(json.dumps(message))  # rank 0 need not tell it
                (supervisor.log_dir / "failure.json").write_text(record, encoding="utf-8")
                supervisor.say(f"rft: {message}")
            (job / RECORD).unlink(missing_ok=True)  # it serves no more
            supervisor.close(config.shutdown_grace_s)
    return 1 if message else 0


def _other(job: Path, launcher: int, ranks: str) -> Serving | None:
    """The sidecar that serves this launcher already: its own rank 0 died while it started.

    None: this process is the job's one from now on, for its life.
    """
    end = time.monotonic() + BEFORE_S
    while durable.lock(job / LOCK, wait_s=LOOK_S) is None:
        found = serving(job)
        if found is not None and found.launcher == ranks:
            return found
        if identity(launcher) != ranks:
            sys.exit(0)  # whom it was for
        if time.monotonic() >= end:
            raise TimeoutError(f"another sidecar still has {job / LOCK}")
    return None


def _tell(told: Serving) -> None:
    """Rank 0, and nobody if it is dead: the next one finds the record."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(told) + b"\n")  # and so as it is


def _hold(supervisor: Supervisor, job: Path, launcher: str) -> str:
    """Start the actors, tell the ranks where they are, wait for the end; why that is a bad one."""
    if not supervisor.start():
        return ""
    told = Serving(
        process=identity(os.getpid()), launcher=launcher, environment=supervisor.environment()
    )
    durable.put(job / RECORD, msgspec.json.encode(told))
    _tell(told)
    event = supervisor.first_event()
    return failure(event, supervisor.log_dir) if event.cause else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
