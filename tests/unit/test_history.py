"""The corridor of `bench.history`: around the runs that were kept, none where there are none."""

import json
import sys
from pathlib import Path

import pytest

from bench import history

RUN = {name: 0.5 for name in history.MARGINS}


def test_what_is_like_a_kept_run_lies_inside() -> None:
    bounds = history.corridor([RUN, RUN | {"reward": 0.6, "sft step": 0.8}])
    assert all(low <= RUN[name] <= high for name, (low, high) in bounds.items())
    assert bounds["reward"] == pytest.approx((0.35, 0.75))
    assert bounds["sft step"] == pytest.approx((0.0, 1.2)), "quicker is never outside"
    assert bounds["mismatch"] == pytest.approx((0.0, 5.0))


def test_without_a_kept_run_nothing_is_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "history.json").write_text("[]")
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.json")
    monkeypatch.setattr(sys, "argv", ["bench.history"])
    assert history.main() == 2


@pytest.mark.parametrize(("name", "value", "code"), [("learns", 0.45, 0), ("learns", 0.3, 1)])
def test_a_run_outside_fails_and_is_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: float,
    code: int,
) -> None:
    kept = tmp_path / "history.json"
    kept.write_text(json.dumps([RUN]))
    monkeypatch.setattr(history, "HISTORY", kept)
    monkeypatch.setattr(history, "shortened", lambda root: None)
    monkeypatch.setattr(history, "measured", lambda root, calibration: RUN | {name: value})
    monkeypatch.setattr(sys, "argv", ["bench.history"])
    assert history.main() == code
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]
    assert line.endswith("OUTSIDE") == bool(code)
    assert json.loads(kept.read_text()) == [RUN]
