"""`rft engines` against a supervisor that only writes down what it is asked."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.ground.process import socket_address
from rft.run.control_socket import NAME, ControlSocket
from rft.tools.engines import main

Said = pytest.CaptureFixture[str]
ROWS = [
    {
        "name": "engine_0",
        "state": "serving",
        "version": 17,
        "restarts": 1,
        "requests": 40,
        "tokens": 900,
        "active": 3,
        "poisoned": None,
        "cause": "EngineDied: engine_0: EngineCore was killed by SIGKILL",
    },
    {"name": "engine_1", "state": "starting", "restarts": 0, "cause": ""},
]


class Supervisor:
    def __init__(self, job: Path):
        self.asked: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {"engines": ROWS}
        self.door = ControlSocket(job / "control", self._answer)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        return self.reply


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "rft" / "quickstart" / "rft"


@pytest.fixture
def supervisor(job: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(job)
    supervisor.door.open()
    yield supervisor
    supervisor.door.close()


@pytest.mark.parametrize("up", [0, 1, 3])
def test_lists_engines_of_the_one_run_there(
    supervisor: Supervisor, job: Path, up: int, capsys: Said
) -> None:
    assert main([str([job, *job.parents][up])]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["name", "state", "version"]
    assert second.split()[:7] == ["engine_0", "serving", "17", "1", "40", "900", "3"]
    assert second.endswith("EngineDied: engine_0: EngineCore was killed by SIGKILL")
    assert third.split() == ["engine_1", "starting", "-", "0", "-", "-", "-"]
    assert supervisor.asked == [{}]


def test_adds_and_removes(supervisor: Supervisor, job: Path, capsys: Said) -> None:
    supervisor.reply = {"begun": ["engine_2", "engine_3"]}
    assert main([str(job), "--add", "2"]) == 0
    supervisor.reply = {"begun": ["engine_1"]}
    assert main([str(job), "--remove", "engine_1"]) == 0
    assert supervisor.asked == [{"add": 2}, {"remove": "engine_1"}]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in said] == [
        "engine_2: starting",
        "engine_3: starting",
        "engine_1: leaving",
    ]


def test_a_refusal_is_one_line(supervisor: Supervisor, job: Path, capsys: Said) -> None:
    supervisor.reply = {"error": "there is no engine_9; there are engine_0, engine_1"}
    assert main([str(job), "--remove", "engine_9"]) == 1
    assert (
        capsys.readouterr().err
        == "rft engines: there is no engine_9; there are engine_0, engine_1\n"
    )


@pytest.mark.parametrize("count", ["0", "-1", "65"])
def test_a_wrong_number_is_refused_here(
    supervisor: Supervisor, job: Path, count: str, capsys: Said
) -> None:
    assert main([str(job), f"--add={count}"]) == 2
    assert (
        f"--add {count}: give a number from 1 to 64" in capsys.readouterr().err
        and supervisor.asked == []
    )


def test_more_than_one_run_is_asked_back(
    supervisor: Supervisor, tmp_path: Path, job: Path, capsys: Said
) -> None:
    other = Supervisor(job.parent.with_name("second"))
    other.door.open()
    assert main([str(tmp_path / "runs" / "rft")]) == 2
    other.door.close()
    error = capsys.readouterr().err
    assert "holds 2 runs, give one" in error and str(job) in error


def test_nobody_there_is_one_line(
    tmp_path: Path, job: Path, supervisor: Supervisor, capsys: Said
) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"rft engines: {tmp_path / 'nothing'}: no such directory\n"
    supervisor.door.close()
    assert main([str(job)]) == 2
    assert "no run is under way here" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as killed, socket_address(job / "control" / NAME) as address:
        killed.bind(address)
    assert main([str(job)]) == 2
    assert "nothing answers at" in capsys.readouterr().err


def test_as_a_command(tmp_path: Path) -> None:
    for arguments, code in (
        (["engines", str(tmp_path)], 2),
        (["engines"], 2),
        (["engines", "-h"], 0),
    ):
        done = subprocess.run(
            [sys.executable, "-c", "from rft.cli import main; main()", *arguments],
            capture_output=True,
            text=True,
        )
        assert done.returncode == code and "Traceback" not in done.stderr
