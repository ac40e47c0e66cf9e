"""Stages 4 to 10: whole runs, started as a user starts them.

    python -m bench.gpu.runs quickstart|qwen3_0_6b|qwen3_8b|experts|nsys|resume cuda|cpu

In: a kind of device. Out: see `bench.gpu.checks`; what a run says is in the log. On "cpu" the same
stages start the same runs with toy models, few steps, and as many ranks and engines as two cores
bear; bars of quality and speed are not asked there.
"""

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.gpu.checks import Checks, main
from rft.ground.process import adopt_orphans, end_descendants
from rft.monitor.run_record import RunRecord
from rft.run import cards
from rft.tools.toy import write_arithmetic

REPOSITORY = Path(__file__).resolve().parents[2]
REWARD = f"{REPOSITORY / 'bench' / 'loop_tasks.py'}:reward"
STEP = re.compile(r"^\[ *(\d+)/\d+ .*loss")
GOES_ON_S = 60.0  # after a death
# of a step; the second so many that a disk has written 8 GB before the next save but one begins,
# for two saves are kept in memory and a third waits
ROWS, LONG_STEP_ROWS = 512, 8192
SHORT_QUICKSTART = (
    "stages.0.trainer.total_steps=6",
    "stages.0.trainer.stop_at_loss=null",
    "stages.0.buffer.train_batch_size=16",
    "stages.1.trainer.total_steps=4",
    "stages.1.buffer.batch_size=8",
    "stages.1.algorithm.repeat_times=4",
    "explorer.rollout_model.kv_cache_gb=0.25",
)
SHORT_GRPO = (
    "model.max_response_tokens=8",
    "buffer.batch_size=4",
    "algorithm.repeat_times=4",
    "explorer.rollout_model.kv_cache_gb=0.25",
    "trainer.max_token_len_per_gpu=4096",
)
LONG_GRPO = (
    "model.max_response_tokens=2048",
    "buffer.batch_size=32",
    "algorithm.repeat_times=8",
    "trainer.max_token_len_per_gpu=16384",
)


class Run:
    """`python -m rft.train WORDS` under way, with `before` in front; ended, with all that it has
    started, when the block is left. Whoever waits here has the deadline of the stage.
    """

    def __init__(self, *words: str, before: Sequence[str] = ()):
        adopt_orphans()
        command = [*before, sys.executable, "-m", "rft.train", *words]
        print(" ".join(command), flush=True)
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.said: list[str] = []
        self.coming = self._lines()

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="", flush=True)
            self.said.append(line)
            yield line

    def steps(self) -> Iterator[int]:
        """Their numbers, as each is over."""
        for line in self.coming:
            if found := STEP.search(line):
                yield int(found[1])

    def until(self, step: int) -> float:
        began = time.monotonic()
        for number in self.steps():
            if number >= step:
                return time.monotonic() - began
        raise RuntimeError(f"the run ended before step {step}")

    def find(self, title: str) -> psutil.Process:
        """The youngest of its processes with this in the command line."""
        found = [one for one in psutil.Process().children(recursive=True) if title in title_of(one)]
        assert found, f"no process of the run is called {title}"
        return max(found, key=psutil.Process.create_time)

    def end(self) -> int:
        for _ in self.coming:
            pass
        return self.process.wait()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        end_descendants()
        self.process.wait()


def title_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


class Place:
    """A directory for the runs of one stage, with tasks and a model."""

    def __init__(self, checks: Checks, directory: str, model: str, stand_in: str = "toy"):
        from bench.gpu import models

        self.root, self.kind, self.fake = Path(directory), checks.device.kind, checks.fake
        self.tasks, _ = write_arithmetic(self.root, num_eval=16)
        name = stand_in if self.fake else model
        self.model = models.write(self.root / "model", name, self.kind)

    def _common(self, name: str, steps: int) -> tuple[str, ...]:
        return (
            f"name={name}",
            f"device={self.kind}",
            "monitor=none",
            f"checkpoint_root_dir={self.root / 'runs'}",
            f"model.model_path={self.model}",
            f"trainer.total_steps={steps}",
            "buffer.total_epochs=1000",
        )

    def grpo(self, name: str, steps: int, *more: str) -> tuple[str, ...]:
        return (
            "experiment=grpo",
            *self._common(name, steps),
            f"buffer.explorer_input.taskset.path={self.tasks}",
            f"buffer.explorer_input.default_reward_fn_type={REWARD}",
            "model.max_prompt_tokens=16",
            *(SHORT_GRPO if self.fake else LONG_GRPO),
            *more,
        )

    def sft(self, name: str, steps: int, rows: int, *more: str) -> tuple[str, ...]:
        """`rows`: of a step, on a card."""
        return (
            "experiment=sft",
            *self._common(name, steps),
            f"buffer.trainer_input.experience_buffer.path={self.tasks}",
            f"buffer.train_batch_size={128 if self.fake else rows}",
            *more,
        )

    def record(self, name: str) -> RunRecord:
        return RunRecord(self.root / "runs" / "rft" / name)


def tell_numbers(checks: Checks, record: RunRecord) -> None:
    """Medians of steps that are warm."""
    for name in (
        *("perf/tokens_per_s", "perf/mfu", "time/step_s"),
        *("sync/pause_s", "sync/receive_s", "time/staging_wait_s"),
    ):
        if values := [value for step, value in record.series(name) if step > 2]:
            checks.tell(name, median(values))


# --- the stages -----------------------------------------------------------------------------------


def quickstart(checks: Checks) -> None:
    fake = checks.fake
    with tempfile.TemporaryDirectory() as directory:
        words = ["experiment=quickstart", f"device={checks.device.kind}", "monitor=none"]
        words += SHORT_QUICKSTART if fake else ["trainer.dtype=bf16"]
        with Run(*words, f"checkpoint_root_dir={directory}") as run:
            checks.most("exit code", run.end(), 0)
        told = json.loads(run.said[-1])["quickstart"]
        record = RunRecord(Path(directory) / "rft" / "quickstart" / "rft")
        probes = [value for _, value in record.series("sync/probe_mean_diff")]
        checks.least("versions that were probed", len(probes), 1)
        checks.most("sync/probe_mean_diff", max(probes), 0.05)
        checks.most("sync/again", sum(value for _, value in record.series("sync/again")), 0)
        accuracy = told["eval_rft"]
        checks.on_card("accuracy", accuracy, "more than 0.9", accuracy > 0.9)
        checks.tell("seconds", told["seconds"])
        tell_numbers(checks, record)


def qwen3_0_6b(checks: Checks) -> None:
    """What is reserved by step 5 is all that is ever reserved, by trainer and engine together."""
    steps, early = (20, 5) if not checks.fake else (6, 3)
    with tempfile.TemporaryDirectory() as directory:
        place = Place(checks, directory, "qwen3_0_6b")
        with Run(*place.grpo("run", steps)) as run:
            used = {step: memory(checks.fake) for step in run.steps()}
            checks.most("exit code", run.end(), 0)
        checks.least("steps", max(used, default=0), steps)
        before = max(used[step] for step in range(early - 2, early + 1))
        after = max(used[step] for step in range(steps - 2, steps + 1))
        checks.tell("bytes after the early steps", before)
        checks.tell("bytes after the last ones", after)
        growth = after / before - 1
        checks.on_card("growth", growth, "at most 0.01", growth <= 0.01)
        tell_numbers(checks, place.record("run"))


def memory(fake: bool) -> int:
    """Bytes of all cards that are in use; of stand-ins, those of this process's descendants."""
    if not fake:
        return sum(card.used for card in cards.look().cards)
    used = 0
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            used += one.memory_info().rss
    return used


def qwen3_8b(checks: Checks) -> None:
    """An engine dies as it takes new weights, then a rank; the run goes on."""
    layout = (
        "trainer.num_ranks=4",
        "trainer.megatron.tensor_model_parallel_size=4",
        "trainer.megatron.sequence_parallel=true",
        "explorer.rollout_model.engine_num=4",
    )
    stand_in = ("trainer.num_ranks=1", "explorer.rollout_model.engine_num=2")
    steps = 10 if not checks.fake else 8
    with tempfile.TemporaryDirectory() as directory:
        place = Place(checks, directory, "qwen3_8b")
        more = ("trainer.max_restarts=3", "trainer.save_interval=2")
        words = place.grpo("run", steps, *(stand_in if checks.fake else layout), *more)
        with Run(*words) as run:
            run.until(2)
            run.find("VLLM::EngineCore").kill()
            on = {"to the next step after an engine's death": run.until(3)}
            run.until(5)
            run.find("rft.run.rank").kill()
            on["to the next step after a rank's death"] = run.until(1)
            checks.most("exit code", run.end(), 0)
        back = sum(bool(re.search("^engine_[0-9]+: serves$", line)) for line in run.said)
        for name, seconds in on.items():
            checks.on_card(name, seconds, f"{GOES_ON_S:g} s", seconds <= GOES_ON_S)
        # toy steps are over before an engine has started
        checks.on_card("engines that came back", back, "1", back == 1)
        checks.least("steps", place.record("run").last_step, steps)
        tell_numbers(checks, place.record("run"))


def experts(checks: Checks) -> None:
    layout = (
        "trainer.num_ranks=4",
        "trainer.megatron.tensor_model_parallel_size=4",
        "trainer.megatron.sequence_parallel=true",
        "trainer.megatron.expert_model_parallel_size=4",
        "trainer.megatron.expert_tensor_parallel_size=1",
        "trainer.recompute_granularity=full",
        "explorer.rollout_model.engine_num=1",
        "explorer.rollout_model.tensor_parallel_size=4",
    )
    steps = 6 if not checks.fake else 3
    with tempfile.TemporaryDirectory() as directory:
        place = Place(checks, directory, "qwen3_30b_a3b_third", "toy_experts")
        used = 0
        with Run(*place.grpo("run", steps, *(() if checks.fake else layout))) as run:
            for _ in run.steps():
                used = max(used, memory(checks.fake))
            checks.most("exit code", run.end(), 0)
        checks.least("steps", place.record("run").last_step, steps)
        checks.tell("bytes of all cards after a step, at most", used)
        tell_numbers(checks, place.record("run"))


def nsys(checks: Checks) -> None:
    """Three steps of training alone; how often a rank waits for the card in one."""
    first, last = 3, 5
    with tempfile.TemporaryDirectory() as directory:
        place = Place(checks, directory, "qwen3_0_6b")
        out = Path(directory) / "profile"
        before = ["nsys", "profile", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"]
        before += ["--capture-range-end=stop", "--output", str(out)]
        more = ("trainer.profiler=nsys", f"trainer.profile_steps=[{first},{last}]")
        with Run(*place.sft("run", last + 1, ROWS, *more), before=before) as run:
            checks.most("exit code", run.end(), 0)
        command = [
            "nsys",
            "stats",
            "--report",
            "cuda_api_sum",
            "--format",
            "csv",
            f"{out}.nsys-rep",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        count = last - first + 1
        for name, calls in waits(done.stdout).items():
            checks.tell(f"{name} a step", calls / count)
        tell_numbers(checks, place.record("run"))


def waits(report: str) -> dict[str, int]:
    """Calls by name, of those that wait for the card, in Nsight Systems' sums."""
    lines = report.splitlines()
    head = next((number for number, line in enumerate(lines) if "Num Calls" in line), None)
    assert head is not None, f"no table of calls in:\n{report}"
    rows = csv.DictReader(io.StringIO("\n".join(lines[head:])))
    return {
        str(row["Name"]): int(row["Num Calls"])
        for row in rows
        if row["Name"] and "Synchronize" in row["Name"]
    }


def resume(checks: Checks) -> None:
    """Killed whole at step 5, behind a checkpoint; the rows are the same by their order."""
    steps, dies_at = 8 if not checks.fake else 20, 5
    with tempfile.TemporaryDirectory() as directory:
        place = Place(checks, directory, "qwen3_0_6b")
        more = LONG_STEP_ROWS, "trainer.save_interval=2"
        with Run(*place.sft("whole", steps, *more)) as run:
            checks.most("exit code", run.end(), 0)
        words = place.sft("killed", steps, *more)
        saves = place.record("killed").directory / "checkpoints"
        with Run(*words) as run:
            at = next(step for step in run.steps() if step >= dies_at and has_one(saves))
        again: list[int] = []
        with Run(*words) as run:
            again += run.steps()
            checks.most("exit code after it was killed", run.end(), 0)
        fits = 1 < again[0] <= at + 1
        checks.tell("it went on with step", again[0], f"2 to {at + 1}", fits)
        whole, killed = (place.record(name).series("loss") for name in ("whole", "killed"))
        fits = [step for step, _ in whole] == [step for step, _ in killed] == [*range(1, steps + 1)]
        checks.true("every step once", fits)
        apart = max(abs(b / a - 1) for (_, a), (_, b) in zip(whole, killed, strict=False))
        checks.most("losses apart", apart, 1e-2 if not checks.fake else 1e-5)
        rows = [row for row in place.record("whole").timed if row["step"] > 2]
        share = max(row.get("time/staging_wait_s", 0.0) / row["time/step_s"] for row in rows)
        checks.on_card("staging_wait_s of a step", share, "less than 0.01", share < 0.01)
        tell_numbers(checks, place.record("whole"))


def has_one(saves: Path) -> bool:
    """A committed checkpoint: a draft has more in its name."""
    return any(path.name.removeprefix("step_").isdigit() for path in saves.glob("step_*"))


CHECKS: dict[str, Any] = {
    "quickstart": quickstart,
    "qwen3_0_6b": qwen3_0_6b,
    "qwen3_8b": qwen3_8b,
    "experts": experts,
    "nsys": nsys,
    "resume": resume,
}

if __name__ == "__main__":
    main(CHECKS)
