"""The experience pipeline: every group on its way from its workflow to the buffer.

    Explorer ── group ──► worker process: operator, operator, ... ──► what is left
            ──► buffer.put, durable
                                                                 └──► nothing left: buffer.abandon

In: the experiences of one group, sampled and scored. Out: those to store, or who dropped them; or
OperatorFailed. Operators see one group at a time: whatever compares responses compares those of one
task, and a step's batch does not exist before the trainer leases it. Groups come in the order in
which they were finished.

Invariants: a group is not stored before it came out of here, so after a crash on the way it is run
again; the event loop of the explorer runs no operator; at most `waiting` groups wait, then sampling
does too.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rft.config import DataJuicerConfig, ExperiencePipelineConfig
from rft.extras.pipeline.data_juicer import JuicerServer
from rft.extras.pipeline.task_operators import text_of
from rft.extras.pipeline.worker_process import (
    EXPERIENCES,
    Done,
    OperatorFailed,
    OperatorProcess,
    Setup,
    Work,
)
from rft.ground.experience import Experience, Task, decode, encode
from rft.rollout.runner import AllTasksFail

METRICS = "experience_pipeline/"


@dataclass(frozen=True)
class ProcessedGroup:
    """What of a group is to be stored; nothing of it: `dropped_by` says why."""

    experiences: list[Experience]
    dropped_by: str = ""


class ExperiencePipeline:
    """`directory`: of the job; `batch_size`: groups of one step."""

    def __init__(
        self,
        config: ExperiencePipelineConfig,
        service: DataJuicerConfig,
        directory: Path,
        batch_size: int,
    ) -> None:
        self.config, self.service = config, service
        self.directory = directory
        self.max_dropped = config.max_dropped_groups or max(20 * batch_size, 200)
        # groups that wait here while others are sampled
        self.room = asyncio.Semaphore(max(2 * batch_size, 8))
        self.dropped_in_a_row = 0
        self.totals: Counter[str] = Counter()  # of the whole run: stored, dropped and failed groups
        self.metrics = MetricTotals()
        self.server: JuicerServer | None = None
        self.worker: OperatorProcess | None = None

    async def start(self, decode: Callable[[list[int]], str]) -> None:
        """Start the service, if this run is to, and the worker; raises what keeps an operator from
        being prepared.

        `decode` makes the texts that operators see.
        """
        self.decode = decode
        service, uses = (
            self.service,
            any(operator.name == "data_juicer" for operator in self.config.operators),
        )
        if uses and service.auto_start:
            self.server = JuicerServer(service, self.directory / "data_juicer.log")
            await self.server.start()
            service = replace(service, server_url=self.server.address)
        record = None
        if self.config.save_input:
            record = self.config.input_save_path or str(
                self.directory / "buffer" / "explorer_output.jsonl"
            )
        setup = Setup(
            key=EXPERIENCES,
            operators=[(operator.name, dict(operator.args)) for operator in self.config.operators],
            service=asdict(service),
            record=record,
        )
        self.worker = OperatorProcess(setup, self.config.timeout)
        try:
            await self.worker.start()
        except OperatorFailed:
            await self.close()
            raise

    async def process(
        self, group: int, task: Task, experiences: list[Experience]
    ) -> ProcessedGroup:
        """Raises OperatorFailed: the group is lost; AllTasksFail: so is the run."""
        assert self.worker is not None, "start comes first"
        prompt = text_of({"prompt": task.prompt}, "prompt")
        texts = [(self.decode(e.prompt_ids), self.decode(e.response_ids)) for e in experiences]
        work = Work(group=group, prompt=prompt, payload=encode(experiences), texts=texts)
        try:
            done = await self.worker.run(work)
        except OperatorFailed:
            self._count("failed")
            raise
        self._tell(done, len(experiences))
        if not done.dropped_by:
            self.dropped_in_a_row = 0
            self._count("stored")
            return ProcessedGroup(decode(done.payload, list[Experience]))
        self._count("dropped")
        self.dropped_in_a_row += 1
        if self.dropped_in_a_row >= self.max_dropped:
            raise AllTasksFail(
                f"{self.dropped_in_a_row} groups in a row were dropped, the last by "
                f"{done.dropped_by}: no step can be filled "
                f"({EXPERIENCES}.max_dropped_groups)"
            )
        return ProcessedGroup([], f"dropped by {done.dropped_by}")

    def pop_metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        return self.metrics.pop()

    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)

    def _count(self, what: str) -> None:
        self.totals[what] += 1
        for name in ("stored", "dropped", "failed"):
            self.metrics.add(f"{name}_groups_count", float(name == what))

    def _tell(self, done: Done, came: int) -> None:
        self.metrics.add("input_experience_count", came)
        self.metrics.add("experience_count", done.counts[-1] if done.counts else came)
        for number, ((name, metrics), seconds) in enumerate(
            zip(done.metrics, done.seconds, strict=True)
        ):
            self.metrics.add(f"time/operator/{number}_{name}", seconds)
            for metric, value in metrics.items():
                self.metrics.add(metric, value)


@dataclass
class MetricTotal:
    total: float = 0.0
    number: int = 0
    least: float = float("inf")
    most: float = float("-inf")

    def value(self, kind: str) -> float:
        return {"count": self.total, "min": self.least, "max": self.most}.get(
            kind, self.total / self.number
        )


class MetricTotals:
    """Numbers of many groups as one number each: what a step tells of its pipeline.

    In: (name, value), group by group. Out: `experience_pipeline/<name>` since the last `pop`. A
    name's last word says how values meet: `..._count` are added up, `min` and `max` are what they
    say, anything else is a mean over the groups that told it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, MetricTotal] = {}

    def add(self, name: str, value: float) -> None:
        metric = self._sums.setdefault(name, MetricTotal())
        metric.total, metric.number = metric.total + value, metric.number + 1
        metric.least, metric.most = min(metric.least, value), max(metric.most, value)

    def pop(self) -> dict[str, float]:
        sums, self._sums = self._sums, {}
        return {
            METRICS + name: metric.value(re.split(r"[/_]", name)[-1])
            for name, metric in sums.items()
        }
