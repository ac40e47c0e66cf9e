"""Gloo ranks for tests: one process per session that imports megatron once and forks the ranks of
every job, by import path.

`run("jobs:train", world=2, ...)` calls `jobs.train(...)` in two processes, each with its RANK and
WORLD_SIZE, and returns their results in rank order. When a rank fails or hangs, all of its job end,
and so does the process that forked them; the next `run` starts a new one.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rft.extras.pipeline.data_juicer import free_port
from rft.ground.process import die_with_parent

SIZE = 32
# a cold import of megatron on a loaded machine takes 20 s, the longest job 20 s on a quiet one
RESULT_TIMEOUT_S = 240


class Ranks:
    """`front`: directories that come first on the path of the processes."""

    def __init__(self, *front: Path) -> None:
        self.front = front
        self.server: Any = None
        self.jobs: Any = None
        self.results: list[Connection] = []

    def run(self, job: str, world: int, **arguments: Any) -> list[Any]:
        if self.server is None:
            self._start()
        self.jobs.send((job, world, free_port(), arguments))
        results, failures = [], []
        for rank, connection in enumerate(self.results[:world]):
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

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(SIZE)]
        jobs, self.jobs = context.Pipe(duplex=False)
        there = [writer for _, writer in pipes]
        self.server = context.Process(target=_serve, args=(jobs, there, self.front), daemon=True)
        self.server.start()
        for connection in (jobs, *there):
            connection.close()
        self.results = [reader for reader, _ in pipes]

    def stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.join()
            for connection in (self.jobs, *self.results):
                connection.close()
            self.server = None


def _serve(jobs: Connection, results: list[Connection], front: tuple[Path, ...]) -> None:
    """Fork the ranks of one job after the other until the parent goes away."""
    sys.path[:0] = map(str, front)
    import torch
    import torch._dynamo  # which torch's optimizers load at their first step, half a second each

    from rft.megatron import cpu_port

    faulthandler.enable()
    torch.set_num_threads(1)
    cpu_port.install()
    while True:
        try:
            job, world, port, arguments = jobs.recv()
        except EOFError:
            sys.exit(0)
        with contextlib.suppress(Exception):  # of an import: the child meets it too, and says so
            importlib.import_module(job.split(":")[0])
        for rank in range(world):
            if os.fork() == 0:
                _work(results[rank], job, rank, world, port, arguments)
        for _ in range(world):
            if os.wait()[1]:
                os._exit(1)  # which ends its peers: they may wait for this rank


def _work(
    connection: Connection, job: str, rank: int, world: int, port: int, arguments: dict[str, Any]
) -> NoReturn:
    """One job, in a process of its own: what it leaves behind ends with it.

    Process groups that a model still holds keep threads which wake a hundred times a second: those
    of a few dozen models take a whole core from all jobs after them.
    """
    die_with_parent()
    if world > 1:  # one starts without a launcher
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    module, function = job.split(":")
    try:
        result = getattr(importlib.import_module(module), function)(**arguments)
        # by value: torch would hand over memory of this process, which ends here
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        connection.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        os._exit(1 if world > 1 else 0)
    os._exit(0)
