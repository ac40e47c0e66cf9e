"""`staging=auto`: three saves of each kind, then lazy, unless each eager step was shorter."""

from types import SimpleNamespace

import pytest

from rft.checkpoint import stager

LAZY, EAGER = "lazy", "eager"


@pytest.mark.parametrize(
    ("lazy", "eager", "slow", "taken"),
    [
        (3.0, 2.0, (), EAGER),
        (3.0, 2.0, (1,), EAGER),  # a slow lazy step: what is compared with is the quickest
        (3.0, 2.0, (4,), LAZY),  # a slow eager one: not every one was shorter
        (2.0, 3.0, (), LAZY),
        (2.0, 3.0, (0, 1), LAZY),
    ],
)
def test_auto_takes_eager_where_it_was_always_quicker(
    monkeypatch: pytest.MonkeyPatch, lazy: float, eager: float, slow: tuple[int, ...], taken: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(stager, "time", SimpleNamespace(monotonic=lambda: now[0]))
    choice = stager.StagingTuner("auto")
    choice.updated()
    chosen = []
    for number in range(8):
        chosen.append(choice.next())
        outlier = 50.0 if number in slow else 0.0
        now[0] += (lazy if chosen[-1] == LAZY else eager) + outlier
        choice.updated()
        now[0] += 1.0  # a step without a save
        choice.updated()
    assert chosen == [LAZY] * 3 + [EAGER] * 3 + [taken] * 2
    assert [len(times) for times in choice._times.values()] == [3, 3], "however long a run is"


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_what_is_asked_for_is_done(kind: str) -> None:
    choice = stager.StagingTuner(kind)
    assert [choice.next() for _ in range(8)] == [kind] * 8
