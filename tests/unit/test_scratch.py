"""What a process leaves in the temporary directory is removed when it is dead, and nothing else."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from rft.ground import scratch

LEAVES = """
import os, socket, sys, tempfile
from rft.ground import scratch
scratch.enter()
place = tempfile.mkdtemp()
socket.socket(socket.AF_UNIX).bind(os.path.join(tempfile.gettempdir(), "x" * 36))
open(os.path.join(tempfile.gettempdir(), "vllm_dist_0a"), "w").close()
print(tempfile.gettempdir(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this test, with a short name, and its shared memory."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        (Path(made) / "shm").mkdir()
        monkeypatch.setattr(scratch, "SHARED_MEMORY", Path(made) / "shm")
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(made)


def left_by_one(end: int | None) -> "tuple[Path, subprocess.Popen[bytes]]":
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    place = Path(process.stdout.readline().decode().strip())
    if end is not None:
        process.send_signal(end)
        process.communicate()
    return place, process


def test_what_a_killed_process_left_is_swept_and_what_others_have_is_not(temporary: Path) -> None:
    dead, _ = left_by_one(signal.SIGKILL)
    alive, process = left_by_one(None)
    others = [temporary / "tmpabc", temporary / f"rft-{os.getuid()}" / "not-a-lock"]
    segments = [temporary / "shm" / name for name in ("vllm_dist_0a-tp:0-[0-1]-cpushm_0", "psm_1")]
    for path in others:
        path.mkdir()
    for path in segments:
        path.touch()
    assert len(list(dead.iterdir())) == 3 and dead.parent == temporary / f"rft-{os.getuid()}"
    (alive / "vllm_dist_0a").rename(alive / "vllm_dist_0b")
    assert scratch.sweep() == [dead] and scratch.sweep() == []
    assert not dead.exists() and not segments[0].exists() and segments[1].exists()
    assert len(list(alive.iterdir())) == 3 and all(path.is_dir() for path in others)
    process.communicate()
    assert scratch.sweep() == [alive]
    assert sorted(path.name for path in others[1].parent.iterdir()) == ["not-a-lock"]


HOLDS = """
import os, sys
from multiprocessing import get_context, resource_tracker, shared_memory
from pathlib import Path
from rft.ground import scratch
own = scratch.take()
own.starts_ray()
(Path(os.environ["TMPDIR"]) / "ray" / f"session_now_{os.getpid()}").mkdir(parents=True)
held = shared_memory.SharedMemory(create=True, size=64)
lock = get_context("spawn").Lock()
for name, kind in (held._name, "shared_memory"), (lock._semlock.name, "semaphore"):
    resource_tracker.unregister(name, kind)  # as if that had been killed with it
own.note(lambda: [os.getpid()])
print(own.directory, held.name, lock._semlock.name, flush=True)
sys.stdin.read()
"""


def test_segments_and_sessions_of_the_dead_are_swept_and_none_that_somebody_has(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", Path("/dev/shm"))
    others = shared_memory.SharedMemory(create=True, size=64)
    session = temporary / "ray" / "session_now_1"
    session.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    directory, name, lock = process.stdout.readline().decode().split()
    semaphore = Path("/dev/shm") / f"sem.{lock[1:]}"
    held, its = Path("/dev/shm") / name, temporary / "ray" / f"session_now_{process.pid}"
    try:
        scratch.free_segments(Path(directory))
        assert scratch.sweep() == [] and held.exists() and semaphore.exists()
        process.kill()
        process.communicate()
        attached = shared_memory.SharedMemory(name)  # somebody goes on with it
        scratch.free_segments(Path(directory))
        assert held.exists()
        resource_tracker.unregister(f"/{name}", "shared_memory")
        attached.close()
        os.utime(Path(directory) / scratch.SEEN, (0, 0))  # only what it had noted counts
        assert scratch.sweep() == [Path(directory)]
        assert not held.exists() and not semaphore.exists() and not its.exists()
        assert session.exists() and (Path("/dev/shm") / others.name).exists()
    finally:
        held.unlink(missing_ok=True)
        semaphore.unlink(missing_ok=True)
        others.close()
        others.unlink()


@pytest.mark.parametrize(
    ("looked", "left"), [(1.0, {"other"}), (60.0, {"other", "psm_a", "sem.mp-a"})]
)
def test_what_was_made_as_its_owner_died_is_swept(
    temporary: Path, looked: float, left: set[str]
) -> None:
    """And had been seen by nobody; what was made long after it looked last is somebody else's."""
    made = temporary / "shm"
    place, _ = left_by_one(signal.SIGKILL)
    for name in ("sem.mp-a", "psm_a", "other"):
        (made / name).touch()
    ago = (made / "other").stat().st_ctime - looked
    (place / scratch.SEEN).touch()
    os.utime(place / scratch.SEEN, (ago, ago))
    assert scratch.sweep() == [place]
    assert {path.name for path in made.iterdir()} == left


def test_its_own_is_gone_at_the_end_and_compilers_keep_their_cache(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it as it is loaded
    own = scratch.take()
    assert own is not None
    environment = own.environment()
    assert environment["TMPDIR"] == str(own.directory) and own.directory.is_dir()
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    own.remove()
    assert list((temporary / f"rft-{os.getuid()}").iterdir()) == []


def test_a_process_within_one_takes_another_beside_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = scratch.take()
    assert outer is not None
    monkeypatch.setattr(tempfile, "tempdir", str(outer.directory))
    inner = scratch.take()
    assert inner is not None and inner.directory.parent == outer.directory.parent
    with socket.socket(socket.AF_UNIX) as line:  # vLLM's have names of 36 letters
        line.bind(str(inner.directory / ("x" * 36)))
    inner.remove()
    outer.remove()


def test_where_there_can_be_none_everything_stays_where_it_is(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = temporary / f"rft-{os.getuid()}"
    place.symlink_to(temporary)  # somebody else's
    assert scratch.take() is None and "somebody else's" in caplog.text
    place.unlink()
    monkeypatch.setattr(scratch, "LONGEST", 5)
    assert scratch.take() is None and "too long" in caplog.text
    assert not place.exists()
