"""A run that starts its own ranks: every stage in order, each under a supervisor in this process.

    rft.train ──► run_stages
            ──► StageRun: `Supervisor` (Ray with buffer, engines, synchronizer, explorer: one actor
                          each), and trainer ranks under a launcher (`rft.run.elastic`, own
                          OS session), whose end is an event like those of the actors; a
                          launcher that was killed is started again

In: filled and checked stage configs. Out: exit code 0, or one message that names part, phase and
cause and that part's exit code. Ranks come and go, it outlives them. Invariants: a signal ends the
run, whichever stage hears it; whatever way a stage ends, no process that it started is left after
`shutdown_grace_s`; a second start of the same role in the same directory (`rft.run.owners`) touches
nothing.
"""

import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rft import config as configs
from rft.checkpoint import fence
from rft.config import TRAINING, Config, ConfigError, is_remote
from rft.ground import scratch, surroundings
from rft.ground.device import quiet_environment, thread_environment
from rft.ground.plugins import imported
from rft.ground.process import adopt_orphans, ending
from rft.monitor import logs, trace
from rft.run import owners, recovery
from rft.run.cards import VISIBLE
from rft.run.elastic import DEATHS, as_line
from rft.run.restarts import Restarts
from rft.run.stages import StageFailed, check_exports, finished, ready, say
from rft.run.supervisor import (
    EXIT_CODES,
    Event,
    Events,
    Supervisor,
    failure,
    kind,
    signals_as_events,
    start_table,
)
from rft.trainer.control import cause
from rft.trainer.feed import reads_files

if TYPE_CHECKING:
    from rft.run.actors import Work

log = logging.getLogger(__name__)
LAUNCHER = "trainer launcher"
RANKS_SHARE = 0.7  # of the grace period: ranks save a checkpoint, actors only close files


def run_stages(stages: list[Config], check: Callable[[Config], None]) -> int:
    """Run the stages in order, each from the model that the one before exported, and the recipe's
    closing function after the last; finished ones are skipped.

    `check` refuses a config that cannot run (`rft.preflight`): asked once more for what a stage
    only has when it begins.
    """
    events: Events = queue.SimpleQueue()
    adopt_orphans()
    with signals_as_events(events):
        for index in range(len(stages)):
            if finished(stages[index]):
                name = stages[index].stage_name or stages[index].name
                print(f"{name}: already finished, see {configs.job_dir(stages[index])}", flush=True)
                continue
            try:
                with owners.held(stages[index]):
                    main_log(owners.place(stages[index]), stages[index].log.level)
                    config = ready(stages, index, check)
                    if config.mode == "bench" or config.explorer.version is not None:
                        check_exports(config)
                    stage = StageRun(config, events)
                    stage.run()
            except StageFailed as error:
                print(f"rft: {error}", file=sys.stderr, flush=True)
                return error.code
            if stage.is_told_to_end and stages[index + 1 :]:
                return 0
    if stages[0].finish:
        imported(stages[0].finish)(stages)
    return 0


class StageRun:
    """One stage from start to end."""

    def __init__(self, config: Config, events: Events, task: "Work | None" = None):
        self.config = config
        self.task = task
        self.events = events
        self.job = configs.job_dir(config)
        self.ranks: subprocess.Popen[bytes] | None = None
        self.scratch: scratch.Scratch | None = None
        self._stopping = threading.Lock()  # nobody starts ranks while somebody ends them
        self._stopped = False
        self.is_told_to_end = False  # a service, by a signal: its good end

    def run(self) -> None:
        """Raises StageFailed unless the stage did all of its work, or is a service that was
        stopped; ConfigError if it cannot even begin.
        """
        config = self.config
        scratch.sweep()  # of runs that were killed
        self.supervisor = Supervisor(config, self.events, say, self.task)
        self.log_dir = self.supervisor.log_dir
        self.resolved = owners.place(config) / "resolved.yaml"
        configs.save(config, self.resolved)
        say(f"{config.stage_name or config.name}: {describe(config)}; logs in {self.log_dir}")
        for line in start_table(config):
            say(line)
        try:
            self._start()
            self._wait()
        except (StageFailed, ConfigError):
            raise
        except Exception as error:
            log.exception("stage failed")
            raise StageFailed(
                1, f"supervisor failed: {cause(error)}; logs in {self.log_dir}"
            ) from error
        finally:
            self._close()

    def _start(self) -> None:
        """Create all parts; they load at the same time."""
        self.supervisor.guard()
        if not reads_files(self.config) and not self.supervisor.start():
            return
        if self.config.mode in TRAINING:
            self._start_ranks()

    def _start_ranks(self) -> None:
        others = surroundings.others_secrets("rank")
        environment = surroundings.without(os.environ, others) | quiet_environment()
        environment |= thread_environment(self.config.cluster.threads_per_rank)
        if names := self.supervisor.rank_cards:
            environment[VISIBLE] = ",".join(names)
        command = [sys.executable, "-m", "rft.run.elastic", str(self.resolved)]
        if (own := scratch.take()) is not None:
            self.scratch, environment = own, environment | own.environment()
        trace.instant("ranks start")
        environment |= self.supervisor.environment()

        def start() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(command, env=environment, start_new_session=True)

        self.ranks = start()
        threading.Thread(target=self._watch_ranks, args=(start,), daemon=True).start()

    def _watch_ranks(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        """Tell how the launcher ended; one that was killed, which ends its ranks, is started again
        as often as failed ranks are. Its ranks go on from the newest checkpoint.
        """
        while True:
            event, died_at = self._ended(self.ranks), time.monotonic()
            # with the deaths that this launcher has counted
            restarts = Restarts(self.config.trainer.max_restarts, kept=self.log_dir / DEATHS)
            with self._stopping:
                killed = event.part == LAUNCHER and self.ranks.returncode < 0
                if self._stopped or not killed:
                    break
                if not restarts.allow(as_line(event.part, event.phase, event.cause)):
                    why = restarts.cause() if restarts.limit else event.cause
                    event = dataclasses.replace(event, cause=why)
                    break
                recovery.note(self.log_dir, died_at)
                say(f"{LAUNCHER}: {event.cause}; it is started again ({restarts.told()})")
                self.ranks = start()
        self.events.put(event)

    def _ended(self, ranks: "subprocess.Popen[bytes]") -> Event:
        code = ranks.wait()
        record = self.log_dir / "failure.json"
        if code == 0:
            return Event("ranks")
        if record.exists():
            return Event(**json.loads(record.read_text(encoding="utf-8")))
        return Event(LAUNCHER, "running the ranks", ending(code))

    def _wait(self) -> None:
        event = self.supervisor.first_event()
        if event.signal:
            self._stop(signal.Signals(event.signal))
        elif event.cause:
            message = failure(event, self.log_dir)
            log.error("%s\nlast metrics: %s", message, last_line(self.job / "metrics.jsonl"))
            raise StageFailed(EXIT_CODES[kind(event)], message)

    def _stop(self, number: signal.Signals) -> None:
        """Raises StageFailed, but for a service, which ends like this.

        By SIGUSR1 it fails too: launch/slurm.sh puts a job that has into the queue again.
        """
        told = f"stopped by {number.name}"
        if self.config.mode == "serve":
            told += f"; what got its reward is in {self.job / 'buffer'}"
            if number != signal.SIGUSR1:
                say(told)
                self.is_told_to_end = True
                return
        else:
            told += self._stop_ranks()
        raise StageFailed(
            128 + number, f"{told}; run the same command again to go on from {self.job}"
        )

    def _stop_ranks(self) -> str:
        """A clean end: ranks save at their step boundary.

        Says so if they had to be killed instead.
        """
        if self.ranks is None or not self.supervisor.is_ready:
            return ""  # no rank has begun: there is nothing to save, and nothing to wait for
        with self._stopping:
            self._stopped = True
            self.ranks.terminate()
        seconds = self.config.shutdown_grace_s * RANKS_SHARE
        try:
            self.ranks.wait(seconds)
        except subprocess.TimeoutExpired:
            return (
                f" (the ranks did not end in {seconds:g} s and were killed: the newest "
                "checkpoint counts)"
            )
        return ""

    def _close(self) -> None:
        """Kill what is left of the ranks, then end everything else; a checkpoint agent may finish
        what it holds, within trainer.checkpoint.agent_deadline_s.
        """
        with self._stopping:
            self._stopped = True
        if self.ranks is not None and self.ranks.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks.pid, signal.SIGKILL)
            self.ranks.wait()
        if self.config.mode in TRAINING:
            fence.end_rest(fence.control_dir(self.job))
        self.supervisor.close(
            self.config.shutdown_grace_s * (1 - RANKS_SHARE),
            spare=lambda: map(fence.holder, self._agents()),
        )
        if alive := self._agents():
            numbers = ", ".join(str(fence.holder(path)) for path in alive)
            say(
                f"rft: checkpoint agent(s) {numbers} still write what was staged, and end by "
                "themselves"
            )
        elif self.scratch is not None:  # else the next start removes it
            self.scratch.remove()
        scratch.sweep()  # of the actors

    def _agents(self) -> list[Path]:
        """Checkpoint agents of this stage that live; one that does not train has none, and those in
        its directory are of a trainer that goes on.
        """
        trains = self.config.mode in TRAINING
        return fence.living_agents(fence.control_dir(self.job)) if trains else []


def last_line(path: Path) -> str:
    """What a run told last, for whoever looks for what broke it."""
    there = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = there.splitlines()
    return lines[-1] if lines else "none"


def describe(config: Config) -> str:
    """What a reader wants to know before the first step."""
    m = config.trainer.megatron
    layout = (
        f"tp{m.tensor_model_parallel_size} pp{m.pipeline_model_parallel_size} "
        f"cp{m.context_parallel_size}"
    )
    if m.virtual_pipeline_model_parallel_size:
        layout += f" vpp{m.virtual_pipeline_model_parallel_size}"
    if m.expert_model_parallel_size > 1:
        layout += (
            f" ep{m.expert_model_parallel_size} "
            f"etp{m.expert_tensor_parallel_size or m.tensor_model_parallel_size}"
        )
    parts = [f"mode={config.mode}", f"algorithm={config.algorithm.algorithm_type}"]
    last = config.trainer.total_steps
    steps = "steps until the data ends" if last is None else f"{last} steps"
    if is_remote(config):
        parts += [
            f"{config.model.tinker.base_model} at a Tinker service",
            steps,
        ]
    elif config.mode in TRAINING:
        parts += [
            f"{config.trainer.num_ranks} trainer rank(s) ({layout})",
            steps,
        ]
    if not reads_files(config):
        kind = "sampling client(s)" if is_remote(config) else "vLLM engine(s)"
        parts.append(f"{config.explorer.rollout_model.engine_num} {kind}")
    return ", ".join(parts)


def main_log(job: Path, level: str) -> None:
    """The supervisor's own log; what the user must read goes to the terminal instead."""
    job.mkdir(parents=True, exist_ok=True)
    logs.hide_secrets()
    stream = logs.Redacted((job / "supervisor.log").open("a", encoding="utf-8"))
    logging.basicConfig(level=level.upper(), format=logs.FORMAT, stream=stream, force=True)
