"""What supervises a stage, whoever starts its ranks: the actors, the first event that ends the
stage, and the end of everything.

    `rft.run.launch`    ranks of its own, under `rft.run.elastic`          ┐
    `rft.run.sidecar`   ranks that torchrun or srun started and holds      ┴─► Supervisor

    start ──► all parts load ──► first_event: an actor died or reported what broke it │ a signal │
                                 exploring is done │ what the entry adds (its ranks, a launcher)
          ──► close: actors, then whatever any of them left behind

In: a stage's config and the queue of its events. Out: the event that ended the stage, of several
failures the root cause. Invariants: it loads no torch and computes nothing; it waits for events
alone, so it hears of signals at any time.
"""

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft import config as configs
from rft.buffer.store import journal_of
from rft.checkpoint import fence, journal_copy
from rft.config import TRAINING, Config
from rft.config.choices import start_lines
from rft.ground import scratch
from rft.ground.process import end_descendants
from rft.ground.rounds import STREAM
from rft.monitor import logs, trace
from rft.run import cards
from rft.run.standstill import Standstill
from rft.run.warden import Warden
from rft.sync import transfer, transport
from rft.trainer.feed import reads_files

if TYPE_CHECKING:
    from rft.run.actors import Actors, Work

EXIT_CODES = {
    "ray": 1,
    "trainer": 10,
    "engine": 11,
    "explorer": 12,
    "buffer": 13,
    "synchronizer": 14,
}
# a later one fails when an earlier one is gone
CAUSES = ("ray", "buffer", "engine", "synchronizer", "explorer", "trainer")
SETTLE_S = 2.0  # between a part's death and the word of it: Ray sees a closed socket at once
# for processes that end by themselves, like those that give back the shared memory of a killed one
LAST_S = 3.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is Slurm's before preemption
Events = queue.SimpleQueue["Event"]


@dataclass(frozen=True)
class Event:
    """Something that ends a stage. `part` says who; `cause` is empty for a good end."""

    part: str
    phase: str = ""
    cause: str = ""
    signal: int = 0


class Supervisor:
    """One attempt at a stage, from the creation of its log directory to its end."""

    def __init__(
        self,
        config: Config,
        events: Events,
        say: Callable[[str], None],
        task: "Work | None" = None,
    ):
        """`say`: a line for the user. `task`: done with the explorer instead of what the mode
        does with it.
        """
        self.config = config
        self.events = events
        self.say = say
        self.task = task
        self.log_dir = logs.new_attempt(configs.job_dir(config))
        self.actors: Actors | None = None
        self.warden: Warden | None = None
        self.standstill: Standstill | None = None
        self.scratch: scratch.Scratch | None = None
        trace.turn_on(self.log_dir, config.monitor.trace)
        trace.start("supervisor")

    def guard(self, *launchers: int) -> None:
        """From now on whatever this process starts ends with it, however it ends, and what is
        stopped does not stay so, nor do ranks that these processes started.
        """
        self.warden = Warden(self.log_dir, fence.control_dir(configs.job_dir(self.config)))
        self.scratch = scratch.take()
        if self.scratch is None:
            self.standstill = Standstill(self.say, *launchers)
        else:
            self.standstill = Standstill(self.say, *launchers, note=self.scratch.note)

    def start(self) -> bool:
        """Create the actors, which load in the background; False if the end was asked for while
        Ray started.
        """
        from rft.run.actors import Actors  # stages that read files need nothing of it

        self._bring_journal()
        self.actors = Actors(self.config, self.log_dir, self._failed, self.say, self.task)
        if self.scratch is not None:
            self.scratch.starts_ray()
        if self.warden is not None:
            self.warden.look()
        try:
            self.actors.start()
        except SystemExit:  # Ray's own SIGTERM handler, in place for as long as Ray starts
            self.events.put(Event("user", signal=signal.SIGTERM))
            return False
        if self.warden is not None:
            self.warden.tell()
        self.actors.work(self._work_done)
        return True

    def _bring_journal(self) -> None:
        """Of a run whose first node is lost: what its agents have copied to this one."""
        config, buffer = self.config, self.config.buffer.trainer_input.experience_buffer
        is_read = config.mode in TRAINING and not reads_files(config)
        if not is_read or buffer.storage_type != "queue":
            return
        job = configs.job_dir(config)
        journal = Path(journal_of(buffer, job))
        position = journal_copy.bring_back(fence.control_dir(job), journal)
        if position is not None:
            self.say(f"{journal} was not here, or older, and begins as the copy of another node's")

    @property
    def is_ready(self) -> bool:
        """Whether ranks may have begun: all actors serve."""
        return self.actors is None or self.actors.ready

    @property
    def rank_cards(self) -> list[str]:
        """GPUs of ranks that are started here; none: what they find."""
        held = self.actors.held.names if self.actors else []
        return held or self.config.cluster.cards.ranks

    def environment(self) -> dict[str, str]:
        """How ranks find the log directory and the actors."""
        environment = {"RFT_LOG_DIR": str(self.log_dir)} | trace.environment()
        if self.actors is None:
            return environment
        ray = {
            "RFT_RAY_ADDRESS": self.actors.address,
            "RFT_RAY_NAMESPACE": str(self.config.ray_namespace),
        }
        return environment | ray | self.actors.rank_environment

    def first_event(self) -> Event:
        """Wait for what ends the stage."""
        event = self.events.get()
        trace.instant(
            "ending", part=event.part, phase=event.phase, cause=event.cause, signal=event.signal
        )
        return root_cause(event, self.events) if event.cause else event

    def close(self, grace_s: float, spare: Callable[[], Iterable[int]] = tuple) -> None:
        """End the actors within about `grace_s` seconds, then every descendant of this process but
        those that `spare` names by then.
        """
        if self.actors is not None:
            self.actors.close(grace_s)
        if self.standstill is not None:
            self.standstill.close()
        if self.warden is not None:
            self.warden.end()
        end_descendants(LAST_S, spare=spare())
        if self.scratch is not None and self.actors is None:
            self.scratch.remove()
        elif self.scratch is not None:  # what Ray wrote can be looked at until the next start
            scratch.free_segments(self.scratch.directory)
        trace.stop()
        logs.end_attempt(self.log_dir)

    def _failed(self, part: str, phase: str, cause: str) -> None:
        self.events.put(Event(part, phase, cause))

    def _work_done(self) -> None:
        """With a trainer, the end of the ranks is the end; without one, this is."""
        if self.config.mode in ("explore", "bench"):
            self.events.put(Event("work"))


@contextlib.contextmanager
def signals_as_events(events: Events, numbers: Iterable[signal.Signals] = STOPS) -> Iterator[None]:
    """These signals become events; the grace period is bounded."""
    previous = {
        number: signal.signal(
            number, lambda received, _frame: events.put(Event("user", signal=received))
        )
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_table(config: Config) -> Iterator[str]:
    """For whoever started the run: who computes on what, and what was chosen for it, with why."""
    yield from cards.table(config, cards.here())
    yield from (f"  {name} is {commit}" for name, commit in config.commits.items())
    if config.trainer.layouts:
        sizes = config.trainer.megatron
        told = f"tp{sizes.tensor_model_parallel_size} pp{sizes.pipeline_model_parallel_size}"
        told += f" cp{sizes.context_parallel_size}"
        yield f"  of trainer.layouts: {config.trainer.num_ranks} rank(s) ({told})"
    yield from start_lines(config)
    if config.mode == "both" and config.synchronizer.sync_method == STREAM:
        yield f"  {transport.told(config)}"
    if said := transfer.told(config):
        yield f"  {said}"


def root_cause(first: Event, events: Events) -> Event:
    """Of failures that follow each other the one that was there first.

    A part may only have met the death of another: that one has SETTLE_S to be heard of.
    """
    failures, deadline = [first], time.monotonic() + SETTLE_S
    while True:
        worst = min(failures, key=lambda event: CAUSES.index(kind(event)))
        if kind(worst) in CAUSES[:3]:
            return worst
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return worst
        failures += [event] if event.cause else []


def kind(event: Event) -> str:
    """`engine` of "engine_1", `trainer` of "trainer rank 0"."""
    return event.part.split()[0].split("_")[0]


def failure(event: Event, log_dir: Path) -> str:
    return f"{event.part} failed while {event.phase}: {event.cause}; logs in {log_dir}"
