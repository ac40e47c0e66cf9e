"""Where a process of the run writes: `<job>/logs/attempt_<n>/<part>.log`, for Python logging and
for stray output alike.

Invariants: after `redirect`, whatever the process or a library or child of it prints to stderr (and
stdout, unless kept for the user) is in that file and not on the user's terminal; what passes
through Python's streams has no secret in it, and what does not loses it at the attempt's end, or at
the next start where it was killed; a log file does not grow without end, however much a
library prints; a line that a full disk does not take is counted (`left_out`), and whoever printed
it goes on.
"""

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rft.ground import durable, redact
from rft.monitor import left_out, trace

if TYPE_CHECKING:
    from rft.config import LogConfig

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STACKS_SIGNAL = signal.SIGUSR2
LOOK_S = 10.0  # between two looks at a log's size: nothing tells when a file has grown
HOLDER, SCRUBBED = "holder.lock", "scrubbed"  # files of an attempt
HOLDER_S = 5.0  # for another start to see that a new attempt is no old one
STACKS_S = 0.5  # for siblings to write theirs, before the launcher ends them


_held: dict[Path, int] = {}  # attempts of this process, with what locks them


class Redacted:
    """A text stream without secrets. Everything else is asked of the stream itself."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, line: str) -> int:
        try:
            self.stream.write(redact.text(line))
        except OSError as error:
            left_out.note("lines of logs", error)
        return len(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            left_out.note("lines of logs", error)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def redirect(path: Path, config: "LogConfig", keep_stdout: bool = False) -> None:
    """Send this process's stderr, logging and (unless kept)
    stdout to `path`, and begin its timeline.
    """
    path = where(path.parent, config) / path.name
    refused = None
    hide_secrets()
    try:
        _send_to(path, keep_stdout)
    except OSError as error:  # it prints where whoever started it does
        refused = error
    logging.basicConfig(level=config.level.upper(), format=FORMAT, stream=sys.stderr, force=True)
    if refused is not None:
        left_out.note("a process's log file", refused)
    show_stacks_on_signal()
    if refused is None:
        keep_small(path, config)
    trace.start(path.stem)


def _send_to(path: Path, keep_stdout: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    flush()
    os.dup2(file, 2)
    if not keep_stdout:
        os.dup2(file, 1)
    os.close(file)


def where(log_dir: Path, config: "LogConfig") -> Path:
    """The directory of this process's logs."""
    return log_dir / socket.gethostname() if config.group_by_node else log_dir


def hide_secrets() -> None:
    """From now on what Python code prints has no secret in it."""
    if not isinstance(sys.stderr, Redacted):
        sys.stdout, sys.stderr = Redacted(sys.stdout), Redacted(sys.stderr)  # type: ignore[assignment]


def keep_small(path: Path, config: "LogConfig") -> None:
    """From now on, also a log that another process will write: one that this one starts."""
    if config.max_mb:
        limit = int(config.max_mb * 1e6)
        threading.Thread(
            target=_keep_small, args=(path, limit), name="log-size", daemon=True
        ).start()


def turn_over(path: Path, limit: int) -> bool:
    """Once it is larger than `limit`, `<part>.log` becomes `<part>.log.1`. Whoever writes, child
    processes too, goes on writing to the same file, now empty: it was opened to append.
    """
    if not path.exists() or path.stat().st_size <= limit:
        return False
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
    return True


def _keep_small(path: Path, limit: int) -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            turn_over(path, limit)
        # a full disk, or a run directory that was removed: the run has other worries
        except OSError as error:
            logging.getLogger(__name__).warning("%s: %s", path, error)


def show_stacks_on_signal() -> None:
    """STACKS_SIGNAL makes this process write every thread's stack to its stderr, even when it hangs
    in a library.
    """
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def show_stacks_when_stopped() -> None:
    """SIGTERM does the same before it does what it did: a rank that cannot hear it, for it hangs,
    is killed soon after.
    """
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


def ask_stacks_of_siblings() -> None:
    """The other ranks of this node, which may hang in a collective with this one, write their
    stacks to their logs.
    """
    import psutil

    parent = psutil.Process().parent()
    siblings = [
        process for process in (parent.children() if parent else []) if process.pid != os.getpid()
    ]
    for process in siblings:
        with contextlib.suppress(psutil.NoSuchProcess):
            if _listens(process.pid):
                process.send_signal(STACKS_SIGNAL)
    if siblings:
        time.sleep(STACKS_S)


def _listens(pid: int) -> bool:
    """Whether STACKS_SIGNAL has a handler there: it ends a process that has none. Linux only."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return False
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def attempts(job: Path) -> list[tuple[int, Path]]:
    """(number, directory) of each, the first one first. What else lies there under a like name is
    somebody's own: a copy, an archive.
    """
    named = ((path.name.removeprefix("attempt_"), path) for path in job.glob("logs/attempt_*"))
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def new_attempt(job: Path) -> Path:
    """Create logs/attempt_<n> and point logs/latest at it. Secrets are taken out of what attempts
    have left that were killed.
    """
    root = job / "logs"
    root.mkdir(parents=True, exist_ok=True)
    begun = attempts(job)
    for _, left in begun:
        if not (left / SCRUBBED).exists():
            _take(left)
            end_attempt(left)
    number = begun[-1][0] + 1 if begun else 1
    while True:  # explorers and a trainer of one run may start at the same time
        directory = root / f"attempt_{number}"
        try:
            directory.mkdir()
            break
        except FileExistsError:
            number += 1
    link = root / f"latest.{number}"
    link.symlink_to(directory.name)
    link.replace(root / "latest")
    _take(directory, wait_s=HOLDER_S)
    (directory / SCRUBBED).unlink(missing_ok=True)  # by a start that found it before it was taken
    return directory


def _take(directory: Path, wait_s: float = 0.0) -> None:
    """Hold an attempt until its end, or this process's; unless another process does."""
    with contextlib.suppress(OSError):  # of a file system without locks: said elsewhere
        if (descriptor := durable.lock(directory / HOLDER, wait_s=wait_s)) is not None:
            _held[directory] = descriptor


def end_attempt(directory: Path) -> None:
    """Take secrets out of what its libraries wrote past Python's own streams, once: nobody will
    write there any more. Not where another process holds it.
    """
    if (descriptor := _held.pop(directory, None)) is None:
        return
    redact.scrub(directory)
    with contextlib.suppress(OSError):  # the next start does it again
        (directory / SCRUBBED).touch()
    os.close(descriptor)
