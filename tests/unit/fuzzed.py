"""Malformed frames and requests for every listener that rft opens, drawn from a seed.

    good bytes ──► `spoilt` ──► a connection of their own ──► whatever comes back, to its end

In: a seed and a number of cases. Out: `Seen`: what went wrong, seconds of the longest case, bytes
by which the process grew. A case that is not answered or cut within HANG_S has hung; threads that
ended with an exception are told by `threading.excepthook`.
"""

import asyncio
import base64
import gc
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow

from rft.extras.environments import juicer_service as juicer
from rft.ground.process import frame
from rft.ground.rounds import Received, Round
from rft.rollout.worker_channel import DIED, Hello, StageReport, WorkerChannel
from rft.run.control_socket import NAME, ControlSocket, ask
from rft.sync import plan as plans
from rft.sync.connection import handshake
from rft.sync.plan import Share, part_of
from rft.sync.relay import Relay
from rft.sync.sender import WeightSender
from rft.tools import studio
from rft.tools.local_page import PageServer
from tests.unit.packed_sender import BUCKET, Weights
from tests.unit.scripted import TOKEN, Pool, listening

HANG_S = 30.0
WAIT_S = 1.0  # of a trainer rank for a version that does not come
Open = Callable[[], socket.socket]
NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1)


@dataclass
class Seen:
    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    grown: int = 0


def spoilt(good: bytes, draw: random.Random) -> bytes:
    """One to three things wrong with it."""
    data = bytearray(good)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = draw.randbytes(draw.randint(1, 64))
        elif kind == 3:
            del data[at : at + draw.randint(1, 16)]
        elif kind == 4:
            data[at:at] = data[at : at + draw.randint(1, 64)] * draw.randint(2, 50)
        elif kind == 5:
            data[at : at + 4] = draw.choice(NUMBERS).to_bytes(9, "little", signed=True)[:4]
        elif kind == 6:
            data[at:at] = draw.choice((b"\x91", b"[", b'{"a":', b"\xc1", b"\0", b"\r\n")) * 3000
        else:
            data = bytearray(draw.randbytes(draw.randint(0, 300)))
    return bytes(data)


def said(*records: Any) -> bytes:
    return b"".join(frame(msgspec.msgpack.encode(one)) for one in records)


def request(path: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1:1", f"Content-Length: {len(data)}", *headers)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def tcp(host: str, port: int, *first: bytes) -> Open:
    def opened() -> socket.socket:
        made = socket.create_connection((host, port), HANG_S)
        for one in first:
            made.sendall(one)
        return made

    return opened


def first_words(sender: WeightSender) -> dict[str, Any]:
    return {
        "peer": "engine_0",
        "epoch": 1,
        "digest": sender.plan.digest,
        "share": {},
        "part": part_of(sender.plan, 0, Share()).digest,
        "link": {"kind": "host", "device": "cpu"},
    }


@contextmanager
def trainer_rank() -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    weights = Weights()
    sender = WeightSender(weights, 1, WAIT_S)
    sender.follow(plans.build([weights.blocks()], BUCKET), 0)
    sender.open(1)
    hello = first_words(sender)
    at = sender.endpoint
    known = said({**hello, "secret": at["secret"]})
    here = tcp(at["host"], at["port"])

    def lives() -> None:
        wire = handshake(at, hello, "a good one", HANG_S)
        wire.send_record({"version": 1})
        assert wire.receive_record() == {"version": 1}
        wire.close()
        assert sender.failure is None, sender.failure
        sender.close_version()
        sender.open(1)

    asks = said({"version": 1, "buckets": [0, 1], "base": None}, {"again": [0]})
    try:
        yield (
            [
                (here, said({**hello, "secret": "x" * 32})),
                (here, known),
                (tcp(at["host"], at["port"], known), asks),
            ],
            lives,
        )
    finally:
        sender.close()


@contextmanager
def engine_worker() -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    relay = Relay("127.0.0.1")
    at = relay.endpoint
    stream = {"peer": "a", "epoch": 1, "digest": "d", "part": "p", "share": {}, "stream": 0}
    stream["generation"] = 1
    member = {"peer": "a", "engine": "a", "group": [1, 1, 0], "place": 1, "machine": "m"}
    here = tcp(at["host"], at["port"])

    def lives() -> None:
        handshake(at, member, "a good one", HANG_S).close()

    try:
        yield (
            [
                (here, said({**stream, "secret": at["secret"]})),
                (here, said({**member, "secret": "x" * 32})),
            ],
            lives,
        )
    finally:
        relay.close()


@contextmanager
def supervisor(directory: Path) -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    control = ControlSocket(directory, lambda question: {"heard": question["said"]})
    control.open()

    def opened() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(HANG_S)
        made.connect(str(directory / NAME))
        return made

    def lives() -> None:
        assert ask(directory, {"said": 1}, HANG_S) == {"heard": 1}

    try:
        yield [(opened, said({"said": {"engines": [1, "a"]}}))], lives
    finally:
        control.close()


@contextmanager
def endpoint(directory: Path) -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    loop, ready = asyncio.new_event_loop(), threading.Event()
    over, told = asyncio.Event(), []

    async def serve() -> None:
        pool = Pool(lambda prompt, number: "ok")
        async with listening(pool, directory) as made:
            told.append((made, made.open_session))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(HANG_S)
    host, port = told[0][0].url.removeprefix("http://").split(":")
    here = tcp(host, int(port))
    key, close = f"Authorization: Bearer {TOKEN}", "Connection: close"
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    good = [
        request("/v1/chat/completions", chat, key, close),
        request("/s/x/v1/completions", {"prompt": "a", "n": 2, "logprobs": 1}, key, close),
        request("/feedback", {"session": "x", "reward": 1, "metrics": {"a": 1}}, key, close),
        request("/commit", {"tasks": ["a"]}, close),
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    ]

    def lives() -> None:
        with here() as made:
            made.sendall(good[-1])
            assert b"200 OK" in to_its_end(made, HANG_S / 2)

    try:
        yield [(here, one) for one in good], lives
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(HANG_S)
        loop.close()


@contextmanager
def page() -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    server = PageServer(0, studio.PAGE, {"/api/echo": lambda asked: {"said": asked["a"]}})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    at = f"127.0.0.1:{server.server_port}"
    ours = (f"Cookie: {server.cookie}={server.token}", f"Origin: http://{at}")
    asked = request("/api/echo", {"a": [1]}, *ours, "Content-Type: application/json")
    asked = asked.replace(b"127.0.0.1:1\r", at.encode() + b"\r")
    here = tcp("127.0.0.1", server.server_port)

    def lives() -> None:
        with here() as made:
            made.sendall(asked)
            assert b'{"said": [1]}' in to_its_end(made, HANG_S / 2)

    try:
        yield [(here, asked), (here, asked.replace(server.token.encode(), b"x"))], lives
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG_S)


@contextmanager
def engine_actor() -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    """Where an engine's workers get their orders."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    over, told = asyncio.Event(), list[Any]()

    async def serve() -> None:
        loop.set_exception_handler(
            lambda _, context: raised.append(repr(context.get("exception") or context["message"]))
        )
        told.append(await new())
        ready.set()
        await over.wait()
        told[0][0].close()

    async def new() -> tuple[WorkerChannel, str, str]:
        made = WorkerChannel(1)
        return made, *await made.open()

    raised: list[str] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(HANG_S)
    channel, path, word = told[0]

    def opened(*first: bytes, at: str = path) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(HANG_S)
        made.connect(at)
        for one in first:
            made.sendall(one)
        return made

    report = StageReport(received=Received(digest="d"), number=1)

    def stages(channel: WorkerChannel) -> list[Received]:
        order = Round(version=1, timeout=HANG_S)
        return asyncio.run_coroutine_threadsafe(channel.stage(order), loop).result(HANG_S)

    def lives() -> None:
        """Strangers are none of its workers; who has said the word and then nonsense has died."""
        assert not raised, raised
        fresh, at, known = asyncio.run_coroutine_threadsafe(new(), loop).result(HANG_S)
        with opened(said(Hello(word="x")), at=at), opened(said(Hello(word=known)), at=at) as good:
            good.sendall(said(report))
            assert stages(fresh) == [report.received]
            good.sendall(frame(b"\xc1"))
            assert stages(fresh) == [DIED]
        loop.call_soon_threadsafe(fresh.close)

    try:
        yield (
            [
                (opened, said(Hello(word=word))),
                (lambda: opened(said(Hello(word=word))), said(report, report)),
            ],
            lives,
        )
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(HANG_S)
        loop.close()


@contextmanager
def juicer_service() -> Iterator[tuple[list[tuple[Open, bytes]], Callable[[], None]]]:
    """Our service around Data-Juicer, with a session that has no operators."""
    session = juicer.JuicerSession.__new__(juicer.JuicerSession)
    session.asked, session.operators = {}, []

    class Service(juicer.JuicerService):
        token, sessions = TOKEN, {"x": session}

        def log_message(self, *_: Any) -> None: ...

    server = juicer.JuicerListener(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    here = tcp("127.0.0.1", server.server_port)
    key = f"Authorization: Basic {base64.b64encode(f'rft:{TOKEN}'.encode()).decode()}"
    rows, sink = pyarrow.Table.from_pylist([{"text": "a", "reward": 1.0}] * 3), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    parts = [(b'"session_id"', b"x"), (b'"arrow_data"; filename="a"', sink.getvalue())]
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; name=" + name + b"\r\n\r\n" + data + b"\r\n"
        for name, data in parts
    )
    body += b"--b--\r\n"
    form = "POST /process_experience HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    good = [
        f"{form}{key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body,
        request("/create", {"operators": []}, key),
        request("/close", {"session_id": "y"}, key),
        request("/process_task", {"session_id": "y"}),
        b"GET /health HTTP/1.1\r\n\r\n",
    ]

    def lives() -> None:
        for asked, answer in ((good[0], b"200 OK"), (good[3], b" 401 "), (good[4], b"200 OK")):
            with here() as made:
                made.sendall(asked)
                assert answer in to_its_end(made, HANG_S / 2), asked[:60]

    try:
        yield [(here, one) for one in good], lives
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG_S)


def to_its_end(made: socket.socket, patience_s: float = 0.02) -> bytes:
    """What comes back. Who still waits for more is told, after a moment, that nothing comes: then
    it need not be waited for until its own deadline.
    """
    found = b""
    made.settimeout(patience_s)
    try:
        while True:
            try:
                part = made.recv(2**16)
            except TimeoutError:
                if made.gettimeout() == HANG_S:
                    raise
                made.settimeout(HANG_S)
                made.shutdown(socket.SHUT_WR)
                continue
            if not part:
                return found
            found = (found + part)[-(2**16) :]
    except ConnectionError:  # cut, which is an answer
        return found


def listeners(directory: Path) -> dict[str, Any]:
    return {
        "trainer rank": trainer_rank,
        "engine worker": engine_worker,
        "supervisor": lambda: supervisor(directory),
        "endpoint": lambda: endpoint(directory),
        "page": page,
        "engine actor": engine_actor,
        "Data-Juicer's service": juicer_service,
    }


def fuzz(made: Any, seed: int, cases: int) -> Seen:
    """`cases` for one of `listeners`; the first tenth is not counted to its growth."""
    draw, seen = random.Random(seed), Seen()
    usual, process, before = threading.excepthook, psutil.Process(), 0

    def died(told: Any) -> None:
        seen.wrong.append(f"a thread died of {told.exc_type.__name__}: {told.exc_value}")

    threading.excepthook = died
    try:
        with made() as (goods, lives):
            for number in range(cases):
                if number == cases // 10:
                    gc.collect()
                    before = process.memory_info().rss
                opened, good = draw.choice(goods)
                data, began = spoilt(good, draw), time.monotonic()
                try:
                    with opened() as line:
                        line.sendall(data)
                        to_its_end(line)
                except TimeoutError:
                    seen.wrong.append(f"case {number} of seed {seed} hangs: {data[:200]!r}")
                except OSError:  # cut before all of it was sent
                    pass
                seen.cases += 1
                seen.longest_s = max(seen.longest_s, time.monotonic() - began)
            lives()
            gc.collect()
            seen.grown = process.memory_info().rss - before
    finally:
        threading.excepthook = usual
    return seen
