"""Persistent gloo ranks for tests: four processes per session that import megatron once and fork a
child for every job, by import path.

`run("jobs:train", world=2, ...)` calls `jobs.train(...)` in the first two processes, each with its
RANK and WORLD_SIZE, and returns their results in rank order. A job that fails or hangs ends all
processes; the next `run` starts new ones.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rft.ground.process import die_with_parent

SIZE = 4
# a cold import of megatron on a loaded machine takes 20 s, the longest job 20 s on a quiet one
RESULT_TIMEOUT_S = 240


class Ranks:
    """`front`: a directory that comes first on the path of the processes."""

    def __init__(self, front: Path | None = None) -> None:
        self.front = front
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, job: str, world: int, **arguments: Any) -> list[Any]:
        self._start(world)
        port = _free_port()
        for rank in range(world):
            self.workers[rank][1].send((job, rank, world, port, arguments))
        results, failures = [], []
        for rank in range(world):
            connection = self.workers[rank][1]
            if not connection.poll(RESULT_TIMEOUT_S if not failures else 5):
                failures.append(f"rank {rank} gave no answer")
                continue
            try:
                ok, value = connection.recv()
            except (EOFError, OSError):
                ok, value = False, f"rank {rank} died"
            (results if ok else failures).append(value)
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < count:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self.front), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Connection, front: Path | None) -> None:
    """One rank: executes jobs until the parent goes away."""
    if front is not None:
        sys.path.insert(0, str(front))
    import torch

    from rft.megatron import cpu_port

    faulthandler.enable()
    torch.set_num_threads(1)
    cpu_port.install()
    while True:
        try:
            job, rank, world, port, arguments = connection.recv()
        except EOFError:
            sys.exit(0)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        if world == 1:  # also covers the start without a launcher
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        with contextlib.suppress(Exception):  # of an import: the child meets it too, and says so
            importlib.import_module(job.split(":")[0])
        child = os.fork()
        if child == 0:
            _work(connection, job, rank, world, arguments)
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)  # peers may wait for this rank


def _work(
    connection: Connection, job: str, rank: int, world: int, arguments: dict[str, Any]
) -> NoReturn:
    """One job, in a process of its own: what it leaves behind ends with it.

    Process groups that a model still holds keep threads which wake a hundred times a second: those
    of a few dozen models take a whole core from all jobs after them.
    """
    die_with_parent()
    module, function = job.split(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        # by value: torch would hand over memory of this process, which ends here
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        connection.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        os._exit(1 if world > 1 else 0)
    os._exit(0)
