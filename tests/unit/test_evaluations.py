"""When the trainer asks for evaluations, and which ones it asks for again after it was killed."""

import subprocess
import sys
import time
from typing import Any

import pytest
import ray

from rft.config import ExplorerConfig
from rft.ground.experience import EvalResult, encode
from rft.ground.protocols import ActorHandle
from rft.trainer import control
from rft.trainer.control import Evaluations, await_engines


class Method:
    """An actor's method: notes each call, answers at once with what `ray.get` is given back."""

    def __init__(self, calls: list[Any], name: str):
        self.calls, self.name = calls, name

    def remote(self, *arguments: Any) -> Any:
        self.calls.append((self.name, *arguments))
        if self.name != "evaluate":
            return None
        return [
            encode(EvalResult(taskset="held_out", version=arguments[0], num_tasks=1, metrics={}))
        ]


class Actor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Method:
        return Method(self.calls, name)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a call has its answer when it is looked for without waiting."""
    answer = [True]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(
        ray, "wait", lambda refs, timeout: (refs, []) if timeout or answer[0] else ([], refs)
    )
    return answer


def evaluations(alone: bool = False, reported: tuple[int, ...] = ()) -> Any:
    found: list[int] = []
    made = Evaluations(
        ActorHandle(Actor()),
        ExplorerConfig(eval_interval=5),
        lambda result: found.append(result.version),
        alone,
        served=lambda version: f"{version} is served",
        reported=reported,
    )
    made.found = found  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("version", "reported", "again"),
    [(0, (), [0]), (0, (0,), []), (5, (0,), [5]), (5, (0, 5), []), (7, (0, 5), [])],
)
def test_only_a_lost_one_is_made_again(
    finished: Any, version: int, reported: tuple[int, ...], again: list[int]
) -> None:
    """Once its version is served.

    The explorer is let go afterwards: nothing else runs beside an evaluation at the start.
    """
    made = evaluations(reported=reported)
    made.at_startup(version)
    assert made.found == again
    assert made.explorer.actor.calls == [
        *(("evaluate", version, f"{version} is served") for version in again),
        ("explore",),
    ]


def test_the_last_one_is_not_made_twice(finished: Any) -> None:
    made = evaluations(reported=(0, 10))
    made.at_startup(10)
    made.at_end(10)
    assert made.found == []


def test_training_waits_for_it_only_in_a_deterministic_run(finished: list[bool]) -> None:
    finished[0] = False
    beside, alone = evaluations(), evaluations(alone=True)
    for made in (beside, alone):
        made.if_due(4)
        made.if_due(5)
    assert (beside.found, alone.found) == ([], [5])
    beside.at_end(6)
    assert beside.found == [5, 6]


def test_an_evaluation_may_take_longer_than_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the explorer answers; then it is over at once."""
    made, looks, silent = evaluations(alone=True), iter([[], [], [1]]), False

    def get(reference: Any, timeout: float) -> Any:
        if silent and reference is None:
            raise ray.exceptions.GetTimeoutError("no answer")
        return reference

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (next(looks), []))
    made.if_due(5)
    assert made.found == [5] and made.explorer.actor.calls[1:] == [("opened",), ("opened",)]
    looks, silent = iter([[]]), True
    with pytest.raises(ray.exceptions.GetTimeoutError):
        made.if_due(10)


def test_every_rank_hears_that_an_evaluation_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often at each, for they would give up before one that takes longer than they wait."""
    looks: list[list[int]] = [[1], [], [], [1], [], [1]]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (looks.pop(0), []))
    said: list[bool] = []

    def tell(is_over: bool) -> bool:
        said.append(is_over)
        return is_over

    lead = evaluations(alone=True)
    lead.agreed = tell
    other = Evaluations(None, lead.config, print, True, agreed=lambda _: said.pop(0))
    for ask, heard in (
        (lambda rank: rank.at_startup(0), [True]),
        (lambda rank: rank.if_due(4), [True]),
        (lambda rank: rank.if_due(5), [False, False, True]),
        (lambda rank: rank.at_end(6), [False, True]),
    ):
        ask(lead)
        assert said == heard
        ask(other)
        assert said == []
    assert lead.found == [0, 5, 6]


def test_ranks_hear_of_several_evaluations_as_often_as_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is over sooner than ranks are told, and all together are not."""
    now, begun, told = [0.0], dict[int, float](), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        over = begun.setdefault(id(refs[0]), now[0]) + 500.0
        now[0] = min(over, now[0] + timeout)
        return (refs, []) if now[0] == over else ([], refs)

    def tell(is_over: bool) -> bool:
        told.append(now[0])
        return is_over

    made = evaluations()
    made.agreed = tell
    for version in (5, 10, 15):
        made._start(version)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(ray, "wait", wait)
    made.at_end(15)
    assert made.found == [5, 10, 15] and told == [600.0, 1200.0, 1500.0]


def test_a_deterministic_run_holds_an_explorer_that_lived_on(finished: Any) -> None:
    beside, alone = evaluations(), evaluations(alone=True)
    for made in (beside, alone):
        await_engines(made.explorer, hold=made.alone)
    assert beside.explorer.actor.calls == [("opened",)]
    assert alone.explorer.actor.calls == [("opened",), ("hold",)]


def test_ranks_hear_of_engines_that_take_longer_than_ranks_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told = [0.0], list[tuple[float, bool]]()

    def get(reference: Any, timeout: float) -> None:
        now[0] += min(timeout, max(0.0, 700.0 - now[0]))
        if now[0] < 700.0:
            raise ray.exceptions.GetTimeoutError

    def tell(is_over: bool) -> bool:
        told.append((now[0], is_over))
        return is_over

    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "get", get)
    await_engines(evaluations().explorer, agreed=tell, beat_s=300.0)
    assert told == [(300.0, False), (600.0, False), (700.0, True)]
    heard = iter([False, False, True])  # another rank, which has no explorer
    await_engines(None, agreed=lambda is_over: next(heard))
    assert list(heard) == []


def test_engines_that_never_come_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def get(reference: Any, timeout: float) -> None:
        now[0] += timeout
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        await_engines(evaluations().explorer, beat_s=400.0)
    assert now[0] == control.START_S


def test_without_an_explorer_ray_is_not_even_loaded() -> None:
    """It takes a fifth of a second, which the first step of a
    supervised run would have as time of evaluation.
    """
    code = (
        "import sys; from rft.trainer.control import Evaluations; from rft.config import "
        "ExplorerConfig\n"
    )
    code += "made = Evaluations(None, ExplorerConfig(eval_interval=1), print, False)\n"
    code += "made.at_startup(0); made.if_due(1); made.at_end(1); print('ray' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
