"""One run of rft for `bench.loop`: started as a user starts it, pinned to cores when its clock
starts, and read afterwards.

    python -m rft.train ... ──stdout: a line per step──┐
    its rollouts ──pipe: when each began and ended──── ┴──► events
            ──► pin at the first, processor time there and at the last

In: a model, a task file, the sizes of a run and its way. Out: `Measured`. Pinning is done from
outside, thread by thread: the trainer ranks to core 0, everything else (engine, explorer and its
rewards, buffer, synchronizer, Ray) to core 1, in every way the same. What a run starts afterwards
inherits the core of whoever starts it. Rollouts that are to begin together with a training hold
their first tasks until a file is there.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import report
from bench.loop_where import Counts, counted, part_of, where
from rft.ground.process import adopt_orphans
from rft.monitor.run_record import RunRecord

REPOSITORY = Path(__file__).resolve().parents[1]
TASKS_FILE = Path(__file__).with_name("loop_tasks.py")
ASYNC, EVEN, ROLLOUT, TOGETHER = "async", "even", "rollouts alone", "halves together"
KEPT = "kept"
MODES = {ASYNC: "both", KEPT: "both", EVEN: "both", ROLLOUT: "explore"}
TASKS, REPEATS = 16, 8  # of one step
TEMPLATE = 16  # tokens, at most, of a sum and of the chat template around a prompt
SAVE_EVERY, EVALUATE_EVERY, EVALUATED = 4, 6, 64  # steps, steps, tasks: of `even`
RANK_CORE, OTHER_CORE = 0, 1
EVENT_S = 300.0  # a start on a busy machine takes a minute; no step takes that long
SPANS = ("wait_batch", "score", "train", "sync_wait", "staging_wait")


@dataclass(frozen=True)
class Sizes:
    """What all ways of a comparison have in common. `rows`: the file of tasks."""

    prompt: int  # tokens; 0: of a sum
    tokens: int  # of every response
    steps: int
    dtype: str
    rows: Path

    @property
    def name(self) -> str:
        return f"{self.prompt}:{self.tokens}" if self.prompt else str(self.tokens)


@dataclass
class Measured:
    """Seconds of the clock of `bench.loop`; of steps those after the first, which warms up, as
    medians.
    """

    wall: float
    busy: float  # processor seconds
    steps: list[float] = field(default_factory=list)
    spans: dict[str, float] = field(default_factory=dict)
    rollouts: float = 0.0  # seconds in which at least one group was in work
    tokens: int = 0
    where: dict[str, float] = field(default_factory=dict)  # processor seconds by row
    first_wait: float = 0.0
    idle: float = 0.0  # share of the time after the first step in which the engine decoded nothing
    slower: str = ""  # half, of two


class LoopRun:
    """`python -m rft.train` under way; with everything it started
    it is ended when the block is left.
    """

    def __init__(self, arguments: list[str], pipe: Path):
        adopt_orphans()
        self.before = {process.pid for process in psutil.Process().children(recursive=True)}
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.pipe = os.open(
            pipe, os.O_RDWR
        )  # also for writing: no writer is the last one, and `end` can say that it is over
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with this object
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rft.train", *arguments],
            cwd=REPOSITORY,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_lines, self._read_groups)
        ]
        for reader in self.readers:
            reader.start()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(("line", line.rstrip("\n")))
        self.events.put(("ended", None))

    def _read_groups(self) -> None:
        with os.fdopen(self.pipe, "r", closefd=False) as lines:
            for line in iter(lines.readline, "\n"):
                self.events.put(("group", json.loads(line)))

    def next(self, waited_for: str) -> tuple[str, Any]:
        """The next event; raises when the run has ended or nothing happens for too long."""
        try:
            kind, what = self.events.get(timeout=EVENT_S)
        except queue.Empty:
            raise TimeoutError(f"{waited_for}: nothing happened for {EVENT_S:g} s") from None
        if kind == "ended":
            raise RuntimeError(
                f"{waited_for}: the run ended first, with code "
                f"{self.process.wait()}\n{self._said()}"
            )
        return kind, what

    def finish(self) -> None:
        """Wait for a good end."""
        code = self.process.wait(EVENT_S)
        if code:
            raise RuntimeError(f"the run ended with code {code}\n{self._said()}")

    def _said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def family(self) -> list[psutil.Process]:
        """All its live processes: the supervisor adopts those that have left their parents."""
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid)
            return [mine, *mine.children(recursive=True)]
        return []

    def pin(self) -> None:
        """Every thread of every process to its core; then again, for those that one not yet pinned
        started meanwhile.
        """
        for _ in range(2):
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    pin(process.pid, RANK_CORE if part_of(process) == "trainer" else OTHER_CORE)

    def counts(self) -> Counts:
        return counted(self.family(), time.time())

    def __enter__(self) -> "LoopRun":
        return self

    def __exit__(self, *_: object) -> None:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in self.before]
        # those of a supervisor that failed, and what it has left to this process
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        self.process.wait(10)
        os.write(self.pipe, b"\n")
        for reader in self.readers:
            reader.join(10)
        os.close(self.pipe)
        self.errors.close()


def pin(process: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), {core})


def overrides(root: Path, name: str, mode: str, sizes: Sizes, pipe: Path, gate: str) -> list[str]:
    """The command line of a run.

    `root` holds the model; runs of one `name` share their journal. `gate`: a file that the first
    tasks wait for.
    """
    return [
        "experiment=grpo",
        f"mode={mode}",
        f"name={name}",
        f"checkpoint_root_dir={root / 'runs'}",
        "device=cpu",
        "monitor=none",
        "monitor.num_samples=0",
        f"model.model_path={root / 'model'}",
        f"model.max_prompt_tokens={sizes.prompt + TEMPLATE}",
        f"model.max_response_tokens={sizes.tokens}",
        f"model.min_response_tokens={sizes.tokens - 1}",
        f"algorithm.repeat_times={REPEATS}",
        "algorithm.optimizer.lr=1e-6",
        f"buffer.batch_size={TASKS}",
        "buffer.total_epochs=1000",
        f"buffer.explorer_input.default_workflow_type={TASKS_FILE}:Timed",
        f"buffer.explorer_input.default_reward_fn_type={TASKS_FILE}:reward",
        f"buffer.explorer_input.taskset.path={sizes.rows}",
        f"+buffer.explorer_input.taskset.workflow_args.pipe={pipe}",
        f"+buffer.explorer_input.taskset.workflow_args.gate={gate}",
        "synchronizer.max_staleness=1",
        f"explorer.runner_per_model={2 * TASKS}",
        "explorer.eval_on_startup=false",
        "explorer.rollout_model.kv_cache_gb=1.0",
        # compiled before the clock runs: half a minute more of a start, a quarter less of decoding
        "explorer.rollout_model.enforce_eager=false",
        # of one step: the next one's groups wait in the engine, and begin as those of this one end
        f"explorer.rollout_model.max_num_seqs={TASKS * REPEATS}",
        f"trainer.dtype={sizes.dtype}",
        f"trainer.total_steps={sizes.steps}",
        # 8192 touch twice the memory in the first step and are no quicker: docs/measured.md
        "trainer.max_token_len_per_gpu=2048",
        "trainer.save_interval=0",
        "trainer.save_hf_checkpoint=never",
    ]


def evenness(sizes: Sizes) -> list[str]:
    """What `even` does besides: checkpoints and evaluations while it trains."""
    held_out = sizes.rows.with_name("held_out.jsonl")
    if not held_out.exists():
        with sizes.rows.open(encoding="utf-8") as rows:
            lines = [line for line, _ in zip(rows, range(EVALUATED), strict=False)]
        held_out.write_text("".join(lines), encoding="utf-8")
    taskset = f"{{name: held_out, path: {held_out}, format: {{prompt_type: plaintext}}}}"
    return [
        f"buffer.explorer_input.eval_tasksets=[{taskset}]",
        "buffer.explorer_input.default_eval_workflow_type=single_turn",
        f"explorer.eval_interval={EVALUATE_EVERY}",
        f"trainer.save_interval={SAVE_EVERY}",
        # an evaluation has an eighth as many under way as training; a step's are one wave still
        f"explorer.rollout_model.max_num_seqs={TASKS * REPEATS * 9 // 8}",
    ]


def started(root: Path, name: str, mode: str, sizes: Sizes, more: list[str], gate: str) -> LoopRun:
    pipe = root / f"{name}-{mode}.pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    return LoopRun([*overrides(root, name, mode, sizes, pipe, gate), *more], pipe)


def measure(root: Path, name: str, way: str, sizes: Sizes) -> Measured:
    """Run one way from its start to its end."""
    groups: list[dict[str, Any]] = []
    begin: Counts | None = None
    more = evenness(sizes) if way == EVEN else ["synchronizer.kv=keep"] if way == KEPT else []
    with started(root, name, MODES[way], sizes, more, "") as run:
        while True:
            kind, what = run.next(f"{way}: {'its last step' if begin else 'its first step'}")
            groups += [what] if kind == "group" else []
            if begin is None and is_first(way, kind, what):
                run.pin()
                begin = run.counts()
            if is_last(way, sizes, kind, what, groups):
                break
        assert begin is not None
        end = run.counts()
        run.finish()
    job = root / "runs" / "rft" / name
    found = read(job, way, sizes, groups)
    found.busy, found.where = end.whole - begin.whole, where(begin, end, job)
    return found


def measure_together(root: Path, name: str, sizes: Sizes) -> Measured:
    """Rollouts, and beside them the training on what `rollouts alone` of this `name` has left:
    nothing goes from one to the other. The clock begins with the first step of the training.
    """
    gate, beside = root / f"{name}.gate", f"{name}-beside"
    gate.unlink(missing_ok=True)
    groups: list[dict[str, Any]] = []
    with started(root, beside, "explore", sizes, [], str(gate)) as rollouts:
        while rollouts.next("rollouts: their first task") != ("group", {"held": True}):
            pass
        with started(root, name, "train", sizes, [], "") as training:
            while not is_first(ASYNC, *training.next("training: its first step")):
                pass
            rollouts.pin()
            training.pin()
            gate.touch()
            begin = [run.counts().whole for run in (rollouts, training)]
            while not is_last(ROLLOUT, sizes, "group", None, groups):
                kind, what = rollouts.next("rollouts: their last task")
                groups += [what] if kind == "group" and "held" not in what else []
            end = [rollouts.counts().whole]  # it may end before the training does
            while not is_last(ASYNC, sizes, *training.next("training: its last step"), groups):
                pass
            end.append(training.counts().whole)
            training.finish()
    runs = root / "runs" / "rft"
    halves = {
        "rollouts": read(runs / beside, ROLLOUT, sizes, groups),
        "training": read(runs / name, TOGETHER, sizes, []),
    }
    slower = max(halves, key=lambda half: halves[half].wall)
    found = halves[slower]
    found.slower, found.steps = slower, halves["training"].steps
    found.rollouts = halves["rollouts"].rollouts
    found.busy = sum(end) - sum(begin)
    return found


def is_first(way: str, kind: str, what: Any) -> bool:
    """Rank 0 says `trainer: ...` just before its first step;
    rollouts alone begin with the first group.
    """
    return kind == "group" if way == ROLLOUT else kind == "line" and what.startswith("trainer: ")


def is_last(way: str, sizes: Sizes, kind: str, what: Any, groups: list[dict[str, Any]]) -> bool:
    if way == ROLLOUT:
        return sum("tokens" in group for group in groups) == sizes.steps * TASKS
    step = re.match(r"\[ *(\d+)/", what) if kind == "line" else None
    return step is not None and int(step.group(1)) == sizes.steps


def read(job: Path, way: str, sizes: Sizes, groups: list[dict[str, Any]]) -> Measured:
    """Put together what the run said and wrote; raises when it did other work than was asked
    for. Of `halves together`, the training.
    """
    ended = [group for group in groups if "tokens" in group]
    tokens = sum(group["tokens"] for group in ended)
    trained = sizes.steps * TASKS * REPEATS * sizes.tokens
    if way != TOGETHER and tokens != trained:
        raise RuntimeError(
            f"{way}: {len(ended)} groups with {tokens} tokens are not what {sizes} asks for"
        )
    working = in_work(groups)
    if way == ROLLOUT:
        return Measured(groups[-1]["at"] - groups[0]["at"], 0.0, rollouts=working, tokens=tokens)
    rows = RunRecord(job).timed
    lengths = {row["response_length/mean"] for row in rows}
    if (
        len(rows) != sizes.steps
        or lengths != {float(sizes.tokens)}
        or {row["sample/groups"] for row in rows} != {TASKS}
    ):
        raise RuntimeError(
            f"{way}: {len(rows)} steps with responses of {lengths} tokens are not what {sizes} "
            "asks for"
        )
    steps = [row["time/step_s"] for row in rows]
    spans = {
        span: report.median([row.get(f"time/{span}_s", 0.0) for row in rows[1:]]) for span in SPANS
    }
    idle = [
        row["explorer/engine_idle_frac"] * row["time/step_s"]
        for row in rows[1:]
        if "explorer/engine_idle_frac" in row
    ]
    return Measured(
        sum(steps),
        0.0,
        steps,
        spans,
        working,
        trained,
        first_wait=rows[0]["time/wait_batch_s"],
        idle=sum(idle) / sum(steps[1:]) if idle else float("nan"),
    )


def in_work(groups: list[dict[str, Any]]) -> float:
    """Seconds in which at least one group had begun and not ended."""
    total, running, since = 0.0, 0, 0.0
    for group in sorted(groups, key=lambda group: group["at"]):
        if "tokens" in group:
            running -= 1
            total += group["at"] - since if not running else 0.0
        else:
            since = since if running else group["at"]
            running += 1
    return total
