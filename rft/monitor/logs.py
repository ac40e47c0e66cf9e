"""Where a process of the run writes: `<job>/logs/attempt_<n>/<part>.log`, for Python logging and for stray output alike.

Invariant: after `redirect`, whatever the process or a library or child of it prints to stderr (and stdout, unless kept for
the user) is in that file and not on the user's terminal.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STACKS_SIGNAL = signal.SIGUSR2


def redirect(path: Path, level: str, keep_stdout: bool = False) -> None:
    """Send this process's stderr, logging and (unless kept) stdout to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    flush()
    os.dup2(file, 2)
    if not keep_stdout:
        os.dup2(file, 1)
    os.close(file)
    logging.basicConfig(level=level.upper(), format=FORMAT, stream=sys.stderr, force=True)
    show_stacks_on_signal()


def show_stacks_on_signal() -> None:
    """STACKS_SIGNAL makes this process write every thread's stack to its stderr, even when it hangs in a library."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def new_attempt(job: Path) -> Path:
    """Create logs/attempt_<n> and point logs/latest at it."""
    root = job / "logs"
    root.mkdir(parents=True, exist_ok=True)
    number = max((int(p.name.removeprefix("attempt_")) for p in root.glob("attempt_*")), default=0) + 1
    directory = root / f"attempt_{number}"
    directory.mkdir()
    link = root / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.name)
    link.replace(root / "latest")
    return directory
