"""One case of `bench.checkpoint` on one rank: the modes take turns, each save is timed and its bits
are compared.

In: a `Case`. Out: rank 0's list of `Sample`, one per save, each the worst over the ranks.
`run_rank` is the whole process.
"""

import logging
import os
import queue
import random
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Queue
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from bench import report
from bench.checkpoint_peers import PEERS, Mode
from bench.checkpoint_rft import RFT
from bench.checkpoint_state import State, Training
from rft.ground.device import freeze_loaded

MODES: dict[str, type[Mode]] = {mode.name: mode for mode in [*PEERS, *RFT]}
CLEAN_STEPS = 5  # measured just before each save
PATIENCE_STEPS = 60  # then the save is waited for


@dataclass(frozen=True)
class Case:
    world: int
    threads: int
    mib: int
    rounds: int  # saves per mode after the first, at most
    # rounds end when another one would not fit; the first always runs, and one more
    budget_s: float
    modes: tuple[str, ...]
    root: Path

    @property
    def name(self) -> str:
        return f"world {self.world}, {self.threads} compute thread{'s' * (self.threads > 1)}"


@dataclass
class Sample:
    """One save. Seconds and bytes."""

    mode: str
    first: bool
    block: float = 0.0  # in save, before_update, poll and finish
    call: float = 0.0  # in save alone
    update_wait: float = 0.0  # in before_update alone
    lost: float = 0.0
    durable: float = 0.0
    clean: float = 0.0  # median step without a save
    steps: int = 0
    peak: int = 0  # growth of this process while it saved; what forks and workers take is not in it
    wrong: int = 0  # tensors that differ from the state at the call


@dataclass
class Result:
    samples: list[Sample] = field(default_factory=list)
    copy_s: float = 0.0  # a warm copy of the same bytes
    start_s: dict[str, float] = field(default_factory=dict)
    # growth of this process at the start of a mode
    start_bytes: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0


class Timer:
    """Seconds in calls of a mode."""

    def __init__(self) -> None:
        self.total = 0.0

    @contextmanager
    def __call__(self):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        yield
        self.total += time.perf_counter() - begin


def _own_memory() -> int:
    return psutil.Process().memory_info().rss


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def measure(
    mode: Mode, step: int, state: State, training: Training, first: bool
) -> tuple[Sample, int]:
    """Clean steps, one save, steps until it is durable.

    Also the version of the state at the call.
    """
    clean = []
    for _ in range(CLEAN_STEPS):
        begin = time.perf_counter()
        training.step(state, lambda: None)
        training.agree(1.0, dist.ReduceOp.MIN)
        clean.append(time.perf_counter() - begin)
    sample = Sample(mode.name, first, clean=report.median(clean))
    if training.world > 1:
        dist.barrier()
    before = _own_memory()
    _reset_peak()
    timer, update_timer = Timer(), Timer()
    version = state.version

    def before_update() -> None:
        with update_timer():
            mode.before_update()

    begin = time.perf_counter()
    with timer():
        mode.save(step, state)
    sample.call = timer.total
    durable = _train_until_durable(
        mode, sample, timer, lambda: training.step(state, before_update), training
    )
    end = time.perf_counter()
    sample.durable = (mode.durable_at() or durable) - begin
    sample.update_wait = update_timer.total
    sample.block = timer.total + update_timer.total
    sample.lost = end - begin - sample.steps * sample.clean
    sample.peak = _peak() - before
    return sample, version


def _train_until_durable(
    mode: Mode, sample: Sample, timer: Timer, train: Callable[[], None], training: Training
) -> float:
    """Rank by rank a save may be durable at different steps; all go on until the last one is."""
    noticed: float | None = time.perf_counter() if mode.kind == "sync" else None
    if noticed is not None:
        return noticed
    while True:
        train()
        sample.steps += 1
        with timer():
            if noticed is None and mode.poll():
                noticed = time.perf_counter()
            elif noticed is None and sample.steps >= PATIENCE_STEPS:
                mode.finish()
        if training.agree(float(noticed is not None), dist.ReduceOp.MIN):
            return noticed or time.perf_counter()


def _worst(samples: list[Sample]) -> Sample:
    """One save as the job sees it: the slowest rank, all wrong tensors."""
    worst = samples[0]
    for field_name in ("block", "call", "update_wait", "lost", "durable", "peak"):
        setattr(worst, field_name, max(getattr(sample, field_name) for sample in samples))
    worst.wrong = sum(sample.wrong for sample in samples)
    return worst


def _warm_copy(state: State) -> float:
    """The bound of an eager save: this rank's bytes copied to memory that is there already."""
    target = {name: torch.ones_like(tensor) for name, tensor in state.tensors.items()}
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        for name, tensor in state.tensors.items():
            target[name].copy_(tensor)
        times.append(time.perf_counter() - begin)
    return report.median(times[1:])


class Turns:
    """All modes of a case, in a random order every round that is the same on every rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.training = Training(case.world)
        self.result = Result()
        self.state = State(case.mib, rank, case.world)
        self.result.state_bytes = self.state.bytes * case.world
        self.result.copy_s = _warm_copy(self.state)
        group = dist.new_group(backend="gloo")
        self.modes = [MODES[name](case.root, rank, case.world, group) for name in case.modes]
        self.states: dict[str, State] = {}
        self.landing = self.state.landing()
        self.step = 0

    def run(self, progress: Callable[[str], None]) -> Result:
        try:
            for mode in self.modes:
                own = mode.own_state
                self.states[mode.name] = (
                    State(self.case.mib, self.rank, self.case.world) if own else self.state
                )
                begin, before = time.perf_counter(), _own_memory()
                mode.start(self.states[mode.name])
                self.result.start_s[mode.name] = time.perf_counter() - begin
                self.result.start_bytes[mode.name] = _own_memory() - before
            freeze_loaded()  # as a rank does before it trains: no mode's steps wait for that
            self._rounds(progress)
        finally:
            for mode in self.modes:
                mode.close()
        return self.result

    def _rounds(self, progress: Callable[[str], None]) -> None:
        order = random.Random(3)
        begin = time.perf_counter()
        for number in range(self.case.rounds + 1):
            before = time.perf_counter()
            order.shuffle(self.modes)
            for mode in self.modes:
                self._turn(mode, first=number == 0)
            now = time.perf_counter()
            progress(
                f"{self.case.name}: round {number} of at most {self.case.rounds}, "
                f"{now - begin:.0f} s"
            )
            late = number > 0 and now - begin + now - before > self.case.budget_s
            if self.training.agree(float(late), dist.ReduceOp.MAX):
                break

    def _turn(self, mode: Mode, first: bool) -> None:
        self.step += 1
        state = self.states[mode.name]
        sample, version = measure(mode, self.step, state, self.training, first)
        if mode.kind != "none":
            for tensor in self.landing.values():
                tensor.fill_(1)  # what a load leaves out must not look right by chance
            sample.wrong = state.differing(mode.load(self.step, state, self.landing), version)
        everyone: list[Any] = [None] * self.case.world
        dist.all_gather_object(everyone, sample)
        self.result.samples.append(_worst(everyone))
        if self.rank == 0:
            mode.drop(self.step)
        dist.barrier()


def run_rank(case: Case, rank: int, port: int, results: "Queue[Any]") -> None:
    """A rank's process.

    Rank 0 sends progress lines and then the `Result`; every rank sends the text of its failure.
    """
    logging.basicConfig(level=logging.WARNING, format="%(processName)s %(levelname)s %(message)s")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(case.threads),
    }
    torch.set_num_threads(case.threads)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=case.world)
        found = Turns(case, rank).run(results.put if rank == 0 else lambda text: None)
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            results.put(found)
    except BaseException:
        results.put(RuntimeError(f"rank {rank} of {case.name} failed:\n{traceback.format_exc()}"))
        raise


def receive(results: "Queue[Any]", ranks: list[Any]) -> Result:
    """Print the progress until the result comes. Raises RuntimeError for a rank that failed."""
    while True:
        try:
            found = results.get(timeout=1.0)
        except queue.Empty:
            if dead := [rank.exitcode for rank in ranks if rank.exitcode not in (None, 0)]:
                raise RuntimeError(f"a rank ended with {dead[0]}") from None
            continue
        if isinstance(found, Result):
            return found
        if isinstance(found, RuntimeError):
            raise found
        print(found, flush=True)


def clear(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
