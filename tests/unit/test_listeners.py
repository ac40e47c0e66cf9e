"""What strangers do to the sockets that rft listens at: they end nothing and hold nothing."""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packed_sender import BUCKET, Weights

from rft.ground.process import frame
from rft.run.control_socket import NAME, ControlSocket, ask
from rft.sync import connection
from rft.sync import plan as plans
from rft.sync.connection import Listener, PeerConnection, PeerLost, PeerRefused, handshake
from rft.sync.sender import WeightSender
from tests.unit import fuzzed

PATIENT_S = 20.0


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, hard))
    held = []
    try:
        with pytest.raises(OSError, match="Too many"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 2.0, lambda hello: "peer", lambda wire, hello: wire.close())
    yield made
    made.close()


def comes_in(to: Listener | WeightSender, **said: Any) -> PeerConnection:
    return handshake(to.endpoint, {"peer": "x", **said}, "test", PATIENT_S)


def test_a_shortage_of_descriptors_ends_no_listener(listener: Listener, tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, lambda question: {"heard": True})
    control.open()
    weights, waiting = socket.socket(), socket.socket(socket.AF_UNIX)
    with weights, waiting:
        with no_descriptors():
            weights.connect((listener.endpoint["host"], listener.endpoint["port"]))
            waiting.connect(str(tmp_path / NAME))
            threading.Event().wait(0.05)  # they are accepted now, or rather not
            waiting.close()
        assert ask(tmp_path, {}, PATIENT_S) == {"heard": True}
        comes_in(listener).close()
    control.close()


def test_a_byte_now_and_then_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(connection, "HELLO_S", 0.1)
    with socket.create_connection((listener.endpoint["host"], listener.endpoint["port"])) as slow:
        slow.settimeout(PATIENT_S)
        slow.sendall(b"\x10")
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                slow.sendall(b"\0")
                threading.Event().wait(0.05)
    until(lambda: not listener._strangers)


def test_the_oldest_stranger_makes_room(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(connection, "STRANGERS", 3)
    where = (listener.endpoint["host"], listener.endpoint["port"])
    came = [socket.create_connection(where) for _ in range(5)]
    came[0].settimeout(PATIENT_S)
    assert came[0].recv(1) == b"", "it was the first"
    comes_in(listener).close()
    assert len(listener._strangers) <= 3
    for one in came:
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        frame(b"hello"),
        frame(msgspec.msgpack.encode([1, 2])),
        frame(msgspec.msgpack.encode({"secret": "é"})),
        frame(msgspec.msgpack.encode({"secret": 5})),
        frame(b"\x91" * 5000),
    ],
)
def test_who_does_not_know_the_secret_is_left_and_the_next_one_let_in(
    said: bytes, listener: Listener, recwarn: pytest.WarningsRecorder
) -> None:
    with socket.create_connection((listener.endpoint["host"], listener.endpoint["port"])) as one:
        one.settimeout(PATIENT_S)
        one.sendall(said)
        while one.recv(2**16):
            pass
    comes_in(listener).close()
    assert not [str(w.message) for w in recwarn if "thread" in str(w.category).lower()]


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    weights = Weights()
    made = WeightSender(weights, 1, 2.0)
    made.follow(plans.build([weights.blocks()], BUCKET), 0)
    yield made
    made.close()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"version": "x"},
        {"version": None},
        {"version": 1, "buckets": [10**6]},
        {"version": 1, "buckets": [0] * 1000},
        {"version": 1, "buckets": "all"},
        {"version": 1, "base": [1]},
        [1, 2],
        b"\xc1",
    ],
)
def test_a_worker_that_says_what_cannot_be_is_left_and_the_rank_lives(
    said: Any, sender: WeightSender
) -> None:
    sender.open(1)
    wire = comes_in(sender, **fuzzed.first_words(sender))
    wire.send(memoryview(frame(said if isinstance(said, bytes) else msgspec.msgpack.encode(said))))
    with pytest.raises(PeerLost):
        wire.receive_record()
    comes_in(sender, **fuzzed.first_words(sender)).close()
    assert sender.failure is None
    sender.close_version()


@pytest.mark.parametrize("name", ["epoch", "digest", "share", "part", "link"])
def test_first_words_that_lack_one_are_refused(name: str, sender: WeightSender) -> None:
    for wrong in ({}, {name: [{"a": 1}]}):
        said = {
            key: value for key, value in fuzzed.first_words(sender).items() if key != name
        } | wrong
        with pytest.raises(PeerRefused):
            comes_in(sender, **said)
    comes_in(sender, **fuzzed.first_words(sender)).close()


@pytest.mark.parametrize("name", list(fuzzed.listeners(Path())))
def test_what_is_malformed_ends_nothing(name: str, tmp_path: Path) -> None:
    """The same few every time; thousands drawn anew are in tests/verify."""
    seen = fuzzed.fuzz(fuzzed.listeners(tmp_path)[name], seed=19, cases=24)
    assert (seen.wrong, seen.cases) == ([], 24)
