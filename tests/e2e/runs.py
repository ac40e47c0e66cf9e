"""Whole runs as a user starts them: a command, its output line by line, its processes, and what it
left behind.

Every process that a run starts, however it detaches itself, stays a descendant of this one: the
test process adopts orphans, so what is left after a run can be listed exactly.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from rft.buffer.journal import Journal
from rft.buffer.progress import Consumed, Issued, Leased, Progress, Resumed, decode_record
from rft.ground.process import adopt_orphans

REPOSITORY = Path(__file__).resolve().parents[2]
LETTERS = f"{REPOSITORY / 'tests' / 'e2e' / 'letters.py'}:reward"
START_S = 240.0  # until the first step, on a busy machine
END_S = 180.0
FOREIGN_RAY = {"RAY_ADDRESS": "127.0.0.1:1"}  # which a run with a Ray of its own must not look at
MODEL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 128}
TASKS = 4  # of one step
REPEATS = 4  # responses to one task


def overrides(root: Path, name: str, assets: Path, *more: str) -> list[str]:
    """A small grpo run on `assets` (see `write_assets`)."""
    return [
        "experiment=grpo",
        f"name={name}",
        f"checkpoint_root_dir={root}",
        "device=cpu",
        "monitor=none",
        f"model.model_path={assets / 'model'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        f"algorithm.repeat_times={REPEATS}",
        f"buffer.batch_size={TASKS}",
        "buffer.total_epochs=1000",
        f"buffer.explorer_input.default_reward_fn_type={LETTERS}",
        "algorithm.optimizer.lr=1e-4",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        "explorer.rollout_model.kv_cache_gb=0.25",
        "trainer.max_token_len_per_gpu=4096",
        *more,
    ]


def write_assets(directory: Path) -> Path:
    from rft.tools.toy import write_arithmetic, write_model

    write_model(directory / "model", **MODEL)
    write_arithmetic(directory, digits=1, num_eval=16)
    return directory


class Run:
    """`command` under way. Ended with everything it started when the block is left."""

    def __init__(self, command: list[str]):
        adopt_orphans()
        self.before = {process.pid for process in psutil.Process().children(recursive=True)}
        self.shared_before = set(os.listdir("/dev/shm"))
        self.lines: list[str] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._passed_over: deque[str | None] = deque()  # to be read first
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with this object
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **FOREIGN_RAY},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._unread.put(line)
        self._unread.put(None)

    def wait_for(
        self, pattern: str, timeout: float = START_S, keep: bool = False
    ) -> "re.Match[str]":
        """The next line of stdout that `pattern` is found in. `keep`: lines before it may still be
        waited for: what goes on beside is told in any order.
        """
        passed_over: list[str | None] = []
        while True:
            try:
                line = (
                    self._passed_over.popleft()
                    if self._passed_over
                    else self._unread.get(timeout=timeout)
                )
            except queue.Empty:
                raise AssertionError(f"{timeout} s without {pattern!r}: {self.lines}") from None
            assert line is not None, f"ended without {pattern!r}: {self.lines}\n{self.errors()}"
            if found := re.search(pattern, line):
                self._passed_over.extendleft(reversed(passed_over))
                return found
            if keep:
                passed_over.append(line)

    def wait_step(self, least: int) -> int:
        """Return the step of the first line that tells of step `least` or a later one."""
        while (step := int(self.wait_for(r"^\[ *(\d+)/\d+ .*loss").group(1))) < least:
            pass
        return step

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self, timeout: float = END_S, lingering: float = 0.0) -> int:
        """Wait for the exit code; whatever the code, nothing that the run started may be left
        running.

        Nor in shared memory, except for semaphores: a process that had to be killed leaves its own,
        and nothing tells them from those of another run. `lingering`: seconds that the rest may
        take to end after the process that was started.
        """
        code = self.process.wait(timeout)
        self.await_extinction(lingering)
        self._reader.join(10)
        left = {name for name in self.left_in_shared_memory() if not name.startswith("sem.mp-")}
        assert left == set()
        return code

    def family(self) -> list[psutil.Process]:
        """All live processes of the run.

        Reaps adopted ones that have ended, as init does: Ray takes a zombie for alive.
        """
        found = [p for p in psutil.Process().children(recursive=True) if p.pid not in self.before]
        _, alive = psutil.wait_procs([p for p in found if p.pid != self.process.pid], timeout=0)
        return alive + ([psutil.Process(self.process.pid)] if self.process.poll() is None else [])

    def find(self, title: str) -> psutil.Process:
        """The one process of the run whose command line contains `title`."""
        found = self.find_all(title)
        assert len(found) == 1, (title, found)
        return found[0]

    def find_all(self, title: str) -> list[psutil.Process]:
        """The oldest first."""
        found = [process for process in self.family() if title in _title(process)]
        return sorted(found, key=psutil.Process.create_time)

    def await_extinction(self, timeout: float) -> None:
        """All processes of the run end by themselves within `timeout`."""
        deadline = time.monotonic() + timeout
        while family := self.family():
            assert time.monotonic() < deadline, f"still alive after {timeout} s: {family}"
            psutil.wait_procs(family, timeout=0.2)

    def left_in_shared_memory(self) -> set[str]:
        """Files under /dev/shm made since the start that no process has open."""
        return {
            name
            for name in set(os.listdir("/dev/shm")) - self.shared_before
            if not _is_open(f"/dev/shm/{name}")
        }

    def kill_everything(self) -> None:
        while family := self.family():
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=10)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_everything()
        self.process.wait(10)
        self._reader.join(10)
        self._errors.close()


def _title(process: psutil.Process) -> str:
    """Its command line; empty when it has just ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""


def _is_open(path: str) -> bool:
    for process in psutil.process_iter():
        try:
            if any(link.startswith(path) for link in _links(process.pid)):
                return True
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
    return False


def _links(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    mapped = [
        line.split()[-1]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]
    return mapped + [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]


def train(*arguments: str) -> Run:
    """`python -m rft.train ARGUMENTS`."""
    return Run([sys.executable, "-m", "rft.train", *arguments])


def torchrun(ranks: int, *arguments: str) -> Run:
    """The same under an outer torchrun, as `launch/torchrun.sh` starts it."""
    launcher = [sys.executable, "-m", "rft.run.loopback", f"--nproc-per-node={ranks}"]
    return Run([*launcher, "-m", "rft.train", *arguments])


def metrics(job: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]


def step_rows(job: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that tell of a training step, as written."""
    return [row for row in metrics(job) if "time/step_s" in row]


def checkpoints(job: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    names = [path.name.removeprefix("step_") for path in (job / "checkpoints").glob("step_*")]
    return sorted(
        int(name) for name in names if name.isdigit()
    )  # a draft that a killed agent left has more in its name


def is_one_line(errors: str, *words: str) -> bool:
    """Whether stderr is exactly one line and has all the words."""
    return (
        errors.count("\n") == 1
        and errors.startswith("rft: ")
        and all(word in errors for word in words)
    )


class History:
    """What a run's journal tells, record by record."""

    def __init__(self, directory: Path):
        journal = Journal(str(directory), 64 * 2**20)
        self.records = [decode_record(payload) for _, payload in journal.records()]
        journal.close()
        self.progress = Progress()
        for record in self.records:
            self.progress.apply(record)

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def check_exactly_once(self, steps: int) -> None:
        """Every step has one batch, every admitted group is in exactly one, and training went
        through them in order.
        """
        assert sorted(self.progress.leases) == list(range(steps))
        leased = [group for record in self.of(Leased) for group in record.groups]
        assert len(leased) == len(set(leased))
        issued = {record.group for record in self.of(Issued)}
        assert set(leased) | set(self.progress.waiting) == issued
        at = 0
        for record in self.records:
            if isinstance(record, Resumed):
                assert record.step <= at, "a trainer went on behind what had been trained"
                at = record.step
            elif isinstance(record, Consumed):
                assert record.step == at, "a step was trained twice, or left out"
                at += 1
        assert at == steps


SIGNALS = (signal.SIGTERM, signal.SIGINT)
