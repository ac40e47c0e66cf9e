"""How an engine's process ended, for the message about its death."""

import signal
import time
from typing import Any


def await_exit_code(process: Any) -> None:
    """Return once an ended process's exit code is known, or after a second: vLLM waits for the same
    process in a thread of its own, and whichever of the two the kernel did not tell sees None until
    the other one has noted it.
    """
    deadline = time.monotonic() + 1
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "ended, how is not known"
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
