"""`staging=auto`: three saves of each kind, then the kind whose steps were shorter."""

from types import SimpleNamespace

import pytest

from rft.checkpoint import stager


@pytest.mark.parametrize(("lazy", "eager"), [(3.0, 2.0), (2.0, 3.0)])
def test_auto_takes_what_was_quicker(
    monkeypatch: pytest.MonkeyPatch, lazy: float, eager: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(stager, "time", SimpleNamespace(monotonic=lambda: now[0]))
    choice = stager.StagingTuner("auto")
    choice.updated()
    chosen = []
    for number in range(8):
        chosen.append(choice.next())
        outlier = 50.0 if number in (1, 4) else 0.0  # one slow step of each kind decides nothing
        now[0] += (lazy if chosen[-1] == "lazy" else eager) + outlier
        choice.updated()
        now[0] += 1.0  # a step without a save
        choice.updated()
    assert chosen == ["lazy"] * 3 + ["eager"] * 3 + ["lazy" if lazy < eager else "eager"] * 2


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_what_is_asked_for_is_done(kind: str) -> None:
    choice = stager.StagingTuner(kind)
    assert [choice.next() for _ in range(8)] == [kind] * 8
