"""The supervisor: starts a stage's parts, waits for the first thing that happens, ends everything.

    rft.train ──► run_stages ──► Stage: Ray with buffer, engines, synchronizer, explorer  (one actor each)
                                        trainer ranks under torch's launcher              (`rft.ranks`, own OS session)
                  events: the ranks ended │ an actor died or reported what broke it │ a signal came │ exploring is done

In: filled and checked stage configs. Out: exit code 0, or one message that names part, phase and cause and that part's exit
code. It computes nothing and loads no torch; ranks come and go, it outlives them. Invariant: whatever way a stage ends, no
process that it started is left after `shutdown_grace_s`.
"""

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft import config as configs
from rft import modes, preflight, processes
from rft.actors import Actors, Work
from rft.checkpoint import fence
from rft.config import Config, ConfigError
from rft.control import cause
from rft.device import thread_environment
from rft.feed import reads_files
from rft.monitor import logs, redact, trace
from rft.pipeline import tasks
from rft.preflight_tinker import is_remote
from rft.stages import source

log = logging.getLogger(__name__)
EXIT_CODES = {"trainer": 10, "engine": 11, "explorer": 12, "buffer": 13, "synchronizer": 14}
CAUSES = ("buffer", "engine", "synchronizer", "explorer", "trainer")  # a later one fails when an earlier one is gone
SETTLE_S = 2.0  # between a part's death and the word of it: Ray sees a closed socket at once
LAST_S = 3.0  # for processes that end by themselves, like those that give back the shared memory of a killed one
RANKS_SHARE = 0.7  # of the grace period: ranks save a checkpoint, actors only close files


class StageFailed(RuntimeError):
    """A stage that ended badly: the process exit code and the one message for the user."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Event:
    """Something that ends a stage. `part` says who; `cause` is empty for a good end."""

    part: str
    phase: str = ""
    cause: str = ""
    signal: int = 0


def run_stages(stages: list[Config]) -> int:
    """Run the stages in order, each from the model that the one before exported; finished ones are skipped."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    processes.adopt_orphans()
    with signals_as_events(events):
        for index in range(len(stages)):
            if finished(stages[index]):
                name = stages[index].stage_name or stages[index].name
                print(f"{name}: already finished, see {configs.job_dir(stages[index])}", flush=True)
                continue
            main_log(configs.job_dir(stages[index]), stages[index].log.level)
            try:
                config = ready(stages, index)
                if config.mode == "bench":
                    modes.check_exports(config)
                Stage(config, events).run()
            except StageFailed as failure:
                print(f"rft: {failure}", file=sys.stderr, flush=True)
                return failure.code
    return 0


def ready(stages: list[Config], index: int) -> Config:
    """Stage `index` with the model that it begins with, and the rows that its task pipeline makes."""
    config = with_model(stages, index)
    if tasks.is_pending(config):
        try:
            tasks.run(config, say)
        except tasks.TaskPipelineFailed as error:
            raise StageFailed(error.code, str(error)) from error
        preflight.check(config)
    return config


def with_model(stages: list[Config], index: int) -> Config:
    """Stage `index` with the model that it begins with."""
    config, before = stages[index], source(stages, index)
    if before is None:
        return config
    export = result(before)["huggingface"]
    if not Path(export).is_dir():
        raise ConfigError(
            f"stages: {config.stage_name} goes on from {export}, which is gone: export it again with `rft ckpt export`, or "
            f"give {config.stage_name} a model.model_path of its own"
        )
    return replace(config, model=replace(config.model, model_path=str(export)))


def resolved_of(config: Config) -> Path:
    """Where a stage's config is written down. Explorers of a database run beside the trainer of the same name."""
    job = configs.job_dir(config)
    if config.mode in ("explore", "serve") and config.buffer.trainer_input.experience_buffer.storage_type == "sql":
        return job / "explorers" / config.explorer.name / "resolved.yaml"
    return (job / "bench" if config.mode == "bench" else job) / "resolved.yaml"


def result(config: Config) -> dict[str, Any]:
    return json.loads((configs.job_dir(config) / "result.json").read_text(encoding="utf-8"))


def finished(config: Config) -> bool:
    """Did an earlier attempt complete this stage, with at least as many steps as are asked for now?"""
    path = configs.job_dir(config) / "result.json"
    if config.mode not in ("both", "train") or not path.exists():
        return False
    last = result(config)
    return last["complete"] and (last["asked"] or 0) >= int(config.trainer.total_steps or 0)


@contextlib.contextmanager
def signals_as_events(events: "queue.SimpleQueue[Event]") -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 (Slurm's word before preemption) become events; the grace period is bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = [signal.signal(n, lambda received, _frame: events.put(Event("user", signal=received))) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


class Stage:
    """One stage from start to end."""

    def __init__(self, config: Config, events: "queue.SimpleQueue[Event]", task: Work | None = None):
        self.config = config
        self.task = task
        self.events = events
        self.job = configs.job_dir(config)
        self.ranks: subprocess.Popen[bytes] | None = None
        self.actors: Actors | None = None

    def run(self) -> None:
        """Raises StageFailed unless the stage did all of its work; ConfigError if it cannot even begin."""
        config = self.config
        self.log_dir = logs.new_attempt(self.job)
        trace.turn_on(self.log_dir, config.monitor.trace)
        trace.start("supervisor")
        self.resolved = resolved_of(config)
        configs.save(config, self.resolved)
        print(f"{config.stage_name or config.name}: {describe(config)}; logs in {self.log_dir}", flush=True)
        try:
            self._start()
            self._wait()
        except (StageFailed, ConfigError):
            raise
        except Exception as error:
            log.exception("stage failed")
            raise StageFailed(1, f"supervisor failed: {cause(error)}; logs in {self.log_dir}") from error
        finally:
            self._close()
            trace.stop()
            redact.scrub(self.log_dir)  # what a library wrote past Python's own streams

    def _start(self) -> None:
        """Create all parts; they load at the same time."""
        if not reads_files(self.config):
            self.actors = Actors(self.config, self.log_dir, self._actor_failed, say, self.task)
            try:
                self.actors.start()
            except SystemExit:  # Ray's own SIGTERM handler, in place for as long as Ray starts
                self.events.put(Event("user", signal=signal.SIGTERM))
                return
            self.actors.work(self._work_done)
        if self.config.mode in ("both", "train"):
            self._start_ranks()

    def _start_ranks(self) -> None:
        environment = os.environ | thread_environment(self.config.cluster.threads_per_rank)
        environment |= {"RFT_LOG_DIR": str(self.log_dir)}
        if self.actors is not None:
            environment |= {"RFT_RAY_ADDRESS": self.actors.address, "RFT_RAY_NAMESPACE": str(self.config.ray_namespace)}
            environment |= self.actors.rank_environment
        command = [sys.executable, "-m", "rft.ranks", str(self.resolved)]
        trace.instant("ranks start")
        self.ranks = subprocess.Popen(command, env=environment, start_new_session=True)
        threading.Thread(target=self._watch_ranks, args=(self.ranks,), daemon=True).start()

    def _watch_ranks(self, ranks: "subprocess.Popen[bytes]") -> None:
        code = ranks.wait()
        record = self.log_dir / "failure.json"
        if code == 0:
            self.events.put(Event("ranks"))
        elif record.exists():
            self.events.put(Event(**json.loads(record.read_text(encoding="utf-8"))))
        else:
            self.events.put(Event("trainer launcher", "running the ranks", logs.ending(code)))

    def _actor_failed(self, part: str, phase: str, cause: str) -> None:
        self.events.put(Event(part, phase, cause))

    def _work_done(self) -> None:
        """With a trainer, the end of the ranks is the end; without one, this is."""
        if self.config.mode in ("explore", "bench"):
            self.events.put(Event("work"))

    def _wait(self) -> None:
        event = self.events.get()
        trace.instant("ending", part=event.part, phase=event.phase, cause=event.cause, signal=event.signal)
        if event.signal and self.config.mode == "serve":  # how a service ends
            say(f"stopped by {signal.Signals(event.signal).name}; what got its reward is in {self.job / 'buffer'}")
        elif event.signal:
            left = self._stop_ranks()
            name = signal.Signals(event.signal).name
            raise StageFailed(
                128 + event.signal, f"stopped by {name}{left}; run the same command again to go on from {self.job}"
            )
        if event.cause:
            event = root_cause(event, self.events)
            message = failure(event, self.log_dir)
            log.error("%s\nlast metrics: %s", message, last_line(self.job / "metrics.jsonl"))
            raise StageFailed(EXIT_CODES[kind(event)], message)

    def _stop_ranks(self) -> str:
        """A clean end: ranks save at their step boundary. Says so if they had to be killed instead."""
        if self.ranks is None or (self.actors is not None and not self.actors.ready):
            return ""  # no rank has begun: there is nothing to save, and nothing to wait for
        self.ranks.terminate()
        seconds = self.config.shutdown_grace_s * RANKS_SHARE
        try:
            self.ranks.wait(seconds)
        except subprocess.TimeoutExpired:
            return f" (the ranks did not end in {seconds:g} s and were killed: the newest checkpoint counts)"
        return ""

    def _close(self) -> None:
        """Kill what is left of the ranks, then end the actors, then whatever any of them left behind."""
        if self.ranks is not None and self.ranks.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks.pid, signal.SIGKILL)
            self.ranks.wait()
        if self.actors is not None:
            self.actors.close(self.config.shutdown_grace_s * (1 - RANKS_SHARE))
        self._end_all()

    def _end_all(self) -> None:
        """End what is left; a checkpoint agent may finish what it holds, within trainer.checkpoint.agent_deadline_s."""
        agents = {fence.holder(path) for path in fence.living_agents(fence.control_dir(self.job))}
        processes.end_descendants(LAST_S, spare=agents)
        if alive := fence.living_agents(fence.control_dir(self.job)):
            numbers = ", ".join(str(fence.holder(path)) for path in alive)
            print(f"rft: checkpoint agent(s) {numbers} still write what was staged, and end by themselves", flush=True)


def root_cause(first: Event, events: "queue.SimpleQueue[Event]") -> Event:
    """A part may only have met the death of another: give that one a moment to be heard of."""
    found, deadline = [first], time.monotonic() + SETTLE_S
    while True:
        worst = min(found, key=lambda event: CAUSES.index(kind(event)))
        if kind(worst) in CAUSES[:2]:
            return worst
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return worst
        found += [event] if event.cause else []


def kind(event: Event) -> str:
    """`engine` of "engine_1", `trainer` of "trainer rank 0"."""
    return event.part.split()[0].split("_")[0]


def last_line(path: Path) -> str:
    """What a run told last, for whoever looks for what broke it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return lines[-1] if lines else "none"


def failure(event: Event, log_dir: Path) -> str:
    return f"{event.part} failed while {event.phase}: {event.cause}; logs in {log_dir}"


def say(line: str) -> None:
    """A line for the user, whole among those of other threads and of the trainer."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def describe(config: Config) -> str:
    """What a reader wants to know before the first step."""
    m = config.trainer.megatron
    layout = f"tp{m.tensor_model_parallel_size} pp{m.pipeline_model_parallel_size} cp{m.context_parallel_size}"
    if m.virtual_pipeline_model_parallel_size:
        layout += f" vpp{m.virtual_pipeline_model_parallel_size}"
    if m.expert_model_parallel_size > 1:
        layout += (
            f" ep{m.expert_model_parallel_size} etp{m.expert_tensor_parallel_size or m.tensor_model_parallel_size}"
        )
    parts = [f"mode={config.mode}", f"algorithm={config.algorithm.algorithm_type}"]
    if is_remote(config):
        parts += [f"{config.model.tinker.base_model} at a Tinker service", f"{config.trainer.total_steps} steps"]
    elif config.mode in ("both", "train"):
        parts += [f"{config.trainer.num_ranks} trainer rank(s) ({layout})", f"{config.trainer.total_steps} steps"]
    if not reads_files(config):
        kind = "sampling client(s)" if is_remote(config) else "vLLM engine(s)"
        parts.append(f"{config.explorer.rollout_model.engine_num} {kind}")
    return ", ".join(parts)


def main_log(job: Path, level: str) -> None:
    """The supervisor's own log; what the user must read goes to the terminal instead."""
    job.mkdir(parents=True, exist_ok=True)
    logs.hide_secrets()
    handler = logging.FileHandler(job / "supervisor.log")
    handler.setFormatter(logs.RedactedFormatter(logs.FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
