"""The supervisor's socket: answers, long names, who may use it, what is left of it."""

import json
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.ground.process import socket_address
from rft.run import control_socket
from rft.run.control_socket import NAME, ControlSocket, NobodyAnswers, ask


def answer(question: dict[str, Any]) -> dict[str, Any]:
    return {"heard": question["said"]}


@pytest.fixture(params=["short", "long"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Also one whose name does not fit into a socket's address."""
    return tmp_path / ("control" if request.param == "short" else "/".join(["x" * 60] * 3))


@pytest.fixture
def opened(directory: Path) -> Iterator[ControlSocket]:
    door = ControlSocket(directory, answer)
    door.open()
    yield door
    door.close()


def test_answers_its_owner_and_nobody_else(opened: ControlSocket, directory: Path) -> None:
    for number in range(3):
        assert ask(directory, {"said": number}, 10) == {"heard": number}
    assert stat.S_IMODE((directory / NAME).stat().st_mode) == 0o600


def test_what_goes_wrong_is_told_and_the_next_one_is_answered(
    opened: ControlSocket, directory: Path
) -> None:
    assert ask(directory, {}, 10) == {"error": "KeyError: 'said'"}
    assert "error" in ask(directory, [1], 10)  # type: ignore[arg-type]
    assert ask(directory, {"said": 1}, 10) == {"heard": 1}


def test_a_caller_that_hangs_up_is_forgotten(opened: ControlSocket, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as line, socket_address(directory / NAME) as address:
        line.connect(address)
    assert ask(directory, {"said": 1}, 10) == {"heard": 1}


def test_a_caller_that_says_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "LINE_S", 0.05)
    door = ControlSocket(tmp_path, answer)
    door.open()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / NAME))
        assert ask(tmp_path, {"said": 1}, 10) == {"heard": 1}
    door.close()


def test_nobody_answers_before_and_after(directory: Path) -> None:
    with pytest.raises(NobodyAnswers, match=f"nothing answers at .*{NAME}"):
        ask(directory, {}, 10)
    door = ControlSocket(directory, answer)
    door.close()  # never opened
    door = ControlSocket(directory, answer)
    door.open()
    door.close()
    assert (
        door.thread is not None and not door.thread.is_alive() and not (directory / NAME).exists()
    )
    with pytest.raises(NobodyAnswers):
        ask(directory, {}, 10)


def test_a_killed_supervisors_socket_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / NAME))
    with pytest.raises(NobodyAnswers):
        ask(tmp_path, {}, 10)
    first, second = ControlSocket(tmp_path, answer), ControlSocket(tmp_path, answer)
    first.open()
    with pytest.raises(OSError, match="another process answers"):
        second.open()
    second.close()
    assert ask(tmp_path, {"said": 1}, 10) == {"heard": 1}
    first.close()
    third = ControlSocket(tmp_path, answer)
    third.open()
    assert ask(tmp_path, {"said": 3}, 10) == {"heard": 3}
    third.close()


def test_a_late_answer_is_not_waited_for(tmp_path: Path) -> None:
    heard = threading.Event()
    door = ControlSocket(tmp_path, lambda question: {"waited": heard.wait(10)})
    door.open()
    with pytest.raises(TimeoutError):
        ask(tmp_path, {}, 0.05)
    heard.set()
    assert json.loads(json.dumps(ask(tmp_path, {}, 10))) == {"waited": True}
    door.close()
