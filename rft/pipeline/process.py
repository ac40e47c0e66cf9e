"""A worker process with its operators set up: one piece of work at a time, with a deadline per operator.

In: `Setup`, `Work`. Out: `Done`, or `OperatorFailed` with the operator's name. Invariant: a process whose operator hung or died, or
that was interrupted, is killed with all that it started, and the next piece of work gets a new one: no answer meets the wrong
question. What operators remembered is lost with the process.
"""

import asyncio
from typing import TypeVar

from rft.experience import decode
from rft.pipeline.messages import Answer, Broken, Close, Done, Entered, Question, Ready, Setup, Work
from rft.rollout.child import Child, frame

WORKER = "rft.pipeline.worker"
START_S = 120.0  # for an interpreter to start and user code to be imported, on a busy machine
CLOSE_S = 5.0  # for operators to close
Kind = TypeVar("Kind", Ready, Done)


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
                    await self._ask(Close(), Ready, CLOSE_S)
            except (OperatorFailed, TimeoutError):
                self._is_set_up = False  # it is killed all the same
        self._child.kill()
        await asyncio.to_thread(self._child.reap)

    async def _start(self) -> None:
        self._child.start()
        self._is_set_up = True
        try:
            await self._ask(self.setup, Ready, max(START_S, self.timeout_s))
        except OperatorFailed:
            self._end()
            raise

    async def _ask(self, question: Question, kind: type[Kind], limit_s: float) -> Kind:
        doing = "(start)" if isinstance(question, Setup) else "(first)"
        try:
            async with asyncio.timeout(limit_s):
                await self._child.send(frame(question))
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
