"""The corridor of `bench.history`: around the runs that were kept, none where there are none."""

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
