"""A network that misbehaves, between clients and an S3 server.

    python -m bench.faults.proxy [UPSTREAM]        (without one: moto's server, in this process)

Prints its own address and the server's as one JSON line, and ends with its standard input;
`Network` is the other end of it. Each request that passes is numbered from the last `Plan` on, and
may be cut, delayed, sent twice, sent again later, refused or answered half, drawn by the plan's
seed; at one number processes may be killed. Invariant: what a plan does is a function of its seed
and of the order in which requests come.
"""

import contextlib
import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

KINDS = (
    "lost request",  # the connection ends, the store has heard nothing
    "lost answer",  # the store has done it
    "half answer",
    "twice",  # the client hears the second answer
    "again later",  # after AGAIN more requests
    "late",
    "503",
    "500 done",  # the store has done it
)
LATE_S = (0.005, 0.05)
AGAIN = 6
LAG_S = 0.25  # that a listing is behind, where a plan says so
CONTROL = "/-/"
HELD_S = 30.0  # the longest that requests are held for the next plan
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
INTERNAL = b"<Error><Code>InternalError</Code><Message>Try again.</Message></Error>"
HOPS = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect")
ENTRY = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
PREFIX = re.compile(rb"<CommonPrefixes>\s*<Prefix>(.*?)</Prefix>\s*</CommonPrefixes>", re.DOTALL)


@dataclass(frozen=True)
class Plan:
    """`rate`: share of requests that meet one of `kinds`. `kill`: processes that get SIGKILL at
    request `number`, before or after it has reached the store. `ignores`: the store knows no
    If-None-Match. `hold`: nothing passes until the next plan.
    """

    seed: int = 0
    rate: float = 0.0
    kinds: tuple[str, ...] = KINDS
    lags: bool = False
    number: int = 0
    after: bool = False
    kill: tuple[int, ...] = ()
    ignores: bool = False
    hold: bool = False


CALM = Plan()


@dataclass
class State:
    """Of the proxy's threads. All under `lock`."""

    plan: Plan = CALM
    drawn: random.Random = field(default_factory=random.Random)
    count: int = 0
    met: dict[str, int] = field(default_factory=dict)
    born: dict[str, float] = field(default_factory=dict)  # keys that were put, and when first
    again: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, plan: Plan) -> dict[str, Any]:
        """Take a plan; what the one before has come to."""
        with self.lock:
            found = {"count": self.count, "met": self.met}
            due = [act for _, act in self.again]
            self.plan, self.drawn, self.again = plan, random.Random(plan.seed), []
            self.count, self.met = 0, {}
            self.lock.notify_all()
        for act in due:
            act()
        return found

    def next(self) -> tuple[str, bool, bool, list[Callable[[], object]]]:
        """(what the next request meets, killed before it, after it, what is sent again now)"""
        with self.lock:
            self.lock.wait_for(lambda: not self.plan.hold, HELD_S)
            self.count += 1
            plan, kind = self.plan, ""
            if self.drawn.random() < plan.rate:
                kind = self.drawn.choice(plan.kinds)
                self.met[kind] = self.met.get(kind, 0) + 1
            hit = self.count == plan.number
            if hit:
                self.met["kill"] = 1
            due = [act for at, act in self.again if at <= self.count]
            self.again = [one for one in self.again if one[0] > self.count]
        return kind, hit and not plan.after, hit and plan.after, due


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: tuple[str, int]
    state: State
    timeout = 60

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith(CONTROL):
            given = json.loads(body)
            plan = Plan(**given | {"kinds": tuple(given["kinds"]), "kill": tuple(given["kill"])})
            self._say(200, {}, json.dumps(self.state.begin(plan)).encode())
            return
        kind, before, after, due = self.state.next()
        for act in due:
            act()
        if before:
            self._kill()
        self._meet(kind, body)
        if after:
            self._kill()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _kill(self) -> None:
        for pid in self.state.plan.kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _meet(self, kind: str, body: bytes) -> None:
        if kind == "lost request":
            return self._cut()
        if kind == "503":
            return self._say(503, {}, SLOW_DOWN)
        if kind == "late":
            time.sleep(random.Random(self.path).uniform(*LATE_S))
        answer = self._forward(body)
        if kind == "twice":
            answer = self._forward(body)
        if kind == "again later":
            with self.state.lock:
                method, path, headers = self.command, self.path, dict(self.headers)
                self.state.again.append(
                    (self.state.count + AGAIN, lambda: self._sent(method, path, headers, body))
                )
        if kind == "lost answer":
            return self._cut()
        if kind == "500 done":
            return self._say(500, {}, INTERNAL)
        return self._say(*answer, half=kind == "half answer")

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        return self._sent(self.command, self.path, dict(self.headers), body)

    def _sent(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        hidden = (*HOPS, "if-none-match") if self.state.plan.ignores else HOPS
        given = {name: value for name, value in headers.items() if name.lower() not in hidden}
        asked = urlsplit(path)
        with contextlib.closing(http.client.HTTPConnection(*self.upstream, timeout=60)) as server:
            server.request(method, path, body, given | {"Content-Length": str(len(body))})
            answer = server.getresponse()
            content = answer.read()
        self._note(method, unquote(asked.path).lstrip("/"), asked.query, answer.status)
        if self.state.plan.lags and method == "GET" and "list-type" in asked.query:
            content = self._lagging(unquote(asked.path).strip("/"), content)
        told = {name: value for name, value in answer.getheaders() if name.lower() not in HOPS}
        if method == "HEAD":
            told["Content-Length"] = answer.getheader("Content-Length") or "0"
        return answer.status, told, content

    def _note(self, method: str, key: str, query: str, status: int) -> None:
        """When which object came and went."""
        asked = parse_qs(query, keep_blank_values=True)
        is_put = method == "PUT" and "uploadId" not in asked
        is_complete = method == "POST" and "uploadId" in asked
        with self.state.lock:
            if status < 300 and (is_put or is_complete):
                self.state.born.setdefault(key, time.monotonic())
            elif status < 300 and method == "DELETE":
                self.state.born.pop(key, None)

    def _lagging(self, bucket: str, content: bytes) -> bytes:
        """A listing without what is younger than LAG_S."""
        with self.state.lock:
            now, born = time.monotonic(), dict(self.state.born)
        young = {key for key, since in born.items() if now < since + LAG_S}

        def of_key(match: re.Match[bytes]) -> bytes:
            return b"" if f"{bucket}/{match[1].decode()}" in young else match[0]

        def of_prefix(match: re.Match[bytes]) -> bytes:
            below = {key for key in born if key.startswith(f"{bucket}/{match[1].decode()}")}
            return b"" if below and below <= young else match[0]

        return PREFIX.sub(of_prefix, ENTRY.sub(of_key, content))

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _say(
        self, status: int, headers: dict[str, str], content: bytes, half: bool = False
    ) -> None:
        try:
            self.send_response_only(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if half:
                self.wfile.write(content[: len(content) // 2])
                self._cut()
            elif self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # who asked is dead
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle of a request."""


class Network:
    """The harness's end: the processes' address of the store, and what happens on the way to it."""

    def __init__(self, upstream: str = ""):
        command = [sys.executable, "-m", "bench.faults.proxy", *filter(None, [upstream])]
        environment = os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "256"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.address, self.store = told["address"], told["store"]

    def plan(self, plan: Plan) -> dict[str, Any]:
        """From now on this; what the plan before has come to: `count` of requests, faults `met`."""
        host = urlsplit(self.address)
        with contextlib.closing(http.client.HTTPConnection(host.netloc, timeout=60)) as proxy:
            proxy.request("POST", CONTROL, json.dumps(asdict(plan)))
            return dict(json.loads(proxy.getresponse().read()))

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def main(arguments: list[str]) -> None:
    if arguments:
        store = arguments[0]
    else:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        store = "http://{}:{}".format(*moto.get_host_and_port())
    host = urlsplit(store)
    Handler.upstream, Handler.state = (str(host.hostname), int(host.port or 80)), State()
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    print(json.dumps({"address": address, "store": store}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
