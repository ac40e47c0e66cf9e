"""One process per role in a run directory: who is refused, what it touches, who works together."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from rft.config import Config, ConfigError, job_dir
from rft.ground import durable, process
from rft.run import launch, owners

HOLDS = """
import sys
from rft.config import Config
from rft.run import owners
held = owners.hold(Config(name="a", checkpoint_root_dir=sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def config(
    root: Path,
    mode: str = "both",
    explorer: str = "explorer",
    sql: bool = True,
    journal: str | None = None,
) -> Config:
    found = Config(name="a", mode=mode, checkpoint_root_dir=str(root))  # type: ignore[arg-type]
    found.explorer.name = explorer
    kind: Literal["sql", "queue"] = "sql" if sql else "queue"
    buffer = found.buffer.trainer_input.experience_buffer
    buffer.storage_type, buffer.path = kind, journal and str(root / journal)
    return found


def test_a_second_start_says_who_has_it_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    one = config(tmp_path)
    began: list[Path] = []
    monkeypatch.setattr(launch, "ready", lambda stages, index, check: stages[index])
    monkeypatch.setattr(launch.StageRun, "run", lambda stage: began.append(stage.job))

    def state() -> dict[Path, tuple[int, int]]:
        there = {path: path.stat() for path in tmp_path.rglob("*")}
        return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in there.items()}

    with owners.held(one):
        before = state()
        with pytest.raises(ConfigError) as refused:
            launch.run_stages([one], lambda config: None)
        assert state() == before and not began
    said = str(refused.value)
    assert f"process {os.getpid()} on {socket.gethostname()} since 2" in said
    assert "is its trainer" in said and str(job_dir(one)) in said
    assert launch.run_stages([one], lambda config: None) == 0 and began == [job_dir(one)]
    with owners.held(one):
        pass  # given back when the stage ended


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on "):
            owners.hold(config(tmp_path))
        process.send_signal(signal.SIGKILL)
    with owners.held(config(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"mode": "train"}, {"mode": "explore"}, None),
        ({"mode": "train"}, {"mode": "serve"}, None),
        ({"mode": "train"}, {"mode": "bench"}, None),
        ({"mode": "both"}, {"mode": "explore", "explorer": "second"}, None),
        ({"mode": "explore"}, {"mode": "explore", "explorer": "second"}, None),
        ({"mode": "train"}, {"mode": "both"}, "trainer"),
        ({"mode": "both"}, {"mode": "explore"}, "explorer explorer"),
        ({"mode": "explore"}, {"mode": "serve"}, "explorer explorer"),
        ({"mode": "bench"}, {"mode": "bench"}, "bench"),
        # a journal is one process's
        ({"mode": "train", "sql": False}, {"mode": "explore", "sql": False}, "journal"),
        ({"mode": "train", "sql": False}, {"mode": "serve", "sql": False, "journal": "b"}, None),
        (
            {"mode": "train", "sql": False, "journal": "b"},
            {"mode": "serve", "sql": False, "journal": "c/../b"},
            "journal",
        ),
    ],
)
def test_parts_that_work_together_share_the_directory(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], refused: str | None
) -> None:
    one, other = config(tmp_path, **first), config(tmp_path, **second)
    with owners.held(one):
        if refused is None:
            with owners.held(other):
                assert owners.place(one) != owners.place(other), "each has its resolved.yaml"
        else:
            with pytest.raises(ConfigError, match=rf"(is|has) its {refused}: "):
                owners.hold(other)
    with owners.held(other):
        pass  # a refusal has left none of its locks


def test_a_file_system_without_locks_is_said_with_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for flock, why in ((refuse, "No locks available"), (lambda *_: None, "grants every lock")):
        monkeypatch.setattr(durable.fcntl, "flock", flock)
        with pytest.raises(ConfigError, match=rf"{why}.*Lustre: -o flock; NFS: version 4"):
            owners.hold(config(tmp_path))


STARTED = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from rft.config import Config
from rft.run import owners
from rft.train import rename_if_taken
raw = OmegaConf.create(
    dict(checkpoint_root_dir=sys.argv[1], project="rft", name="a", continue_from_checkpoint=False)
)
rename_if_taken(raw)
print(raw.name, owners.own_run(Path(sys.argv[1]) / "rft" / "a"), flush=True)
owners.hold(Config(**raw))
"""


def started(root: Path, **environment: str) -> list[str]:
    """The name that one start of ranks gives its run, and what was its own before."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(root)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_launch_that_begins_anew_has_one_run_whatever_starts_its_ranks_again(
    tmp_path: Path,
) -> None:
    """This process is a torchrun; a plain start is a launch of its own, and begins another."""
    (tmp_path / "rft" / "a" / "checkpoints").mkdir(parents=True)  # of an earlier run
    (begun,) = started(tmp_path, TORCHELASTIC_RUN_ID="rft")
    assert begun.startswith("a_2")
    assert started(tmp_path, TORCHELASTIC_RUN_ID="rft") == [begun, begun]
    assert len(started(tmp_path)) == 1


def test_a_later_stage_and_a_job_put_back_into_the_queue_are_of_the_run_they_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "rft" / "a"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name in ("a", "a_20260101000000", "a_b"):
        owners.hold(Config(name=name, checkpoint_root_dir=str(tmp_path)))
    assert owners.own_run(first) == ""
    anew = Config(name="a_20260101000000", checkpoint_root_dir=str(tmp_path))
    anew.continue_from_checkpoint, anew.stage_name = False, "sft"
    owners.note_launch(anew)
    assert owners.own_run(first) == anew.name  # the same process, after its exec

    monkeypatch.setattr(process, "identity", lambda pid: f"{pid}-other")
    assert owners.own_run(first) == "", "another command of the same allocation"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert owners.own_run(first) == anew.name
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert owners.own_run(first) == ""
