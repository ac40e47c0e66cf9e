"""`save_strategy`: how many agents may write at the same time. No torch.

    unrestricted     all                        single_node       those of one node
    single_process   one agent in the system    single_thread
            one agent, one stream (an agent has one stream)

Locks of files (flock) in the job's control directory: the kernel gives them back when a holder
dies, so the gate cannot stay closed; one that stays closed because its holder hangs is passed,
loudly, after `patience_s`. It delays writing, never staging.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from rft.ground import durable

log = logging.getLogger(__name__)
STRATEGIES = ("unrestricted", "single_node", "single_process", "single_thread")
LOOK_S = 0.02  # between tries; nothing tells when another process's lock goes


class Gate:
    """`with gate.passed():` around the writing of one save."""

    def __init__(self, control: Path, strategy: str, patience_s: float, node: str = ""):
        self.directory = control / "gate"
        self.strategy = strategy
        self.patience_s = patience_s
        self.node = node or socket.gethostname()
        self.directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        held = self._wait() if self.strategy != "unrestricted" else []
        try:
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)

    def _wait(self) -> list[int]:
        end = time.monotonic() + self.patience_s
        while (held := self._try()) is None:
            if time.monotonic() > end:
                log.error(
                    "save_strategy=%s: waited %g s for another writer, going on",
                    self.strategy,
                    self.patience_s,
                )
                return []
            time.sleep(LOOK_S)
        return held

    def _try(self) -> list[int] | None:
        """Descriptors that hold the gate; None when it is somebody else's turn."""
        if self.strategy != "single_node":
            mine = durable.lock(self.directory / "writer")
            return [mine] if mine is not None else None
        # one at a time looks at who is inside
        door = durable.lock(self.directory / "door")
        if door is None:
            return None
        try:
            if any(
                durable.is_locked(path, by_anybody=True)
                for path in self.directory.glob("node-*")
                if path.name != f"node-{self.node}"
            ):
                return None
            mine = durable.lock(self.directory / f"node-{self.node}", shared=True)
            return [mine] if mine is not None else None
        finally:
            os.close(door)
