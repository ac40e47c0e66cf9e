"""Calls that are gathered: each goes once, goes on when its own has gone, and hears of its own
failure only.
"""

import asyncio
from typing import Any

import pytest

from rft.buffer import calls as buffer_calls
from rft.buffer.calls import CallBatcher


def test_what_comes_while_a_call_is_under_way_goes_with_the_next() -> None:
    async def scenario() -> None:
        calls: list[list[int]] = []
        gates = [asyncio.Event() for _ in range(3)]

        async def call(items: list[int]) -> None:
            calls.append(items)
            await gates[len(calls) - 1].wait()
            if 2 in items:
                raise OSError("full")

        batcher = CallBatcher(call, expected=lambda: 1)
        jobs: list[asyncio.Task[Any]] = [asyncio.create_task(batcher(0))]
        await asyncio.wait(jobs, timeout=0)
        jobs += [asyncio.create_task(batcher(item)) for item in (1, 2, 3)]
        await asyncio.wait(jobs, timeout=0)
        jobs[3].cancel()  # it is sent all the same: nobody can say how far it was
        gates[0].set()
        await jobs[0]
        assert not jobs[1].done()
        gates[1].set()
        for job in jobs[1:3]:
            with pytest.raises(OSError, match="full"):
                await job
        gates[2].set()
        await batcher(4)
        assert calls == [[0], [1, 2, 3], [4]]

    asyncio.run(scenario())


def test_what_others_are_about_to_send_is_waited_for_until_all_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        calls: list[list[int]] = []

        async def call(items: list[int]) -> None:
            calls.append(items)

        monkeypatch.setattr(buffer_calls, "GATHER_S", 600.0)
        batcher = CallBatcher(call, expected=lambda: 3)
        jobs = [asyncio.create_task(batcher(item)) for item in (0, 1)]
        await asyncio.wait(jobs, timeout=0)
        assert calls == []  # the third is on its way
        await batcher(2)
        await asyncio.gather(*jobs)
        assert calls == [[0, 1, 2]]
        monkeypatch.setattr(buffer_calls, "GATHER_S", 0.0)
        await batcher(3)  # alone, though others were expected: not for ever
        assert calls[1:] == [[3]]

    asyncio.run(scenario())
