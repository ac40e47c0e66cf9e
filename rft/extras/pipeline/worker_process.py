"""A worker process with its operators set up: one piece of work at a time, with a deadline per
operator; and what the two say to each other.

    pipeline ── Setup ──►  worker: makes its operators   ── WorkerReady or Broken ──►
             ── Work ───►  for each of them ── Entered ──►, at the end ── Done or Broken ──►
             ── CloseWorker ──►  closes them             ── WorkerReady ──►

`payload` is an encoded list of experiences, or JSON of a list of rows: what `Setup.key` says.

In: `Setup`, `Work`. Out: `Done`, or `OperatorFailed` with the operator's name. Invariant: a process
whose operator hung or died, or that was interrupted, is killed with all that it started, and the
next piece of work gets a new one: no answer meets the wrong question. What operators remembered is
lost with the process.
"""

import asyncio
from typing import Any, TypeVar

from rft.ground.experience import Record, decode, encode
from rft.ground.process import Child

EXPERIENCES, TASKS = "data_processor.experience_pipeline", "data_processor.task_pipeline"
WORKER = "rft.extras.pipeline.worker"
START_S = 120.0  # for an interpreter to start and user code to be imported, on a busy machine
CLOSE_S = 5.0  # for operators to close


class Setup(Record, tag="setup", kw_only=True):
    key: str  # EXPERIENCES or TASKS
    operators: list[tuple[str, dict[str, Any]]]  # name, args
    service: dict[str, Any]  # of DataJuicerConfig
    record: str | None = None  # file for what comes in


class Work(Record, tag="work", kw_only=True):
    payload: bytes
    group: int = -1
    prompt: str = ""  # of the task, as its data file has it
    texts: list[tuple[str, str]] = []  # prompt and response of every experience
    chosen: list[int] | None = None  # operators to apply; None: all


class CloseWorker(Record, tag="close"):
    pass


class WorkerReady(Record, tag="ready"):
    pass


class Entered(Record, tag="entered"):
    """The clock of this operator starts."""

    operator: str


class Done(Record, tag="done", kw_only=True):
    payload: bytes
    metrics: list[tuple[str, dict[str, float]]]  # of every operator
    seconds: list[float]
    counts: list[int]  # items behind every operator
    dropped_by: str = ""  # the operator that left nothing


class Broken(Record, tag="broken", kw_only=True):
    operator: str
    message: str


Question = Setup | Work | CloseWorker
Answer = WorkerReady | Entered | Done | Broken
Kind = TypeVar("Kind", WorkerReady, Done)


class OperatorFailed(RuntimeError):
    """One operator could not do its work."""

    def __init__(self, operator: str, message: str) -> None:
        super().__init__(f"operator {operator}: {message}")
        self.operator, self.reason = operator, message


class OperatorProcess:
    def __init__(self, setup: Setup, timeout_s: float) -> None:
        self.setup, self.timeout_s = setup, timeout_s
        self.restarts = 0
        self._child = Child(WORKER)
        self._is_set_up = False
        self._free = asyncio.Lock()

    async def start(self) -> None:
        async with self._free:
            await self._start()

    async def run(self, work: Work) -> Done:
        """Raises OperatorFailed; the process is there again when it is needed next."""
        async with self._free:
            if not self._is_set_up:
                self.restarts += 1
                await self._start()
            return await self._ask(work, Done, self.timeout_s)

    async def close(self) -> None:
        """Let operators close, for a moment; then the process is gone."""
        if self._is_set_up and not self._free.locked():
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._ask(CloseWorker(), WorkerReady, CLOSE_S)
            except (OperatorFailed, TimeoutError):
                self._is_set_up = False  # it is killed all the same
        self._child.kill()
        await asyncio.to_thread(self._child.reap)

    async def _start(self) -> None:
        self._child.start()
        self._is_set_up = True
        try:
            await self._ask(self.setup, WorkerReady, max(START_S, self.timeout_s))
        except OperatorFailed:
            self._end()
            raise

    async def _ask(self, question: Question, kind: type[Kind], limit_s: float) -> Kind:
        doing = "(start)" if isinstance(question, Setup) else "(first)"
        try:
            async with asyncio.timeout(limit_s):
                await self._child.send(encode(question))
            while True:
                async with asyncio.timeout(limit_s):
                    answer = decode(await self._child.receive(), Answer)
                if isinstance(answer, Entered):
                    doing = answer.operator
                elif isinstance(answer, Broken):
                    raise OperatorFailed(answer.operator, answer.message)
                elif isinstance(answer, kind):
                    return answer
                else:
                    raise EOFError(f"out of order: {type(answer).__name__}")
        except TimeoutError as error:
            self._end()
            raise OperatorFailed(doing, f"ran longer than {limit_s:g} s and was killed") from error
        except EOFError as error:
            how = await self._child.end()
            self._end()
            raise OperatorFailed(doing, f"its process {how}") from error
        except asyncio.CancelledError:
            self._end()
            raise

    def _end(self) -> None:
        self._child.kill()
        self._is_set_up = False
