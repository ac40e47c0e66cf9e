"""A page of one file with a few questions behind it, for a browser on this machine.

In: a page, and functions by path. Out: a server on loopback that answers only who asks for it by that name, so no other page that
the browser has open can ask it. Invariant: one question is answered at a time.
"""

import json
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rft.config import ConfigError

LARGEST = 2**20  # bytes of one question
SHARED = {  # what stands in a page for what all pages have
    "/*STYLE*/": Path(__file__).with_name("page.css"),
    "/*SCRIPT*/": Path(__file__).with_name("page.js"),
}
Answers = dict[str, Callable[[dict[str, Any]], Any]]


class PageServer(ThreadingHTTPServer):
    """GET / is `page`; POST to a path of `answers`, with an object as JSON, is what the function says of it."""

    daemon_threads = True

    def __init__(self, port: int, page: Path, answers: Answers):
        self.page = page.read_text(encoding="utf-8")
        for mark, file in SHARED.items():
            self.page = self.page.replace(mark, file.read_text(encoding="utf-8").rstrip("\n"))
        self.answers = answers
        self.asking = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)


class Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.encode())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not here")

    def do_POST(self) -> None:
        size, answer = int(self.headers.get("Content-Length") or 0), self.server.answers.get(self.path)
        if answer is None or size > LARGEST:
            self._refuse(HTTPStatus.NOT_FOUND, "not here")
            return
        try:
            asked = json.loads(self.rfile.read(size) or b"{}")
            with self.server.asking:
                found = json.dumps(answer(asked)).encode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._refuse(HTTPStatus.BAD_REQUEST, what)
            return
        self._send(HTTPStatus.OK, "application/json", found)

    def parse_request(self) -> bool:
        """Whoever asks under another name is a page of somebody else that made its name point here."""
        if not super().parse_request():
            return False
        if str(self.headers.get("Host", "")).rpartition(":")[0] in ("127.0.0.1", "localhost"):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1")
        return False

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain; charset=utf-8", why.encode() + b"\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """A line per request would hide the address."""


def serve(name: str, port: int, page: Path, answers: Answers) -> int:
    """Until Ctrl-C; 2 if the port cannot be had."""
    try:
        server = PageServer(port, page, answers)
    except OSError as error:
        print(f"{name}: port {port}: {error.strerror}; give another with --port, or 0", file=sys.stderr)
        return 2
    print(f"{name}: http://127.0.0.1:{server.server_port}   (ends with Ctrl-C)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
