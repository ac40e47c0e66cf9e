"""Runs that are started and killed with -9 at drawn moments, again and again: all of one at once,
or its supervisor alone. After the sweep of the next start nothing of any of them is left: no
process, nothing in the temporary directory, nothing in shared memory, no session of Ray's.

    RFT_STARTS=25 pytest tests/verify/test_starts_and_kills.py       (default: 100)

Semaphores of other tests at the same time would be taken for these runs': on a machine that is
shared, `unshare -m` with a /dev/shm of its own.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runs import Run, overrides, train, write_assets

STARTS = int(os.environ.get("RFT_STARTS", "100"))
WITH_ENGINES = 5  # one start in so many; the others train from a file
LONGEST_S = {True: 40.0, False: 15.0}  # until the kill: with engines, and without
DIES_ALONE_S = 10.0  # 5 on a quiet machine

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


def lose(run: Run, moment: float, alone: bool) -> None:
    deadline = time.monotonic() + moment
    while run.process.poll() is None and time.monotonic() < deadline:
        psutil.wait_procs([psutil.Process(run.process.pid)], timeout=deadline - time.monotonic())
    if alone:
        run.process.kill()
        run.process.wait()
        run.await_extinction(DIES_ALONE_S)
    run.kill_everything()


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
    before, after_kill = shared(), list[tuple[int, int]]()
    for number in range(STARTS):
        engines, alone = number % WITH_ENGINES == 0, dice.random() < 0.5
        with train(*(grpo if engines else [*sft, "name=sft"])) as run:
            lose(run, dice.uniform(0.5, LONGEST_S[engines]), alone)
        after_kill.append((len(list(temporary.rglob("*"))), len(shared() - before)))
    print(f"left by each kill (temporary files, shared memory): {after_kill}")
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
