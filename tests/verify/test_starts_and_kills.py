"""Runs that are started and killed with -9 at drawn moments, again and again: all of one at once,
or its supervisor alone. After the sweep of the next start nothing of any of them is left: no
process, nothing in the temporary directory, nothing in shared memory, no session of Ray's.
And runs where the machine is odd: few open files, a clock that jumps.

    RFT_STARTS=25 pytest tests/verify/test_starts_and_kills.py       (default: 100)

Semaphores of other tests at the same time would be taken for these runs': on a machine that is
shared, `unshare -m` with a /dev/shm of its own.
"""

import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rft.ground.errors import REFUSED
from rft.run.supervisor import EXIT_CODES

from runs import START_S, Run, is_one_line, overrides, step_rows, train, write_assets

STARTS = int(os.environ.get("RFT_STARTS", "100"))
WITH_ENGINES = 5  # one start in so many; the others train from a file
LONGEST_S = {True: 40.0, False: 15.0}  # until the kill: with engines, and without
DIES_ALONE_S = 5.0  # of a core: on a quiet machine of the clock, else of what it gives to each
HANGS_S = 60.0  # of the clock, however busy the machine is
STEPS = 6
LIMITED = """
import os, resource, sys
soft, hard, *words = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
os.execv(sys.executable, [sys.executable, *words])
"""
JUMPING = """
import os, time
def jumping(real, unit):
    def now():
        with open(os.environ["JUMP"]) as file:
            return real() + int(file.read() or 0) * unit
    return now
time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
"""

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600 * 3)]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of these runs alone, with a short name; Ray's too."""
    with tempfile.TemporaryDirectory(prefix="k") as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setenv("RAY_TMPDIR", made)
        yield Path(made)


def shared() -> set[str]:
    return set(os.listdir("/dev/shm"))


@contextmanager
def core_time(run: Run) -> Iterator[Callable[[], float]]:
    """Seconds for which a process that always has something to do has had a core since then: as
    many as have passed where nobody else wants one.
    """
    process = psutil.Popen([sys.executable, "-c", "while True: pass"])
    run.before.add(process.pid)  # it is none of the run's

    def had() -> float:
        return sum(process.cpu_times()[:2])

    try:
        while not had():
            psutil.wait_procs([process], timeout=0.01)
        began = had()
        yield lambda: had() - began
    finally:
        process.kill()
        process.wait()


def die_alone(run: Run) -> tuple[float, float]:
    """Kill its supervisor; seconds, of the clock and of a core, until all of it has ended."""
    with core_time(run) as had:
        run.process.kill()
        began = time.monotonic()
        run.process.wait()
        while family := run.family():
            assert had() < DIES_ALONE_S, f"still alive after {had():.1f} s of a core: {family}"
            assert time.monotonic() < began + HANGS_S, f"still alive: {family}"
            psutil.wait_procs(family, timeout=0.1)
        return round(time.monotonic() - began, 1), round(had(), 1)


def lose(run: Run, moment: float, alone: bool) -> tuple[float, float] | None:
    deadline = time.monotonic() + moment
    while run.process.poll() is None and time.monotonic() < deadline:
        psutil.wait_procs([psutil.Process(run.process.pid)], timeout=deadline - time.monotonic())
    took = die_alone(run) if alone else None
    run.kill_everything()
    return took


def test_nothing_is_left(tmp_path: Path, temporary: Path) -> None:
    assets, dice = write_assets(tmp_path / "assets"), random.Random(19)
    sft = [
        *("experiment=sft", "device=cpu", "monitor=none", "trainer.total_steps=100000"),
        f"model.model_path={assets / 'model'}",
        "buffer.train_batch_size=8",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
        f"checkpoint_root_dir={tmp_path}",
    ]
    grpo = overrides(tmp_path, "grpo", assets, "trainer.total_steps=100000")
    before, after_kill, took = shared(), list[tuple[int, int]](), list[tuple[float, float]]()
    for number in range(STARTS):
        engines, alone = number % WITH_ENGINES == 0, dice.random() < 0.5
        with train(*(grpo if engines else [*sft, "name=sft"])) as run:
            seconds = lose(run, dice.uniform(0.5, LONGEST_S[engines]), alone)
        took += [seconds] if seconds else []
        after_kill.append((len(list(temporary.rglob("*"))), len(shared() - before)))
    print(f"left by each kill (temporary files, shared memory): {after_kill}")
    print(f"ended by itself after (s of the clock, of a core): {took}")
    with train(*sft, "name=last", "trainer.total_steps=1") as run:  # its start sweeps
        assert (run.end(), run.errors()) == (0, "")
    left = [
        path
        for path in temporary.rglob("*")
        if not path.is_dir() or path.name.startswith("session_")
    ]
    left = [path for path in left if "torchinductor" not in str(path)]
    assert [str(path.relative_to(temporary)) for path in left] == []
    assert shared() - before == set()


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A run with engines."""
    assets = write_assets(tmp_path / "assets")
    return overrides(tmp_path, "small", assets, f"trainer.total_steps={STEPS}")


def test_few_open_files_are_enough_where_more_may_be_had(tmp_path: Path, small: list[str]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limited = [sys.executable, "-c", LIMITED, "256", str(hard), "-m", "rft.train", *small]
    with Run(limited) as run:
        assert (run.end(timeout=START_S), run.errors()) == (0, "")
    rows = step_rows(tmp_path / "rft" / "small")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_too_few_open_files_are_refused_in_a_line(tmp_path: Path, small: list[str]) -> None:
    with Run([sys.executable, "-c", LIMITED, "256", "256", "-m", "rft.train", *small]) as run:
        assert run.end() == REFUSED
        assert is_one_line(run.errors(), "256", "open files", "ulimit -Hn")
    assert not (tmp_path / "rft").exists()


def test_a_clock_that_jumps_an_hour_in_mid_run_changes_nothing(
    tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all Python of all processes reads it, Ray's too; forward, and then two hours back."""
    jump = tmp_path / "jump"
    jump.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JUMP", str(jump))
    with train(*small) as run:
        for step, by in ((1, "3600"), (3, "-3600")):
            run.wait_step(step)
            jump.write_text(by)
        assert (run.end(timeout=START_S), run.errors()) == (0, "")
    rows = step_rows(tmp_path / "rft" / "small")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 <= row["time/step_s"] < START_S for row in rows)


def test_a_part_that_cannot_be_made_again_is_tried_again(tmp_path: Path, small: list[str]) -> None:
    """Something else is in the place of the buffer's directory for a while."""
    journal = tmp_path / "rft" / "small" / "buffer"
    with train(*small, "cluster.max_restarts=6") as run:
        run.wait_step(1)
        journal.rename(journal.with_name("aside"))
        journal.touch()
        run.find("ray::ExperienceBuffer").kill()
        assert "buffer: its process died" in run.wait_for("it comes back").string
        run.wait_for("^buffer: .*Not a directory.*; it is tried again .2 of 6 within an hour")
        journal.unlink()
        journal.with_name("aside").rename(journal)
        assert (run.end(timeout=START_S), run.errors()) == (0, "")
    rows = step_rows(tmp_path / "rft" / "small")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_a_part_that_can_never_be_made_again_ends_the_run_with_its_cause(
    tmp_path: Path, small: list[str]
) -> None:
    journal = tmp_path / "rft" / "small" / "buffer"
    with train(*small, "cluster.max_restarts=2") as run:
        run.wait_step(1)
        journal.rename(journal.with_name("aside"))
        journal.touch()
        run.find("ray::ExperienceBuffer").kill()
        assert run.end(timeout=START_S) == EXIT_CODES["buffer"]
        assert is_one_line(run.errors(), "buffer failed", "died 3 times", "Not a directory")
