"""User code of either kind, from one event loop: a coroutine is awaited, a plain function gets a
thread of its own.

In: a function and its arguments. Out: what it returns or raises. A context among the arguments of a
plain function becomes one whose methods wait. Invariant: when the caller is cancelled (the task's
timeout), the thread is over: its next call of the context raises, and so does the next line of
Python that it runs. Only a call into C that never returns outlives that, in a daemon thread.
"""

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable
from typing import Any


class Abandoned(BaseException):
    """Raised in the thread of a function that nobody waits for any more.

    No Exception: user code must not catch it.
    """


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, awaited if it is a coroutine function, else in a thread that ends
    with the caller's patience.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    waiting = Waiting(loop)
    given = [
        waiting.context(one) if hasattr(one, "generate") and hasattr(one, "score") else one
        for one in arguments
    ]

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def body() -> None:
        value, error = None, None
        try:
            value = function(*given)
            if inspect.iscoroutine(value):
                value.close()
            if inspect.isawaitable(value):
                raise TypeError(
                    f"{function!r} returned something to be awaited: make it an async function"
                )
        except Exception as raised:
            error = raised
        # sys.exit of user code, too, must not end anything but this call
        except BaseException as raised:
            error = RuntimeError(f"{function!r} raised {type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(
        target=body, daemon=True, name=getattr(function, "__name__", "user code")
    )
    thread.start()
    try:
        return await answer
    finally:
        waiting.over()
        if thread.is_alive() and answer.cancelled():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Abandoned)
            )


class Waiting:
    """Lends an event loop's coroutines to one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._over = loop, False
        self._pending: set[Any] = set()

    def context(self, of: Any) -> "_WaitingContext":
        return _WaitingContext(of, self)

    def wait(self, coroutine: Any) -> Any:
        if self._over:
            coroutine.close()
            raise Abandoned("the task is over")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._pending.add(future)
        try:
            return future.result()
        finally:
            self._pending.discard(future)

    def over(self) -> None:
        """What the thread still waits for is cancelled."""
        self._over = True
        for future in list(self._pending):
            future.cancel()


class _WaitingContext:
    """A context whose coroutines are waited for."""

    def __init__(self, of: Any, waiting: Waiting) -> None:
        self._of, self._waiting = of, waiting

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *arguments, **named: self._waiting.wait(found(*arguments, **named))


async def together(*coroutines: Any) -> list[Any]:
    """All results, in order. The first failure ends the others before it is raised."""
    jobs = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
