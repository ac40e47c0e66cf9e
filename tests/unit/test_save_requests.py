"""`rft ckpt save RUN`: a save is due at the end of the step, and whoever asked hears of it."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from states import PATIENCE, until

from rft.checkpoint import asking, fence
from rft.checkpoint.asking import NobodySaves, SaveRequests
from rft.checkpoint.records import Committed, Report, SaveFailed
from rft.ground import durable
from rft.tools import ckpt
from rft.trainer.saving import SaveTimes


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Path]:
    """Of a job that trains."""
    control = fence.control_dir(tmp_path / "job")
    (control / fence.OWNER).parent.mkdir(parents=True)
    descriptor = durable.lock(control / fence.OWNER)
    assert descriptor is not None
    yield control
    os.close(descriptor)


def committed(step: int, name: str = "step_00000007") -> Committed:
    return Committed(id="e0001n0001", step=step, collection="", name=name, seconds=0.1)


def asked(control: Path, report: Report) -> int:
    """Exit code of a command whose save ends so; a save of another step says nothing to it."""
    times = SaveTimes(1000, 0.0, lambda item: item, requests=SaveRequests(control))
    assert not times.is_due(6)
    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(ckpt.main, ["save", str(control.parent.parent)])
        until(lambda: times.is_due(7), "it is asked for")
        times.begun(7, 0)
        assert not times.is_due(8)
        times.hear(committed(3, "step_00000003"))
        assert not code.done()
        times.hear(report)
        assert not times.is_due(9)
        return code.result(PATIENCE)


def test_a_save_that_is_asked_for_is_told_when_it_is_committed(
    control: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(control, committed(7)) == 0
    assert capsys.readouterr().out == "step 7 is committed as step_00000007\n"
    assert list(asking.directory(control).iterdir()) == []


def test_a_save_that_fails_is_told_with_its_cause(
    control: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(control, SaveFailed(id="e0001n0001", step=7, cause="the disk is full")) == 1
    assert "the save of step 7 failed: the disk is full" in capsys.readouterr().err


def test_ranks_that_come_back_find_what_was_asked_of_those_before(control: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asking.ask, control, PATIENCE)
        first = SaveRequests(control)
        until(first.is_asked, "it is asked for")
        first.begun(7)  # and dies
        again = SaveRequests(control)
        assert again.is_asked()
        again.begun(9)
        again.hear(committed(9, "step_00000009"))
        assert answer.result(PATIENCE).name == "step_00000009"


def test_without_a_run_or_in_time_there_is_an_error(
    control: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt.main(["save", str(control.parent), "--timeout", "0"]) == 1
    assert "no save was committed within 0 s" in capsys.readouterr().err
    (tmp_path / "other" / "control").mkdir(parents=True)
    assert ckpt.main(["save", str(tmp_path / "other")]) == 2
    assert "no run trains here" in capsys.readouterr().err


def test_a_run_that_ends_without_a_word_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "GONE_S", 0.0)
    control = fence.control_dir(tmp_path)
    (control / fence.OWNER).parent.mkdir(parents=True)
    descriptor = durable.lock(control / fence.OWNER)
    assert descriptor is not None
    threading.Timer(0.0, os.close, [descriptor]).start()
    with pytest.raises(NobodySaves):
        asking.ask(control, PATIENCE)
