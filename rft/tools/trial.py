"""A trial's supervisor: `python -m rft.tools.trial LOCK`, with the composed config as one line of
JSON on standard input.

In: the config; then standard input stays open for as long as the sweep lives. Out: the run's exit
code. Nothing that a trial loads or sets survives it, because it is a process of its own. Invariant:
a trial whose sweep is gone ends as if it had got SIGTERM: with a checkpoint, and without a process
left behind. The config comes through a pipe because it may hold secrets, which belong in no file.
"""

import json
import os
import signal
import sys
import threading

from omegaconf import OmegaConf


def main(lock: str) -> int:
    from rft import train
    from rft.ground.errors import ConfigError, refuse

    os.set_inheritable(int(lock), False)  # it is held by the trial, not by what the trial starts
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for what the trial starts
    line, rest = _first_line(pipe)
    assert not rest, "the sweep sends one line"
    threading.Thread(target=_end_with_sweep, args=(pipe,), daemon=True).start()
    try:
        return train.run(OmegaConf.create(json.loads(line)))
    except ConfigError as error:
        return refuse(error)


def _first_line(pipe: int) -> tuple[bytes, bytes]:
    found = b""
    while b"\n" not in found:
        more = os.read(pipe, 2**16)
        if not more:
            sys.exit(1)  # the sweep ended before it had said anything
        found += more
    line, _, rest = found.partition(b"\n")
    return line, rest


def _end_with_sweep(pipe: int) -> None:
    while os.read(pipe, 2**16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
